"""The ghost machine: a process in which torch believes in a CUDA card."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.activations.losses.settings import choose_chunk_tokens
from lowtide.activations.stash import Stash
from lowtide.errors import UnsupportedHeadError
from lowtide.tracing.ghost.device import GhostMover
from lowtide.tracing.ghost.machine import MATCHING_NOTE
from lowtide.tracing.prediction.predict import CHUNKED_LOSS_NOTE
from lowtide.tracing.settings import StepSettings
from lowtide.tracing.step_trace import Category, StepTrace
from tests.tracing.ghost.ghost_process import GhostProcess, Lab


def test_a_ghost_looks_like_a_card(ghosts: GhostProcess) -> None:
    def step(lab: Lab) -> tuple[object, ...]:
        x = lab.ghost(2, 3)
        return str(x.device), x.is_cuda, torch.autocast("cuda").device, tuple(x.shape), "Ghost" in repr(x)

    assert ghosts(step) == ("ghost:0", True, "ghost", (2, 3), True)


def test_there_is_one_machine_a_process(ghosts: GhostProcess) -> None:
    assert ghosts(lambda lab: type(lab.machine).get() is lab.machine)


def test_tensors_made_from_numbers_know_their_values(ghosts: GhostProcess) -> None:
    """`torch.tensor` and indexing with a list make their tensors below any dispatch mode."""

    def step(lab: Lab) -> tuple[object, ...]:
        x = lab.ghost(5, 2)
        made = torch.tensor([3, 1, 2], device=x.device)
        rows = x[[0, 2, 4]]
        scalar = torch.tensor(2.5, device=x.device)
        return made.tolist(), tuple(rows.shape), float(scalar * 2), int(made.max())

    assert ghosts(step) == ([3, 1, 2], (3, 2), 5.0, 3)


def test_tensors_made_on_the_card_cost_their_bytes(ghosts: GhostProcess) -> None:
    def step(lab: Lab) -> list[int]:
        device = lab.ghost(1).device
        lab.mark()
        keep = [torch.tensor([1, 2, 3], device=device), torch.zeros(4, device=device), torch.arange(6, device=device)]
        return [nbytes for _, nbytes in lab.births] if keep else []

    assert ghosts(step) == [24, 16, 48]


def test_moving_to_the_card_and_back(ghosts: GhostProcess) -> None:
    def step(lab: Lab) -> tuple[object, ...]:
        lab.mark()
        there = torch.arange(4).to("ghost")
        births = list(lab.births)
        back = there.cpu()
        return births, str(back.device), back.tolist()

    births, device, values = ghosts(step)
    assert [nbytes for _, nbytes in births] == [32]
    assert (device, values) == ("cpu", [0, 1, 2, 3])


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad])
def test_optimizers_take_their_foreach_form_as_on_cuda(ghosts: GhostProcess, kind: type[torch.optim.Optimizer]) -> None:
    def step(lab: Lab) -> bool:
        parameter = lab.ghost(4, 4, needs_grad=True)
        optimizer = kind([parameter])  # type: ignore[call-arg]
        parameter.grad = lab.ghost(4, 4)
        lab.recorder.begin_phase(lab.phase.UPDATE)
        optimizer.step()
        return any(name.startswith("aten._foreach") for name in lab.calls)

    assert ghosts(step)


def test_a_checkpoint_runs_its_forward_again(ghosts: GhostProcess) -> None:
    def step(lab: Lab) -> tuple[int, int]:
        x = lab.ghost(8, 8, needs_grad=True)
        start = lab.live_bytes
        out = checkpoint(lambda y: y.exp().exp().exp(), x, use_reentrant=False)
        held = lab.live_bytes - start
        lab.recorder.begin_phase(lab.phase.BACKWARD)
        out.sum().backward()
        return held, sum(name == "aten.exp" for name in lab.calls)

    held, count = ghosts(step)
    assert held == 4 * 64  # the output; its inputs are recomputed
    assert count in (5, 6)  # three, and again up to the last that is needed


def test_small_tensors_on_the_host_stay_real(ghosts: GhostProcess) -> None:
    assert ghosts(lambda lab: (torch.ones(3) + 1).sum().item()) == 6.0


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Linear(8, 4), (2, 8)), (nn.Conv2d(3, 4, 3), (1, 3, 8, 8)), (nn.LayerNorm(8), (2, 8)), (nn.BatchNorm2d(3), (2, 3, 4, 4)),
     (nn.MultiheadAttention(8, 2, batch_first=True), (2, 5, 8)), (nn.GELU(), (4,)), (nn.MaxPool2d(2), (1, 3, 8, 8)),
     (nn.GroupNorm(2, 4), (2, 4, 3, 3)), (nn.ConvTranspose2d(3, 4, 2, 2), (1, 3, 4, 4)), (nn.Embedding(5, 3), None)],
)  # fmt: skip
def test_layers_give_shapes_types_and_strides_as_on_the_cpu(
    ghosts: GhostProcess, layer: nn.Module, shape: tuple[int, ...] | None
) -> None:
    inputs = torch.zeros(2, 3, dtype=torch.int64) if shape is None else torch.randn(shape)
    state = {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}

    def call(network: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return network(x, x, x, need_weights=False)[0] if isinstance(network, nn.MultiheadAttention) else network(x)

    def step(lab: Lab) -> tuple[object, ...]:
        moved = layer.to("meta")
        for module in moved.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = lab.ghost(*parameter.shape, needs_grad=True)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = lab.ghost(*buffer.shape, dtype=buffer.dtype)
        out = call(moved, lab.known(inputs))
        return tuple(out.shape), out.dtype, out.stride()

    real = call(layer, inputs)
    assert state == {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
    assert ghosts(step) == (tuple(real.shape), real.dtype, real.stride())


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
