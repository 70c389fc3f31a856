"""Looking at parameters and writing to them between steps: the true value, and the new value in the next step."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lowtide.errors import ModelChangedError
from tests.runtime.side_by_side import (
    Tower,
    adamw,
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
from tests.zoo import assert_same_tensors

Optimizer = torch.optim.Optimizer


def through_file(value: object) -> object:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


READERS: dict[str, Callable[[nn.Module], list[Tensor]]] = {
    "sum": lambda model: [parameter.sum() for parameter in model.parameters()],
    "data": lambda model: [parameter.data.clone() for parameter in model.parameters()],
    "detach": lambda model: [parameter.detach().clone() for parameter in model.parameters()],
    "item": lambda model: [torch.tensor(parameter.flatten()[0].item()) for parameter in model.parameters()],
    "numpy": lambda model: [torch.tensor(parameter.detach().numpy().copy()) for parameter in model.parameters()],
    "foreach": lambda model: list(torch._foreach_norm(list(model.parameters()))),
    "vector": lambda model: [torch.nn.utils.parameters_to_vector(model.parameters())],
    "state_dict": lambda model: [tensor.clone() for tensor in model.state_dict().values()],
    "deepcopy": lambda model: list(copy.deepcopy(model).parameters()),
    "deepcopy of parameters": lambda model: [copy.deepcopy(parameter) for parameter in model.parameters()],
    "pickle": lambda model: list(pickle.loads(pickle.dumps(model)).parameters()),
    "pickle of parameters": lambda model: [pickle.loads(pickle.dumps(parameter)) for parameter in model.parameters()],
    "torch.save": lambda model: list(through_file(model).parameters()),  # type: ignore[attr-defined]
    "functional": lambda model: [torch.func.functional_call(model, dict(model.named_parameters()), (inputs(9),))],
}


@in_turn
@pytest.mark.parametrize("reader", READERS)
def test_readers_find_the_true_value(place: str, schedule: str, reader: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        seen = READERS[reader](model)
        for seed in range(3):
            loss = loss_of(model, seed)
            seen += READERS[reader](model)
            loss.backward()
            if schedule == "deferred":
                seen += READERS[reader](model)
            optimizer.step()
            seen += READERS[reader](model)
            optimizer.zero_grad()
            seen += READERS[reader](model)
        return [tensor.detach().clone() for tensor in seen]

    side_by_side(loop, place, schedule=schedule)


@in_all_places
@pytest.mark.parametrize("reader", ["sum", "state_dict", "deepcopy", "pickle"])
def test_in_backward_readers_find_the_new_weights_before_step(place: str, reader: str) -> None:
    model = seeded(Tower)
    optimizer = adamw(model)
    with manage(model, optimizer, place, "in_backward"):
        loss_of(model, 0).backward()
        before = [tensor.detach().clone() for tensor in READERS[reader](model)]
        optimizer.step()
        assert_same_values(before, [tensor.detach().clone() for tensor in READERS[reader](model)])
        plain = seeded(Tower)
        steps(plain, adamw(plain), [0])
        assert_same_values([tensor.detach() for tensor in READERS[reader](plain)], before)


@in_all_places
def test_copies_are_plain_and_train_by_themselves(place: str) -> None:
    """A copy, by whatever way, is no part of the session, and its optimizer is an ordinary one."""
    plain = seeded(Tower)
    expected = steps(plain, adamw(plain), range(2))
    expected_copy = copy.deepcopy(plain)
    expected += steps(expected_copy, adamw(expected_copy), range(5, 8))
    model = seeded(Tower)
    optimizer = adamw(model)
    with manage(model, optimizer, place):
        found = steps(model, optimizer, range(2))
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), through_file(model)]
        for copied in copies:
            assert isinstance(copied, nn.Module)
            assert all(type(parameter) is nn.Parameter for parameter in copied.parameters())
            assert_same_values(expected, found + steps(copied, adamw(copied), range(5, 8)))
            assert_same_tensors(expected_copy.state_dict(), copied.state_dict())
        assert_same_tensors(plain.state_dict(), model.state_dict())


@in_all_places
def test_saved_files_hold_the_weights_and_nothing_else(place: str, tmp_path: Path) -> None:
    """Parameters are parts of larger buffers; a file of one parameter must not carry its neighbours."""
    model = seeded(Tower)
    optimizer = adamw(model)
    plain_size = len(pickle.dumps(model.state_dict()))
    torch.save(model.state_dict(), tmp_path / "plain.pt")
    plain_bytes = (tmp_path / "plain.pt").stat().st_size
    with manage(model, optimizer, place):
        steps(model, optimizer)
        assert len(pickle.dumps(model.state_dict())) <= 1.05 * plain_size
        torch.save(model.state_dict(), tmp_path / "managed.pt")
        assert (tmp_path / "managed.pt").stat().st_size <= 1.05 * plain_bytes
        for parameter in model.parameters():
            assert len(pickle.dumps(parameter)) <= parameter.nbytes + 2000
            file = io.BytesIO()
            torch.save(parameter, file)
            assert len(file.getvalue()) <= parameter.nbytes + 3000


@in_all_places
def test_a_state_dict_outlives_the_session(place: str) -> None:
    model = seeded(Tower)
    optimizer = adamw(model)
    with manage(model, optimizer, place):
        steps(model, optimizer)
        state = model.state_dict()
        values = {name: tensor.clone() for name, tensor in state.items()}
    assert_same_tensors(values, state)


# Averages


@in_all_places
@with_both_schedules
def test_averages_of_the_weights_each_step(place: str, schedule: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        averaged = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        by_hand = [parameter.detach().clone() for parameter in model.parameters()]
        seen = []
        for seed in range(4):
            seen += steps(model, optimizer, [seed])
            averaged.update_parameters(model)
            with torch.no_grad():
                for average, parameter in zip(by_hand, model.parameters(), strict=True):
                    average.mul_(0.9).add_(parameter, alpha=0.1)
                seen.append(averaged(inputs(seed + 40)))
        return [*seen, *by_hand, *(parameter.detach() for parameter in averaged.parameters())]

    side_by_side(loop, place, schedule=schedule)


# Writing


def fresh_values(model: nn.Module) -> list[Tensor]:
    generator = torch.Generator().manual_seed(99)
    return [torch.randn(parameter.shape, generator=generator) * 0.1 for parameter in model.parameters()]


def write_data_copy(model: nn.Module) -> None:
    for parameter, value in zip(model.parameters(), fresh_values(model), strict=True):
        parameter.data.copy_(value)


def write_no_grad(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5).add_(0.01)


def write_data_set(model: nn.Module) -> None:
    for parameter, value in zip(model.parameters(), fresh_values(model), strict=True):
        parameter.data = value


def write_one(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("blocks.1.inner.weight")[0, 0] = 0.25


def write_state_dict(model: nn.Module) -> None:
    values = fresh_values(model)
    model.load_state_dict(dict(zip(model.state_dict(), values, strict=True)))


def write_apply(model: nn.Module) -> None:
    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.1, generator=torch.Generator().manual_seed(1))
            nn.init.zeros_(module.bias)

    model.apply(fill)


def write_vector(model: nn.Module) -> None:
    vector = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.nn.utils.vector_to_parameters(vector * 0.9, model.parameters())


def write_swap(model: nn.Module) -> None:
    """The averaged weights in, an evaluation, and the trained ones back."""
    kept = [parameter.data.clone() for parameter in model.parameters()]
    write_data_copy(model)
    with torch.no_grad():
        model(inputs(60))
    for parameter, value in zip(model.parameters(), kept, strict=True):
        parameter.data.copy_(value)


WRITERS = {
    "data.copy_": write_data_copy,
    "no_grad": write_no_grad,
    "data =": write_data_set,
    "one element": write_one,
    "load_state_dict": write_state_dict,
    "apply": write_apply,
    "vector": write_vector,
    "swap": write_swap,
}


@in_turn
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("moment", ["before step", "after step", "twice"])
def test_writers_reach_the_next_step(place: str, schedule: str, writer: str, moment: str) -> None:
    write = WRITERS[writer]

    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        seen = []
        for seed in range(4):
            loss = loss_of(model, seed)
            loss.backward()
            # In backward the weights are new by then: what the user writes comes after the update.
            is_late = schedule == "in_backward" and "step" not in vars(optimizer)
            if moment == "before step" and not is_late:
                write(model)
            optimizer.step()
            if moment != "before step" or is_late:
                write(model)
            optimizer.zero_grad()
            if moment == "twice":
                write(model)
            seen.append(loss.detach())
        return seen

    side_by_side(loop, place, schedule=schedule)


@in_all_places
def test_writers_before_the_first_step(place: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        write_state_dict(model)
        losses = steps(model, optimizer)
        write_data_set(model)
        with torch.no_grad():
            losses.append(model(inputs(70)))
        return losses + steps(model, optimizer)

    side_by_side(loop, place)


@in_all_places
def test_a_parameter_that_was_replaced_raises(place: str) -> None:
    model = seeded(Tower)
    optimizer = adamw(model)
    with manage(model, optimizer, place):
        steps(model, optimizer)
        old = model.get_parameter("blocks.0.inner.weight")
        module = model.get_submodule("blocks.0.inner")
        module.weight = nn.Parameter(old.detach().clone())
        with pytest.raises(ModelChangedError, match=r"1 replaced \(blocks.0.inner.weight\)"):
            steps(model, optimizer)
        module.weight = old
        steps(model, optimizer)


@pytest.mark.parametrize("place", ["streamed-host", "streamed-device"])
def test_a_model_cast_to_another_dtype_raises(place: str) -> None:
    model = seeded(Tower)
    optimizer = adamw(model)
    with manage(model, optimizer, place):
        steps(model, optimizer)
        model.double()
        with pytest.raises(ModelChangedError, match="became torch.float64"):
            model(inputs(0).double())
        model.float()
        steps(model, optimizer)
