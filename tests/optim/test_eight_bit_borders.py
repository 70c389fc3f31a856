"""8-bit codes at the borders between them: every implementation finds those of the Note, to the last bit.

The truth is a search in the table of borders. Kernels take what they are to encode as a gradient: SGD's first momentum is
the gradient itself, and with beta2 = 0 Adam's second moment is its square.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import pytest
import torch

from lowtide import compat
from lowtide.optim import reference
from lowtide.optim.device import kernel as device_kernel
from lowtide.optim.host import kernel as host_kernel
from lowtide.optim.host import library as host_library
from lowtide.optim.reference import decode_blocks, encode_blocks
from lowtide.optim.rules import Adam, Sgd
from lowtide.optim.update_types import BLOCK, Moments, Piece, Rounding

Update = Callable[[Piece], Piece]

TINY, SMALLEST_SCALE, LARGEST = 2.0**-126, 2.0**-124, torch.finfo(torch.float32).max
SIGNED_BORDERS = ((torch.arange(127) + 0.5) / 32).square()
UNSIGNED_BORDERS = ((torch.arange(255) + 0.5) / 128).square().square()
SIGNED_SHARE = torch.tensor(127**2 / 2**10)
UNSIGNED_SHARE = torch.tensor(255**4 / 2**28)


def _reference(piece: Piece) -> Piece:
    reference.update([piece], rounding=Rounding.NEAREST, moments=Moments.INT8)
    return piece


def _host(piece: Piece, isa: str) -> Piece:
    host_kernel.update([piece], rounding=Rounding.NEAREST, moments=Moments.INT8, isa=isa)
    return piece


def _device(piece: Piece, device: str) -> Piece:
    piece.weight, piece.gradient = piece.weight.to(device), piece.gradient.to(device)
    piece.state = {name: value.to(device) for name, value in piece.state.items()}
    device_kernel.launch_all([piece], rounding=Rounding.NEAREST, moments=Moments.INT8, gradient_factor=1.0)
    piece.weight, piece.state = piece.weight.cpu(), {name: value.cpu() for name, value in piece.state.items()}
    return piece


def _implementations() -> list[object]:
    isas = host_kernel.available_isas() if host_library.why_missing() is None else ()
    can_interpret = compat.has_triton() and os.environ.get("TRITON_INTERPRET") == "1"
    return [
        pytest.param(_reference, id="reference"),
        *(pytest.param(functools.partial(_host, isa=isa), id=isa) for isa in isas),
        pytest.param(functools.partial(_device, device="cuda"), id="device", marks=pytest.mark.gpu),
        pytest.param(
            functools.partial(_device, device="cpu"),
            id="interpreter",
            marks=pytest.mark.skipif(not can_interpret, reason="needs Triton and TRITON_INTERPRET=1"),
        ),
    ]


every_implementation = pytest.mark.parametrize("update", _implementations())


def piece_of(rule: Adam | Sgd, gradient: torch.Tensor, state: dict[str, torch.Tensor], step: int) -> Piece:
    return Piece(weight=torch.zeros_like(gradient), gradient=gradient, state=state, rule=rule, step=step)


def empty(name: str, num_elements: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(num_elements, dtype=dtype), f"{name}_scale": torch.zeros(-(-num_elements // BLOCK))}


def encode_signed(update: Update, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rule, state = Sgd(lr=0.0, momentum=0.9), empty("momentum_buffer", values.numel(), torch.int8)
    state = update(piece_of(rule, values.clone(), state, step=1)).state
    return state["momentum_buffer"], state["momentum_buffer_scale"]


def encode_squares(update: Update, roots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    state = empty("exp_avg", roots.numel(), torch.int8) | empty("exp_avg_sq", roots.numel(), torch.uint8)
    state = update(piece_of(Adam(lr=0.0, beta2=0.0), roots.clone(), state, step=1)).state
    return state["exp_avg_sq"], state["exp_avg_sq_scale"]


def flush(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values.abs() < TINY, 0.0, values)


def shares_of(values: torch.Tensor, *, is_unsigned: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The shares of numbers of their block's scale, for whole blocks of finite numbers; and the scales."""
    magnitudes = flush(values).abs().view(-1, BLOCK)
    scales = magnitudes.amax(1, keepdim=True)
    scales = torch.where(scales < SMALLEST_SCALE, 0.0, scales)
    factors = (UNSIGNED_SHARE if is_unsigned else SIGNED_SHARE) / scales
    shares = torch.where(scales > 0, magnitudes * factors, 0.0)
    return shares.view(-1), scales.view(-1)


def truth(values: torch.Tensor, *, is_unsigned: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The Note, by counting borders."""
    shares, scales = shares_of(values, is_unsigned=is_unsigned)
    codes = torch.bucketize(shares, UNSIGNED_BORDERS if is_unsigned else SIGNED_BORDERS, right=True)
    if is_unsigned:
        has_code = (values >= TINY) & (scales.repeat_interleave(BLOCK) > 0)
        return torch.where(has_code, codes.clamp(min=1), codes).to(torch.uint8), scales
    return torch.where(values < 0, -codes, codes).to(torch.int8), scales


def neighbours(values: torch.Tensor, reach: int) -> torch.Tensor:
    """Each positive number and those next to it, in a row."""
    return (values.view(torch.int32)[:, None] + torch.arange(-reach, reach + 1, dtype=torch.int32)).view(torch.float32)


def in_blocks(values: torch.Tensor, largest: float) -> torch.Tensor:
    """Blocks that begin with their largest element, and are filled up with zeros."""
    num_blocks = -(-values.numel() // (BLOCK - 1))
    rows = torch.nn.functional.pad(values, (0, num_blocks * (BLOCK - 1) - values.numel())).view(num_blocks, BLOCK - 1)
    return torch.nn.functional.pad(rows, (1, 0), value=largest).view(-1)


def many_scales(low: float, high: float, count: int) -> list[float]:
    """Over all magnitudes from one to the other, which are exponents of 2."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.rand(count, generator=generator, dtype=torch.float64) * (high - low) + low
    return torch.exp2(exponents).float().tolist()


@functools.cache
def signed_values_at_borders() -> torch.Tensor:
    blocks = []
    for scale in (1.0, SMALLEST_SCALE, LARGEST, *many_scales(-124, 128 - 1e-6, 60)):
        where = (SIGNED_BORDERS.double() / (SIGNED_SHARE.double() / scale)).float()
        values = neighbours(where, 3).reshape(-1)
        values[1::2] *= -1
        blocks.append(in_blocks(values.clamp(-scale, scale), scale))
    return torch.cat(blocks)


@functools.cache
def roots_at_borders() -> torch.Tensor:
    """Numbers whose squares are at the borders."""
    blocks = []
    for root in (1.0, 2.0**-62, *many_scales(-62, 64 - 1e-6, 60)):
        scale = root * root
        where = (UNSIGNED_BORDERS.double() / (UNSIGNED_SHARE.double() / scale)).sqrt().float()
        blocks.append(in_blocks(neighbours(where, 3).reshape(-1).clamp(max=root), root))
    return torch.cat(blocks)


@pytest.mark.parametrize("is_unsigned", [False, True])
def test_values_lie_just_below_at_and_just_above_every_border(is_unsigned: bool) -> None:
    """The values themselves do so: or the tests with them would show nothing."""
    values = roots_at_borders().square() if is_unsigned else signed_values_at_borders()
    shares, _ = shares_of(values, is_unsigned=is_unsigned)
    borders = UNSIGNED_BORDERS if is_unsigned else SIGNED_BORDERS
    assert torch.isin(neighbours(borders, 1), shares).all()


@every_implementation
def test_signed_codes_at_every_border(update: Update) -> None:
    values = signed_values_at_borders()
    codes, scales = encode_signed(update, values)
    expected_codes, expected_scales = truth(values, is_unsigned=False)
    assert expected_codes.unique().numel() == 255
    assert torch.equal(scales, expected_scales)
    assert torch.equal(codes, expected_codes)


@every_implementation
def test_unsigned_codes_at_every_border(update: Update) -> None:
    roots = roots_at_borders()
    codes, scales = encode_squares(update, roots)
    expected_codes, expected_scales = truth(roots.square(), is_unsigned=True)
    assert expected_codes.unique().numel() == 256
    assert torch.equal(scales, expected_scales)
    assert torch.equal(codes, expected_codes)


def random_blocks(seed: int, exponent: float) -> torch.Tensor:
    """Numbers of both signs between 1e-exponent and 1e+exponent: some blocks over all of it, and others over a part."""
    generator = torch.Generator().manual_seed(seed)
    middle = (torch.rand(600, 1, generator=generator, dtype=torch.float64) * 2 - 1) * exponent
    reach = torch.rand(600, 1, generator=generator, dtype=torch.float64).pow(3) * 2 * exponent
    powers = middle + (torch.rand(600, BLOCK, generator=generator, dtype=torch.float64) - 0.5) * reach
    signs = torch.randint(0, 2, (600, BLOCK), generator=generator) * 2 - 1
    values = (10 ** powers.clamp(-exponent, exponent) * signs).float()
    values[torch.rand(600, BLOCK, generator=generator) < 0.05] = 0.0
    return values.view(-1)


@every_implementation
@pytest.mark.parametrize("seed", range(3))
def test_random_blocks_of_all_magnitudes(update: Update, seed: int) -> None:
    values = random_blocks(seed, 38.0)
    for found, expected in zip(encode_signed(update, values), truth(values, is_unsigned=False), strict=True):
        assert torch.equal(found, expected)
    roots = random_blocks(seed, 19.2)
    for found, expected in zip(encode_squares(update, roots), truth(roots.square(), is_unsigned=True), strict=True):
        assert torch.equal(found, expected)


SCALES = torch.tensor([1.0, SMALLEST_SCALE, 1e-30, LARGEST, *many_scales(-124, 128 - 1e-6, 30)])


def one_code_in_a_block(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A block for each code and each of the scales."""
    info = torch.iinfo(dtype)
    each = torch.arange(max(info.min, -127), info.max + 1).to(dtype)
    return each.repeat_interleave(BLOCK).repeat(SCALES.numel()), SCALES.repeat_interleave(each.numel())


def by_the_note(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    spread = scales.repeat_interleave(BLOCK)
    if codes.dtype is torch.uint8:
        square = (codes.float() * torch.tensor(1 / 255)).square()
        return flush(square * square * spread)
    root = codes.float() * torch.tensor(1 / 127)
    return flush(root * root.abs() * spread)


@every_implementation
def test_every_signed_code_is_read_as_in_the_note(update: Update) -> None:
    codes, scales = one_code_in_a_block(torch.int8)
    expected = by_the_note(codes, scales)
    state = {"momentum_buffer": codes.clone(), "momentum_buffer_scale": scales.clone()}
    # The momentum stays what it is, and the weight becomes its negative.
    rule = Sgd(lr=1.0, momentum=1.0, dampening=1.0)
    done = update(piece_of(rule, torch.zeros(codes.numel()), state, step=2))
    assert torch.equal(done.weight, -expected)
    largest = expected.abs().view(-1, BLOCK).amax(1)
    assert torch.equal(done.state["momentum_buffer_scale"], torch.where(largest < SMALLEST_SCALE, 0.0, largest))


@every_implementation
def test_every_unsigned_code_is_read_as_in_the_note(update: Update) -> None:
    codes, scales = one_code_in_a_block(torch.uint8)
    state = empty("exp_avg", codes.numel(), torch.int8)
    state |= {"exp_avg_sq": codes.clone(), "exp_avg_sq_scale": scales.clone()}
    # Half of it is the next scale: all elements of a block are alike.
    done = update(piece_of(Adam(lr=0.0, beta2=0.5), torch.zeros(codes.numel()), state, step=2))
    half = by_the_note(codes, scales).view(-1, BLOCK)[:, 0] * 0.5
    assert torch.equal(done.state["exp_avg_sq_scale"], torch.where(half < SMALLEST_SCALE, 0.0, half))


def test_decoding_is_that_of_the_note() -> None:
    for dtype in (torch.int8, torch.uint8):
        codes, scales = one_code_in_a_block(dtype)
        assert torch.equal(decode_blocks(codes, scales), by_the_note(codes, scales))


@pytest.mark.parametrize(("dtype", "top"), [(torch.int8, 127), (torch.uint8, 255)])
def test_the_largest_code_reads_as_the_scale(dtype: torch.dtype, top: int) -> None:
    scales = torch.tensor([SMALLEST_SCALE, LARGEST, *many_scales(-124, 128 - 1e-6, 100_000)])
    codes = torch.zeros(scales.numel(), BLOCK, dtype=dtype)
    codes[:, 5] = top
    assert torch.equal(decode_blocks(codes.view(-1), scales).view(-1, BLOCK)[:, 5], scales)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_codes_that_were_read_are_written_as_they_were(dtype: torch.dtype) -> None:
    """All codes beside the largest, in many scales; where a number is too small, it is zero."""
    info = torch.iinfo(dtype)
    rows = torch.arange(max(info.min, -127), info.max).to(dtype).view(-1, 1).repeat(1, BLOCK)
    rows[:, 0] = info.max
    for scale in SCALES.tolist():
        scales = torch.full((rows.shape[0],), scale)
        values = decode_blocks(rows.view(-1), scales)
        codes, scales_again = encode_blocks(values, is_unsigned=dtype is torch.uint8)
        assert torch.equal(codes, torch.where(values == 0, 0, rows.view(-1)))
        assert torch.equal(scales_again, scales)
        if scale > 2.0**-94:
            assert torch.equal(codes, rows.view(-1))


@every_implementation
def test_blocks_that_are_too_small_are_zeros(update: Update) -> None:
    below = float(torch.nextafter(torch.tensor(SMALLEST_SCALE), torch.tensor(0.0)))
    for largest, is_kept in ((below, False), (SMALLEST_SCALE, True), (TINY, False)):
        values = torch.full((BLOCK,), largest)
        codes, scales = encode_signed(update, values)
        assert scales.tolist() == [largest if is_kept else 0.0]
        assert codes.tolist() == [127 if is_kept else 0] * BLOCK
        # For the square, a root that comes nearest from below.
        root = torch.full((BLOCK,), largest).sqrt()
        root = torch.where(root.square() > largest, torch.nextafter(root, torch.zeros(BLOCK)), root)
        codes, scales = encode_squares(update, root)
        assert (scales.item() > 0) == (root[0].square().item() >= SMALLEST_SCALE)
        assert codes.any() == (scales.item() > 0)
