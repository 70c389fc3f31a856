"""What a session saves, when it may, and what it refuses to save."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import lowtide
from lowtide.errors import ConfigError, SessionError
from lowtide.runtime.checkpoints.contents import session_contents
from lowtide.runtime.checkpoints.folder import RunFolder
from tests.runtime.checkpoints.training_runs import (
    RESIDENT,
    SPREAD,
    STREAMED_HOST,
    Run,
    assert_same,
    make_net,
    training,
)
from tests.zoo import bf16_safe


@pytest.fixture(autouse=True)
def safe() -> Iterator[None]:
    with bf16_safe():
        yield


def test_each_tensor_once_under_its_own_name(tmp_path: Path) -> None:
    """Weights as `state_dict` names them, and the optimizer's as they are kept: no byte more."""
    with training(Run(precision="bf16 exact", moments="8bit")) as made:
        made.steps(1)
        folder = made.session.save(tmp_path, state=made.state)
        values = made.values()
    assert folder.name == "step-00000001"
    weights = load_file(folder / "model.safetensors")
    assert values.keys() - weights.keys() == {"head.weight"}
    assert_same(weights, {name: value for name, value in values.items() if name != "head.weight"})
    optimizer = load_file(folder / "optimizer.safetensors")
    parameters = dict(make_net(torch.bfloat16).named_parameters())
    expected = {
        f"{name}.{key}": size
        for name, p in parameters.items()
        for key, size in {
            "exp_avg": p.numel(),
            "exp_avg_scale": 4 * -(-p.numel() // 128),
            "exp_avg_sq": p.numel(),
            "exp_avg_sq_scale": 4 * -(-p.numel() // 128),
            "remainder": 2 * p.numel(),
        }.items()
    }
    assert {name: tensor.nbytes for name, tensor in optimizer.items()} == expected
    index = json.loads((folder / "checkpoint.json").read_text())["state"]
    assert index["optimizer"]["numerics"] == {"rounding": "exact", "moments": "8bit", "seed": 7}
    assert index["model"]["tied"] == {"head.weight": "embed.weight"}
    assert {"data", "scheduler"} == index["given"].keys()


def test_a_part_has_what_one_update_changes(tmp_path: Path) -> None:
    with training(Run(precision="fp16 exact", place=SPREAD)) as made:
        made.steps(1)
        made.session.settle()
        contents = session_contents(made.session._open())
        parts = {id(part.parameter): part for part in contents.parts if part.parameter is not None}
        named = dict(made.model.named_parameters())
        assert parts.keys() == {id(p) for p in named.values()}
        part = parts[id(named["blocks.0.up.bias"])]
        assert [name for _, name in part.tensors] == [
            "blocks.0.up.bias",
            "blocks.0.up.bias.exp_avg",
            "blocks.0.up.bias.exp_avg_sq",
            "blocks.0.up.bias.master",
        ]
        # The live memory, not a copy: and nobody takes it for somebody's hold on the weights.
        for p in named.values():
            (weight,) = [tensor for (file, _), tensor in parts[id(p)].tensors.items() if file == "model"]
            assert weight.data_ptr() == p.data_ptr()


@pytest.mark.parametrize("place", [RESIDENT, STREAMED_HOST, SPREAD])
@pytest.mark.parametrize("schedule", ["deferred", "in_backward"])
def test_not_between_a_backward_and_its_step(place: dict[str, Any], schedule: str, tmp_path: Path) -> None:
    with training(Run(place=place, schedule=schedule)) as made:
        made.steps(1)
        ids = torch.zeros(2, 6, dtype=torch.int64)
        loss = nn.functional.cross_entropy(made.model(ids).flatten(0, 1), ids.flatten())
        # A forward alone changes nothing that is saved.
        made.session.save(tmp_path, state=made.state)
        loss.backward()
        with pytest.raises(
            SessionError, match=r"session.save was called between a backward and its step\(\), with .* it after"
        ):
            made.session.save(tmp_path, state=made.state)
        made.optimizer.step()
        # Before the gradients are cleared, too.
        made.session.save(tmp_path, state=made.state)
        made.optimizer.zero_grad()
        made.session.save(tmp_path, state=made.state)


def test_a_step_that_was_given_up_may_be_saved(tmp_path: Path) -> None:
    for set_to_none in (True, False):
        with training(Run(place=STREAMED_HOST)) as made:
            made.model(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
            made.optimizer.zero_grad(set_to_none=set_to_none)
            made.session.save(tmp_path, step=1)


def test_not_inside_of_a_forward_or_a_backward(tmp_path: Path) -> None:
    with training(Run(place=STREAMED_HOST)) as made:
        asked: list[str] = []

        def save(*_: object) -> None:
            with pytest.raises(SessionError, match="was called inside of a forward or a backward"):
                made.session.save(tmp_path)
            asked.append("asked")

        handles = [made.model.blocks[1].register_forward_hook(save)]
        made.model.blocks[0].up.weight.register_post_accumulate_grad_hook(save)  # type: ignore[union-attr, operator]
        made.step()
        assert len(asked) == 2
        for handle in handles:
            handle.remove()


def test_not_after_a_step_that_broke_off(tmp_path: Path) -> None:
    with training(Run(place=STREAMED_HOST, schedule="in_backward")) as made:

        def fail(_: object) -> None:
            raise RuntimeError("tripped")

        handle = made.model.blocks[0].up.weight.register_hook(fail)  # type: ignore[union-attr, operator]
        with pytest.raises(RuntimeError, match="tripped"):
            made.step()
        with pytest.raises(SessionError, match=r"session.save was called after what broke off: .* raised after it had"):
            made.session.save(tmp_path)
        handle.remove()
        with pytest.warns(RuntimeWarning, match="raised after it had updated"):
            made.optimizer.zero_grad()
        made.session.save(tmp_path)


def test_during_warm_up(tmp_path: Path) -> None:
    """The step that decides the plan is a step like any other."""
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters())
    with lowtide.manage(model, optimizer, lowtide.WarmUp(device_memory="8MiB"), device="cpu") as session:
        assert session.is_warming_up
        session.save(tmp_path)
        ids = torch.zeros(2, 6, dtype=torch.int64)
        for number in range(3):
            model(ids).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert session.save(tmp_path).name == f"step-{number + 1:08d}"
        assert not session.is_warming_up
        values = {name: value.clone() for name, value in model.state_dict().items()}
        model(ids).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        lowtide.load(tmp_path, session)
        assert_same(dict(model.state_dict()), values)


def test_what_has_no_plain_form_is_refused_by_name(tmp_path: Path) -> None:
    with training(Run()) as made:
        with pytest.raises(ConfigError, match=r"state\['tokens'\]\[0\] is a builtins.object, which has no plain form"):
            made.session.save(tmp_path, state={"tokens": [object()]})
        with pytest.raises(ConfigError, match="state is a list; give a dictionary"):
            made.session.save(tmp_path, state=[1])  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="state has the key 3; give each object a name that is text"):
            made.session.save(tmp_path, state={3: 1})  # type: ignore[dict-item]
        made.steps(1)
        entries = made.optimizer.state[made.model.embed.weight]
        entries["note"] = object()
        with pytest.raises(ConfigError, match=r"optimizer.state\[embed.weight\]\['note'\] is a builtins.object"):
            made.session.save(tmp_path)
        del entries["note"]
        assert RunFolder(tmp_path).newest_good() is None


def test_a_parameter_of_the_optimizer_alone_is_saved(tmp_path: Path) -> None:
    """A weight of a loss that is learnt, say: it is no part of the model."""

    def managed() -> tuple[nn.Parameter, torch.optim.Optimizer, nn.Module, lowtide.Session]:
        model = make_net()
        scale = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.AdamW([*model.parameters(), scale], lr=0.1)
        return scale, optimizer, model, lowtide.manage(model, optimizer, lowtide.make_plan(model), device="cpu")

    def step(scale: nn.Parameter, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        torch.manual_seed(3)
        (model(torch.zeros(1, 2, dtype=torch.int64)).square().mean() * scale.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()

    scale, optimizer, model, session = managed()
    with session:
        step(scale, optimizer, model)
        session.save(tmp_path)
        step(scale, optimizer, model)
    other, optimizer, model, session = managed()
    with session:
        lowtide.load(tmp_path, session)
        step(other, optimizer, model)
    assert torch.equal(other, scale)
    with pytest.warns(UserWarning, match="1 parameters that the optimizer holds and the model has not"):
        lowtide.export(tmp_path, tmp_path / "out")


class Counting(nn.Module):
    """Has extra state, which is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.calls: dict[int, tuple[int, ...]] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[len(self.calls)] = tuple(x.shape)
        return x * self.weight

    def get_extra_state(self) -> dict[int, tuple[int, ...]]:
        return self.calls

    def set_extra_state(self, state: dict[int, tuple[int, ...]]) -> None:
        self.calls = state


def test_extra_state_of_modules(tmp_path: Path) -> None:
    model = nn.Sequential(Counting(), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters())
    with lowtide.manage(model, optimizer, lowtide.make_plan(model), device="cpu") as session:
        model(torch.zeros(4, 3))
        session.save(tmp_path)
    other = nn.Sequential(Counting(), nn.Linear(3, 2))
    lowtide.load(tmp_path, other, torch.optim.SGD(other.parameters()))
    assert other[0].calls == {0: (4, 3)}


class WithAttributes(torch.optim.SGD):
    """Adds entries of its own to `state_dict`."""

    counted = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "counted": self.counted}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.counted = state_dict["counted"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "counted"})


def test_what_an_optimizer_class_adds_is_its_own_to_load(tmp_path: Path) -> None:
    def managed() -> tuple[nn.Module, WithAttributes, lowtide.Session]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        optimizer = WithAttributes(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, lowtide.manage(model, optimizer, lowtide.make_plan(model), device="cpu")

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer, session = managed()
    with session:
        step(model, optimizer)
        optimizer.counted = 5
        session.save(tmp_path)
        step(model, optimizer)
    other, optimizer, session = managed()
    with session:
        lowtide.load(tmp_path, session)
        assert optimizer.counted == 5
        step(other, optimizer)
    assert_same(dict(other.state_dict()), dict(model.state_dict()))


def test_old_checkpoints_go(tmp_path: Path) -> None:
    with training(Run()) as made:
        for _ in range(5):
            made.step()
            made.session.save(tmp_path, keep=1, keep_every=2)
    assert sorted(RunFolder(tmp_path).checkpoints()) == [2, 4, 5]


def test_a_closed_session_lets_others_save(tmp_path: Path) -> None:
    for _ in range(2):
        with training(Run()) as made:
            made.session.save(tmp_path)
        with pytest.raises(SessionError, match="this session is closed"):
            made.session.save(tmp_path)
