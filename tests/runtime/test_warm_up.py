"""A session that plans from its first step: it observes, changes its plan, and nobody sees it in the numbers."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide import WarmUp
from lowtide.errors import ConfigError, PlanError, SessionError
from lowtide.memory.store import ChunkStore
from lowtide.planning.budget_plans import MonitorMode
from lowtide.planning.plan import Schedule
from lowtide.runtime.emulation.memory import TrackedMemory
from lowtide.runtime.statistics.observer import StepObserver
from lowtide.runtime.warm_up import WarmUpRun
from tests.runtime.stack import (
    BLOCK_BYTES,
    KB,
    NUM_BLOCKS,
    REST_BYTES,
    Stack,
    batch,
    managed,
    num_on_device,
    steps,
    tier,
)
from tests.runtime.stack import num_resident as residents
from tests.zoo import assert_same, train, zoo

SIZE = 400 * KB
"""The device's size: enough for the stack's activations and some of its chunks."""


def plain(num_steps: int) -> tuple[nn.Module, list[float]]:
    model = Stack()
    return model, steps(model, torch.optim.AdamW(model.parameters(), lr=1e-2), num_steps)


@pytest.fixture
def warming() -> Iterator[lowtide.Session]:
    """A session before its first step."""
    session, _ = managed(WarmUp(device_memory=SIZE))
    yield session
    session.close()


@pytest.fixture
def roomy() -> Iterator[lowtide.Session]:
    """One with room for several graphs."""
    session, _ = managed(WarmUp(device_memory=8 * SIZE))
    yield session
    session.close()


def optimizer_of(session: lowtide.Session) -> torch.optim.Optimizer:
    assert session.optimizer is not None
    return session.optimizer


class TestTheNumbers:
    @pytest.mark.parametrize("schedule", list(Schedule))
    @pytest.mark.parametrize(("name", "size"), [("gpt", "1300KiB"), ("gpt", "16MiB"), ("resnet", "2200KiB")])
    def test_are_those_of_plain_torch_through_the_change(self, name: str, size: str, schedule: Schedule) -> None:
        model = zoo(name)
        loop: dict[str, Any] = {"clip": 1.0, "accumulation": 2} if schedule is Schedule.DEFERRED else {}

        def run(plan: WarmUp | None) -> tuple[nn.Module, list[float]]:
            network = model.build(True, torch.float32)
            optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
            session = None if plan is None else lowtide.manage(network, optimizer, plan, device="cpu")
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            losses = train(network, optimizer, model.batches(4), scheduler=scheduler, loss=model.loss, **loop)
            if session is not None:
                assert not session.is_warming_up
                assert session.plan.schedule is schedule
                assert tier(session, "device").is_within_budget
                session.close()
            return network, losses

        network, losses = run(None)
        other, other_losses = run(WarmUp(device_memory=size, schedule=schedule))
        assert_same(network, other, losses, other_losses)

    @pytest.mark.parametrize("schedule", list(Schedule))
    @pytest.mark.parametrize("segment", [2, 3])
    def test_in_segments_whose_groups_run_again_beside_one_another(self, segment: int, schedule: Schedule) -> None:
        _, expected = plain(4)
        plan = WarmUp(device_memory="1MiB", warm_up_share=0, activations=f"recompute/{segment}", schedule=schedule)
        session, losses = managed(plan, num_steps=4)
        with session:
            assert not session.is_warming_up
            assert losses == expected

    @pytest.mark.parametrize("segment", [2, 3])
    def test_in_segments_of_a_plan_by_hand_without_prefetching(self, segment: int) -> None:
        _, expected = plain(2)
        plan = lowtide.make_plan(Stack(), activations=f"recompute/{segment}", prefetch_depth=0)
        session, losses = managed(plan, num_steps=2)
        with session:
            assert losses == expected
            assert session.stats().activations is not None

    def test_with_gradients_that_outlive_the_step(self) -> None:
        # The plan changes at the second forward, while the first step's gradients are there to be added to.
        def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
            losses = []
            for step in range(5):
                loss = model(batch(step))
                if step != 1:
                    optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            return losses

        model = Stack()
        losses = run(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        for size in (SIZE, 4 * SIZE):  # some chunks updated on the host, and all on the device
            session, _ = managed(WarmUp(device_memory=size))
            found = run(session.model, optimizer_of(session))
            assert not session.is_warming_up
            session.close()
            assert_same(model, session.model, losses, found)

    @pytest.mark.parametrize("schedule", list(Schedule))
    def test_with_a_closure(self, schedule: Schedule) -> None:
        def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
            losses = []
            for step in range(4):

                def closure(step: int = step) -> Tensor:
                    optimizer.zero_grad()
                    loss = model(batch(step))
                    loss.backward()
                    return loss  # type: ignore[no-any-return]

                losses.append(optimizer.step(closure).item())  # type: ignore[attr-defined, call-overload]
            return losses

        model = Stack()
        losses = run(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        session, _ = managed(WarmUp(device_memory=SIZE, schedule=schedule))
        found = run(session.model, optimizer_of(session))
        assert not session.is_warming_up
        session.close()
        assert_same(model, session.model, losses, found)


class TestTheChange:
    def test_the_observed_steps_peaks_are_not_taken_away(self, warming: lowtide.Session) -> None:
        with pytest.raises(SessionError, match="ask after it"):
            warming.take_device_peak()
        steps(warming.model, optimizer_of(warming), 3)
        assert not warming.is_warming_up
        assert warming.take_device_peak() > 0
        tiers = {row.tier: row.peak_bytes for row in warming.stats().tiers}
        assert tiers["device"] > warming.take_device_peak()  # the statistics remember the peaks before

    def test_comes_at_the_second_step_and_uses_what_the_first_left(self, warming: lowtide.Session) -> None:
        first = warming.plan
        assert warming.is_warming_up
        assert residents(first) == 1
        assert num_on_device(first) == 0
        steps(warming.model, optimizer_of(warming), 1)
        assert warming.plan is first
        steps(warming.model, optimizer_of(warming), 1, first=1)
        assert not warming.is_warming_up
        assert residents(warming.plan) == NUM_BLOCKS + 1
        assert 0 < num_on_device(warming.plan) < NUM_BLOCKS + 1
        assert tier(warming, "device").is_within_budget
        tracked = warming._open().setup.tracked
        assert tracked is not None
        assert tracked.charged_bytes == REST_BYTES + NUM_BLOCKS * BLOCK_BYTES, "each chunk once"

    @pytest.mark.parametrize("share", [0.0, 0.1], ids=["one window", "all"])
    @pytest.mark.parametrize("rises", ["in a module", "between two", "for a while"])
    def test_what_was_seen_is_what_no_chunk_took(
        self, rises: str, share: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kept: list[Tensor] = []

        def between(model: Stack, index: int, x: Tensor) -> Tensor:
            if index == 3:
                wide = x.detach().repeat(1, 64)
                kept[:] = [wide] if rises == "for a while" else []
                return x + wide.mean()
            if index == 5:
                kept.clear()
            return x

        if rises != "in a module":
            monkeypatch.setattr(Stack, "between", between)
        truth = [0]
        observe = TrackedMemory.observe

        def watched(tracked: TrackedMemory, *args: Any) -> Any:
            error = observe(tracked, *args)
            truth[0] = max(truth[0], tracked.current_bytes - tracked.charged_bytes)
            return error

        monkeypatch.setattr(TrackedMemory, "observe", watched)
        session, _ = managed(WarmUp(device_memory=4 * SIZE, warm_up_share=share), num_steps=1)
        assert max(sample.other_bytes for sample in session.observed) == truth[0]
        assert {sample.phase for sample in session.observed} == {"forward", "backward", "update"}
        session.close()

    def test_what_was_before_the_session_is_not_seen(self) -> None:
        class Gauge:
            highest_bytes = 0
            peak_bytes = 10**9

            def current_bytes(self) -> int:
                return 0

            def take_peak(self) -> int:
                peak, self.peak_bytes = self.peak_bytes, 0
                return peak

        model = Stack()
        optimizer = torch.optim.AdamW(model.parameters())
        observer = StepObserver(Gauge(), MonitorMode.PEAKS)
        plan = lowtide.make_plan(model)
        with lowtide.manage(model, optimizer, plan, device="cpu") as session:
            plan_run = session._open()
            observer.watch(
                ChunkStore(
                    [],
                    plan_run.setup.mover,
                    [],
                    window_bytes=0,
                    prefetch_depth=0,
                    listener=plan_run._executor.residency,
                ),
                0,
            )
            assert plan_run.calls.root_window is not None
            run = WarmUpRun(
                plan_run.calls.root_window,
                optimizer,
                observer,
                plan_after=lambda samples: plan,
                is_quiet=lambda: True,
                switch=lambda plan: None,
            )
            observer.take_sample("blocks.0", "forward")
            assert [sample.used_bytes for sample in observer.samples] == [0]
            run.remove()

    def test_statistics_go_on(self, warming: lowtide.Session) -> None:
        optimizer = optimizer_of(warming)
        steps(warming.model, optimizer, 1)
        before = warming.stats()
        peak = tier(warming, "device").peak_bytes
        steps(warming.model, optimizer, 2, first=1)
        after = warming.stats()
        assert (before.num_steps, after.num_steps) == (1, 3)
        assert after.moved_bytes("to device") >= before.moved_bytes("to device") > 0
        fetches = {row.name: row.num_fetches for row in before.chunks}
        assert all(row.num_fetches >= fetches[row.name] for row in after.chunks)
        assert fetches["blocks.0/0"] > 0
        assert tier(warming, "device").peak_bytes >= peak > 0

    def test_the_peak_of_the_observed_step_is_not_lost(self) -> None:
        peaks = {}
        for monitor in MonitorMode:
            session, _ = managed(WarmUp(device_memory=SIZE, monitor=monitor), num_steps=1)
            peaks[monitor] = tier(session, "device").peak_bytes
            session.model(batch(num_rows=1))
            assert not session.is_warming_up
            assert tier(session, "device").peak_bytes == peaks[monitor], "after the change too"
            session.close()
        assert peaks[MonitorMode.PEAKS] == peaks[MonitorMode.BOUNDARIES]

    def test_a_scheduler_does_not_notice(self, warming: lowtide.Session) -> None:
        # One that first steps after the change complains if `step` is not the one that it has wrapped.
        optimizer = optimizer_of(warming)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        steps(warming.model, optimizer, 3)
        assert not warming.is_warming_up
        scheduler.step()
        assert scheduler.get_last_lr() == [0.005]

    def test_optimizer_state_is_readable_and_whole(self, warming: lowtide.Session) -> None:
        steps(warming.model, optimizer_of(warming), 3)
        found = optimizer_of(warming).state_dict()["state"]
        warming.close()  # a plain model in its thread would be on its device
        model = Stack()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        steps(model, optimizer, 3)
        expected = optimizer.state_dict()["state"]
        assert expected.keys() == found.keys()
        for key, state in expected.items():
            assert all(torch.equal(value, found[key][name]) for name, value in state.items())

    def test_a_graph_that_is_kept_puts_it_off(self, roomy: lowtide.Session) -> None:
        optimizer = optimizer_of(roomy)
        kept = roomy.model(batch(9))
        steps(roomy.model, optimizer, 2)
        assert roomy.is_warming_up
        del kept
        steps(roomy.model, optimizer, 1, first=2)
        assert not roomy.is_warming_up

    def test_a_backward_through_the_old_plan_is_refused(self, roomy: lowtide.Session) -> None:
        optimizer = optimizer_of(roomy)
        loss = roomy.model(batch())
        loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        steps(roomy.model, optimizer, 1, first=1)
        assert not roomy.is_warming_up
        with pytest.raises(RuntimeError, match="modified by an inplace operation|are gone"):
            loss.backward()
        steps(roomy.model, optimizer, 1, first=2)

    def test_a_plan_that_cannot_be_made_is_said_and_nothing_is_lost(self) -> None:
        # The large matrix is off the device while the wide rows are there, and there is no room for both.
        class Wide(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.large = nn.Linear(64, 512, bias=False)
                self.small = nn.Linear(512, 8, bias=False)

            def forward(self, x: Tensor) -> Tensor:
                x = self.small(self.large(x)).sum(dim=1, keepdim=True)
                return x.expand(-1, 40 * KB).contiguous().mean()

        model = Wide()
        model.large.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with lowtide.manage(model, optimizer, WarmUp(device_memory="300KiB", warm_up_share=0)) as session:
            model(torch.ones(1, 64)).backward()
            optimizer.step()
            optimizer.zero_grad()
            before = [parameter.detach().clone() for parameter in model.parameters()]
            for _ in range(2):
                with pytest.raises(PlanError, match="that were no chunks at the fullest point of the step"):
                    model(torch.ones(1, 64))
            assert session.is_open
            assert session.is_warming_up
            assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


class TestWhatIsNoStep:
    def test_an_evaluation(self, warming: lowtide.Session) -> None:
        warming.model.eval()
        for _ in range(3):
            with torch.no_grad():
                warming.model(batch())
        assert warming.is_warming_up
        assert warming.observed == ()
        warming.model.train()
        steps(warming.model, optimizer_of(warming), 2)
        assert not warming.is_warming_up

    def test_an_evaluation_in_the_middle(self, roomy: lowtide.Session) -> None:
        # It has 1000 rows, where the step has 64.
        reference, _ = managed(WarmUp(device_memory=SIZE), num_steps=1)
        expected = max(sample.other_bytes for sample in reference.observed)
        reference.close()
        optimizer = optimizer_of(roomy)
        with torch.no_grad():
            roomy.model(batch(num_rows=1000))
        roomy.model(batch()).backward()
        with torch.inference_mode():
            roomy.model(batch(num_rows=1000))
        optimizer.step()
        optimizer.zero_grad()
        assert max(sample.other_bytes for sample in roomy.observed) < expected + KB
        with torch.inference_mode():
            roomy.model(batch())
        assert roomy.is_warming_up, "nothing that is made in inference mode could be trained"
        steps(roomy.model, optimizer, 1, first=1)
        assert not roomy.is_warming_up

    def test_a_step_without_a_backward(self, warming: lowtide.Session) -> None:
        optimizer = optimizer_of(warming)
        optimizer.step()
        warming.model(batch())
        assert warming.is_warming_up
        steps(warming.model, optimizer, 2)
        assert not warming.is_warming_up


class TestTheEnd:
    @pytest.mark.parametrize("num_steps", [0, 1, 3])
    def test_close_gives_plain_objects_back(self, num_steps: int) -> None:
        session, losses = managed(WarmUp(device_memory=SIZE), num_steps=num_steps)
        optimizer = optimizer_of(session)
        session.close()
        assert not session.is_warming_up
        assert "step" not in vars(optimizer)
        assert not vars(optimizer)["_optimizer_step_post_hooks"]
        losses += steps(session.model, optimizer, 2, first=num_steps)
        model, expected = plain(num_steps + 2)
        assert_same(model, session.model, expected, losses)

    def test_the_model_may_be_managed_again(self, warming: lowtide.Session) -> None:
        steps(warming.model, optimizer_of(warming), 3)
        warming.close()
        with lowtide.manage(warming.model, warming.optimizer, WarmUp(device_memory=SIZE)) as again:
            steps(warming.model, optimizer_of(warming), 2, first=3)
            assert not again.is_warming_up
        model, _ = plain(5)
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), warming.model.parameters(), strict=True))


class TestWhatItNeeds:
    def test_a_size_of_an_emulated_device(self) -> None:
        with pytest.raises(ConfigError, match="no size of its own .* give device_memory"):
            managed(WarmUp(), device="cpu")

    def test_an_optimizer(self) -> None:
        with pytest.raises(ConfigError, match="no optimizer to take one"):
            lowtide.manage(Stack(), None, WarmUp(device_memory=SIZE), device="cpu")

    def test_no_norm_in_backward(self) -> None:
        with pytest.raises(SessionError, match="needs all gradients"):
            managed(WarmUp(device_memory=SIZE, schedule=Schedule.IN_BACKWARD), max_grad_norm=1.0)

    def test_a_host_that_is_large_enough(self) -> None:
        with pytest.raises(lowtide.errors.LowtideError, match="host"):
            managed(WarmUp(device_memory=SIZE, host_memory=NUM_BLOCKS * BLOCK_BYTES + REST_BYTES))


@pytest.mark.gpu
class TestOnACard:
    """Sites change with the plan there, and with them whose arithmetic it is: near, not the same bits."""

    @pytest.mark.parametrize("margin_share", [0.0, 1.0], ids=["host", "device"])
    def test_the_change(self, margin_share: float) -> None:
        def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
            losses = []
            for step in range(6):
                loss = model(batch(step).cuda())
                if step != 1:  # gradients live through the change
                    optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            return losses

        plain = Stack().cuda()
        expected = run(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
        gc.collect()  # models of other tests wait for it, and the peak is the process's
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        model = Stack()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        session = lowtide.manage(model, optimizer, WarmUp(device_memory="256MiB", margin_share=margin_share))
        losses = run(model, optimizer)
        assert not session.is_warming_up
        assert residents(session.plan) == NUM_BLOCKS + 1
        assert (num_on_device(session.plan) > 0) is (margin_share > 0)
        assert (
            0 < max(sample.other_bytes for sample in session.observed) < 160 * 1024 * KB
        )  # two workspaces of cuBLAS are in it
        assert tier(session, "device").is_within_budget
        assert all(parameter.is_cuda for parameter in model.parameters())
        session.close()
        assert all(parameter.device.type == "cpu" for parameter in model.parameters())
        assert losses == pytest.approx(expected, rel=1e-3)
