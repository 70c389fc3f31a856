"""State in torch's form, there and back."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.errors import OptimizerStateError
from lowtide.optim import Adafactor, Lion, reference
from lowtide.optim.device import kernel as device_kernel
from lowtide.optim.rules import Adafactor as AdafactorRule
from lowtide.optim.rules import Adam, require_rule
from lowtide.optim.state import (
    LoadTarget,
    ParameterState,
    SavedState,
    from_torch_state,
    new_state,
    read_state_dict,
    state_bytes,
    to_torch_state,
)
from lowtide.optim.update_types import Moments, Numerics, Piece, Rounding, rounding_for, update_key
from tests.optim.matrix_cases import piece_of as matrix_piece_of

Make = Callable[[Any], torch.optim.Optimizer]
MAKE: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.3, foreach=False),
    "sgd-plain": lambda p: torch.optim.SGD(p, lr=1e-2, foreach=False),
    "lion": lambda p: Lion(p, lr=1e-2),
}


class Run:
    """A model that is updated through the reference, with its state saved and loaded in torch's form."""

    def __init__(self, make: Make, numerics: Numerics, dtype: torch.dtype, seed: int = 0) -> None:
        torch.manual_seed(seed)
        # The kernel of the convolution lies in another order of memory than its shape says.
        convolution = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model = nn.ModuleDict({"conv": convolution, "linear": nn.Linear(20, 30)}).to(dtype)
        self.numerics = numerics
        self.optimizer = make(self.model.parameters())
        self.load({"state": {}, "param_groups": self.optimizer.state_dict()["param_groups"]})

    def targets(self) -> list[list[LoadTarget]]:
        rule = require_rule(self.optimizer, self.optimizer.param_groups[0])
        return [[LoadTarget(name=name, weight=p, rule=rule) for name, p in self.model.named_parameters()]]

    def load(self, state_dict: dict[str, Any]) -> None:
        (targets,) = self.targets()
        (saved,) = read_state_dict(state_dict, [targets])
        self.states: list[ParameterState] = [
            from_torch_state(target, state, self.numerics) for target, state in zip(targets, saved, strict=True)
        ]

    def save(self) -> dict[str, Any]:
        (targets,) = self.targets()
        entries = {
            index: to_torch_state(target.weight, state, self.numerics)
            for index, (target, state) in enumerate(zip(targets, self.states, strict=True))
            if state.step
        }
        return {"state": entries, "param_groups": self.optimizer.state_dict()["param_groups"]}

    def train(self, steps: range) -> None:
        (targets,) = self.targets()
        for step in steps:
            for index, (target, state) in enumerate(zip(targets, self.states, strict=True)):
                state.step += 1
                weight = target.weight.detach()
                piece = Piece(
                    weight=flat(weight),
                    gradient=flat(gradient_for(weight, step, index)),
                    state=state.tensors,
                    rule=target.rule,
                    step=state.step,
                    remainder=state.remainder,
                    master=state.master,
                    key=update_key(0, index, state.step),
                )
                rounding = rounding_for(weight, self.numerics)
                reference.update([piece], rounding=rounding, moments=self.numerics.moments)


def flat(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))


def gradient_for(weight: Tensor, step: int, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + index)
    return torch.empty_like(weight).copy_(torch.randn(weight.shape, generator=generator))


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


FORMATS = [
    (torch.float32, Rounding.NEAREST),
    (torch.bfloat16, Rounding.EXACT),
    (torch.bfloat16, Rounding.MASTER),
    (torch.bfloat16, Rounding.STOCHASTIC),
    (torch.float16, Rounding.MASTER),
]


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("moments", list(Moments))
@pytest.mark.parametrize(("dtype", "rounding"), FORMATS)
def test_a_resumed_run_is_the_same_bit_for_bit(
    name: str, moments: Moments, dtype: torch.dtype, rounding: Rounding
) -> None:
    numerics = Numerics(rounding=rounding, moments=moments)
    run = Run(MAKE[name], numerics, dtype)
    run.train(range(5))
    saved = through_a_file({"model": run.model.state_dict(), "optimizer": run.save()})
    other = Run(MAKE[name], numerics, dtype, seed=1)
    other.model.load_state_dict(saved["model"])
    other.load(saved["optimizer"])
    for one in (run, other):
        one.train(range(5, 10))
    for theirs, ours in zip(run.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(theirs, ours)
    for theirs_state, ours_state in zip(run.states, other.states, strict=True):
        assert ours_state.step == theirs_state.step
        for key, tensor in theirs_state.tensors.items():
            assert torch.equal(ours_state.tensors[key], tensor)
        assert theirs_state.remainder is None or torch.equal(ours_state.remainder, theirs_state.remainder)
        assert theirs_state.master is None or torch.equal(ours_state.master, theirs_state.master)


@pytest.mark.parametrize("name", MAKE)
def test_torch_goes_on_where_we_stopped_and_we_where_torch_did(name: str) -> None:
    reference_run = Run(MAKE[name], Numerics(), torch.float32)
    reference_run.train(range(10))

    ours_first = Run(MAKE[name], Numerics(), torch.float32)
    ours_first.train(range(5))
    ours_first.optimizer.load_state_dict(ours_first.save())
    steps_of_torch(ours_first, range(5, 10))

    torch_first = Run(MAKE[name], Numerics(), torch.float32)
    steps_of_torch(torch_first, range(5))
    torch_first.load(torch_first.optimizer.state_dict())
    torch_first.train(range(5, 10))

    for run in (ours_first, torch_first):
        for ours, expected in zip(run.model.parameters(), reference_run.model.parameters(), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-7)


def steps_of_torch(run: Run, steps: range) -> None:
    for step in steps:
        for index, parameter in enumerate(run.model.parameters()):
            parameter.grad = gradient_for(parameter, step, index)
        run.optimizer.step()


def test_torchs_bf16_state_is_taken_and_given() -> None:
    run = Run(MAKE["adamw"], Numerics(), torch.bfloat16)
    steps_of_torch(run, range(3))
    run.load(run.optimizer.state_dict())
    assert [state.step for state in run.states] == [3] * 4
    weight, state = next(iter(run.model.parameters())), run.states[0]
    assert torch.equal(state.tensors["exp_avg"], flat(run.optimizer.state[weight]["exp_avg"]).float())
    assert state.remainder is not None
    assert not state.remainder.any()
    run.train(range(3, 6))
    run.optimizer.load_state_dict(run.save())
    loaded = run.optimizer.state[weight]
    assert loaded["exp_avg"].dtype is torch.bfloat16
    assert int(loaded["step"]) == 6
    steps_of_torch(run, range(6, 8))


def test_entries_have_torchs_form() -> None:
    run = Run(MAKE["adamw"], Numerics(moments=Moments.INT8), torch.bfloat16)
    run.train(range(2))
    entries = run.save()["state"][0]
    assert set(entries) == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master"}
    weight = run.model["conv"].weight
    assert all(entries[name].dtype is torch.float32 for name in entries)
    assert all(entries[name].shape == weight.shape for name in entries if name != "step")
    assert torch.equal(entries["master"].bfloat16(), weight)
    assert entries["step"].shape == ()
    before = entries["exp_avg"].clone()
    run.train(range(2, 3))
    assert torch.equal(entries["exp_avg"], before)


def snapshot(run: Run) -> list[Tensor]:
    return [p.detach().clone() for p in run.model.parameters()] + [
        t.clone() for state in run.states for t in state.tensors.values()
    ]


def bad_shape(state: dict[str, Any]) -> None:
    state["state"][3]["exp_avg"] = torch.zeros(7)


def other_optimizer(state: dict[str, Any]) -> None:
    state["state"][3] = {"step": torch.tensor(1.0), "momentum_buffer": torch.zeros(30)}


def without_amsgrad(state: dict[str, Any]) -> None:
    del state["state"][3]["max_exp_avg_sq"]


def other_master(state: dict[str, Any]) -> None:
    state["state"][3]["master"] = state["state"][3]["master"] + 1


def rounded_master(state: dict[str, Any]) -> None:
    state["state"][3]["master"] = state["state"][3]["master"].bfloat16()


def other_groups(state: dict[str, Any]) -> None:
    state["param_groups"][0]["params"] = [0, 1, 2]


def a_model(state: dict[str, Any]) -> None:
    del state["param_groups"]


@pytest.mark.parametrize(
    ("damage", "message", "parameter"),
    [
        (bad_shape, r"exp_avg of 'linear.bias' has shape \(7,\).*shape \(30,\).*another model", "linear.bias"),
        (other_optimizer, r"'linear.bias' has momentum_buffer, step; Adam .*another optimizer", "linear.bias"),
        (without_amsgrad, r"'linear.bias' has exp_avg, exp_avg_sq, master, step; .*amsgrad", "linear.bias"),
        (other_master, r"master of 'linear.bias'.*30 of 30 elements.*weights from the same checkpoint", "linear.bias"),
        (rounded_master, r"master of 'linear.bias' .* in torch.bfloat16.*Load the state after manage", "linear.bias"),
        (other_groups, r"groups of \[3\] parameters, and the optimizer of \[4\]", None),
        (a_model, r"has the entries \['state'\].*optimizer.state_dict\(\)", None),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    damage: Callable[[dict[str, Any]], None], message: str, parameter: str | None
) -> None:
    run = Run(MAKE["adamw"], Numerics(), torch.bfloat16)
    run.train(range(2))
    state = copy.deepcopy(run.save())
    for entries in state["state"].values():
        # What was loaded of it would show.
        entries["exp_avg"] += 1
    damage(state)
    before = snapshot(run)
    with pytest.raises(OptimizerStateError, match=message) as caught:
        run.load(state)
    assert caught.value.parameter == parameter
    assert all(torch.equal(one, other) for one, other in zip(before, snapshot(run), strict=True))


def test_adams_state_is_not_lions() -> None:
    adam = Run(MAKE["adamw"], Numerics(), torch.float32)
    adam.train(range(2))
    lion = Run(MAKE["lion"], Numerics(), torch.float32)
    with pytest.raises(OptimizerStateError, match="Lion with these settings keeps step, exp_avg:"):
        lion.load(adam.save())


def test_options_switched_off_are_passed_over() -> None:
    run = Run(MAKE["adamw"], Numerics(), torch.float32)
    run.train(range(2))
    state = run.save()
    run.optimizer.param_groups[0]["amsgrad"] = False
    run.load(state)
    assert set(run.states[0].tensors) == {"exp_avg", "exp_avg_sq"}


def test_a_master_of_bf16_weights_is_taken_by_fp32_ones() -> None:
    run = Run(MAKE["adamw"], Numerics(), torch.bfloat16)
    run.train(range(3))
    saved = through_a_file({"model": run.model.state_dict(), "optimizer": run.save()})
    wide = Run(MAKE["adamw"], Numerics(), torch.float32)
    wide.model.load_state_dict(saved["model"])
    wide.load(saved["optimizer"])
    for index, parameter in enumerate(wide.model.parameters()):
        assert torch.equal(parameter, saved["optimizer"]["state"][index]["master"])


def test_a_parameter_without_state_starts_anew() -> None:
    run = Run(MAKE["adamw"], Numerics(), torch.bfloat16)
    (targets,) = run.targets()
    (saved,) = read_state_dict({"state": {}, "param_groups": [{"params": [0, 1, 2, 3]}]}, [targets])
    assert saved == [SavedState(num_steps=0, tensors={})] * 4


MATRIX_FORMATS = [
    (torch.float32, Rounding.NEAREST),
    (torch.bfloat16, Rounding.EXACT),
    (torch.bfloat16, Rounding.STOCHASTIC),
    (torch.bfloat16, Rounding.NEAREST),
    (torch.float16, Rounding.MASTER),
]


class MatrixRun:
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
                piece = matrix_piece_of(
                    (weight, state), gradient_for(weight, step, index), state.step, target.rule, key=key
                )
                device_kernel.update_matrices([piece], rounding=rounding_for(weight, self.numerics))

    def train_eagerly(self, steps: range) -> None:
        for step in steps:
            for index, parameter in enumerate(self.model.parameters()):
                parameter.grad = gradient_for(parameter, step, index).to(parameter.dtype)
            self.optimizer.step()


@pytest.mark.parametrize("moments", list(Moments))
@pytest.mark.parametrize(("dtype", "rounding"), MATRIX_FORMATS)
def test_a_resumed_matrix_run_is_the_same_bit_for_bit(dtype: torch.dtype, rounding: Rounding, moments: Moments) -> None:
    numerics = Numerics(rounding=rounding, moments=moments)
    run = MatrixRun(numerics, dtype)
    run.train(range(5))
    saved = through_a_file({"model": run.model.state_dict(), "optimizer": run.save()})
    other = MatrixRun(numerics, dtype, seed=1)
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
    expected = MatrixRun(Numerics(), torch.float32)
    expected.train_eagerly(range(10))

    ours_first = MatrixRun(Numerics(), torch.float32)
    ours_first.train(range(5))
    ours_first.optimizer.load_state_dict(ours_first.save())
    ours_first.train_eagerly(range(5, 10))

    theirs_first = MatrixRun(Numerics(), torch.float32)
    theirs_first.train_eagerly(range(5))
    theirs_first.load(theirs_first.optimizer.state_dict())
    theirs_first.train(range(5, 10))

    for run in (ours_first, theirs_first):
        for ours, theirs in zip(run.model.parameters(), expected.model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-6)


def test_entries_are_those_of_the_optimizer() -> None:
    ours, theirs = (MatrixRun(Numerics(moments=Moments.INT8), torch.float32) for _ in range(2))
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
    run = MatrixRun(Numerics(), torch.bfloat16)
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


def entries_of_adam(state: dict[str, Any]) -> None:
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
        (entries_of_adam, r"'linear.weight' has exp_avg, exp_avg_sq, step; .*another optimizer", "linear.weight"),
    ],
)
def test_what_does_not_fit_a_matrix_rule_is_refused(
    damage: Callable[[dict[str, Any]], None], message: str, parameter: str
) -> None:
    run = MatrixRun(Numerics(), torch.bfloat16)
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
