"""Selective recomputation is a dispatch mode of torch's: it has to live with the one that makes ghosts."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from lowtide.activations.selective import selective_contexts
from tests.tracing.ghost.ghost_process import GhostProcess, Lab

ROWS, WIDTH, WIDER = 128, 64, 256


def run(lab: Lab, dropout: float) -> tuple[int, list[str]]:
    """Bytes that the forward leaves beside its inputs and its output, and the operators that run again."""
    x, up, down = (lab.ghost(*shape, needs_grad=True) for shape in ((ROWS, WIDTH), (WIDTH, WIDER), (WIDER, WIDTH)))

    def block(x: torch.Tensor) -> torch.Tensor:
        heads = (F.gelu(x @ up) @ down).view(1, ROWS, 4, 16).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=dropout)
        return mixed.transpose(1, 2).reshape(ROWS, WIDTH).relu().sum()

    before = lab.live_bytes
    out = checkpoint(block, x, use_reentrant=False, context_fn=functools.partial(selective_contexts(None)))
    kept = lab.live_bytes - before - 4
    lab.recorder.begin_phase(lab.phase.BACKWARD)
    lab.mark()
    out.backward()
    again = [op for op, _ in lab.outputs if op in ("aten.mm", "aten.gelu", "aten.relu") or "dot_product" in op]
    return kept, [op for op in again if not op.endswith("_backward")]


ROW_SUMS = 4 * 4 * ROWS
MATMULS = 4 * ROWS * (WIDER + WIDTH)


def test_matmuls_and_attention_are_kept_and_the_rest_runs_again(ghosts: GhostProcess) -> None:
    kept, again = ghosts(lambda lab: run(lab, 0.0))
    assert kept == MATMULS + 4 * ROWS * WIDTH + ROW_SUMS
    # The matmuls that run in the backward are the gradients' own four.
    assert (again.count("aten.mm"), again.count("aten.gelu"), again.count("aten.relu")) == (4, 1, 1)
    assert not any("attention" in op for op in again)


def test_attention_with_dropout_runs_again(ghosts: GhostProcess) -> None:
    kept, again = ghosts(lambda lab: run(lab, 0.1))
    assert kept == MATMULS
    assert any("attention" in op for op in again)
