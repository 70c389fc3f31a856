"""Autocast on ghosts: CUDA's lists, the dtypes that come out, and the life of cast weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide import compat
from lowtide.tracing.ghost import autocast
from tests.tracing.ghost.ghost_process import GhostProcess, Lab

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
LISTS = {
    "AT_FORALL_LOWER_PRECISION_FP": autocast.LOWER_PRECISION,
    "AT_FORALL_FP32": autocast.FP32,
    "AT_FORALL_FP32_SET_OPT_DTYPE": autocast.FP32_SET_DTYPE,
    "AT_FORALL_PROMOTE": autocast.WIDEST,
}


def names_in_header(macro: str) -> set[str]:
    body = re.search(rf"#define {macro}\(_\)((?:.*\\\n)*.*)\n", HEADER.read_text())
    assert body is not None
    return {".".join(part for part in match if part) for match in re.findall(r"_\((\w+)(?:,\s*(\w+))?\)", body[1])}


@pytest.mark.skipif(not HEADER.exists(), reason="this torch comes without its headers")
@pytest.mark.parametrize("macro", LISTS)
def test_the_lists_are_those_of_torchs_header(macro: str) -> None:
    ours = set(LISTS[macro])
    assert len(ours) == len(LISTS[macro])
    # Overloads for named dimensions, which later versions dropped, are not used by models.
    theirs = {name for name in names_in_header(macro) if "dimname" not in name.lower()}
    assert theirs <= ours
    # Another version may have operators this one has not, or cast some that it does not.
    assert all(name in autocast.SINCE or compat.find_overload(name) is None for name in ours - theirs)


LOW, FULL = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("call", "inputs", "expected"),
    [
        # Lower precision, whatever comes in.
        (lambda x, w: x @ w, (FULL, FULL), LOW),
        (lambda x, w: F.linear(x, w), (FULL, FULL), LOW),
        (lambda x, w: torch.addmm(x[0], x, w), (FULL, FULL), LOW),
        (lambda x, w: torch.bmm(x[None], w[None]), (FULL, LOW), LOW),
        (lambda x, w: F.conv2d(x[None, None], w[None, None, :3, :3]), (FULL, FULL), LOW),
        (lambda x, w: F.conv2d(x[None, None], w[None, None, :2, :2], padding="same"), (FULL, FULL), LOW),
        (lambda x, w: F.scaled_dot_product_attention(x[None, None], w[None, None], w[None, None]), (FULL, FULL), LOW),
        # fp32, whatever comes in.
        (lambda x, w: x.exp() + 0 * w.float(), (LOW, LOW), FULL),
        (lambda x, w: F.layer_norm(x, (8,), w[0], w[0]), (LOW, FULL), FULL),
        (lambda x, w: x.pow(2), (LOW, LOW), FULL),
        (lambda x, w: F.mse_loss(x, w), (LOW, LOW), FULL),
        (lambda x, w: F.softmax(x, -1), (LOW, LOW), FULL),
        (lambda x, w: x.sum(), (LOW, LOW), FULL),
        (lambda x, w: x.sum(0), (LOW, LOW), FULL),
        (lambda x, w: x.cumsum(0), (LOW, LOW), FULL),
        # unless the caller named a dtype
        (lambda x, w: F.softmax(x, -1, dtype=torch.bfloat16), (LOW, LOW), LOW),
        # The widest of the inputs.
        (lambda x, w: torch.addcmul(x, x, w), (LOW, FULL), FULL),
        (lambda x, w: torch.addcmul(x, x, w), (LOW, LOW), LOW),
        (lambda x, w: torch.dot(x[0], w[0]), (LOW, FULL), FULL),
        # Not listed: as without autocast.
        (lambda x, w: x + 1, (FULL, FULL), FULL),
        (lambda x, w: F.relu(x), (LOW, LOW), LOW),
        (lambda x, w: x + w, (LOW, FULL), FULL),
        (lambda x, w: F.gelu(x), (LOW, LOW), LOW),
        (lambda x, w: x.mean(), (LOW, LOW), LOW),
    ],
)
def test_the_dtype_that_comes_out(
    ghosts: GhostProcess,
    call: Callable[[Tensor, Tensor], Tensor],
    inputs: tuple[torch.dtype, torch.dtype],
    expected: torch.dtype,
) -> None:
    def step(lab: Lab) -> torch.dtype:
        x, w = (lab.ghost(8, 8, dtype=dtype) for dtype in inputs)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return call(x, w).dtype

    assert ghosts(step) is expected


class TestWeightCasts:
    def test_a_weight_is_cast_once_and_the_cast_dies_with_the_context(self, ghosts: GhostProcess) -> None:
        def step(lab: Lab) -> tuple[int, int, int]:
            x, weight = lab.ghost(4, 16, dtype=torch.bfloat16), lab.ghost(32, 16, needs_grad=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                lab.mark()
                outputs = [F.linear(x, weight) for _ in range(3)]
                casts = sum(op == "aten._to_copy" for op, _ in lab.births)
                del outputs
                inside = lab.live_bytes
            return casts, inside - 2 * 4 * 16 - 4 * 32 * 16, lab.live_bytes - 2 * 4 * 16 - 4 * 32 * 16

        assert ghosts(step) == (1, 2 * 32 * 16, 0)

    def test_the_backward_keeps_the_cast_it_needs(self, ghosts: GhostProcess) -> None:
        def step(lab: Lab) -> tuple[int, int]:
            x = lab.ghost(4, 16, dtype=torch.bfloat16, needs_grad=True)
            weight = lab.ghost(32, 16, needs_grad=True)
            start = lab.live_bytes
            with torch.autocast("cuda", dtype=torch.bfloat16):
                out = F.linear(x, weight)
            held = lab.live_bytes - start
            del out
            return held, lab.live_bytes - start

        assert ghosts(step) == (2 * 4 * 32 + 2 * 32 * 16, 0)

    def test_a_frozen_weight_is_cast_at_each_use(self, ghosts: GhostProcess) -> None:
        def step(lab: Lab) -> int:
            x, weight = lab.ghost(4, 16, dtype=torch.bfloat16), lab.ghost(32, 16)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                lab.mark()
                for _ in range(3):
                    F.linear(x, weight)
            return sum(op == "aten._to_copy" for op, _ in lab.births)

        assert ghosts(step) == 3

    def test_without_the_cache_every_use_casts(self, ghosts: GhostProcess) -> None:
        def step(lab: Lab) -> int:
            x, weight = lab.ghost(4, 16, dtype=torch.bfloat16), lab.ghost(32, 16, needs_grad=True)
            with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
                lab.mark()
                for _ in range(3):
                    F.linear(x, weight)
            return sum(op == "aten._to_copy" for op, _ in lab.births)

        assert ghosts(step) == 3

    def test_the_gradient_arrives_in_fp32(self, ghosts: GhostProcess) -> None:
        def step(lab: Lab) -> torch.dtype:
            x, weight = lab.ghost(4, 16), lab.ghost(32, 16, needs_grad=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = F.linear(x, weight).sum()
            lab.recorder.begin_phase(lab.phase.BACKWARD)
            loss.backward()
            return weight.grad.dtype

        assert ghosts(step) is torch.float32

    def test_sums_in_fp32_keep_no_copy_of_their_input(self, ghosts: GhostProcess) -> None:
        def step(lab: Lab) -> list[tuple[str, int]]:
            x = lab.ghost(8, 8, dtype=torch.bfloat16)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                lab.mark()
                out = x.sum(0)
            return lab.outputs if out is not None else []

        assert ghosts(step) == [("aten.sum", 32)]


def test_arguments_are_cast_from_the_last_to_the_first(ghosts: GhostProcess) -> None:
    """As measured on a card: a linear layer's bias, its weight, its input; those of a product in their own order."""

    def step(lab: Lab) -> list[int]:
        x, w = lab.ghost(2, 64), lab.ghost(16, 64, needs_grad=True)
        bias = lab.ghost(16, needs_grad=True)
        lab.mark()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            F.linear(x, w, bias)
            x @ lab.ghost(64, 8)
        return [nbytes for op, nbytes in lab.outputs if op == "aten._to_copy"]

    of_linear, of_product = [2 * 16, 2 * 16 * 64, 2 * 2 * 64], [2 * 2 * 64, 2 * 64 * 8]
    assert ghosts(step) == of_linear + of_product


def test_a_recurrent_layer_casts_its_weights_into_one_buffer(ghosts: GhostProcess) -> None:
    def step(lab: Lab) -> tuple[list[tuple[str, int]], torch.dtype, set[torch.dtype]]:
        layer = torch.nn.LSTM(8, 8, 2, device="ghost")
        x = lab.ghost(5, 3, 8)
        lab.mark()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = layer(x)[0]
        births = lab.outputs
        lab.recorder.begin_phase(lab.phase.BACKWARD)
        out.float().sum().backward()
        return births, out.dtype, {weight.grad.dtype for weight in layer.parameters()}  # type: ignore[union-attr]

    births, dtype, gradients = ghosts(step)
    weights = 2 * (2 * 4 * 8 * 8 + 2 * 4 * 8)
    assert ("aten.empty", 2 * weights) in births
    assert births.count(("aten._cudnn_rnn", 2 * weights)) == 0, "the buffer is not copied again"
    assert dtype is torch.bfloat16
    assert gradients == {torch.float32}


def test_a_recurrent_layers_gradients_are_cast_from_the_last_weight_to_the_first(ghosts: GhostProcess) -> None:
    """The order of the allocator's history; the buffer itself has no gradient."""

    def step(lab: Lab) -> list[tuple[str, int]]:
        layer = torch.nn.GRU(8, 16, device="ghost")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = layer(lab.ghost(5, 3, 8))[0]
        lab.recorder.begin_phase(lab.phase.BACKWARD)
        lab.mark()
        out.float().sum().backward()
        return lab.births

    births = ghosts(step)
    weights = {4 * 48 * 8, 4 * 48 * 16, 4 * 48}
    casts = [num_bytes for name, num_bytes in births if name == "aten._to_copy" and num_bytes in weights]
    assert casts == [4 * 48, 4 * 48, 4 * 48 * 16, 4 * 48 * 8]
    assert "aten.zeros" not in [name for name, _ in births]


def test_nesting_and_switching_off(ghosts: GhostProcess) -> None:
    def step(lab: Lab) -> list[torch.dtype]:
        x = lab.ghost(4, 4)
        seen = []
        with torch.autocast("cuda", dtype=torch.float16):
            seen.append((x @ x).dtype)
            with torch.autocast("cuda", enabled=False):
                seen.append((x @ x).dtype)
            seen.append((x @ x).dtype)
        return [*seen, (x @ x).dtype]

    assert ghosts(step) == [torch.float16, torch.float32, torch.float16, torch.float32]
