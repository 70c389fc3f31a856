"""The worker, in this process: every way an experiment can end becomes a record, and the pipe tells of it."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lowtide.config import write_config
from lowtide.errors import BudgetError
from lowtide.lab.data_recipe import EvaluationRecipe
from lowtide.lab.messages import Done, Message, Request, decode
from lowtide.lab.progress import Progress
from lowtide.lab.recipe import Recipe
from lowtide.lab.record import Outcome, RunRecord, Surroundings, read_record
from lowtide.lab.worker import is_out_of_memory, main
from tests.lab.pretend_runs import DOTTED, EVALUATION_LOSS, LOSSES

RECIPE = Recipe(model="gpt-tiny", device="cpu", steps=3)


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the worker changes for its whole process is taken back."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setattr(sys, "path", list(sys.path))


def work(
    folder: Path, name: str, *, recipe: Recipe = RECIPE, experiment: str = DOTTED
) -> tuple[RunRecord, list[Message]]:
    """The record, and what was told."""
    reading, writing = os.pipe()
    request = Request(
        name=name,
        recipe=recipe,
        record=folder / "record.json",
        tensorboard=folder / "tensorboard",
        experiment=experiment,
        import_paths=(str(folder), *sys.path),
        progress_fd=writing,
    )
    write_config(request, folder / "request.json")
    try:
        main(str(folder / "request.json"))
        lines = os.read(reading, 1 << 16).splitlines()
    finally:
        os.close(reading)
        os.close(writing)
    messages = [message for line in lines if (message := decode(line)) is not None]
    assert len(messages) == len(lines)
    return read_record(request.record), messages


def test_everything_is_told_and_the_end_last(tmp_path: Path) -> None:
    record, messages = work(tmp_path, "finishes")
    assert record.outcome is Outcome.FINISHED
    assert [type(message) for message in messages] == [Surroundings, Progress, Progress, Done]
    assert sys.path[0] == str(tmp_path)


@pytest.mark.parametrize(
    ("name", "outcome", "parts"),
    [
        ("raises", Outcome.FAILED, ("ValueError: the third step is missing\n", 'pretend_runs.py", line', "in raises")),
        ("exits", Outcome.FAILED, ("SystemExit: 0\n", "in exits")),
        ("runs_out", Outcome.OUT_OF_MEMORY, ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n",)),
        ("runs_out_emulated", Outcome.OUT_OF_MEMORY, ("SessionError: the backward broke off\n",)),
        ("runs_out_on_host", Outcome.FAILED, ("BudgetError: 'state' needs 2 MiB\n",)),
    ],
)
def test_errors_become_records_with_what_was_known(
    tmp_path: Path, name: str, outcome: Outcome, parts: tuple[str, ...]
) -> None:
    record, messages = work(tmp_path, name)
    assert record.outcome is outcome
    for part in (*parts, "last heard: training, step 2 of 3, loss 5.2500, peak 2.000 GiB, 20 samples/s"):
        assert part in record.message
    assert record.losses == LOSSES[:2]
    assert record.surroundings.device == "cpu, emulated"
    assert record.recipe["model"] == "gpt-tiny"
    assert messages[-1] == Done()


def test_evaluations_before_an_error_are_known(tmp_path: Path) -> None:
    record, _ = work(tmp_path, "raises", recipe=replace(RECIPE, evaluation=EvaluationRecipe(after=(1,))))
    assert record.outcome is Outcome.FAILED
    assert record.evaluations == ((1, EVALUATION_LOSS),)


def test_a_loss_that_is_no_number_is_a_failure_that_keeps_its_memory(tmp_path: Path) -> None:
    record, _ = work(tmp_path, "diverges")
    assert record.outcome is Outcome.FAILED
    assert record.message.startswith("the loss of step 2 is nan; lower optimizer.settings.lr")
    assert record.losses == (5.5,)
    assert record.evaluation_loss is None
    assert record.memory is not None


def test_an_evaluation_that_is_no_number_is_one_too(tmp_path: Path) -> None:
    record, _ = work(tmp_path, "evaluates_to_infinity")
    assert record.outcome is Outcome.FAILED
    assert record.message.startswith("the evaluation's loss is inf; ")
    assert record.losses == LOSSES


def test_an_evaluation_within_the_run_that_is_no_number_is_one_too(tmp_path: Path) -> None:
    record, _ = work(tmp_path, "evaluates_to_infinity_within")
    assert record.outcome is Outcome.FAILED
    assert record.message.startswith("the evaluation's loss after step 2 is inf; ")
    assert record.evaluations == ((1, 5.25),)
    assert record.evaluation_loss == math.log(100.0)
    assert record.losses == LOSSES


def test_a_record_that_json_cannot_hold_is_replaced_by_one_that_says_so(tmp_path: Path) -> None:
    record, _ = work(tmp_path, "cannot_be_written")
    assert record.outcome is Outcome.FAILED
    assert "'speed.step_s[0]' is inf, which JSON cannot hold" in record.message
    assert record.losses == LOSSES


def test_a_device_that_is_not_there_is_a_failure(tmp_path: Path) -> None:
    record, _ = work(tmp_path, "asks", recipe=replace(RECIPE, device="cuda:99"))
    assert record.outcome is Outcome.FAILED
    assert "there is no device 'cuda:99'" in record.message
    assert record.surroundings.device == "unknown"


@pytest.mark.parametrize("experiment", ["tests.lab.no_such_module:run", "tests.lab.pretend_runs:no_such_function"])
def test_an_experiment_that_is_not_there_is_a_failure(tmp_path: Path, experiment: str) -> None:
    record, _ = work(tmp_path, "finishes", experiment=experiment)
    assert record.outcome is Outcome.FAILED
    assert "no_such" in record.message
    assert "nothing was heard of it" in record.message


@pytest.mark.parametrize(("workspace", "expected"), [(":4096:2:16:8", ":4096:2:16:8"), (None, "None")])
def test_the_workspace_is_the_recipes_or_the_librarys(tmp_path: Path, workspace: str | None, expected: str) -> None:
    record, _ = work(tmp_path, "shows_environment", recipe=replace(RECIPE, cublas_workspace=workspace))
    assert record.message.partition(",")[0] == expected


def budget_error(tier: str) -> BudgetError:
    return BudgetError("too small", tier=tier, needed_bytes=2, free_bytes=1, budget_bytes=1)


def test_which_errors_are_the_devices_memory() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(budget_error("device"))
    assert is_out_of_memory(budget_error("device budget"))
    # A library's own handle did not get its memory, which is no error of torch's allocator.
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert not is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"))
    assert not is_out_of_memory(budget_error("host"))
    assert not is_out_of_memory(budget_error("pinned"))
    assert not is_out_of_memory(MemoryError())
    later = RuntimeError("the step was lost")
    later.__context__ = torch.OutOfMemoryError("CUDA out of memory")
    assert is_out_of_memory(later)
    later.__suppress_context__ = True
    assert not is_out_of_memory(later)
    circle = RuntimeError("first")
    circle.__cause__ = RuntimeError("second")
    circle.__cause__.__cause__ = circle
    assert not is_out_of_memory(circle)
