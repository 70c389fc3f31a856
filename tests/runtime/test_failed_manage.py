"""A `manage` that fails, wherever that is, leaves model and optimizer as they were, and the next one works."""

from __future__ import annotations

import copy
import gc
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import lowtide
from lowtide import compat
from tests.runtime.side_by_side import Tower, adamw, assert_same_state, loss_of, seeded
from tests.zoo import assert_same_tensors, bf16_safe

ROOMS = tuple(str(Path(lowtide.__file__).parent / room) for room in ("runtime", "memory", "activations", "optim"))
Case = tuple[Callable[[], nn.Module], dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {
    "streamed-host": (Tower, {"weights": "streamed", "update": "host"}, {}),
    "resident": (Tower, {"weights": "resident"}, {}),
    "recompute": (Tower, {"weights": "streamed", "activations": "recompute"}, {}),
    "exact, 8-bit": (
        lambda: Tower().bfloat16(),
        {"weights": "streamed", "update": "host"},
        {"precision": "bf16 exact", "moments": "8bit"},
    ),
}


class Injected(BaseException):
    """Raised by the tests; nobody who tries something out catches it."""


@contextmanager
def failing_at(number: int) -> Iterator[list[str]]:
    """Raise at the call of a function with this number, counted over the library's rooms; gives the calls so far."""
    calls: list[str] = []

    def watch(frame: FrameType, event: str, argument: object) -> None:
        del argument
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(ROOMS) or code.co_name.startswith("<"):
            return
        if code.co_name == "_unmark":
            return  # a finaliser comes when it comes, and its errors go nowhere
        calls.append(code.co_qualname)
        if len(calls) == number:
            raise Injected(code.co_qualname)

    # What the session before left is finalised now: calls must have the same numbers each time.
    gc.collect()
    gc.disable()
    sys.setprofile(watch)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        gc.enable()


@pytest.fixture(autouse=True)
def quick_collections() -> Iterator[None]:
    """Only what the test itself makes is looked through."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Snapshot:
    """Everything that `manage` might leave changed."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._values = {name: value.clone() for name, value in model.state_dict().items()}
        self._gradients = {name: _gradient(parameter) for name, parameter in model.named_parameters()}
        self._saved = copy.deepcopy(optimizer)
        self._attributes = {name: id(value) for name, value in vars(optimizer).items()}
        self._hooks = self._num_hooks()
        self._modules = [{name: id(value) for name, value in vars(module).items()} for module in model.modules()]

    def _num_hooks(self) -> list[int]:
        holders = [*map(vars, self._model.modules()), vars(self._optimizer)]
        found = [
            len(value)
            for holder in holders
            for name, value in holder.items()
            if name.endswith("hooks") and value is not None
        ]
        return found + [len(parameter._backward_hooks or ()) for parameter in self._model.parameters()]

    def check(self) -> None:
        assert_same_tensors(self._values, self._model.state_dict())
        for name, parameter in self._model.named_parameters():
            assert type(parameter) is nn.Parameter, name
            gradient = self._gradients[name]
            assert (gradient is None) == (parameter.grad is None), name
            if gradient is not None:
                assert torch.equal(gradient, parameter.grad), name
        assert {name: id(value) for name, value in vars(self._optimizer).items()} == self._attributes
        assert_same_state(self._saved, self._optimizer)
        assert self._num_hooks() == self._hooks
        for module, expected in zip(self._model.modules(), self._modules, strict=True):
            found = {name: id(value) for name, value in vars(module).items()}
            none = id(None)  # what the class has of itself
            changed = {name for name in found | expected if found.get(name, none) != expected.get(name, none)}
            assert not changed, f"{type(module).__name__}: {changed}"


def _gradient(parameter: Tensor) -> Tensor | None:
    return None if parameter.grad is None else parameter.grad.clone()


def first_calls(case: Case) -> list[int]:
    """The number of the first call of each function that `manage` runs: each is a stage of its own."""
    model, optimizer, plan = make(case)
    # Once before: what is done once in a process does not happen again, nor fail.
    lowtide.manage(model, optimizer, plan, device="cpu", **case[2]).close()
    with failing_at(0) as calls:
        session = lowtide.manage(model, optimizer, plan, device="cpu", **case[2])
    session.close()
    found: dict[str, int] = {}
    for number, name in enumerate(calls, start=1):
        found.setdefault(name, number)
    return list(found.values())


def make(case: Case) -> tuple[nn.Module, torch.optim.Optimizer, lowtide.Plan]:
    """A model that has trained a little, with gradients and optimizer state of its own."""
    build, words, _ = case
    model = seeded(build)
    optimizer = adamw(model)
    backward(model)
    optimizer.step()
    return model, optimizer, lowtide.make_plan(model, **words)


def backward(model: nn.Module) -> None:
    dtype = next(model.parameters()).dtype
    loss_of(model if dtype is torch.float32 else _InFloat(model, dtype), 0).backward()


class _InFloat(nn.Module):
    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x.to(self.dtype)).float()
        return out


@pytest.mark.parametrize("name", CASES)
def test_a_failure_leaves_everything_as_it_was(name: str) -> None:
    fail_and_manage(CASES[name], sample=12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["recompute", "exact, 8-bit"])
def test_a_failure_in_any_function_leaves_everything_as_it_was(name: str) -> None:
    fail_and_manage(CASES[name], sample=None)


def fail_and_manage(case: Case, sample: int | None) -> None:
    """Fail at so many places, spread over all stages; at all of them for None. Then manage, and train."""
    with bf16_safe():
        numbers = first_calls(case)
        assert len(numbers) > 100
        chosen = numbers if sample is None else [*numbers[:: len(numbers) // sample], *numbers[-3:]]
        model, optimizer, plan = make(case)
        before = Snapshot(model, optimizer)
        num_failed = 0
        for number in chosen:
            try:
                with failing_at(number) as calls:
                    session = lowtide.manage(model, optimizer, plan, device="cpu", **case[2])
            except Injected:
                num_failed += 1
            else:
                session.close()  # fewer calls than the first time
                # A session that was there hands rounded moments back, where that is their format.
                model, optimizer, plan = make(case)
                before = Snapshot(model, optimizer)
                continue
            try:
                before.check()
            except AssertionError as error:
                raise AssertionError(f"after a failure at call {number}, {calls[number - 1]}: {error}") from error
        assert num_failed > 0.9 * len(chosen)
        with lowtide.manage(model, optimizer, plan, device="cpu", **case[2]):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()


def test_a_model_on_meta_is_empty_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same parameters, which its optimizer holds, without values; filled by the next `manage`."""
    full = seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)))
    save_file(full.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    plan = lowtide.make_plan(model)

    def refuse(*_: object, **__: object) -> None:
        raise Injected

    with monkeypatch.context() as patched:
        patched.setattr("lowtide.runtime.manage.Session", refuse)
        with pytest.raises(Injected):
            lowtide.manage(model, optimizer, plan, device="cpu", weights=tmp_path / "model.safetensors")
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    with lowtide.manage(model, optimizer, plan, device="cpu", weights=tmp_path / "model.safetensors"):
        assert_same_tensors(full.state_dict(), model.state_dict())
        model(torch.ones(3, 8)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("name", CASES)
def test_a_failure_right_after_a_modules_call_was_taken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt may come before the one who has taken it could note that down."""
    model, optimizer, plan = make(CASES[name])
    before = Snapshot(model, optimizer)
    replace_call, awaited = compat.replace_call, 0

    def replace_and_fail(module: nn.Module, call: Callable[..., Any] | None) -> Callable[..., Any] | None:
        nonlocal awaited
        replaced = replace_call(module, call)
        awaited -= 1
        if awaited == 0:
            raise Injected
        return replaced

    monkeypatch.setattr(compat, "replace_call", replace_and_fail)
    for number in itertools.count(1):
        awaited = number
        try:
            session = lowtide.manage(model, optimizer, plan, device="cpu", **CASES[name][2])
        except Injected:
            before.check()
        else:
            break
    awaited = 0
    session.close()
    assert number > 1
