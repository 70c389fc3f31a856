"""A prepared session whose loop is not as planned goes on under a new plan, with the bits of plain torch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.errors import EmulatedOutOfMemoryError, StepLostError
from lowtide.models import resolve_model
from lowtide.models.gpt import GPT, GPTConfig
from lowtide.runtime.emulation.device import Mark, set_mark
from lowtide.runtime.planner import faster_schedule
from lowtide.runtime.statistics.session_stats import SessionStats
from lowtide.runtime.step_planner import StepPlanner, num_moved
from lowtide.units import format_seconds
from tests.runtime.twins import device_peak, flat_state, off_the_books
from tests.zoo import assert_same_tensors

WIDTH = 64
MiB = 1 << 20


class Block(nn.Module):
    """A layer with statistics and random numbers, and room for what a plan does not know of."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.1)
        self.num_backward = 0
        """Elements that it makes and lets go of in the middle of a backward."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.inner(self.norm(x)))
        if self.num_backward and hidden.requires_grad:
            hidden.register_hook(self._waste)
        out: Tensor = x + self.dropout(self.outer(hidden))
        return out

    def _waste(self, gradient: Tensor) -> None:
        """A hook, which the backward calls."""
        gradient.sum().expand(self.num_backward).clone()


class Net(nn.Module):
    """Gives its loss, as models of transformers do."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 4)
        self.num_forward = self.num_held = 0
        """Elements that it makes and lets go of at the end of a forward, and those that it keeps from call to call."""
        self.held: Tensor | None = None

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        self.held = None
        if self.num_held:
            self.held = self.head.weight.detach().sum().expand(self.num_held).clone()
        for block in self.blocks:
            x = block(x)
        if self.num_forward:
            x.detach().sum().expand(self.num_forward).clone()
        logits: Tensor = self.head(x)
        return logits if target is None else F.mse_loss(logits, target)


def batch_of(size: int, seed: int = 0) -> dict[str, Tensor]:
    with off_the_books():
        generator = torch.Generator().manual_seed(seed)
        return {
            "x": torch.randn(size, WIDTH, generator=generator),
            "target": torch.randn(size, 4, generator=generator),
        }


def make_net() -> Net:
    torch.manual_seed(3)
    return Net()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> Tensor:
    loss = model(**batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


class Pair:
    """A plain and a prepared model; what is done to one is done to the other."""

    def __init__(self, size: int, device_memory: int, **words: Any) -> None:
        self.plain, self.model = make_net(), make_net()
        self.plain_optimizer, self.optimizer = adamw(self.plain), adamw(self.model)
        for tensor in (*self.plain.parameters(), *self.plain.buffers()):
            set_mark(tensor.untyped_storage(), Mark.HOST)
        self.budget = device_memory
        self.session = lowtide.prepare(
            self.model, self.optimizer, batch_of(size), device="cpu", device_memory=device_memory, **words
        )

    def run(self, loop: Callable[[Net, torch.optim.Optimizer], Sequence[Tensor]], seed: int = 1) -> None:
        """The loop on both; what it returns, and what comes of the random numbers, is the same."""
        torch.manual_seed(seed)
        with off_the_books():
            expected, random = loop(self.plain, self.plain_optimizer), torch.get_rng_state()
        torch.manual_seed(seed)
        found = loop(self.model, self.optimizer)
        with off_the_books():
            assert [float(value) for value in expected] == [float(value) for value in found]
            assert torch.equal(random, torch.get_rng_state())

    def steps(self, *sizes: int, seed: int = 1) -> None:
        self.run(
            lambda model, optimizer: [
                take_step(model, optimizer, batch_of(size, number)) for number, size in enumerate(sizes)
            ],
            seed,
        )

    def each(self, change: Callable[[Net], None]) -> None:
        change(self.plain)
        change(self.model)

    @property
    def reasons(self) -> list[str]:
        return [row.reason for row in self.session.stats().plans]

    def assert_same(self) -> None:
        assert device_peak(self.session) <= self.budget
        with off_the_books():
            assert_same_tensors(self.plain.state_dict(), self.model.state_dict())
            assert_same_tensors(flat_state(self.plain_optimizer), flat_state(self.optimizer))


@contextmanager
def prepared(size: int, device_memory: int, **words: Any) -> Iterator[Pair]:
    pair = Pair(size, device_memory, **words)
    with pair.session:
        yield pair
        pair.assert_same()
    with off_the_books():
        assert_same_tensors(pair.plain.state_dict(), pair.model.state_dict())


def test_a_batch_that_outgrows_its_plan_gets_another_one() -> None:
    with prepared(256, int(2.5 * MiB)) as pair:
        pair.steps(256, 128, 256)
        assert not pair.reasons
        before = pair.session.plan
        pair.steps(400, 410, 256, seed=2)
        (reason,) = pair.reasons
        assert reason.startswith("a batch of 400x64 is larger than the one planned for, 256x64")
        assert pair.session.plan != before
        assert pair.session.stats().plans[0].step == 3


def repeat_lost(
    model: nn.Module, optimizer: torch.optim.Optimizer, *sizes: int, lost: list[StepLostError] | None = None
) -> list[Tensor]:
    """A loop that repeats a step that was lost."""
    losses = []
    for number, size in enumerate(sizes):
        for _ in range(4):
            try:
                losses.append(take_step(model, optimizer, batch_of(size, number)))
                break
            except StepLostError as error:
                if lost is not None:
                    lost.append(error.with_traceback(None))
    return losses


def test_memory_that_runs_out_in_a_forward_is_not_noticed_by_the_loop() -> None:
    with prepared(256, int(2.5 * MiB)) as pair:
        pair.steps(256)
        pair.each(lambda net: setattr(net, "num_forward", 320_000))
        pair.steps(256, 256, seed=2)
        assert len(pair.reasons) == 1
        assert pair.reasons[0].startswith("memory ran out in a forward (the emulated device is out of memory")


def test_a_forward_that_nothing_makes_room_for_raises_what_it_raised(caplog: pytest.LogCaptureFixture) -> None:
    with prepared(256, int(2.5 * MiB)) as pair:
        pair.steps(256)
        pair.each(lambda net: setattr(net, "num_forward", 2_500_000))
        with pytest.raises(EmulatedOutOfMemoryError) as caught:
            pair.model(**batch_of(256))
        assert any(
            "the session found no plan that leaves more room: no plan fits" in note for note in caught.value.__notes__
        )
        pair.each(lambda net: setattr(net, "num_forward", 0))
        # The statistics of BatchNorm are as before the call.
        pair.steps(256, 256)


def test_a_step_that_is_lost_in_backward_can_be_repeated() -> None:
    with prepared(256, int(2.5 * MiB)) as pair:
        pair.steps(256)
        pair.each(lambda net: setattr(net.blocks[1], "num_backward", 250_000))
        lost: list[StepLostError] = []
        pair.run(lambda model, optimizer: repeat_lost(model, optimizer, 256, 256, lost=lost))
        assert len(lost) == len(pair.reasons) == 1
        assert pair.reasons[0].startswith("memory ran out in a backward")
        assert "weights, optimizer, random numbers and buffers are as before the step" in str(lost[0])
        assert lost[0].__context__ is None


def test_a_step_of_several_batches_is_lost_as_a_whole() -> None:
    def loop(model: Net, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        found: list[Tensor] = []
        while len(found) < 2:
            try:
                losses = []
                for number in range(2):
                    loss = model(**batch_of(256, number))
                    loss.backward()
                    losses.append(loss.detach())
                    # The second batch of the first step alone takes more.
                    model.blocks[1].num_backward = 210_000 if not found and not number else 0
            except StepLostError:
                model.blocks[1].num_backward = 0
                continue
            optimizer.step()
            optimizer.zero_grad()
            found.append(sum(losses))
        return found

    with prepared(256, int(2.5 * MiB)) as pair:
        pair.steps(256)
        pair.run(loop)
        assert len(pair.reasons) == 1


def test_groups_that_a_lost_backward_has_updated_are_named() -> None:
    with Pair(256, int(2.0 * MiB), schedule="in_backward").session as session:
        model, optimizer = session.model, session.optimizer
        assert optimizer is not None
        take_step(model, optimizer, batch_of(256))
        model.blocks[0].num_backward = 400_000
        loss = model(**batch_of(256))
        with pytest.raises(StepLostError, match=r"memory ran out in a backward .* had updated \d of 5 groups"):
            loss.backward()
        with pytest.raises(StepLostError, match="had updated"):
            optimizer.step()
    assert not session.is_open


def test_an_evaluation_of_larger_batches_gets_a_plan_of_its_own_where_it_needs_one() -> None:
    def evaluate(model: Net, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        model.eval()
        with torch.inference_mode():
            found = [model(batch_of(size)["x"]).sum() for size in (300, 750, 750)]
        model.train()
        return found

    with prepared(256, int(2.5 * MiB)) as pair:
        pair.steps(256)
        training = pair.session.plan
        pair.run(evaluate)
        assert len(pair.reasons) == 1
        assert pair.reasons[0].startswith("memory ran out in a forward without gradients")
        pair.steps(256, 256)
        assert pair.reasons[1] == "training goes on after an evaluation under a plan of its own"
        assert pair.session.plan == training


def test_steps_that_take_more_than_predicted_get_a_smaller_plan() -> None:
    budget = int(3.4 * MiB)
    with prepared(256, budget) as pair:
        pair.steps(256, 256)
        free_bytes = budget - device_peak(pair.session)
        pair.each(lambda net: setattr(net, "num_held", (free_bytes - 8192) // 4))
        pair.steps(256, 256, 256)
        (reason,) = pair.reasons
        assert reason.startswith("steps took 3.4 MiB of the device, ")
        pair.session.take_device_peak()
        pair.steps(256)
        assert pair.session.take_device_peak() < 0.98 * budget


def test_a_loop_that_is_small_again_returns_to_the_faster_plan() -> None:
    with prepared(256, int(2.5 * MiB)) as pair:
        first = pair.session.plan
        pair.steps(256, 400)
        second = pair.session.plan
        pair.steps(*[128] * 31)
        assert pair.session.plan == second
        pair.steps(128)
        assert pair.session.plan == first
        assert pair.reasons[1].startswith("the last 32 batches fit the plan for 256x64, which is faster")
        pair.steps(400)
        assert pair.session.plan == second


def test_a_loss_outside_of_the_model_may_keep_what_the_model_returned() -> None:
    """The loop holds the outputs and the loss of the step that was lost; both let go of the graph."""

    def loop(model: Net, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        found: list[Tensor] = []
        while len(found) < 2:
            batch = batch_of(256, len(found))
            try:
                outputs = model(batch["x"])
                loss = F.mse_loss(outputs, batch["target"])
                loss.backward()
            except StepLostError:
                assert not outputs.requires_grad
                continue
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return found

    def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(model(batch["x"]), batch["target"])

    with prepared(256, int(2.5 * MiB), loss=loss_of) as pair:
        pair.run(loop)
        pair.each(lambda net: setattr(net.blocks[1], "num_backward", 250_000))
        pair.run(loop)
        assert len(pair.reasons) == 1


def test_a_smaller_plan_waits_for_a_graph_that_somebody_holds() -> None:
    with prepared(256, int(2.5 * MiB)) as pair:
        pair.steps(256)
        pair.model.blocks[1].num_backward = 300_000
        held = [pair.model(batch_of(256)["x"]) * 1.0]
        with pytest.raises(StepLostError, match="before which you drop what else you hold of its graph"):
            held[0].sum().backward()
        assert not pair.reasons
        held.clear()
        pair.each(lambda net: setattr(net.blocks[1], "num_backward", 50_000))
        pair.run(lambda model, optimizer: [model(**batch_of(256, 5)).detach()])
        assert len(pair.reasons) == 1


def test_a_backward_of_another_model_is_left_alone() -> None:
    """Its exception passes as it is, and the session goes on."""
    with prepared(256, int(2.5 * MiB)) as pair:
        pair.steps(256)
        x = torch.ones(4, requires_grad=True)
        out = x * 2
        out.register_hook(_run_out)
        with pytest.raises(torch.OutOfMemoryError, match="somebody else"):
            out.sum().backward()
        assert out.requires_grad
        pair.steps(256)
        assert not pair.reasons
    # With the last session torch's own engine is back.
    assert torch.autograd._engine_run_backward is torch.autograd.graph._engine_run_backward


def _run_out(gradient: Tensor) -> None:
    raise torch.OutOfMemoryError("somebody else")


def test_plans_are_kept_in_the_statistics() -> None:
    with prepared(256, int(2.5 * MiB)) as pair:
        pair.session._switch(lowtide.make_plan(make_net(), device_memory=pair.budget))
        stats = pair.session.stats()
        assert [row.step for row in stats.plans] == [0]
        assert SessionStats.from_dict(stats.to_dict()) == stats
        assert "new plan after 0 steps: " in str(stats)


def test_what_updates_in_backward_would_gain_is_one_sentence() -> None:
    source = resolve_model("gpt-tiny")
    words = {"optimizer": torch.optim.AdamW, "hardware": "rtx-4090", "device_memory": "150MiB"}
    found = lowtide.plan(source.build(torch.bfloat16), source.make_batch("8x128"), **words)
    faster = dataclasses.replace(found, in_backward_s=0.75 * found.step_s)
    told = faster_schedule(faster)
    assert told is not None
    assert format_seconds(0.75 * found.step_s) in told
    assert "schedule='in_backward'" in told
    assert faster_schedule(dataclasses.replace(found, in_backward_s=None)) is None


def test_updates_stay_where_they_are_if_a_plan_with_the_same_sites_fits() -> None:
    """The fastest plan for the larger batch moves an update; the one that is taken streams all blocks instead."""
    budget = int(2.5 * MiB)
    search = functools.partial(lowtide.plan, hardware="cpu")
    model, batch = make_net(), batch_of(256)
    optimizer = adamw(model)
    before = search(model, batch, optimizer=optimizer, device_memory=budget).plan
    planner = StepPlanner(
        search, {"hardware": "cpu"}, model=model, batch=batch, optimizer=optimizer, loss=None, device_bytes=budget
    )
    assert planner.shapes == {"x": (256, WIDTH), "target": (256, 4)}
    free = search(model, batch_of(384), optimizer=optimizer, device_memory=budget).plan
    assert num_moved(before, free) > 0
    shapes = {"x": (384, WIDTH), "target": (384, 4)}
    # Window memory above the least was the plan's before, and is not that of the next one.
    like = dataclasses.replace(before, budgets=dataclasses.replace(before.budgets, window_bytes=1 << 20))
    found = planner.at(shapes, like=like, limit_bytes=budget)
    assert found.num_moved == num_moved(before, found.plan) == 0
    assert found.plan != before
    assert found.reserved_bytes <= budget
    again = planner.replayed(found.plan, shapes, budget)
    assert again is not None
    assert again.reserved_bytes == found.reserved_bytes


class Waster:
    """A hook on a model that makes memory for a moment, at the end of its forward or in its backward: 50
    MiB more than the budget had left when it was first called.
    """

    def __init__(self, where: str, budget: int) -> None:
        self.where, self.budget = where, budget
        self.num_bytes: int | None = None

    def __call__(self, model: nn.Module, args: object, output: Any) -> None:
        if self.where == "forward":
            self.waste()
        else:
            output.loss.register_hook(self.waste)

    def waste(self, *_: object) -> None:
        if self.num_bytes is None:
            self.num_bytes = self.budget - torch.cuda.memory_allocated() + 50 * MiB
        torch.empty(self.num_bytes, dtype=torch.uint8, device="cuda")


def train_on_gpu(where: str, device_memory: int | None) -> list[float]:
    """Five steps, the last three of them with a waster that the budget, if there is one, has no room for."""
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=8192, context_length=256, num_layers=12, hidden_size=1024, num_heads=16)
    model = GPT(config).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, 8192, (8, 256), generator=torch.Generator().manual_seed(0)).to("cuda")
    batch = {"input_ids": ids, "labels": ids}

    def loop(num_steps: int, lost: list[StepLostError]) -> list[float]:
        found: list[float] = []
        while len(found) < num_steps:
            try:
                loss = model(**batch).loss
                loss.backward()
            except StepLostError as error:
                lost.append(error.with_traceback(None))
                continue
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
        return found

    if device_memory is None:
        return loop(5, [])
    lost: list[StepLostError] = []
    with lowtide.prepare(model, optimizer, batch, device_memory=device_memory) as session:
        found = loop(2, lost)
        model.register_forward_hook(Waster(where, device_memory))
        found += loop(3, lost)
        assert session.stats().plans[0].reason.startswith(f"memory ran out in a {where}")
        assert bool(lost) == (where == "backward")
        assert torch.cuda.max_memory_reserved() <= device_memory
    return found


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:the host updates .* by torch's own AdamW:UserWarning")
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_memory_that_runs_out_on_a_gpu(where: str) -> None:
    """The losses stay those of plain torch but for the last bits of updates that have moved."""
    plain = train_on_gpu(where, None)
    torch.cuda.empty_cache()
    assert train_on_gpu(where, 1200 * MiB) == pytest.approx(plain, rel=1e-2)
