"""Loading: what fits is loaded whole, what does not is refused whole, and a damaged checkpoint gives way to the last good one."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.errors import (
    BadRecordError,
    CheckpointError,
    CheckpointMismatchError,
    ConfigError,
    DamagedCheckpointError,
    OptimizerStateError,
    SessionError,
    StepLostError,
)
from lowtide.optim import update_types
from lowtide.runtime.checkpoints.folder import RunFolder
from lowtide.runtime.checkpoints.format import CheckpointReader, CheckpointWriter
from tests.runtime.checkpoints.saves import saving
from tests.runtime.checkpoints.training_runs import (
    RESIDENT,
    STREAMED_HOST,
    Run,
    Training,
    assert_same,
    draw_from,
    make_net,
    make_optimizer,
    training,
)
from tests.zoo import bf16_safe


@pytest.fixture(autouse=True)
def safe() -> Iterator[None]:
    with bf16_safe():
        yield


def trained(run: Run, folder: Path, *, num_steps: int = 2, **state: Any) -> tuple[list[float], dict[str, Tensor]]:
    """A run of so many steps that is saved; the losses and weights of two more."""
    draw_from(11)
    with training(run) as made:
        made.steps(num_steps)
        made.session.save(folder, state={**made.state, **state})
        return made.steps(2), made.values()


def all_state(each: Training) -> dict[str, Tensor]:
    """Copies of weights, and of the optimizer's state in torch's form."""
    found = each.values()
    for number, entries in each.optimizer.state_dict()["state"].items():
        for key, value in entries.items():
            found[f"{number}.{key}"] = torch.as_tensor(value).clone()
    return found


# -- another format ----------------------------------------------------------------------------------------------------

FORMS = [
    Run(precision=None),
    Run(precision="fp32", moments="8bit"),
    Run(precision="bf16 exact"),
    Run(precision="bf16 exact", moments="bf16"),
    Run(precision="bf16 stochastic", moments="8bit"),
    Run(precision="fp16 exact"),
]


# Each with two others as its source and as its target.
CHANGES = [(FORMS[number], FORMS[(number + step) % len(FORMS)]) for number in range(len(FORMS)) for step in (2, 5)]


@pytest.mark.parametrize(("saved", "wanted"), CHANGES, ids=str)
def test_another_format_is_converted_with_a_warning(saved: Run, wanted: Run, tmp_path: Path) -> None:
    """The fp32 number of each weight, and the moments, are those that were saved, as far as the new form has room."""
    with training(saved) as first:
        first.steps(2)
        first.session.save(tmp_path)
        weights, moments = masters(first), moments_of(first)
    with training(wanted) as second:
        second.steps(1)
        with pytest.warns(UserWarning, match="were converted, and losses from here on are not bit-identical"):
            loaded = lowtide.load(tmp_path, second.session)
        assert not loaded.is_exact
        for name, value in masters(second).items():
            torch.testing.assert_close(value, weights[name], rtol=1e-2, atol=1e-3)
            if wanted.precision == "bf16 exact" or (wanted.precision == "fp16 exact" and saved.precision is None):
                assert torch.equal(value, weights[name]), name
        for name, value in moments_of(second).items():
            rounds = "8bit" in (wanted.moments,) or "bf16" in (wanted.moments,)
            torch.testing.assert_close(value, moments[name], rtol=0.15 if rounds else 0, atol=1e-3 if rounds else 0)
        second.steps(1)


def masters(each: Training) -> dict[str, Tensor]:
    """The fp32 number that each weight is the rounding of."""
    state = each.optimizer.state_dict()["state"]
    numbers = {id(p): n for n, p in enumerate(p for group in each.optimizer.param_groups for p in group["params"])}
    return {
        name: state[numbers[id(p)]].get("master", p.detach()).float().clone()
        for name, p in each.model.named_parameters()
    }


def moments_of(each: Training) -> dict[str, Tensor]:
    state = each.optimizer.state_dict()["state"]
    return {f"{number}.{key}": state[number][key].float() for number in state for key in ("exp_avg", "exp_avg_sq")}


def test_a_weight_in_another_order_of_memory_is_converted(tmp_path: Path) -> None:
    def managed(*, channels_last: bool) -> tuple[nn.Module, torch.optim.Optimizer, lowtide.Session]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3))
        if channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = torch.optim.AdamW(model.parameters())
        plan = lowtide.make_plan(model)
        return model, optimizer, lowtide.manage(model, optimizer, plan, device="cpu", precision="fp32")

    batch = torch.randn(2, 3, 8, 8)
    model, optimizer, session = managed(channels_last=False)
    with session:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        session.save(tmp_path)
        expected = optimizer.state_dict()["state"][0]["exp_avg"]
    model, optimizer, session = managed(channels_last=True)
    with session:
        with pytest.warns(UserWarning, match="not bit-identical"):
            lowtide.load(tmp_path, session)
        assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], expected)


# -- the wrong order ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "run", [Run(precision="bf16 stochastic", moments="8bit"), Run(precision="bf16 exact")], ids=str
)
def test_masters_and_small_moments_are_not_loaded_into_plain_objects(run: Run, tmp_path: Path) -> None:
    trained(run, tmp_path)
    model = make_net(run.dtype)
    optimizer = make_optimizer("adamw", model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(
        CheckpointMismatchError, match=r"which a plain torch optimizer cannot keep; call lowtide\.manage"
    ):
        lowtide.load(tmp_path, model, optimizer)
    assert_same(dict(model.state_dict()), before)
    assert not optimizer.state


def test_a_checkpoint_loaded_before_manage_goes_on_exactly(tmp_path: Path) -> None:
    run = Run(has_scheduler=False)
    losses, values = trained(run, tmp_path)
    model = make_net()
    optimizer = make_optimizer("adamw", model)
    generator = torch.Generator()
    loaded = lowtide.load(tmp_path, model, optimizer, state={"data": generator})
    assert (loaded.is_exact, loaded.step) == (True, 2)
    found = []
    with lowtide.manage(model, optimizer, lowtide.make_plan(model, **STREAMED_HOST), device="cpu"):
        for _ in range(2):
            found.append(plain_step(model, optimizer, generator))
    assert found == losses
    assert_same(dict(model.state_dict()), values)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, generator: torch.Generator) -> float:
    import random

    import numpy as np

    ids = torch.randint(20, (2, 6), generator=generator)
    logits = model(ids)
    noise = 1 + 0.01 * random.random() + 0.01 * float(np.random.rand())
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()) * noise
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def test_a_plain_loop_goes_on_exactly(tmp_path: Path) -> None:
    losses, values = trained(Run(has_scheduler=False), tmp_path)
    model = make_net()
    optimizer = make_optimizer("adamw", model)
    generator = torch.Generator()
    lowtide.load(tmp_path, model, optimizer, state={"data": generator})
    assert [plain_step(model, optimizer, generator) for _ in range(2)] == losses
    assert_same(dict(model.state_dict()), values)


def test_plain_objects_under_management_are_refused(tmp_path: Path) -> None:
    with training(Run()) as made:
        made.session.save(tmp_path)
        with pytest.raises(SessionError, match="under management already") as caught:
            lowtide.load(tmp_path, made.model, made.optimizer)
        assert "lowtide.load(folder, session)" in caught.value.__notes__[0]


# -- of another model or optimizer -------------------------------------------------------------------------------------


def without_tie(model: nn.Module) -> None:
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())  # type: ignore[union-attr]


def wider(model: nn.Module) -> None:
    model.blocks[1].up = nn.Linear(24, 64)  # type: ignore[index, operator]
    model.blocks[1].down = nn.Linear(64, 24)  # type: ignore[index, operator]


def with_more(model: nn.Module) -> None:
    model.extra = nn.Linear(2, 2)


def with_whole_numbers(model: nn.Module) -> None:
    model.blocks[0].mean = torch.zeros(24, dtype=torch.int64)  # type: ignore[index, union-attr]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_more, r"lacks 2 tensors \(extra.weight, extra.bias\) of the model's, and has nothing"),
        (wider, r"blocks.1.up.weight has the shape \(48, 24\) there, and \(64, 24\) in the model"),
        (without_tie, r"lacks 1 tensors \(head.weight\)"),
        (with_whole_numbers, r"blocks.0.mean is torch.float32 there, and torch.int64 in the model"),
    ],
)
def test_another_model_is_refused(change: Callable[[nn.Module], None], message: str, tmp_path: Path) -> None:
    trained(Run(), tmp_path)
    model = make_net()
    change(model)
    optimizer = make_optimizer("adamw", model)
    with lowtide.manage(model, optimizer, lowtide.make_plan(model), device="cpu") as session:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(CheckpointMismatchError, match=message):
            lowtide.load(tmp_path, session)
        assert_same(dict(model.state_dict()), before)
    with pytest.raises(CheckpointMismatchError, match=message):
        lowtide.load_weights(tmp_path, model)


def test_another_tie_is_refused(tmp_path: Path) -> None:
    model = make_net()
    without_tie(model)
    optimizer = make_optimizer("adamw", model)
    with lowtide.manage(model, optimizer, lowtide.make_plan(model), device="cpu") as session:
        session.save(tmp_path)
    with (
        training(Run()) as made,
        pytest.raises(CheckpointMismatchError, match=r"has 1 tensors \(head.weight\) that the model has not"),
    ):
        lowtide.load(tmp_path, made.session)


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    trained(Run(has_scheduler=False), tmp_path)
    for optimizer, message in [
        (
            lambda model: torch.optim.Adam(model.parameters()),
            r"saved from a torch.optim.adamw.AdamW, and this one is a",
        ),
        (
            lambda model: torch.optim.AdamW(model.parameters()),
            r"param groups of \[7, 6\] parameters, and this one of \[13\]",
        ),
        (
            lambda model: torch.optim.AdamW(
                [
                    {"params": [p for p in model.parameters() if p.dim() > 1][::-1]},
                    {"params": [p for p in model.parameters() if p.dim() < 2]},
                ]
            ),
            r"parameter 0 of its param group 0 is embed.weight, and blocks.2.down.weight here",
        ),
    ]:
        model = make_net()
        made = optimizer(model)  # type: ignore[no-untyped-call]
        with (
            lowtide.manage(model, made, lowtide.make_plan(model), device="cpu") as session,
            pytest.raises(CheckpointMismatchError, match=message),
        ):
            lowtide.load(tmp_path, session)
        assert not made.state


def test_a_session_without_an_optimizer_takes_the_weights_alone(tmp_path: Path) -> None:
    trained(Run(), tmp_path)
    model = make_net()
    with lowtide.manage(model, None, lowtide.make_plan(model), device="cpu") as session:
        with pytest.raises(
            CheckpointMismatchError, match=r"there is no optimizer here; to take the weights alone, use"
        ):
            lowtide.load(tmp_path, session)
        lowtide.load_weights(tmp_path, session)
        assert_same(dict(model.state_dict()), weights_in(tmp_path))
        # And such a session can be saved itself.
        session.save(tmp_path / "evaluated", step=9)
        lowtide.load(tmp_path / "evaluated", session)
    with (
        training(Run()) as made,
        pytest.raises(CheckpointMismatchError, match="has none, and there is an optimizer here"),
    ):
        lowtide.load(tmp_path / "evaluated", made.session)


def weights_in(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    checkpoint = max(path for path in folder.iterdir() if path.name.startswith("step-"))
    found = load_file(checkpoint / "model.safetensors")
    found["head.weight"] = found["embed.weight"]
    return {name: found[name] for name in make_net().state_dict()}


# -- the user's objects ------------------------------------------------------------------------------------------------


def test_objects_must_be_those_that_were_saved(tmp_path: Path) -> None:
    trained(Run(), tmp_path, epoch=3)
    with training(Run()) as made:
        before = made.values()
        with pytest.raises(
            CheckpointMismatchError, match=r"state has 'loader', .* was saved with 'data', 'scheduler', 'epoch'"
        ):
            lowtide.load(tmp_path, made.session, state={"loader": made.generator})
        with pytest.raises(
            CheckpointMismatchError, match=r"state\['data'\] is a OneCycleLR, and was saved from a torch.Generator"
        ):
            lowtide.load(tmp_path, made.session, state={"data": made.scheduler})
        with pytest.raises(
            CheckpointMismatchError, match=r"state\['scheduler'\] is a Generator, .* with load_state_dict"
        ):
            lowtide.load(tmp_path, made.session, state={"scheduler": made.generator})
        assert_same(made.values(), before)
        with pytest.warns(UserWarning, match=r"has the state of 'scheduler', which is not loaded"):
            loaded = lowtide.load(tmp_path, made.session, state={"data": made.generator, "epoch": 0})
        assert loaded.state == {"epoch": 3}


def test_an_object_that_refuses_its_state_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    trained(Run(), tmp_path)
    with training(Run()) as made:
        before = made.values()

        class Picky:
            def state_dict(self) -> dict[str, int]:
                return {}

            def load_state_dict(self, state: dict[str, int]) -> None:
                raise ValueError("not mine")

        with pytest.raises(ValueError, match="not mine") as caught:
            lowtide.load(tmp_path, made.session, state={"data": made.generator, "scheduler": Picky()})
        assert "This is state['scheduler'] of lowtide.load. The model and the optimizer" in caught.value.__notes__[0]
        assert_same(made.values(), before)


# -- damage ------------------------------------------------------------------------------------------------------------


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path) -> None:
    run = Run()
    with training(run) as made:
        made.steps(1)
        made.session.save(tmp_path, state=made.state)
        expected = made.values()
        made.steps(1)
        newest = made.session.save(tmp_path, state=made.state)
    flip(newest / "optimizer.safetensors", -5)
    with training(run) as made:
        with pytest.warns(UserWarning, match=r"step-00000002/optimizer.safetensors.* step-00000001 is used instead"):
            loaded = made.load(tmp_path)
        assert loaded.step == made.session.num_steps == 1
        assert_same(made.values(), expected)
        before = all_state(made)
        for asked in ({"step": 2}, {}):
            with pytest.raises(DamagedCheckpointError, match=r"step-00000002/optimizer.safetensors"):
                lowtide.load(tmp_path if asked else newest, made.session, state=made.state, **asked)
        # All of it is verified first: nothing was written.
        assert_same(all_state(made), before)


def test_a_checkpoint_that_breaks_while_it_is_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a disk may: it was whole a moment ago."""
    run = Run(has_scheduler=False)
    losses, _ = trained(run, tmp_path)
    whole = CheckpointReader.read

    def read(reader: CheckpointReader, file: str, name: str, into: Tensor | None = None) -> Tensor:
        if name == "blocks.1.up.weight.exp_avg":
            raise DamagedCheckpointError("gone")
        return whole(reader, file, name, into)

    with training(run) as made:
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointReader, "read", read)
            with pytest.raises(DamagedCheckpointError) as caught:
                made.load(tmp_path)
        assert (
            "of 16 tensors of the model: it is a mixture of what it was and of the checkpoint"
            in caught.value.__notes__[0]
        )
        # Nor can it be trained or saved by mistake.
        nn.functional.cross_entropy(
            made.model(torch.zeros(1, 2).long()).flatten(0, 1), torch.zeros(2).long()
        ).backward()
        with pytest.raises(StepLostError, match=r"broke off after \d+ of 16 tensors of the model: it is a mixture"):
            made.optimizer.step()
        with pytest.raises(SessionError, match="session.save was called after what broke off: loading step-00000002"):
            made.session.save(tmp_path)
        made.load(tmp_path)
        assert made.steps(2) == losses


def test_a_step_is_asked_for(tmp_path: Path) -> None:
    with training(Run()) as made:
        with pytest.raises(CheckpointError, match="there is no checkpoint in"):
            made.load(tmp_path / "nothing")
        assert lowtide.newest_checkpoint(tmp_path / "nothing") is None
        for _ in range(3):
            made.step()
            made.session.save(tmp_path, state=made.state, keep=5)
        assert lowtide.newest_checkpoint(tmp_path) == tmp_path / "step-00000003"
        assert lowtide.load(tmp_path, made.session, state=made.state, step=2).step == 2
        with pytest.raises(CheckpointError, match=r"no checkpoint of step 7 in .*; there are those of steps 1, 2, 3"):
            lowtide.load(tmp_path, made.session, state=made.state, step=7)
        with pytest.raises(
            CheckpointError, match=r"step-00000001 is the checkpoint of step 1, and step 3 was asked for"
        ):
            lowtide.load(tmp_path / "step-00000001", made.session, state=made.state, step=3)


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_what_it_is_loaded_into_is_checked(tmp_path: Path) -> None:
    model = make_net()
    with pytest.raises(
        ConfigError, match="the optimizer is None; give lowtide.load the plain model's optimizer as well"
    ):
        lowtide.load(tmp_path, model)
    with pytest.raises(ConfigError, match="was given a dict to load into"):
        lowtide.load(tmp_path, {})  # type: ignore[arg-type]
    with training(Run()) as made, pytest.raises(ConfigError, match="a session has its optimizer"):
        lowtide.load(tmp_path, made.session, made.optimizer)


def test_a_model_without_memory_is_refused(tmp_path: Path) -> None:
    trained(Run(), tmp_path)
    with lowtide.empty_weights():
        model = make_net()
    optimizer = make_optimizer("adamw", model)
    with pytest.raises(CheckpointMismatchError, match="is on the meta device and has no memory to load into"):
        lowtide.load(tmp_path, model, optimizer)


def test_a_model_on_meta_is_filled_from_a_checkpoint(tmp_path: Path) -> None:
    run = Run(precision="bf16 exact")
    losses, values = trained(run, tmp_path)
    with lowtide.empty_weights():
        model = make_net(run.dtype)
    optimizer = make_optimizer("adamw", model)
    made = Training.__new__(Training)
    checkpoint = next(path for path in tmp_path.iterdir() if path.name.startswith("step-"))
    made.run, made.model, made.optimizer, made.scaler = run, model, optimizer, None
    made.scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=40, cycle_momentum=False)
    made.generator = torch.Generator()
    plan = lowtide.make_plan(model, **STREAMED_HOST)
    with lowtide.manage(
        model, optimizer, plan, device="cpu", weights=checkpoint, precision=run.precision
    ) as made.session:
        assert made.load(tmp_path).is_exact
        assert made.steps(2) == losses
        assert_same(made.values(), values)


def test_gradients_and_a_lost_step_go(tmp_path: Path) -> None:
    run = Run(place=RESIDENT, has_scheduler=False)
    losses, _ = trained(run, tmp_path)
    with training(run) as made:
        nn.functional.cross_entropy(
            made.model(torch.zeros(2, 6, dtype=torch.int64)).flatten(0, 1), torch.zeros(12).long()
        ).backward()
        made.load(tmp_path)
        assert all(parameter.grad is None for parameter in made.model.parameters())
        assert made.steps(2) == losses


def test_weights_come_from_other_files_too(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model, other = make_net(), make_net()
    with torch.no_grad():
        other.blocks[0].up.weight.add_(1)  # type: ignore[union-attr, operator]
    values = {name: value.clone() for name, value in other.state_dict().items() if name != "head.weight"}
    save_file(values, tmp_path / "w.safetensors")
    lowtide.load_weights(tmp_path / "w.safetensors", model)
    assert_same(dict(model.state_dict()), dict(other.state_dict()))
    del values["blocks.0.up.weight"]
    save_file(values, tmp_path / "w.safetensors")
    with pytest.raises(BadRecordError, match=r"no tensor named 'blocks.0.up.weight'"):
        lowtide.load_weights(tmp_path, model)


def test_state_of_another_kind_of_parameter_is_refused(tmp_path: Path) -> None:
    """A setting that keeps more than the checkpoint has."""
    run = Run(optimizer="amsgrad", has_scheduler=False)
    with training(run) as made:
        made.optimizer.param_groups[0]["amsgrad"] = False
        made.steps(1)
        made.optimizer.param_groups[0]["amsgrad"] = True
        made.session.save(tmp_path)
    with training(run) as made, pytest.raises(OptimizerStateError, match="max_exp_avg_sq"):
        lowtide.load(tmp_path, made.session)


def test_settings_come_with_the_checkpoint(tmp_path: Path) -> None:
    run = Run(precision="bf16 exact")
    trained(run, tmp_path)
    with training(replace(run, optimizer="adamw")) as made:
        for group in made.optimizer.param_groups:
            group["lr"], group["betas"] = 0.5, (0.1, 0.2)
        before = copy.deepcopy([dict(group, params=None) for group in made.optimizer.param_groups])
        made.load(tmp_path)
        after = [dict(group, params=None) for group in made.optimizer.param_groups]
        assert before != after
        assert all(group["betas"] == (0.9, 0.999) and group["lr"] == made.scheduler.get_last_lr()[0] for group in after)


@pytest.mark.parametrize("schedule", ["deferred", "in_backward"])
def test_a_run_goes_on_after_a_step_that_broke_off(schedule: str, tmp_path: Path) -> None:
    """Whatever the last step has left, loading needs nothing before it, and warns of nothing that it has made good."""
    run = Run(place=STREAMED_HOST, schedule=schedule, has_scheduler=False)
    losses, values = trained(run, tmp_path)

    def fail(_: object) -> None:
        raise RuntimeError("tripped")

    with training(run) as made:
        handle = made.model.blocks[0].up.weight.register_hook(fail)  # type: ignore[union-attr, operator]
        with pytest.raises(RuntimeError, match="tripped"):
            made.step()
        handle.remove()
        made.load(tmp_path)
        assert made.steps(2) == losses
        assert_same(made.values(), values)


@pytest.mark.parametrize("precision", [None, "fp32"])
@pytest.mark.parametrize("place", [RESIDENT, STREAMED_HOST])
def test_a_run_goes_on_after_a_gradient_that_was_not_finite(
    precision: str | None, place: dict[str, Any], tmp_path: Path
) -> None:
    run = Run(place=place, schedule="in_backward", precision=precision, has_scheduler=False)
    losses, values = trained(run, tmp_path)
    with training(run) as made:
        handle = made.model.blocks[0].up.weight.register_hook(lambda gradient: gradient * torch.nan)  # type: ignore[union-attr, operator]
        made.model(torch.zeros(2, 3).long()).square().mean().backward()
        handle.remove()
        made.load(tmp_path)
        assert made.steps(2) == losses
        assert_same(made.values(), values)


def test_the_host_holds_one_parameter_more_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(precision="bf16 exact", moments="8bit", has_scheduler=False)
    trained(run, tmp_path)
    whole = CheckpointReader.read
    weights: list[weakref.ref[Tensor]] = []

    def read(reader: CheckpointReader, file: str, name: str, into: Tensor | None = None) -> Tensor:
        found = whole(reader, file, name, into)
        if file == "model":
            assert all(weight() is None for weight in weights), name
            weights.append(weakref.ref(found))
        return found

    monkeypatch.setattr(CheckpointReader, "read", read)
    with training(run) as made:
        made.load(tmp_path)
    assert len(weights) == 16


def test_a_setting_that_asks_for_more_state_comes_with_the_next_update(tmp_path: Path) -> None:
    """Our own kernels add it, in the undisturbed run and in the resumed one."""
    run = Run(precision="bf16 exact", optimizer="amsgrad", has_scheduler=False)
    draw_from(11)
    with training(run) as made:
        made.optimizer.param_groups[0]["amsgrad"] = False
        made.steps(1)
        made.optimizer.param_groups[0]["amsgrad"] = True
        made.session.save(tmp_path, state=made.state)
        losses, values = made.steps(2), made.values()
    with training(run) as made:
        made.load(tmp_path)
        assert made.steps(2) == losses
        assert_same(made.values(), values)


class Three(nn.Module):
    """Of three weights the last is tied to one of the others."""

    def __init__(self, tied_to: str) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.c.weight = getattr(self, tied_to).weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)))  # type: ignore[no-any-return]  # a module's call


def test_a_tie_to_another_weight_is_refused(tmp_path: Path) -> None:
    for tied_to in ("a", "b"):
        model = Three(tied_to)
        optimizer = torch.optim.SGD(model.parameters())
        with lowtide.manage(model, optimizer, lowtide.make_plan(model), device="cpu") as session:
            if tied_to == "a":
                session.save(tmp_path)
                continue
            with pytest.raises(
                CheckpointMismatchError,
                match=r"c.weight is tied to b.weight in the model, and tied to a.weight in the checkpoint; tie them alike",
            ):
                lowtide.load(tmp_path, session)


class Extra(nn.Linear):
    def get_extra_state(self) -> int:
        return 3

    def set_extra_state(self, state: int) -> None:
        assert state == 3


def test_extra_state_must_be_in_both(tmp_path: Path) -> None:
    model: nn.Module = nn.Sequential(Extra(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters())
    with lowtide.manage(model, optimizer, lowtide.make_plan(model), device="cpu") as session:
        session.save(tmp_path)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with pytest.raises(
        CheckpointMismatchError, match=r"extra state of 1 tensors \(0._extra_state\) is in one of the two only"
    ):
        lowtide.load(tmp_path, model, torch.optim.SGD(model.parameters()))


def test_a_checkpoint_that_no_session_wrote_is_refused(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run, saving(run, 3) as partial:
        CheckpointWriter(partial, {}).finish(step=3, state={"epoch": 3})
    model = make_net()
    with pytest.raises(
        CheckpointMismatchError, match="step-00000003 has the entries epoch, and is no checkpoint of a session"
    ):
        lowtide.load(tmp_path, model, make_optimizer("adamw", model))


def test_kernel_state_of_another_size_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As blocks of another length would have."""
    run = Run(precision="fp32", moments="8bit", has_scheduler=False)
    trained(run, tmp_path)
    with training(run) as made:
        before = all_state(made)
        monkeypatch.setattr(update_types, "BLOCK", 64)
        with pytest.raises(
            CheckpointMismatchError, match=r"exp_avg_scale of .* has the shape \(\d+,\) .* another version of"
        ):
            made.load(tmp_path)
        monkeypatch.undo()
        assert_same(all_state(made), before)
