"""State of matrix rules in the form that `lowtide.optim.Adafactor` has it, and back."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.errors import OptimizerStateError
from lowtide.optim import Adafactor, matrix_kernel
from lowtide.optim.formats import update_key
from lowtide.optim.matrix_rules import Adafactor as AdafactorRule
from lowtide.optim.parameter_state import ParameterState, new_state, state_bytes
from lowtide.optim.precision import rounding_for
from lowtide.optim.rules import require_rule
from lowtide.optim.torch_state import LoadTarget, from_torch_state, read_state_dict, to_torch_state
from lowtide.optim.update_types import Adam, Moments, Numerics, Rounding
from tests.optim.matrix_cases import gradient_for, piece_of

FORMATS = [
    (torch.float32, Rounding.NEAREST),
    (torch.bfloat16, Rounding.EXACT),
    (torch.bfloat16, Rounding.STOCHASTIC),
    (torch.bfloat16, Rounding.NEAREST),
    (torch.float16, Rounding.MASTER),
]


class Run:
    """A model that is updated through the kernel, with its state saved and loaded in the optimizer's form."""

    def __init__(self, numerics: Numerics, dtype: torch.dtype, seed: int = 0) -> None:
        torch.manual_seed(seed)
        # The kernel of the convolution lies in another order of memory than its shape says.
        convolution = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model = nn.ModuleDict({"conv": convolution, "linear": nn.Linear(20, 30)}).to(dtype)
        self.model.register_parameter("gain", nn.Parameter(torch.ones((), dtype=dtype)))
        self.numerics = numerics
        self.optimizer = Adafactor(self.model.parameters(), lr=1e-2)
        self.load({"state": {}, "param_groups": self.optimizer.state_dict()["param_groups"]})

    def targets(self) -> list[LoadTarget]:
        rule = require_rule(self.optimizer, self.optimizer.param_groups[0])
        return [LoadTarget(name=name, weight=p, rule=rule) for name, p in self.model.named_parameters()]

    def load(self, state_dict: dict[str, Any]) -> None:
        (saved,) = read_state_dict(state_dict, [self.targets()])
        self.states: list[ParameterState] = [
            from_torch_state(target, state, self.numerics) for target, state in zip(self.targets(), saved, strict=True)
        ]

    def save(self) -> dict[str, Any]:
        entries = {
            index: to_torch_state(target.weight, state, self.numerics)
            for index, (target, state) in enumerate(zip(self.targets(), self.states, strict=True))
        }
        return {"state": entries, "param_groups": self.optimizer.state_dict()["param_groups"]}

    def train(self, steps: range) -> None:
        for step in steps:
            for index, (target, state) in enumerate(zip(self.targets(), self.states, strict=True)):
                state.step += 1
                weight = target.weight.detach()
                assert isinstance(target.rule, AdafactorRule)
                key = update_key(0, index, state.step)
                piece = piece_of((weight, state), gradient_for(weight, step, index), state.step, target.rule, key=key)
                matrix_kernel.update([piece], rounding=rounding_for(weight, self.numerics))

    def train_eagerly(self, steps: range) -> None:
        for step in steps:
            for index, parameter in enumerate(self.model.parameters()):
                parameter.grad = gradient_for(parameter, step, index).to(parameter.dtype)
            self.optimizer.step()


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("moments", list(Moments))
@pytest.mark.parametrize(("dtype", "rounding"), FORMATS)
def test_a_resumed_run_is_the_same_bit_for_bit(dtype: torch.dtype, rounding: Rounding, moments: Moments) -> None:
    numerics = Numerics(rounding=rounding, moments=moments)
    run = Run(numerics, dtype)
    run.train(range(5))
    saved = through_a_file({"model": run.model.state_dict(), "optimizer": run.save()})
    other = Run(numerics, dtype, seed=1)
    other.model.load_state_dict(saved["model"])
    other.load(saved["optimizer"])
    for one in (run, other):
        one.train(range(5, 10))
    for theirs, ours in zip(run.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(theirs, ours)
    for theirs_state, ours_state in zip(run.states, other.states, strict=True):
        assert ours_state.step == theirs_state.step == 10
        for one_tensor, other_tensor in zip(theirs_state.all_tensors(), ours_state.all_tensors(), strict=True):
            assert torch.equal(one_tensor, other_tensor)


def test_the_optimizer_goes_on_where_we_stopped_and_we_where_it_did() -> None:
    expected = Run(Numerics(), torch.float32)
    expected.train_eagerly(range(10))

    ours_first = Run(Numerics(), torch.float32)
    ours_first.train(range(5))
    ours_first.optimizer.load_state_dict(ours_first.save())
    ours_first.train_eagerly(range(5, 10))

    theirs_first = Run(Numerics(), torch.float32)
    theirs_first.train_eagerly(range(5))
    theirs_first.load(theirs_first.optimizer.state_dict())
    theirs_first.train(range(5, 10))

    for run in (ours_first, theirs_first):
        for ours, theirs in zip(run.model.parameters(), expected.model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-6)


def test_entries_are_those_of_the_optimizer() -> None:
    ours, theirs = (Run(Numerics(moments=Moments.INT8), torch.float32) for _ in range(2))
    ours.train(range(2))
    theirs.train_eagerly(range(2))
    saved, expected = ours.save()["state"], theirs.optimizer.state_dict()["state"]
    assert saved.keys() == expected.keys()
    for index, entries in expected.items():
        assert saved[index].keys() == entries.keys()
        assert saved[index]["step"] == entries["step"] == 2
        assert type(saved[index]["step"]) is int
        for name in entries.keys() - {"step"}:
            assert saved[index][name].dtype is torch.float32
            torch.testing.assert_close(saved[index][name], entries[name])
    before = saved[0]["row"].clone()
    ours.train(range(2, 3))
    assert torch.equal(saved[0]["row"], before)


def test_statistics_are_fp32_whatever_was_asked_for() -> None:
    for moments in Moments:
        state = new_state(torch.zeros(6, 4, dtype=torch.bfloat16), AdafactorRule(lr=1.0), Numerics(moments=moments))
        assert {name: (t.dtype, t.numel()) for name, t in state.tensors.items()} == {
            "row": (torch.float32, 6),
            "col": (torch.float32, 4),
        }


@pytest.mark.parametrize("shape", [(6, 4), (7,), (), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("rule", [AdafactorRule(lr=1.0), Adam(lr=1.0)], ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("moments", list(Moments))
@pytest.mark.parametrize("rounding", [Rounding.EXACT, Rounding.STOCHASTIC, Rounding.MASTER])
def test_bytes_are_foreseen(shape: tuple[int, ...], rule: Any, moments: Moments, rounding: Rounding) -> None:
    numerics = Numerics(rounding=rounding, moments=moments)
    for dtype in (torch.bfloat16, torch.float32):
        weight = torch.zeros(shape, dtype=dtype)
        assert state_bytes(shape, dtype, rule, numerics) == new_state(weight, rule, numerics).nbytes


def test_bf16_statistics_are_taken() -> None:
    run = Run(Numerics(), torch.bfloat16)
    run.train_eagerly(range(3))
    run.load(run.optimizer.state_dict())
    weight, state = list(run.model.parameters())[3], run.states[3]
    assert state.step == 3
    assert set(state.tensors) == {"row", "col"}
    assert torch.equal(state.tensors["row"], run.optimizer.state[weight]["row"].float())
    run.train(range(3, 5))
    run.optimizer.load_state_dict(run.save())
    assert run.optimizer.state[weight]["row"].dtype is torch.bfloat16
    run.train_eagerly(range(5, 6))
    assert run.optimizer.state[weight]["step"] == 6


def short_column(state: dict[str, Any]) -> None:
    state["state"][3]["col"] = torch.zeros(7)


def whole_moment(state: dict[str, Any]) -> None:
    state["state"][3]["row"] = torch.zeros(30, 20)


def vector_as_matrix(state: dict[str, Any]) -> None:
    state["state"][4]["col"] = torch.zeros(30)


def without_column(state: dict[str, Any]) -> None:
    del state["state"][3]["col"]


def other_optimizer(state: dict[str, Any]) -> None:
    state["state"][3] = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(30, 20), "exp_avg_sq": torch.zeros(30, 20)}


@pytest.mark.parametrize(
    ("damage", "message", "parameter"),
    [
        (
            short_column,
            r"col of 'linear.weight' has shape \(7,\).*\(30, 20\), for which it is \(20,\)",
            "linear.weight",
        ),
        (whole_moment, r"row of 'linear.weight' has shape \(30, 20\).*for which it is \(30,\)", "linear.weight"),
        (vector_as_matrix, r"'linear.bias' has col, master, row, step; Adafactor .*keeps step, row:", "linear.bias"),
        (without_column, r"'linear.weight' has master, row, step; Adafactor .*keeps step, row, col:", "linear.weight"),
        (other_optimizer, r"'linear.weight' has exp_avg, exp_avg_sq, step; .*another optimizer", "linear.weight"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    damage: Callable[[dict[str, Any]], None], message: str, parameter: str
) -> None:
    run = Run(Numerics(), torch.bfloat16)
    run.train(range(2))
    state = copy.deepcopy(run.save())
    for entries in state["state"].values():
        entries["row"] += 1  # what was loaded of it would show
    damage(state)

    def snapshot() -> list[Tensor]:
        weights = [p.detach().clone() for p in run.model.parameters()]
        return weights + [tensor.clone() for kept in run.states for tensor in kept.all_tensors()]

    before = snapshot()
    with pytest.raises(OptimizerStateError, match=message) as caught:
        run.load(state)
    assert caught.value.parameter == parameter
    assert all(torch.equal(one, other) for one, other in zip(before, snapshot(), strict=True))
