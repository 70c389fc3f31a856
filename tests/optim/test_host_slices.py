"""The host kernel in other places: slices, short ends, memory without alignment. The result is always the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.optim import host_kernel
from lowtide.optim.update_types import Moments, Piece, Rounding
from tests.optim.host_cases import FORMATS, RULES, assert_same_bits, clone, make_piece, needs_kernel, tensors_of

pytestmark = needs_kernel


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
