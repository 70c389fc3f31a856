"""Models, plans and training loops made up at random, for property tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.memory.chunk import Layout, lay_out
from lowtide.memory.groups import find_groups
from lowtide.planning.placement import largest_window
from lowtide.runtime import manage as manage_module
from lowtide.runtime.session import Session
from lowtide.runtime.updates.worker import HostWorker, Job


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What the model looks like."""

    width: int
    num_layers: int
    calls: tuple[int, ...]
    """Which layer is called when: some twice, some never."""
    is_tied: bool
    is_checkpointed: bool
    dropout: float
    frozen: frozenset[int]
    """Layers that are not trained."""
    has_loose_parameter: bool


class RandomNet(nn.Module):
    """An embedding, layers in any order, and a head that may share the embedding's weight."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        width = spec.width
        self.spec = spec
        self.embedding = nn.Embedding(12, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Dropout(spec.dropout), nn.Linear(2 * width, width))
            for _ in range(spec.num_layers)
        )
        self.head = nn.Linear(width, 12, bias=not spec.is_tied)
        if spec.is_tied:
            self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(width)) if spec.has_loose_parameter else None
        self.register_buffer("num_calls", torch.zeros(()))
        for index in spec.frozen:
            self.layers[index].requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        if self.training:
            self.num_calls += 1
        for index in self.spec.calls:
            layer = self.layers[index]
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.spec.is_checkpointed else layer(x))
        if self.scale is not None:
            x = x * self.scale
        return F.cross_entropy(self.head(x).flatten(0, -2), ids.roll(1).flatten())


def build(spec: ModelSpec) -> RandomNet:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return RandomNet(spec)


@st.composite
def model_specs(draw: st.DrawFn) -> ModelSpec:
    num_layers = draw(st.integers(1, 4))
    layers = st.integers(0, num_layers - 1)
    return ModelSpec(
        width=draw(st.sampled_from([4, 12])),
        num_layers=num_layers,
        calls=tuple(draw(st.lists(layers, min_size=1, max_size=6))),
        is_tied=draw(st.booleans()),
        is_checkpointed=draw(st.integers(0, 3)) == 0,
        dropout=draw(st.sampled_from([0.0, 0.3])),
        frozen=draw(st.frozensets(layers, max_size=1)),
        has_loose_parameter=draw(st.booleans()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSpec:
    """How it is managed."""

    chunk_bytes: int
    weights: dict[str, str]
    update: dict[str, str | float]
    schedule: str
    prefetch_depth: int
    has_smallest_window: bool
    cached_buffers: int
    defragment_every: int

    def plan(self, model: nn.Module, device_bytes: int | None) -> lowtide.Plan:
        layout = lay_out(find_groups(model), chunk_bytes=self.chunk_bytes)
        return lowtide.make_plan(
            layout,
            weights=self.weights,
            update=self.update,
            schedule=self.schedule,
            prefetch_depth=self.prefetch_depth,
            cached_buffers=self.cached_buffers,
            defragment_every=self.defragment_every,
            window_memory=self._smallest_window(layout) if self.has_smallest_window else None,
            device_memory=device_bytes,
        )

    def _smallest_window(self, layout: Layout) -> int:
        streamed = [group.name for group in layout.groups if self.weights.get(group.name) == "streamed"]
        return largest_window(layout, streamed)[1]


@st.composite
def plan_specs(draw: st.DrawFn, model: ModelSpec) -> PlanSpec:
    names = [group.name for group in find_groups(build(model))]
    return PlanSpec(
        chunk_bytes=draw(st.sampled_from([512, 1024, 1 << 20])),
        weights={name: draw(st.sampled_from(["streamed", "streamed", "resident"])) for name in names},
        update={name: draw(st.sampled_from(["device", "host", 0.5])) for name in names},
        schedule=draw(st.sampled_from(["deferred", "in_backward"])),
        # A checkpoint around several groups calls the first while the last is open: the windows must hold both.
        prefetch_depth=draw(st.integers(2 if model.is_checkpointed else 0, 3)),
        has_smallest_window=not model.is_checkpointed and draw(st.booleans()),
        cached_buffers=draw(st.integers(0, 2)),
        defragment_every=draw(st.integers(0, 2)),
    )


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.02),
    "adam foreach": lambda model: torch.optim.Adam(model.parameters(), lr=0.02, foreach=True),
    "sgd momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01),
}
ACTIONS = (
    "step",
    "step",
    "accumulate",
    "clip",
    "evaluate",
    "forward only",
    "read",
    "write",
    "state",
    "gradient",
    "keep",
)


class Loop:
    """One training loop, the same for the plain and the managed model: a list of what it saw."""

    def __init__(self, model: RandomNet, optimizer: torch.optim.Optimizer, *, is_deferred: bool) -> None:
        self.model, self.optimizer, self.is_deferred = model, optimizer, is_deferred
        self.seen: list[Any] = []
        self.kept: list[Tensor] = []

    def act(self, action: str, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        length = 3 + seed % 3
        ids = torch.randint(12, (2, length), generator=generator)
        torch.manual_seed(seed)
        parameters = list(self.model.parameters())
        chosen = parameters[seed % len(parameters)]
        if action == "evaluate":
            self.model.eval()
            with torch.no_grad():
                self.see(self.model(ids))
            self.model.train()
        elif action == "forward only":
            self.see(self.model(ids).detach())
        elif action == "read":
            self.see(chosen)
        elif action == "write":
            with torch.no_grad():
                chosen.mul_(0.5)
        elif action == "state":
            self.see(*self.model.state_dict().values())
            self.optimizer.state_dict()
        else:
            self.train(action, ids, chosen, seed)

    def train(self, action: str, ids: Tensor, chosen: Tensor, seed: int) -> None:
        num_backwards = 3 if action == "accumulate" and self.is_deferred else 1
        for _ in range(num_backwards):
            loss = self.model(ids)
            self.see(loss.detach())
            if action == "keep":
                self.kept.append(loss)
            loss.backward()
        if self.is_deferred and action == "clip":
            self.see(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1))
        if self.is_deferred and action == "gradient" and chosen.grad is not None:
            self.see(chosen.grad)
            chosen.grad.mul_(0.5)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=seed % 3 > 0)

    def see(self, *tensors: Tensor) -> None:
        self.seen.extend(tensor.detach().clone() for tensor in tensors)


@st.composite
def trainings(draw: st.DrawFn) -> Training:
    model = draw(model_specs())
    return Training(
        model=model,
        plan=draw(plan_specs(model)),
        optimizer=draw(st.sampled_from(sorted(OPTIMIZERS))),
        actions=tuple(draw(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 99)), min_size=3, max_size=7))),
        eagerness=draw(st.sampled_from([0.0, 0.0, 0.5])),
        mover_seed=draw(st.integers(0, 99)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A model, its optimizer, how it is managed, and what the loop does."""

    model: ModelSpec
    plan: PlanSpec
    optimizer: str
    actions: tuple[tuple[str, int], ...]
    eagerness: float
    mover_seed: int

    def plainly(self) -> Loop:
        return self._run(None)[0]

    def managed(self, device_bytes: int | None = None) -> tuple[Loop, int]:
        """The loop, and the peak of the device."""
        with pytest.MonkeyPatch.context() as patch:
            mover = functools.partial(manage_module.EmulatedMover, eagerness=self.eagerness, seed=self.mover_seed)
            patch.setattr(manage_module, "EmulatedMover", mover)
            return self._run(device_bytes, is_managed=True)

    def _run(self, device_bytes: int | None, *, is_managed: bool = False) -> tuple[Loop, int]:
        model = build(self.model)
        optimizer = OPTIMIZERS[self.optimizer](model)
        loop = Loop(model, optimizer, is_deferred=self.plan.schedule == "deferred")
        session: Session | None = None
        if is_managed:
            session = lowtide.manage(model, optimizer, self.plan.plan(model, device_bytes), device="cpu")
        peak_bytes = 0
        try:
            for action, seed in self.actions:
                loop.act(action, seed)
            if session is not None:
                peak_bytes = next(row.peak_bytes for row in session.stats().tiers if row.tier == "device")
        finally:
            if session is not None:
                session.close()
        return loop, peak_bytes


def promptly(patch: pytest.MonkeyPatch) -> None:
    """Host updates are over when they are given: how many gradients wait for one is no longer a matter of luck."""
    whole = HostWorker.submit

    def submit(worker: HostWorker, work: Any, **options: Any) -> Job:
        job = whole(worker, work, **options)
        job.wait()
        return job

    patch.setattr(HostWorker, "submit", submit)
