"""`optimizer.state` while a session is open: the state of the last step, or an error that says where it is."""

from __future__ import annotations

import copy
import pickle
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.errors import OptimizerStateError
from lowtide.runtime.updates.worker import HostWorker
from tests.runtime.side_by_side import Tower, adamw, in_turn, manage, seeded, steps


@in_turn
def test_state_is_that_of_the_last_step(place: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read right after `step()`, with a worker that is late."""
    _make_slow(monkeypatch)
    plain, managed = seeded(Tower), seeded(Tower)
    one, other = adamw(plain), adamw(managed)
    before = other.state
    with manage(managed, other, place, schedule):
        for seed in range(2):
            steps(plain, one, [seed])
            steps(managed, other, [seed])
            for mine, theirs in zip(plain.parameters(), managed.parameters(), strict=True):
                for name in ("step", "exp_avg", "exp_avg_sq"):
                    assert torch.equal(other.state[theirs][name], one.state[mine][name])
                assert torch.equal(other.state.get(theirs, {})["exp_avg"], one.state[mine]["exp_avg"])
            found = [value["exp_avg"] for value in other.state.values()]
            assert len(found) == len([*other.state]) == len(other.state.items()) == len(list(plain.parameters()))
    assert other.state is before
    assert len(before) == len(list(plain.parameters()))


def test_copies_of_the_state_are_torchs_own_kind() -> None:
    model = seeded(Tower)
    optimizer = adamw(model)
    with manage(model, optimizer, "streamed-host"):
        steps(model, optimizer, [0])
        for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            assert type(copied.state).__module__ == "collections"
            assert len(copied.state) == len(list(model.parameters()))
        shallow = copy.copy(optimizer.state)
        assert type(shallow).__module__ == "collections"
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        steps(model, optimizer, [1])
        assert float(optimizer.state[next(model.parameters())]["step"]) == 2


def test_with_a_precision_reading_is_refused_in_one_sentence() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with lowtide.manage(model, optimizer, lowtide.make_plan(model), device="cpu", precision="fp32"):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        for read in (lambda: optimizer.state[model.weight], lambda: optimizer.state.get(model.weight)):
            with pytest.raises(OptimizerStateError, match=r"the states are the session's.*optimizer.state_dict\(\)"):
                read()
        assert not optimizer.state
        saved: dict[str, Any] = optimizer.state_dict()
        assert isinstance(saved["state"][0]["exp_avg"], Tensor)
        optimizer.load_state_dict(saved)
        with pytest.raises(OptimizerStateError, match="the states are the session's"):
            optimizer.state[model.weight]
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], saved["state"][0]["exp_avg"])


def _make_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = HostWorker.submit

    def late(self: HostWorker, work: Any, **words: Any) -> Any:
        def slow() -> None:
            time.sleep(0.002)
            work()

        return submit(self, slow, **words)

    monkeypatch.setattr(HostWorker, "submit", late)
