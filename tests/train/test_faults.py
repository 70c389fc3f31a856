"""What becomes of a run when something goes wrong: it goes on with the same losses, or says what happened and keeps what it has."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lowtide.config import override
from lowtide.errors import (
    CheckpointWriteError,
    EmulatedOutOfMemoryError,
    FolderInUseError,
    PlanError,
    RunStoppedError,
    StepLostError,
)
from lowtide.runtime.checkpoints.folder import RunFolder
from lowtide.runtime.checkpoints.format import CheckpointReader
from lowtide.train.folder import OutputFolder
from lowtide.train.keeper import Keeper
from lowtide.train.model import Trained
from lowtide.train.run import Run
from tests.train.runs import Heard, losses, rows, small_recipe, train, trained_with


def out_of_memory() -> Exception:
    return EmulatedOutOfMemoryError("injected", tier="device", needed_bytes=1, free_bytes=0, budget_bytes=0)


class Fault:
    """Does something in chosen calls of a hook, counted over all starts of a run."""

    def __init__(self, calls: set[int], act: Callable[[], Any]) -> None:
        self._calls, self._act, self._count = calls, act, 0

    def __call__(self) -> Any:
        self._count += 1
        return self._act() if self._count in self._calls else None


def fail(error: Exception) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def in_backward(fault: Fault) -> Callable[[Trained], None]:
    """The fault in the backward of the first block, when that of others is over."""

    def change(trained: Trained) -> None:
        trained.model.get_submodule("layers.0").register_full_backward_hook(lambda *_: fault())

    return change


def in_forward(fault: Fault) -> Callable[[Trained], None]:
    """The fault in the middle of a training forward."""

    def change(trained: Trained) -> None:
        def hook(module: nn.Module, *_: object) -> None:
            if module.training:
                fault()

        trained.model.get_submodule("layers.1").register_forward_hook(hook)

    return change


def of_loss(fault: Fault) -> Callable[[Trained], None]:
    """The fault's factor on the loss."""

    def change(trained: Trained) -> None:
        def hook(module: nn.Module, inputs: object, output: Any) -> Any:
            factor = fault() if module.training else None
            return None if factor is None else dataclasses.replace(output, loss=output.loss * factor)

        trained.model.register_forward_hook(hook)

    return change


def of_gradient(fault: Fault) -> Callable[[Trained], None]:
    """The fault's factor on one gradient."""

    def change(trained: Trained) -> None:
        def hook(gradient: Tensor) -> Tensor | None:
            factor = fault()
            return None if factor is None else gradient * factor

        trained.model.get_parameter("layers.1.mlp.up.weight").register_hook(hook)

    return change


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    train(small_recipe(folder, "checkpoints.every=2"), folder / "out")
    return folder / "out"


class TestLostSteps:
    def test_a_backward_without_memory_is_repeated(self, undisturbed: Path, tmp_path: Path) -> None:
        heard = Heard()
        with trained_with(in_backward(Fault({4}, fail(out_of_memory())))):
            result = train(small_recipe(undisturbed.parent, "device_memory=700KiB"), tmp_path / "out", heard=heard)
        assert result.is_finished
        assert losses(tmp_path / "out") == losses(undisturbed)
        (lost,) = rows(tmp_path / "out", "lost")
        assert "memory ran out in a backward" in lost["reason"]
        assert any(note.startswith("step 4 was lost") and note.endswith("it is repeated") for note in heard.notes)

    @pytest.mark.slow
    def test_a_forward_without_memory_is_none_of_the_loops_business(self, undisturbed: Path, tmp_path: Path) -> None:
        with trained_with(in_forward(Fault({4}, fail(out_of_memory())))):
            train(small_recipe(undisturbed.parent, "device_memory=700KiB"), tmp_path / "out")
        assert losses(tmp_path / "out") == losses(undisturbed)
        assert rows(tmp_path / "out", "lost") == []
        (plan,) = rows(tmp_path / "out", "plan")
        assert "memory ran out" in plan["reason"]

    def test_a_step_that_moved_some_weights_goes_back_to_the_last_checkpoint(
        self, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real, fault = Run._updated, Fault({4}, fail(StepLostError("the update thread broke off")))

        def updated(self: Run) -> float | None:
            norm = real(self)
            fault()
            return norm

        monkeypatch.setattr(Run, "_updated", updated)
        heard = Heard()
        train(small_recipe(undisturbed.parent, "checkpoints.every=2"), tmp_path / "out", heard=heard)
        assert "step 4 was lost (the update thread broke off): back to the last checkpoint" in heard.notes
        assert "going on after step 2" in heard.notes
        assert losses(tmp_path / "out") == losses(undisturbed)

    @pytest.mark.parametrize("settings", [("schedule=in_backward",), ("schedule=in_backward", "checkpoints.every=3")])
    def test_in_backward_it_goes_back_to_the_last_checkpoint(self, tmp_path: Path, settings: tuple[str, ...]) -> None:
        recipe = small_recipe(tmp_path, *settings)
        train(recipe, tmp_path / "whole")
        heard = Heard()
        with trained_with(in_backward(Fault({5}, fail(out_of_memory())))):
            train(recipe, tmp_path / "out", heard=heard)
        assert losses(tmp_path / "out") == losses(tmp_path / "whole")
        assert any(note.endswith("back to the last checkpoint") for note in heard.notes)
        assert ("going on after step 3" in heard.notes) == (len(settings) == 2)

    @pytest.mark.slow
    def test_a_step_that_is_lost_again_and_again_ends_the_run(self, undisturbed: Path, tmp_path: Path) -> None:
        recipe = small_recipe(undisturbed.parent, "checkpoints.every=2", "faults.retries=1")
        with (
            trained_with(in_backward(Fault({4, 5, 6}, fail(out_of_memory())))),
            pytest.raises(
                RunStoppedError, match="2 times in a row step 4 was lost.*Step 2 is saved; go on by `lowtide train"
            ),
        ):
            train(recipe, tmp_path / "out")
        assert train(recipe, tmp_path / "out", resume=True).is_finished
        assert losses(tmp_path / "out") == losses(undisturbed)

    @pytest.mark.slow
    def test_a_run_does_not_go_back_for_ever(self, tmp_path: Path) -> None:
        recipe = small_recipe(tmp_path, "schedule=in_backward", "faults.retries=1")
        with (
            trained_with(in_backward(Fault(set(range(2, 100)), fail(out_of_memory())))),
            pytest.raises(
                RunStoppedError, match="it went back to a checkpoint 2 times: step .*Nothing of it is saved yet"
            ),
        ):
            train(recipe, tmp_path / "out")


class TestNotFinite:
    @pytest.mark.parametrize("place", [of_loss, of_gradient], ids=["loss", "gradient"])
    @pytest.mark.parametrize(
        "budget", ["450KiB", pytest.param("4MiB", marks=pytest.mark.slow)], ids=["streamed", "resident"]
    )
    def test_the_run_stops_with_what_it_saved(
        self, undisturbed: Path, tmp_path: Path, place: Callable[[Fault], Any], budget: str
    ) -> None:
        recipe = small_recipe(undisturbed.parent, "checkpoints.every=2", f"device_memory={budget}")
        with (
            trained_with(place(Fault({4}, lambda: float("nan")))),
            pytest.raises(RunStoppedError, match="step 4 is not finite.*Lower optimizer.settings.lr.*Step 2 is saved"),
        ):
            train(recipe, tmp_path / "out")
        assert list(RunFolder(tmp_path / "out" / "checkpoints").checkpoints()) == [2]
        assert train(recipe, tmp_path / "out", resume=True).is_finished
        assert losses(tmp_path / "out") == losses(undisturbed)

    @pytest.mark.parametrize("place", [of_loss, of_gradient], ids=["loss", "gradient"])
    def test_steps_are_left_out_as_often_as_is_allowed(self, tmp_path: Path, place: Callable[[Fault], Any]) -> None:
        recipe = small_recipe(tmp_path, "faults.skip_non_finite=2")
        with trained_with(place(Fault({3, 4}, lambda: float("nan")))):
            result = train(recipe, tmp_path / "out")
        assert result.is_finished
        assert [step for step, loss in losses(tmp_path / "out") if loss is None] == [3, 4]
        assert [row["step"] for row in rows(tmp_path / "out", "left out")] == [3, 4]
        with (
            trained_with(place(Fault({3, 4, 5}, lambda: float("inf")))),
            pytest.raises(RunStoppedError, match="step 5 is not finite, 3 steps in a row"),
        ):
            train(recipe, tmp_path / "again")


class TestExceptions:
    def test_a_hook_that_raises_is_named(self, undisturbed: Path, tmp_path: Path) -> None:
        recipe = small_recipe(undisturbed.parent, "checkpoints.every=2")
        with (
            trained_with(in_forward(Fault({4}, fail(KeyError("my own"))))),
            pytest.raises(RunStoppedError, match="step 4 failed: KeyError: 'my own'.*traceback.txt.*Step 2 is saved"),
        ):
            train(recipe, tmp_path / "out")
        assert "KeyError: 'my own'" in (tmp_path / "out" / "traceback.txt").read_text()
        assert list(RunFolder(tmp_path / "out" / "checkpoints").checkpoints()) == [2]
        assert train(recipe, tmp_path / "out", resume=True).is_finished
        assert losses(tmp_path / "out") == losses(undisturbed)

    @pytest.mark.slow
    def test_a_hook_that_raises_in_a_backward_is_named(self, tmp_path: Path) -> None:
        with (
            trained_with(in_backward(Fault({2}, fail(ValueError("odd"))))),
            pytest.raises(RunStoppedError, match="step 2 failed: ValueError: odd.*Nothing of it is saved yet"),
        ):
            train(small_recipe(tmp_path), tmp_path / "out")

    def test_a_token_that_no_model_has_is_named_with_its_place(self, tmp_path: Path) -> None:
        tokens = np.zeros(32 * 40, dtype=np.uint16)
        tokens[32 * 9 + 5] = 999
        np.save(tmp_path / "tokens.npy", tokens)
        recipe = small_recipe(
            tmp_path, "data.text=null", f"data.tokens={tmp_path / 'tokens.npy'}", "data.shuffle=false"
        )
        recipe = override(recipe, ["checkpoints.every=1"])
        message = (
            r"batch 4 could not be made: token 999 of the sequence in .*tokens.npy, at token 288, is not one of the"
        )
        with pytest.raises(RunStoppedError, match=rf"{message} model's 256.*Step 4 is saved"):
            train(recipe, tmp_path / "out")
        assert [step for step, _ in losses(tmp_path / "out")] == [1, 2, 3, 4]

    def test_a_full_disk_costs_a_checkpoint_and_not_the_run(
        self, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = Keeper.save

        def save(self: Keeper, trained: Trained, step: int) -> None:
            if step == 4:
                raise CheckpointWriteError("no space left")
            real(self, trained, step)

        monkeypatch.setattr(Keeper, "save", save)
        heard = Heard()
        recipe = small_recipe(undisturbed.parent, "checkpoints.every=2")
        assert train(recipe, tmp_path / "out", heard=heard).is_finished
        assert "a checkpoint could not be saved: no space left; the training goes on" in heard.notes
        assert losses(tmp_path / "out") == losses(undisturbed)

    def test_a_last_save_that_fails_ends_the_run_with_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def save(self: Keeper, trained: Trained, step: int) -> None:
            raise CheckpointWriteError("no space left")

        monkeypatch.setattr(Keeper, "save", save)
        with pytest.raises(
            RunStoppedError, match="step 2 could not be saved: no space left. Nothing of it is saved yet"
        ):
            train(small_recipe(tmp_path, "steps=2"), tmp_path / "out")


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(undisturbed: Path, tmp_path: Path) -> None:
    recipe = small_recipe(undisturbed.parent, "checkpoints.every=2", "steps=6", "scheduler.decay=none")
    train(recipe, tmp_path / "out")
    file = tmp_path / "out" / "checkpoints" / "step-00000006" / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 4
    file.write_bytes(content)
    heard = Heard()
    with pytest.warns(UserWarning, match=r"step-00000006/optimizer.safetensors.*step-00000004 is used instead"):
        result = train(recipe, tmp_path / "out", resume=True, heard=heard)
    assert result.is_finished
    assert "going on after step 4" in heard.notes
    assert [step for step, _ in losses(tmp_path / "out")] == [1, 2, 3, 4, 5, 6]
    assert torch.isfinite(torch.tensor([loss for _, loss in losses(tmp_path / "out")])).all()


def test_a_second_process_on_a_folder_is_refused_with_the_number_of_the_first(tmp_path: Path) -> None:
    with (
        OutputFolder(tmp_path / "out").held(),
        pytest.raises(FolderInUseError, match=r"process.* \d+ on .* saves into .*; stop it, or give this run a folder"),
    ):
        train(small_recipe(tmp_path), tmp_path / "out")


def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, "schedule=in_backward", "device_memory=4MiB", "checkpoints.every=1")
    with (
        trained_with(of_gradient(Fault({3}, lambda: float("nan")))),
        pytest.raises(RunStoppedError, match=r"NaN or infinite.*Step \d is saved"),
    ):
        train(recipe, tmp_path / "out")
    newest = next(iter(RunFolder(tmp_path / "out" / "checkpoints").checkpoints().values()))
    reader = CheckpointReader(newest)
    assert all(torch.isfinite(reader.read("model", name)).all() for name in reader.names("model"))
    assert reader.index.step == 2


def test_a_plan_that_does_not_fit_leaves_the_recipe_of_the_run(undisturbed: Path, tmp_path: Path) -> None:
    recipe = small_recipe(undisturbed.parent, "steps=2")
    train(recipe, tmp_path / "out")
    with pytest.raises(PlanError):
        train(override(recipe, ["steps=3", "device_memory=60KiB"]), tmp_path / "out", resume=True)
    assert OutputFolder(tmp_path / "out").recipe().device_memory == "450KiB"
