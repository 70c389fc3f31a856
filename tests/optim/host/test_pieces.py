"""Pieces whose tensors do not fit together are refused, with a message, before anything is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from lowtide.errors import BadPieceError, ConfigError
from lowtide.optim.host import library as host_library
from lowtide.optim.host.kernel import PIECE_BYTES, pack
from lowtide.optim.rules import Adam, Sgd
from lowtide.optim.update_types import Moments, Piece, Rounding
from tests.optim.host.cases import RULES, clone, make_piece, needs_kernel, tensors_of

Change = Callable[[Piece], None]


def packed(*pieces: Piece, rounding: Rounding = Rounding.EXACT, moments: Moments = Moments.INT8) -> bytearray:
    return pack(pieces, rounding=rounding, moments=moments, gradient_factor=1.0)


def good_piece(num_elements: int = 300) -> Piece:
    return make_piece(
        num_elements, RULES["amsgrad"], dtype=torch.bfloat16, rounding=Rounding.EXACT, moments=Moments.INT8
    )


def set_state(name: str, value: torch.Tensor) -> Change:
    return lambda piece: piece.state.__setitem__(name, value)


def set_field(name: str, value: object) -> Change:
    return lambda piece: setattr(piece, name, value)


BAD: list[tuple[str, Change]] = [
    ("piece 1 has a weight of torch.bfloat16 and a gradient of torch.float64", set_field("gradient", torch.ones(300).double())),
    ("the gradient of piece 1 is torch.float32 of shape (299,)", set_field("gradient", torch.ones(299))),
    ("stride (2,); it must be flat and dense, with 300 elements", set_field("gradient", torch.ones(600)[::2])),
    ("the gradient of piece 1 is on meta, and the update on cpu", set_field("gradient", torch.ones(300).to("meta"))),
    ("piece 1 has a weight of torch.float64", set_field("weight", torch.ones(300).double())),
    ("the remainder of piece 1 is missing; its format needs 300 elements", set_field("remainder", None)),
    ("the remainder of piece 1 is torch.int32", set_field("remainder", torch.ones(300).int())),
    ("the exp_avg of piece 1 is torch.uint8", set_state("exp_avg", torch.ones(300).byte())),
    ("the exp_avg_sq of piece 1 is torch.float32", set_state("exp_avg_sq", torch.ones(300))),
    ("it must be flat and dense, with 3 elements of torch.float32", set_state("max_exp_avg_sq_scale", torch.ones(2))),
    ("the exp_avg_scale of piece 1 is missing", lambda piece: piece.state.__delitem__("exp_avg_scale")),
    ("piece 1 is at step 0; the first step is 1", set_field("step", 0)),
    ("piece 1 begins at element 100; cut at multiples of 128", set_field("first_element", 100)),
    ("the weight of piece 1 and the gradient of piece 1 share memory", lambda piece: setattr(piece, "gradient", piece.weight)),
]  # fmt: skip


@pytest.mark.parametrize(("message", "change"), BAD)
def test_a_bad_piece_is_named(message: str, change: Change) -> None:
    good, bad = good_piece(), good_piece()
    assert len(packed(good, bad)) == 2 * PIECE_BYTES
    change(bad)
    before = {name: tensor.clone() for name, tensor in tensors_of(good).items()}
    with pytest.raises(BadPieceError, match=re.escape(message)):
        packed(good, bad)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors_of(good).items())


def test_the_exact_format_is_for_bf16() -> None:
    piece = good_piece()
    piece.weight = torch.ones(300).half()
    with pytest.raises(ConfigError, match="a exact update is for bf16 weights, and this one is torch.float16"):
        packed(piece)


def test_a_master_is_needed() -> None:
    piece = make_piece(300, RULES["sgd"], dtype=torch.bfloat16, rounding=Rounding.MASTER)
    packed(piece, rounding=Rounding.MASTER, moments=Moments.FP32)
    piece.master = None
    with pytest.raises(BadPieceError, match=r"the master of piece 0 is missing"):
        packed(piece, rounding=Rounding.MASTER, moments=Moments.FP32)


def test_overlaps_are_found_wherever_they_are() -> None:
    memory = torch.zeros(1000)
    pieces = [good_piece(num_elements) for num_elements in (128, 0, 300, 1)]
    packed(*pieces)
    sgd = Sgd(lr=0.1)

    def plain(begin: int, end: int) -> Piece:
        return Piece(weight=memory[begin:end], gradient=torch.ones(end - begin), state={}, rule=sgd, step=1)

    # Side by side is fine, and so are gradients that share memory.
    shared = torch.ones(100)
    beside = [replace(plain(begin, begin + 100), gradient=shared) for begin in (0, 100, 200)]
    packed(*beside, moments=Moments.FP32)
    with pytest.raises(BadPieceError, match=r"the weight of piece 1 and the weight of piece 0 share memory"):
        packed(plain(500, 900), plain(0, 501), moments=Moments.FP32)
    # One inside the other, and a third, clear of both, between them.
    with pytest.raises(BadPieceError, match=r"the weight of piece 0 and the gradient of piece 1 share memory"):
        packed(plain(0, 900), replace(plain(900, 1000), gradient=memory[300:400]), moments=Moments.FP32)
    twice = good_piece()
    with pytest.raises(BadPieceError, match="share memory"):
        packed(twice, replace(clone(twice), remainder=twice.remainder))


def test_numbers_beyond_fp32_are_refused() -> None:
    piece = make_piece(4, Adam(lr=1e300))
    with pytest.raises(ConfigError, match=r"lr=1e\+300.*at step 1.*beyond fp32"):
        packed(piece, moments=Moments.FP32)


@needs_kernel
def test_python_and_c_agree_on_the_struct() -> None:
    assert host_library.load().piece_bytes == PIECE_BYTES


def test_thousands_of_pieces_take_milliseconds() -> None:
    import time

    piece = good_piece(256)
    # Distinct memory, or the check for overlaps would end the call early.
    pieces = [clone(piece) for _ in range(2000)]
    packed(*pieces)
    began_s = time.perf_counter()
    packed(*pieces)
    # About 20 ms; ten times that on a busy machine is still no hang.
    assert time.perf_counter() - began_s < 0.3
