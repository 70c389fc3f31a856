"""Hungarian matching on ghosts: as many pairs as the real one finds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowtide
from lowtide.activations.losses.settings import choose_chunk_tokens
from lowtide.activations.stash import Stash
from lowtide.errors import UnsupportedHeadError
from lowtide.tracing.ghost.accepting import CHUNKED_LOSS_NOTE, MATCHING_NOTE, GhostMover
from lowtide.tracing.settings import StepSettings
from lowtide.tracing.step_trace import Category, StepTrace
from tests.tracing.ghost.ghost_process import GhostProcess, Lab


@pytest.mark.parametrize("shape", [(10, 3), (3, 10), (4, 4), (5, 0)])
def test_as_many_pairs_as_for_real(ghosts: GhostProcess, shape: tuple[int, int]) -> None:
    from scipy.optimize import linear_sum_assignment

    def step(lab: Lab) -> tuple[list[int], list[int], list[str]]:
        from scipy.optimize import linear_sum_assignment

        rows, columns = linear_sum_assignment(lab.ghost(*shape).cpu())
        return rows.tolist(), columns.tolist(), list(lab.mode.notes)

    rows, columns, notes = ghosts(step)
    real_rows, _ = linear_sum_assignment(np.random.default_rng(0).random(shape))
    assert len(rows) == len(columns) == len(real_rows)
    assert len(set(rows)) == len(set(columns)) == len(rows)
    assert notes == [MATCHING_NOTE]


def test_known_costs_are_matched_for_real(ghosts: GhostProcess) -> None:
    costs = torch.tensor([[4.0, 1.0], [2.0, 9.0]])

    def step(lab: Lab) -> list[int]:
        from scipy.optimize import linear_sum_assignment

        return list(linear_sum_assignment(lab.known(costs))[1].tolist())

    assert ghosts(step) == [1, 0]


SIZE = 2**21
"""Bytes of a tensor here: enough for its copy on the host to be a ghost."""


def ghost(lab: Lab) -> torch.Tensor:
    found: torch.Tensor = lab.ghost(SIZE // 4)
    return found


@pytest.mark.parametrize("is_part", [False, True])
def test_a_mover_holds_nothing(ghosts: GhostProcess, is_part: bool) -> None:
    def step(lab: Lab) -> int:
        mover = GhostMover(lab.machine.device)
        source = lab.ghost(2, SIZE // 8)[0] if is_part else ghost(lab)
        mover.to_host(mover.host_buffer(source.nbytes).view(torch.float32), source, keep=False)
        del source
        return int(lab.live_bytes)

    assert ghosts(step) == 0


class TestStash:
    def test_views_of_one_storage_go_once_and_come_back_as_they_were(self, ghosts: GhostProcess) -> None:
        def step(lab: Lab) -> tuple[int, int, list[bool]]:
            stash = Stash(GhostMover(lab.machine.device))
            parcel = stash.open_parcel(0)
            whole = lab.ghost(4, SIZE // 16)
            views = [whole[index] for index in range(4)] + [whole.t()]
            saved = [stash.put(parcel, view) for view in views]
            wanted = [(view.shape, view.stride(), view.storage_offset(), view.dtype) for view in views]
            del whole, views
            others = [stash.put(parcel, ghost(lab)) for _ in range(2)]  # now the first may go
            gone = lab.live_bytes
            back = [item.peek() for item in saved]
            found = [(view.shape, view.stride(), view.storage_offset(), view.dtype) for view in back]
            same = [left == right for left, right in zip(wanted, found, strict=True)]
            return stash.num_put - len(others), (lab.live_bytes - gone) // SIZE, same

        num_put, num_back, same = ghosts(step)
        assert (num_put, num_back, same) == (1, 1, [True] * 5)

    def test_a_small_view_of_a_large_storage_goes_alone(self, ghosts: GhostProcess) -> None:
        def step(lab: Lab) -> tuple[int, bool]:
            stash = Stash(GhostMover(lab.machine.device))
            part = lab.ghost(8, SIZE // 4)[3]
            saved = stash.put(stash.open_parcel(0), part)
            return stash.put_bytes, saved.peek().shape == part.shape

        assert ghosts(step) == (SIZE, True)


def test_a_ghost_mover_has_no_windows(ghosts: GhostProcess) -> None:
    def step(lab: Lab) -> None:
        mover = GhostMover(lab.machine.device)
        mover.shrink(mover.device_buffer(SIZE), [])

    with pytest.raises(AssertionError, match="cannot be taken away"):
        ghosts(step)


transformers = pytest.importorskip("transformers")

TOKENS, VOCABULARY, WIDTH = 4096, 32000, 64


def predict(chunked: bool, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> StepTrace:
    config = transformers.LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(dtype)
    ids = torch.zeros(2, TOKENS // 2, dtype=torch.int64)
    return lowtide.trace(
        model, {"input_ids": ids, "labels": ids}, settings=StepSettings(chunked_loss=chunked, **settings)
    )


def widest(trace: StepTrace) -> int:
    """Bytes of the largest tensor with a logit of each word, apart from weights and their gradients."""
    kinds = (Category.ACTIVATIONS, Category.TEMPORARIES)
    return max(a.requested_bytes for a in trace.allocations if a.category in kinds and a.shape[-1:] == (VOCABULARY,))


def test_one_chunk_of_logits_is_all_there_is() -> None:
    """The kernel for CUDA works in place: no copy in fp32 beside the logits."""
    whole, chunked = predict(False), predict(True)
    assert widest(whole) == TOKENS * VOCABULARY * 4
    chunk_tokens = choose_chunk_tokens(TOKENS, VOCABULARY, 2)
    assert chunk_tokens < TOKENS
    assert widest(chunked) == chunk_tokens * VOCABULARY * 2
    wide = [a for a in chunked.allocations if a.born is not None and a.requested_bytes >= widest(chunked)]
    assert len(wide) == 1
    assert CHUNKED_LOSS_NOTE in chunked.notes
    assert CHUNKED_LOSS_NOTE not in whole.notes


def test_under_autocast_the_gradient_is_summed_in_place() -> None:
    """Into the fp32 gradient of the weight itself: the host's way would widen each chunk's factors first."""
    chunked = predict(True, torch.float32, autocast="bfloat16")
    assert widest(chunked) == choose_chunk_tokens(TOKENS, VOCABULARY, 2) * VOCABULARY * 2


def test_together_with_a_policy() -> None:
    both, chunked = predict(True, activations="recompute"), predict(True)
    assert both.peak_bytes <= chunked.peak_bytes
    assert widest(both) == widest(chunked)


def test_a_model_without_such_a_head() -> None:
    with pytest.raises(UnsupportedHeadError, match="the head of Linear cannot be chunked"):
        lowtide.trace(nn.Linear(2, 2), torch.ones(1, 2), settings=StepSettings(chunked_loss=True))
