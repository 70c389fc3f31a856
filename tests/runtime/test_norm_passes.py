"""Clipping takes no pass over the gradients on the host in the loop's thread, unless the user has looked at them.

Without clipping no thread does: what was added up is judged by its parts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from lowtide import compat
from tests.runtime.stack import Stack, batch

PLACES: dict[str, dict[str, Any]] = {
    "streamed": {"weights": "streamed", "update": "host"},
    "resident": {"weights": "resident", "update": "host"},
    "half": {"weights": "streamed", "update": 0.5},
}
MAX_NORM = 1e-3
VIEWS = {"alias", "as_strided", "detach", "view"}
"""Operators that read no element."""


class Passes(compat.TorchDispatchMode):
    """Counts the elements of gradients on the host that this thread passes over."""

    def __init__(self, session: lowtide.Session, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        plan_run = session._plan_run
        assert plan_run is not None
        members = [managed for group in plan_run._groups.values() for managed in group.members]
        # On an emulated device every tensor says that it is the host's; these lie where the host updates from.
        gradients = [managed.host_gradient for managed in members if managed.host_gradient is not None]
        homes = [gradient.home for gradient in gradients if gradient.home is not None]
        self.num_on_host = sum(home.numel() for home in homes)
        self._ranges = [(home.data_ptr(), home.data_ptr() + home.nbytes) for home in homes]
        self._thread = threading.get_ident()
        self._plain_norm = torch.linalg.vector_norm
        self.num_norms = 0
        """Norms of tensors anywhere."""
        self.num_by_norms = 0
        self.num_by_norms_elsewhere = 0
        """In other threads: the worker's."""
        self.num_by_operators = 0
        """Norms among them, while the mode is on; views are none."""
        # Not seen by the mode where a session has put modes aside.
        monkeypatch.setattr(torch.linalg, "vector_norm", self._norm)

    def _norm(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if threading.get_ident() == self._thread:
            self.num_norms += 1
            self.num_by_norms += self._elements_on_host(tensor)
        else:
            self.num_by_norms_elsewhere += self._elements_on_host(tensor)
        norm: Tensor = self._plain_norm(tensor, *args, **kwargs)
        return norm

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in VIEWS:
            # An emulated device copies when somebody waits: where a gradient lands it is not read.
            read = args[1:] if name == "copy_" else args
            self.num_by_operators += sum(self._elements_on_host(value) for value in read if isinstance(value, Tensor))
        return func(*args, **(kwargs or {}))

    def _elements_on_host(self, tensor: Tensor) -> int:
        with compat.without_torch_function():  # asking is no look
            address = tensor.data_ptr()
        return tensor.numel() if any(first <= address < end for first, end in self._ranges) else 0


@contextmanager
def managed(
    place: str, precision: str | None, max_grad_norm: float | None = MAX_NORM
) -> Iterator[tuple[Stack, torch.optim.Optimizer, lowtide.Session]]:
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plan = lowtide.make_plan(model, schedule="deferred", **PLACES[place])
    with lowtide.manage(
        model, optimizer, plan, device="cpu", precision=precision, max_grad_norm=max_grad_norm
    ) as session:
        yield model, optimizer, session
        if max_grad_norm is not None:
            assert session.last_grad_norm is not None
            assert float(session.last_grad_norm) > max_grad_norm, "nothing was clipped"


in_each_place = pytest.mark.parametrize("place", PLACES)


@in_each_place
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_passes_over_no_gradient_on_the_host(
    place: str, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with managed(place, "fp32") as (model, optimizer, session):
        passes = Passes(session, monkeypatch)
        for step in range(3):
            for part in range(accumulation):
                model(batch(10 * step + part)).backward()
            with passes:
                optimizer.step()
            optimizer.zero_grad()
        assert passes.num_on_host > 0
        assert passes.num_norms > 0, "norms are taken in another way, which nobody counts"
        assert (passes.num_by_norms, passes.num_by_operators) == (0, 0)


@in_each_place
@pytest.mark.parametrize("precision", [None, "fp32"])
@pytest.mark.parametrize("max_grad_norm", [None, MAX_NORM])
def test_the_worker_takes_norms_of_sums_for_clipping_alone(
    place: str, precision: str | None, max_grad_norm: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with managed(place, precision, max_grad_norm) as (model, optimizer, session):
        passes = Passes(session, monkeypatch)
        for part in range(2):
            model(batch(part)).backward()
        with passes:
            optimizer.step()
        session.settle()
        is_needed = precision is not None and max_grad_norm is not None
        assert passes.num_by_norms_elsewhere == (passes.num_on_host if is_needed else 0)
        if max_grad_norm is None:
            assert passes.num_by_norms == 0


@in_each_place
def test_a_gradient_that_was_looked_at_is_passed_over_alone(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with managed(place, "fp32") as (model, optimizer, session):
        passes = Passes(session, monkeypatch)
        model(batch()).backward()
        last = list(model.blocks.parameters())[-1]
        assert last.grad is not None
        assert last.grad.sum().isfinite()
        with passes:
            optimizer.step()
        assert passes.num_by_norms == last.numel()
        assert passes.num_by_operators >= last.numel()


@in_each_place
def test_torchs_own_step_passes_over_all_of_them(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What there is no pass of above can be seen here: gradients are scaled before a step that is not Lowtide's."""
    with managed(place, None) as (model, optimizer, session):
        passes = Passes(session, monkeypatch)
        model(batch()).backward()
        with passes:
            optimizer.step()
        assert passes.num_by_norms == passes.num_on_host
        assert passes.num_by_operators >= 2 * passes.num_on_host
