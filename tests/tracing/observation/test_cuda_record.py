from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from lowtide.models.gpt import GPT, GPTConfig
from lowtide.tracing.observation.cuda_record import phase_starts
from lowtide.tracing.observation.observe import applied, observe
from lowtide.tracing.observation.profile import Mark
from lowtide.tracing.settings import StepSettings, UpdateSchedule
from lowtide.tracing.step_trace import Category, Phase, StepTrace
from lowtide.tracing.training_step import TrainingStep
from tests.tracing.observation.profiled import profile_step

TINY = GPTConfig(num_layers=3, hidden_size=64, num_heads=2, vocab_size=128, context_length=32, dropout=0.0)


def make_gpt() -> tuple[GPT, dict[str, Tensor]]:
    torch.manual_seed(0)
    ids = torch.randint(0, TINY.vocab_size, (4, 32))
    return GPT(TINY), {"input_ids": ids, "labels": ids.clone()}


def bytes_by_module(trace: StepTrace, event: int) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for allocation in trace.alive_at(event):
        sizes[allocation.module] += allocation.bytes
    return sizes


@pytest.mark.parametrize(
    "settings",
    [
        StepSettings(),
        StepSettings(activations="recompute"),
        StepSettings(accumulate=2),
        StepSettings(autocast="float16"),
        StepSettings(update=UpdateSchedule.IN_BACKWARD),
        StepSettings(max_grad_norm=1.0, keep_gradients=True),
    ],
    ids=["plain", "recompute", "accumulate", "autocast", "in_backward", "clip_and_keep"],
)
def test_two_ways_of_observing_agree(settings: StepSettings) -> None:
    """A dispatch mode over storages, and the profiler's memory events: neither knows of the other."""
    model, batch = make_gpt()
    watched = observe(model, batch, optimizer=torch.optim.AdamW, settings=settings)
    optimizer = torch.optim.AdamW(model.parameters())
    with applied(model, optimizer, settings):
        profiled, raw_peak = profile_step(TrainingStep(model, batch, optimizer, None, settings))
    assert profiled.peak_bytes == raw_peak
    # The mode does not see the kernels' own scratch, nor the random states that checkpoints keep.
    seen = profiled.curve - profiled.stacked[Category.WORKSPACE]
    event = int(seen.argmax()) - 1
    slack = 64 + (TINY.num_layers * torch.get_rng_state().nbytes if settings.activations else 0)
    assert seen.max() - slack <= watched.peak_bytes <= seen.max()
    assert watched.peak_phase is profiled.events[event].phase
    ours, theirs = watched.at_peak, profiled.by_category_at(event)
    for category in set(Category) - {Category.WORKSPACE}:
        assert theirs[category] - slack <= ours[category] <= theirs[category], category
    if settings.activations:
        # Two events of a recomputation can carry the same time stamp, and now and then a tensor goes to the next module.
        return
    by_module, truth = bytes_by_module(watched, watched.peak_event), bytes_by_module(profiled, event)
    assert {module: size for module, size in (by_module - truth).items() if size > 64} == {}


def test_the_profiled_trace_is_consistent() -> None:
    model, batch = make_gpt()
    step = TrainingStep(model, batch, torch.optim.AdamW(model.parameters()), None, StepSettings())
    trace, _ = profile_step(step)
    assert sum(trace.at_peak.values()) == trace.peak_bytes
    assert trace.curve[-1] == trace.start_allocated_bytes
    for index, event in enumerate(trace.events):
        allocation = trace.allocations[event.allocation]
        assert (allocation.died if event.is_free else allocation.born) == index
    weight = next(a for a in trace.allocations if a.module == "layers.1.mlp.up" and a.op == "parameter weight")
    phases = {trace.ops[use].phase for use in weight.uses}
    assert phases == {Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE}
    made = {(op.name, op.phase): op.module for op in trace.ops if op.module.startswith("layers.1.mlp")}
    assert made["aten.gelu", Phase.FORWARD] == made["aten.gelu_backward", Phase.BACKWARD] == "layers.1.mlp"


def test_a_kernels_own_scratch_is_workspace() -> None:
    model, batch = make_gpt()
    trace, _ = profile_step(TrainingStep(model, batch, None, None, StepSettings()))
    scratch = [a for a in trace.allocations if a.category is Category.WORKSPACE]
    assert any("scaled_dot_product" in a.op for a in scratch)
    for allocation in scratch:
        assert allocation.born is not None
        assert allocation.died is not None
        assert trace.events[allocation.born].op == trace.events[allocation.died].op


def test_the_backward_of_a_reentrant_checkpoint_belongs_to_its_modules() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(16, 32)
            self.second = nn.Linear(32, 16)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            return torch.utils.checkpoint.checkpoint(self.second, hidden, use_reentrant=True).sum()  # type: ignore[no-any-return]

    step = TrainingStep(Checkpointed(), torch.ones(8, 16), None, None, StepSettings())
    trace, _ = profile_step(step)
    gradients = {a.module for a in trace.allocations if a.category is Category.GRADIENTS}
    assert gradients == {"first", "second"}


def test_phases_begin_at_their_marks_and_the_loss_after_the_last_weights() -> None:
    marks = [
        Mark(0, 1, "phase", "forward"),
        Mark(1, 1, "enter", ""),
        Mark(2, 1, "enter", "head"),
        Mark(3, 1, "leave", "1"),
        Mark(4, 1, "enter", "dropout"),
        Mark(5, 1, "leave", "0"),
        Mark(6, 1, "leave", "1"),
        Mark(7, 1, "phase", "loss"),
        Mark(8, 1, "phase", "backward"),
        Mark(9, 2, "enter", "head"),  # recomputed in the backward's thread
        Mark(10, 2, "leave", "1"),
        Mark(11, 1, "phase", "update"),
    ]
    assert phase_starts(marks) == [
        (0, Phase.FORWARD),
        (3, Phase.LOSS),
        (7, Phase.LOSS),
        (8, Phase.BACKWARD),
        (11, Phase.UPDATE),
    ]
