"""The host kernel against torch.optim and the reference, in any place, with any number of threads and instruction set."""

from __future__ import annotations

import platform

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lowtide
from lowtide.errors import ConfigError
from lowtide.optim import reference
from lowtide.optim.host import kernel as host_kernel
from lowtide.optim.host import library as host_library
from lowtide.optim.rules import Adam, ElementwiseRule, Lion, Sgd
from lowtide.optim.update_types import Moments, Piece, Rounding
from tests.optim.host.cases import (
    FORMATS,
    RULES,
    assert_same_bits,
    clone,
    full_weight,
    make_piece,
    needs_kernel,
    next_gradient,
    tensors_of,
)

pytestmark = needs_kernel

GRADIENTS = [torch.float32, torch.bfloat16, torch.float16]


def torch_optimizer(rule: ElementwiseRule, weight: torch.Tensor) -> torch.optim.Optimizer:
    if isinstance(rule, Adam):
        kind = torch.optim.AdamW if rule.is_decoupled else torch.optim.Adam
        return kind(
            [weight],
            lr=rule.lr,
            betas=(rule.beta1, rule.beta2),
            eps=rule.eps,
            weight_decay=rule.weight_decay,
            amsgrad=rule.amsgrad,
            maximize=rule.maximize,
            foreach=False,
        )
    assert isinstance(rule, Sgd)
    return torch.optim.SGD(
        [weight],
        lr=rule.lr,
        momentum=rule.momentum,
        dampening=rule.dampening,
        nesterov=rule.nesterov,
        weight_decay=rule.weight_decay,
        maximize=rule.maximize,
        foreach=False,
    )


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if not isinstance(rule, Lion)])
def test_two_hundred_steps_as_torch_takes_them(name: str) -> None:
    rule = RULES[name]
    piece = make_piece(1000, rule)
    weight = piece.weight.clone().requires_grad_()
    optimizer = torch_optimizer(rule, weight)
    for step in range(1, 201):
        next_gradient(piece, step)
        weight.grad = piece.gradient.clone()
        optimizer.step()
        host_kernel.update([piece], rounding=Rounding.NEAREST, moments=Moments.FP32)
    # torch's square root on the CPU is not always the nearest number: the last bits part, and stay together.
    torch.testing.assert_close(piece.weight, weight.detach(), rtol=2e-6, atol=2e-6)
    for key, value in piece.state.items():
        torch.testing.assert_close(value, optimizer.state[weight][key], rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if isinstance(rule, Lion)])
def test_two_hundred_steps_of_lion_as_its_optimizer_takes_them(name: str) -> None:
    rule = RULES[name]
    assert isinstance(rule, Lion)
    piece = make_piece(1000, rule)
    weight = piece.weight.clone().requires_grad_()
    optimizer = lowtide.optim.Lion(
        [weight],
        lr=rule.lr,
        betas=(rule.beta1, rule.beta2),
        weight_decay=rule.weight_decay,
        maximize=rule.maximize,
    )
    for step in range(1, 201):
        next_gradient(piece, step)
        weight.grad = piece.gradient.clone()
        optimizer.step()
        host_kernel.update([piece], rounding=Rounding.NEAREST, moments=Moments.FP32)
    is_far = (piece.weight - weight.detach()).abs() > 2e-6 * (1 + weight.detach().abs())
    # Where the momentum is zero but for rounding, its sign is either: that element has gone another way.
    assert int(is_far.sum()) <= 2
    torch.testing.assert_close(piece.state["exp_avg"], optimizer.state[weight]["exp_avg"], rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("moments", list(Moments))
@pytest.mark.parametrize(("dtype", "rounding"), FORMATS)
@pytest.mark.parametrize("name", RULES)
def test_one_step_as_the_reference_takes_it(
    name: str, dtype: torch.dtype, rounding: Rounding, moments: Moments
) -> None:
    """From the same state each time: so that rounding to few bits does not add up."""
    for number, gradient in enumerate(GRADIENTS):
        piece = make_piece(777, RULES[name], dtype=dtype, rounding=rounding, moments=moments, gradient=gradient)
        for step in range(1, 6):
            next_gradient(piece, step)
            expected, before = clone(piece), full_weight(piece).clone()
            reference.update([expected], rounding=rounding, moments=moments, gradient_factor=0.25)
            host_kernel.update([piece], rounding=rounding, moments=moments, gradient_factor=0.25)
            # State is the same to the bit, codes of 8 bits included.
            for key, value in expected.state.items():
                assert torch.equal(piece.state[key], value), (key, step, number)
            # A few units in the last place, for torch's square root: of the weight as it is kept, and of the step in fp32, which
            # is the larger of the two where a weight comes out near zero.
            ulps = {torch.float32: 2**-22, torch.bfloat16: 2**-7, torch.float16: 2**-10}
            kept = torch.float32 if rounding in (Rounding.EXACT, Rounding.MASTER) else dtype
            right = full_weight(expected)
            of_step = ulps[torch.float32] * (right - before).abs()
            allowed = ulps[kept] * right.abs() + of_step.clamp(min=1e-9)
            difference = (full_weight(piece) - right).abs()
            assert (difference <= allowed).all(), (step, number, float((difference / allowed).max()))
            if not isinstance(RULES[name], Adam):
                assert_same_bits(piece, expected)


@pytest.mark.parametrize("isa", host_kernel.available_isas() if host_library.why_missing() is None else ())
@pytest.mark.parametrize("moments", list(Moments))
@pytest.mark.parametrize(("dtype", "rounding"), FORMATS)
def test_instruction_sets_agree_to_the_bit(isa: str, dtype: torch.dtype, rounding: Rounding, moments: Moments) -> None:
    for rule in RULES.values():
        for gradient in GRADIENTS:
            best = make_piece(517, rule, dtype=dtype, rounding=rounding, moments=moments, gradient=gradient)
            other = clone(best)
            for step in range(1, 5):
                for piece in (best, other):
                    next_gradient(piece, step)
                host_kernel.update([best], rounding=rounding, moments=moments, gradient_factor=0.3)
                host_kernel.update([other], rounding=rounding, moments=moments, gradient_factor=0.3, isa=isa)
            assert_same_bits(best, other)


@pytest.mark.parametrize("moments", list(Moments))
def test_exact_is_an_fp32_master_to_the_bit(moments: Moments) -> None:
    for rule in RULES.values():
        exact = make_piece(3001, rule, dtype=torch.bfloat16, rounding=Rounding.EXACT, moments=moments)
        master = make_piece(3001, rule, dtype=torch.bfloat16, rounding=Rounding.MASTER, moments=moments)
        for step in range(1, 51):
            for piece in (exact, master):
                next_gradient(piece, step)
            host_kernel.update([exact], rounding=Rounding.EXACT, moments=moments)
            host_kernel.update([master], rounding=Rounding.MASTER, moments=moments)
        assert master.master is not None
        assert torch.equal(full_weight(exact), master.master)
        assert all(torch.equal(value, master.state[name]) for name, value in exact.state.items())


@pytest.mark.parametrize("isa", host_kernel.available_isas() if host_library.why_missing() is None else ())
@pytest.mark.parametrize("moments", list(Moments))
@pytest.mark.parametrize(("dtype", "rounding"), FORMATS)
def test_nan_and_infinity_as_in_the_reference(
    isa: str, dtype: torch.dtype, rounding: Rounding, moments: Moments
) -> None:
    for name, rule in RULES.items():
        piece = make_piece(400, rule, dtype=dtype, rounding=rounding, moments=moments)
        piece.gradient[[3, 140]] = float("nan")
        piece.gradient[130] = float("inf")
        piece.gradient[131] = -float("inf")
        piece.gradient[50] = 1e30
        expected = clone(piece)
        for step in (1, 2):
            for each in (piece, expected):
                each.step = step
            host_kernel.update([piece], rounding=rounding, moments=moments, isa=isa)
            reference.update([expected], rounding=rounding, moments=moments)
        for key, value in tensors_of(piece).items():
            theirs = tensors_of(expected)[key]
            assert torch.equal(value.isnan(), theirs.isnan()), (name, key)
            assert torch.equal(value.isinf(), theirs.isinf()), (name, key)
        assert piece.weight[[3, 140]].isnan().all(), name
        assert piece.weight[256:].isfinite().all(), name  # blocks of 8 bits without one of them


def test_stochastic_rounding_is_right_in_the_mean() -> None:
    num_elements = 1 << 20
    value = 1.0 + 0.3 * 2**-7  # 0.3 of the way to the next bf16
    piece = make_piece(num_elements, Sgd(lr=1.0), dtype=torch.bfloat16, rounding=Rounding.STOCHASTIC)
    piece.weight.fill_(1.0)
    piece.gradient.fill_(1.0 - value)
    host_kernel.update([piece], rounding=Rounding.STOCHASTIC, moments=Moments.FP32)
    assert set(piece.weight.unique().tolist()) == {1.0, 1.0 + 2**-7}
    share = (piece.weight > 1).double().mean().item()
    # Five standard deviations.
    assert abs(share - 0.3) < 5 * (0.3 * 0.7 / num_elements) ** 0.5
    # Nearest, the reference for what this avoids, never moves.
    still = make_piece(128, Sgd(lr=1.0), dtype=torch.bfloat16)
    still.weight.fill_(1.0)
    still.gradient.fill_(1.0 - value)
    host_kernel.update([still], rounding=Rounding.NEAREST, moments=Moments.FP32)
    assert (still.weight == 1.0).all()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="ARM computes with tiny numbers at full speed")
@pytest.mark.parametrize("isa", host_kernel.available_isas() if host_library.why_missing() is None else ())
def test_tiny_numbers_count_as_zero(isa: str) -> None:
    piece = make_piece(300, RULES["adamw"], step=1000)
    piece.gradient.zero_()
    piece.state["exp_avg"].fill_(1e-45)
    piece.state["exp_avg_sq"].fill_(1e-40)
    expected = clone(piece)
    reference.update([expected], rounding=Rounding.NEAREST, moments=Moments.FP32)
    host_kernel.update([piece], rounding=Rounding.NEAREST, moments=Moments.FP32, isa=isa)
    assert (expected.state["exp_avg"] > 0).all()
    assert not piece.state["exp_avg"].any()
    assert not piece.state["exp_avg_sq"].any()
    assert torch.equal(piece.weight, expected.weight)
    # Only there: the caller's own arithmetic is as it was.
    assert (torch.full((4,), 1e-40) * 0.5 > 0).all()


def test_the_first_momentum_is_not_read() -> None:
    piece = make_piece(300, RULES["nesterov"])
    piece.state["momentum_buffer"].fill_(float("nan"))
    host_kernel.update([piece], rounding=Rounding.NEAREST, moments=Moments.FP32)
    assert torch.equal(piece.state["momentum_buffer"], piece.gradient)
    assert piece.weight.isfinite().all()


def test_gradients_are_not_changed_and_versions_count() -> None:
    piece = make_piece(300, RULES["adamw"], gradient=torch.bfloat16)
    before, version = piece.gradient.clone(), piece.weight._version
    host_kernel.update([piece], rounding=Rounding.NEAREST, moments=Moments.FP32, gradient_factor=0.5)
    assert torch.equal(piece.gradient, before)
    assert piece.weight._version > version


def test_settings_that_cannot_be() -> None:
    piece = make_piece(10, RULES["sgd"])
    with pytest.raises(ConfigError, match=r"num_threads is 0; an update needs at least one"):
        host_kernel.update([piece], rounding=Rounding.NEAREST, moments=Moments.FP32, num_threads=0)
    with pytest.raises(ConfigError, match=r"no instruction set 'mmx' here; choose one of plain"):
        host_kernel.update([piece], rounding=Rounding.NEAREST, moments=Moments.FP32, isa="mmx")
    host_kernel.update([], rounding=Rounding.NEAREST, moments=Moments.FP32)


@given(
    sizes=st.lists(st.sampled_from([0, 1, 5, 16, 127, 128, 129, 1000, 65535, 65536, 65537]), max_size=6),
    offset=st.integers(0, 7),
    case=st.sampled_from(FORMATS),
    moments=st.sampled_from(list(Moments)),
    num_threads=st.integers(1, 5),
)
def test_threads_slices_and_alignment_change_nothing(
    sizes: list[int], offset: int, case: tuple[torch.dtype, Rounding], moments: Moments, num_threads: int
) -> None:
    dtype, rounding = case
    rule = RULES["adamw"]
    together = [
        make_piece(size, rule, dtype=dtype, rounding=rounding, moments=moments, seed=seed)
        for seed, size in enumerate(sizes)
    ]
    alone = [clone(piece) for piece in together]
    shifted = [_shifted(piece, offset) for piece in together]
    for step in (1, 2):
        for piece in (*alone, *shifted):
            piece.step = step
        host_kernel.update(shifted, rounding=rounding, moments=moments, num_threads=num_threads)
        for piece in alone:
            host_kernel.update([piece], rounding=rounding, moments=moments, num_threads=1)
    for one, other in zip(alone, shifted, strict=True):
        assert_same_bits(one, other)


def _shifted(piece: Piece, offset: int) -> Piece:
    """The same piece in memory that begins somewhere else than at 64 bytes, between guards that must stay."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        buffer = torch.zeros(tensor.numel() + 2 * offset, dtype=tensor.dtype)
        buffer[offset : offset + tensor.numel()] = tensor
        return buffer[offset : offset + tensor.numel()]

    moved = clone(piece)
    moved.weight, moved.gradient = move(piece.weight), move(piece.gradient)
    moved.state = {name: move(value) for name, value in piece.state.items()}
    moved.remainder = None if piece.remainder is None else move(piece.remainder)
    moved.master = None if piece.master is None else move(piece.master)
    return moved


@pytest.mark.parametrize("moments", list(Moments))
@pytest.mark.parametrize(("dtype", "rounding"), FORMATS)
@pytest.mark.parametrize("num_elements", [1, 127, 129])
def test_nothing_beyond_the_end_is_written(
    dtype: torch.dtype, rounding: Rounding, moments: Moments, num_elements: int
) -> None:
    piece = _shifted(make_piece(num_elements, RULES["amsgrad"], dtype=dtype, rounding=rounding, moments=moments), 64)
    host_kernel.update([piece], rounding=rounding, moments=moments)
    for name, tensor in tensors_of(piece).items():
        whole = tensor._base
        assert whole is not None
        assert not whole[:64].any(), name
        assert not whole[64 + tensor.numel() :].any(), name
        assert tensor.any(), name


@pytest.mark.parametrize("moments", list(Moments))
@pytest.mark.parametrize("rounding", list(Rounding))
def test_a_parameter_in_slices_is_the_whole(rounding: Rounding, moments: Moments) -> None:
    whole = make_piece(1000, RULES["adamw"], dtype=torch.bfloat16, rounding=rounding, moments=moments)
    cut = clone(whole)
    parts = []
    for begin, end in ((0, 256), (256, 640), (640, 1000)):
        blocks = slice(begin // 128, -(-end // 128))
        state = {
            name: value[blocks if name.endswith("_scale") else slice(begin, end)] for name, value in cut.state.items()
        }
        parts.append(
            Piece(
                weight=cut.weight[begin:end],
                gradient=cut.gradient[begin:end],
                state=state,
                rule=cut.rule,
                step=1,
                remainder=None if cut.remainder is None else cut.remainder[begin:end],
                master=None if cut.master is None else cut.master[begin:end],
                key=cut.key,
                first_element=begin,
            )
        )
    host_kernel.update(parts, rounding=rounding, moments=moments)
    host_kernel.update([whole], rounding=rounding, moments=moments)
    assert_same_bits(whole, cut)
