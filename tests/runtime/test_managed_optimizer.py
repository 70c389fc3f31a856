"""The user's own optimizer object under management: every kind of step, schedulers, scalers, hooks and state."""

from __future__ import annotations

import copy
import io
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lowtide.errors import UnsupportedOptimizerError
from lowtide.runtime.updates.chunk_optimizer import ChunkOptimizer, Settings, Update
from tests.runtime.side_by_side import (
    WIDTH,
    Block,
    Tower,
    adamw,
    assert_same_state,
    assert_same_values,
    in_all_places,
    in_turn,
    inputs,
    loss_of,
    manage,
    seeded,
    side_by_side,
    steps,
    with_both_schedules,
)
from tests.zoo import assert_same_tensors, bf16_safe

Optimizer = torch.optim.Optimizer
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "adamw-foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
    "adamw-loop": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=False, fused=False),
    "adamw-tensor-lr": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(1e-2), foreach=False),
    "adam-amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, amsgrad=True),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, nesterov=True),
    "sgd-fused": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-2, momentum=0.5),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("place", ["streamed-host", "mixed"])
@with_both_schedules
def test_every_kind_of_optimizer(name: str, place: str, schedule: str) -> None:
    side_by_side(
        lambda model, optimizer: steps(model, optimizer, range(4)),
        place,
        schedule=schedule,
        make_optimizer=lambda model: OPTIMIZERS[name](model.parameters()),
    )


def test_lbfgs_is_refused_and_the_model_stays_plain() -> None:
    model = seeded(Tower)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(UnsupportedOptimizerError, match="LBFGS takes its step over all parameters at once"):
        manage(model, optimizer, "streamed-host")
    assert_same_tensors(before, model.state_dict())
    steps(model, adamw(model))


# Schedulers


def test_schedulers_made_before_and_after_and_during() -> None:
    """Warnings are errors here: the one about the order of scheduler and optimizer must not come."""

    def make(optimizer: Optimizer, which: int) -> Any:
        kinds = (
            lambda: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step),
            lambda: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=20),
            lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        )
        return kinds[which % 3]()

    def run(which: int, when: str | None) -> tuple[nn.Module, list[Tensor]]:
        model = seeded(Tower)
        optimizer = adamw(model)
        scheduler = make(optimizer, which) if when in (None, "before") else None
        session = None if when is None else manage(model, optimizer, "streamed-host")
        scheduler = scheduler or make(optimizer, which)
        losses = []
        for seed in range(3):
            losses += steps(model, optimizer, [seed])
            scheduler.step()
        if session is not None:
            session.close()
        for seed in range(3, 6):
            losses += steps(model, optimizer, [seed])
            scheduler.step()
        return model, losses

    for which in range(3):
        plain, expected = run(which, None)
        for when in ("before", "after"):
            managed, found = run(which, when)
            assert_same_values(expected, found)
            assert_same_tensors(plain.state_dict(), managed.state_dict())


@pytest.mark.parametrize("place", ["streamed-host", "streamed-device"])
def test_a_scheduler_made_in_a_session_does_not_warn_after_it(place: str) -> None:
    model = seeded(Tower)
    optimizer = adamw(model)
    with manage(model, optimizer, place):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    steps(model, optimizer, [0])
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)


def test_a_scheduler_made_before_a_session_is_tracked_in_it_and_after_it() -> None:
    model = seeded(Tower)
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with manage(model, optimizer, "streamed-host"), pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()
    assert "step" in vars(optimizer)
    model = seeded(Tower)
    optimizer = adamw(model)
    with manage(model, optimizer, "streamed-host"):
        pass
    assert "step" not in vars(optimizer)
    assert "zero_grad" not in vars(optimizer)


@in_all_places
def test_the_learning_rate_at_the_step_counts_even_if_it_changes_at_once(place: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        losses = []
        for seed in range(3):
            loss = loss_of(model, seed)
            loss.backward()
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"].fill_(0.5 / (seed + 10))
                group["weight_decay"] = 0.1 * seed
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    side_by_side(
        loop,
        place,
        make_optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), foreach=False),
    )


# Scalers


def scaled(
    model: nn.Module, optimizer: Optimizer, *, dtype: torch.dtype | None, bad_step: int | None, unscale: bool = False
) -> list[Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    seen: list[Any] = []
    for seed in range(5):
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = model(inputs(seed)).float().square().mean()
        if seed == bad_step:
            # What an overflow of fp16 gives: finite loss, gradients that are not.
            loss.register_hook(lambda gradient: gradient * float("inf"))
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen += [loss.detach(), scaler.get_scale(), *(parameter.detach().clone() for parameter in model.parameters())]
    scales = [1024.0, *(value for value in seen if isinstance(value, float))]
    is_skipped = any(after < before for before, after in itertools.pairwise(scales))
    assert is_skipped == (bad_step is not None), scales
    return seen


@in_all_places
@pytest.mark.parametrize("bad_step", [None, 2])
@pytest.mark.parametrize("kind", ["adamw-loop", "adamw-foreach", "adamw-fused"])
def test_scaler_with_and_without_a_skipped_step(place: str, kind: str, bad_step: int | None) -> None:
    side_by_side(
        lambda model, optimizer: scaled(model, optimizer, dtype=None, bad_step=bad_step),
        place,
        make_optimizer=lambda model: OPTIMIZERS[kind](model.parameters()),
    )


@pytest.mark.parametrize("place", ["mixed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("kind", ["adamw-loop", "adamw-fused"])
def test_scaler_with_autocast(place: str, dtype: torch.dtype, unscale: bool, kind: str) -> None:
    with bf16_safe():
        side_by_side(
            lambda model, optimizer: scaled(model, optimizer, dtype=dtype, bad_step=3, unscale=unscale),
            place,
            make_optimizer=lambda model: OPTIMIZERS[kind](model.parameters()),
        )


# Param groups


@in_all_places
@with_both_schedules
def test_several_param_groups_and_one_added_later(place: str, schedule: str) -> None:
    def some_groups(model: nn.Module) -> Optimizer:
        assert isinstance(model, Tower)
        return torch.optim.AdamW(
            [{"params": model.stem.parameters()}, {"params": model.blocks.parameters(), "lr": 1e-3}], lr=1e-2
        )

    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        assert isinstance(model, Tower)
        losses = steps(model, optimizer, range(2))
        model.zero_grad()
        optimizer.add_param_group({"params": model.head.parameters(), "lr": 0.05, "weight_decay": 0.3})
        losses += steps(model, optimizer, range(2, 4))
        model.zero_grad()
        optimizer.param_groups[0]["lr"] = 0.2
        return losses + steps(model, optimizer, range(4, 6))

    side_by_side(loop, place, schedule=schedule, make_optimizer=some_groups)


@in_all_places
@with_both_schedules
def test_parameters_of_no_model_in_the_optimizer(place: str, schedule: str) -> None:
    """A temperature beside the model: it is stepped with the rest."""

    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        temperature = nn.Parameter(torch.tensor(1.5))
        optimizer.add_param_group({"params": [temperature], "lr": 0.1})
        losses = []
        for seed in range(3):
            loss = loss_of(model, seed) * temperature
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [*losses, temperature.detach()]

    side_by_side(loop, place, schedule=schedule)


@in_all_places
def test_trained_parameters_that_the_optimizer_lacks_keep_their_gradients(place: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        losses = steps(model, optimizer)
        assert isinstance(model, Tower)
        return [*losses, *(p.grad.clone() for p in model.head.parameters() if p.grad is not None)]

    side_by_side(loop, place, make_optimizer=lambda model: adamw(model.blocks))  # type: ignore[arg-type]


# State


@in_turn
@pytest.mark.parametrize("name", ["adamw-loop", "adamw-fused", "sgd-momentum", "adafactor"])
def test_resume_from_plain_and_into_plain(place: str, schedule: str, name: str) -> None:
    """State goes through a file: a managed run continued plainly, and a plain one continued under management."""
    make = OPTIMIZERS[name]

    def fresh() -> tuple[nn.Module, Optimizer]:
        model = seeded(Tower)
        return model, make(model.parameters())

    def saved(model: nn.Module, optimizer: Optimizer) -> Any:
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        return torch.load(file)

    whole, whole_optimizer = fresh()
    expected = steps(whole, whole_optimizer, range(6))

    first, first_optimizer = fresh()
    with manage(first, first_optimizer, place, schedule):
        found = steps(first, first_optimizer, range(3))
        record = saved(first, first_optimizer)
        steps(first, first_optimizer, range(90, 92))  # what is saved must not follow
    second, second_optimizer = fresh()
    second.load_state_dict(record["model"])
    second_optimizer.load_state_dict(record["optimizer"])
    found += steps(second, second_optimizer, range(3, 6))
    assert_same_values(expected, found)
    assert_same_tensors(whole.state_dict(), second.state_dict())
    assert_same_state(whole_optimizer, second_optimizer)

    first, first_optimizer = fresh()
    found = steps(first, first_optimizer, range(3))
    record = saved(first, first_optimizer)
    second, second_optimizer = fresh()
    with manage(second, second_optimizer, place, schedule):
        steps(second, second_optimizer, range(90, 92))  # a run that is given up for the saved one
        second.load_state_dict(record["model"])
        second_optimizer.load_state_dict(record["optimizer"])
        found += steps(second, second_optimizer, range(3, 6))
        assert_same_state(whole_optimizer, second_optimizer)
    assert_same_values(expected, found)
    assert_same_tensors(whole.state_dict(), second.state_dict())


@in_all_places
def test_state_loaded_before_and_copied_in_a_session(place: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        before = steps(model, optimizer)
        state = copy.deepcopy(optimizer.state_dict())
        steps(model, optimizer, range(10, 12))
        optimizer.load_state_dict(state)
        return before + steps(model, optimizer, range(3, 6))

    def stepped(model: nn.Module) -> Optimizer:
        optimizer = adamw(model)
        steps(model, optimizer, range(20, 22))
        return optimizer

    side_by_side(loop, place, make_optimizer=stepped)


@in_all_places
@with_both_schedules
def test_hooks_of_the_step_run_once(place: str, schedule: str) -> None:
    """Those of the optimizer and the global ones, around the step, with what plain torch gives them."""

    def loop(model: nn.Module, optimizer: Optimizer) -> list[float]:
        calls: list[float] = []

        def note(number: float) -> Any:
            def hook(given: Optimizer, args: Any, kwargs: Any) -> None:
                assert given is optimizer
                assert args == (optimizer,)
                assert kwargs == {}
                calls.append(number)

            return hook

        handles = [
            optimizer.register_step_pre_hook(note(1.0)),
            optimizer.register_step_post_hook(note(2.0)),
            register_optimizer_step_pre_hook(note(3.0)),
            register_optimizer_step_post_hook(note(4.0)),
        ]
        try:
            steps(model, optimizer)
        finally:
            for handle in handles:
                handle.remove()
        assert calls == [3.0, 1.0, 2.0, 4.0] * 3
        return calls

    side_by_side(loop, place, schedule=schedule)


@in_all_places
def test_a_hook_before_the_step_may_clip(place: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        def clip(given: Optimizer, args: Any, kwargs: Any) -> None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

        optimizer.register_step_pre_hook(clip)
        return steps(model, optimizer)

    side_by_side(loop, place)


# The order of updates on the host


class HeadFirst(nn.Module):
    """Registers its head before the blocks that it calls first, and holds a parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.stem = nn.Linear(8, WIDTH)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x * self.scale)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


IN_ORDER_OF_USE = ["", "stem", "blocks.0", "blocks.1", "head"]


def _on_each_update(monkeypatch: pytest.MonkeyPatch, model: nn.Module, told: Callable[[str], None]) -> None:
    """Tell which group is about to be updated."""
    groups = {
        id(parameter): next(group for group in reversed(IN_ORDER_OF_USE) if name.startswith(group))
        for name, parameter in model.named_parameters()
    }
    run = ChunkOptimizer.run

    def watched(self: ChunkOptimizer, updates: Sequence[Update], settings: Settings) -> None:
        if id(updates[0].parameter) in groups:  # and not of a copy that `manage` tries out
            told(groups[id(updates[0].parameter)])
        run(self, updates, settings)

    monkeypatch.setattr(ChunkOptimizer, "run", watched)


@pytest.mark.parametrize("place", ["streamed-host", "resident-host"])
def test_the_host_updates_first_what_the_next_forward_uses_first(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, order = seeded(HeadFirst), list[str]()
    optimizer = adamw(model)
    _on_each_update(monkeypatch, model, order.append)
    with manage(model, optimizer, place) as session:
        for step in range(3):
            order.clear()
            steps(model, optimizer, [step])
            session.settle()
            assert order == IN_ORDER_OF_USE


@pytest.mark.parametrize("place", ["streamed-host", "resident-host"])
def test_a_forward_begins_while_the_updates_of_later_groups_are_pending(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, is_begun, were_late = seeded(HeadFirst), threading.Event(), list[str]()
    optimizer = adamw(model)

    def hold(group: str) -> None:
        if group not in ("", "stem") and not is_begun.wait(timeout=5):
            were_late.append(group)

    _on_each_update(monkeypatch, model, hold)
    with manage(model, optimizer, place):
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        hook = model.stem.register_forward_hook(lambda *_: is_begun.set())  # type: ignore[union-attr]
        loss_of(model, 1).backward()
        hook.remove()
        optimizer.step()
    assert not were_late
