"""State of our own kernels: loaded, saved, taken over, given back, and where it lies meanwhile."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from tests.runtime.kernel_loops import (
    adamw,
    batch,
    network,
    one_step,
    trained_in_turn,
)
from tests.zoo import bf16_safe


@pytest.fixture(autouse=True)
def safe() -> Iterator[None]:
    with bf16_safe():
        yield


@pytest.mark.parametrize("update", [0.5, "paged"])
@pytest.mark.parametrize("moments", ["fp32", "8bit"])
@pytest.mark.parametrize("precision", ["bf16 exact", "bf16 stochastic"])
def test_resume_is_exact(precision: str, moments: str, update: Any) -> None:
    def part(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            model(batch(step, torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def manage(model: nn.Module, optimizer: torch.optim.Optimizer) -> lowtide.Session:
        plan = lowtide.make_plan(model, update=update)
        return lowtide.manage(model, optimizer, plan, device="cpu", precision=precision, moments=moments, seed=7)

    whole = network(torch.bfloat16)
    optimizer = adamw(whole)
    with manage(whole, optimizer):
        part(whole, optimizer, range(8))
    first = network(torch.bfloat16)
    optimizer = adamw(first)
    with manage(first, optimizer):
        part(first, optimizer, range(4))
        saved = copy.deepcopy((first.state_dict(), optimizer.state_dict()))
    entries = saved[1]["state"][0]
    more = {"master"} if precision == "bf16 exact" else {"moments"} if moments != "bf16" else set()
    assert {"step", "exp_avg", "exp_avg_sq"} | more == set(entries)
    assert entries["exp_avg"].dtype is torch.float32
    second = network(torch.bfloat16)
    second.load_state_dict(saved[0])
    optimizer = adamw(second)
    with manage(second, optimizer):
        optimizer.load_state_dict(saved[1])
        part(second, optimizer, range(4, 8))
    for (name, one), other in zip(whole.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other), name


def saved_whole(both: Any) -> Any:
    file = io.BytesIO()
    torch.save(both, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both)), saved_whole])
@pytest.mark.parametrize(("precision", "moments"), [("bf16 exact", "fp32"), ("bf16 exact", "8bit"), (None, "fp32")])
@pytest.mark.parametrize("schedule", ["deferred", "in_backward"])
def test_a_copy_of_the_optimizer_has_its_states(
    copied: Callable[[Any], Any], precision: str | None, moments: str, schedule: str
) -> None:
    """Model and optimizer together, in the midst of a session: a session over the copies goes on as this one does."""
    settings: dict[str, Any] = (
        {"device": "cpu"} if precision is None else {"device": "cpu", "precision": precision, "moments": moments}
    )

    def go_on(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            model(batch(step, torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model = network(torch.bfloat16)
    optimizer = adamw(model)
    plan = lowtide.make_plan(model, update=0.5, schedule=schedule)
    with lowtide.manage(model, optimizer, plan, **settings):
        go_on(model, optimizer, range(3))
        other_model, other = copied((model, optimizer))
        assert "step" not in vars(other)
        assert len(other.state) == len(list(model.parameters()))
        go_on(model, optimizer, range(3, 6))
    with lowtide.manage(other_model, other, lowtide.make_plan(other_model, update=0.5, schedule=schedule), **settings):
        go_on(other_model, other, range(3, 6))
    for (name, one), another in zip(model.named_parameters(), other_model.named_parameters(), strict=True):
        assert torch.equal(one, another[1]), name
    assert "__getstate__" not in vars(optimizer)


class TakesAllAlong(torch.optim.AdamW):
    """Whose copies have every attribute, as those of most classes do, and not torch's three alone."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both)), saved_whole])
def test_a_copy_that_takes_all_attributes_along_steps_its_own_model(copied: Callable[[Any], Any]) -> None:
    model = network(torch.float32)
    optimizer = TakesAllAlong(model.parameters(), lr=0.1)
    with lowtide.manage(model, optimizer, lowtide.make_plan(model, update=0.5), device="cpu"):
        one_step(model, optimizer, 0)
        other_model, other = copied((model, optimizer))
        one_step(model, optimizer, 1)
        one_step(other_model, other, 1)
        for one, another in zip(model.parameters(), other_model.parameters(), strict=True):
            assert torch.equal(one, another)
        other.load_state_dict(optimizer.state_dict())


def test_a_closed_session_leaves_an_optimizer_that_steps() -> None:
    model = network(torch.bfloat16)
    optimizer = adamw(model)
    with lowtide.manage(model, optimizer, lowtide.make_plan(model), device="cpu", precision="bf16 exact"):
        model(batch(0, torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(batch(1, torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
    state = optimizer.state[next(model.parameters())]
    assert int(state["step"]) == 2
    assert state["exp_avg"].dtype is torch.bfloat16


def test_state_from_before_goes_on() -> None:
    """Three plain steps, three managed ones, three plain ones: as nine of torch's own, to rounding."""
    plain, model, optimizer = trained_in_turn(adamw)
    assert int(optimizer.state[model[0].up.weight]["step"]) == 9  # type: ignore[union-attr]  # a block
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_refused_session_gives_the_state_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network(torch.float32)
    optimizer = adamw(model)
    one_step(model, optimizer, 0)
    before = copy.deepcopy(optimizer.state_dict()["state"])

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr("lowtide.runtime.assembly.apply", refuse)
    plan = lowtide.make_plan(model, activations="recompute")
    with pytest.raises(RuntimeError, match="no"):
        lowtide.manage(model, optimizer, plan, device="cpu", precision="fp32")
    after = optimizer.state_dict()["state"]
    assert before.keys() == after.keys()
    for key, entries in before.items():
        for name, value in entries.items():
            assert torch.equal(value, after[key][name]), (key, name)


def test_close_gives_the_model_back_whatever_the_optimizer_says() -> None:
    model = network(torch.float32)
    optimizer = adamw(model)
    session = lowtide.manage(model, optimizer, lowtide.make_plan(model), device="cpu", precision="fp32")
    one_step(model, optimizer, 0)
    optimizer.param_groups[0]["lr"] = float("nan")
    session.close()
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert len(optimizer.state) == len(list(model.parameters()))
    assert model(batch(0, torch.float32)).isfinite().all()


def test_expanded_state_does_not_pass_through_the_device() -> None:
    model = network(torch.bfloat16)
    optimizer = adamw(model)
    plan = lowtide.make_plan(model, weights="resident", update="device")
    with lowtide.manage(model, optimizer, plan, device="cpu", precision="bf16 exact", moments="8bit") as session:
        for step in range(2):
            one_step(model, optimizer, step)

        def peak() -> int:
            return next(row.peak_bytes for row in session.stats().tiers if row.tier == "device")

        before = peak()
        optimizer.load_state_dict(optimizer.state_dict())
        assert peak() == before


@pytest.mark.parametrize("moments", ["fp32", "8bit"])
@pytest.mark.parametrize("update", ["host", "paged"])
def test_a_momentum_that_is_switched_on_with_a_loaded_state(update: str, moments: str) -> None:
    model = network(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, dampening=0.5)
    plan = lowtide.make_plan(model, update=update)
    with lowtide.manage(model, optimizer, plan, device="cpu", precision="fp32", moments=moments):
        one_step(model, optimizer, 0)
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][0]["momentum"] = 0.9
        optimizer.load_state_dict(saved)
        model(batch(1, torch.float32)).square().mean().backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
        for gradient, entries in zip(gradients, optimizer.state_dict()["state"].values(), strict=True):
            # In 8 bits within a hundredth of the block's largest; without dampening it would be half of it.
            tolerance = float(gradient.abs().max()) / 50 if moments == "8bit" else 0.0
            torch.testing.assert_close(entries["momentum_buffer"], gradient, rtol=0, atol=tolerance)


def test_host_state_is_not_the_devices() -> None:
    peaks = []
    for precision in (None, "fp32"):
        model = network(torch.float32)
        optimizer = adamw(model)
        with lowtide.manage(model, optimizer, lowtide.make_plan(model), device="cpu", precision=precision) as session:
            one_step(model, optimizer, 0)
            peaks.append(next(row.peak_bytes for row in session.stats().tiers if row.tier == "device"))
    assert peaks[1] <= peaks[0]


def test_loading_again_frees_what_was_locked() -> None:
    model = network(torch.bfloat16)
    optimizer = adamw(model)
    plan = lowtide.make_plan(model, update="paged")
    with lowtide.manage(model, optimizer, plan, device="cpu", precision="bf16 exact") as session:
        one_step(model, optimizer, 0)
        managed = session._plan_run._managed  # type: ignore[union-attr]  # open
        assert managed is not None
        pages = managed.runner.pages  # type: ignore[attr-defined]  # of kernels
        sizes = set()
        for _ in range(3):
            optimizer.load_state_dict(optimizer.state_dict())
            sizes.add(len(pages._memory))
        assert sizes == {len(list(model.parameters()))}
