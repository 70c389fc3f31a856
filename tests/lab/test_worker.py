"""The worker, in this process: every way an experiment can end becomes a record, and the pipe tells of it."""

from __future__ import annotations

import importlib.machinery
import math
import os
import sys
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from types import ModuleType

import pytest
import torch

from lowtide.config import write_config
from lowtide.errors import BudgetError
from lowtide.lab.progress import Done, Message, Progress, Request, named_surroundings
from lowtide.lab.recipe import Recipe
from lowtide.lab.recipe_parts import EvaluationRecipe
from lowtide.lab.record import Outcome, RunRecord, Surroundings, read_record
from lowtide.lab.worker import NOT_INSTALLED, Board, is_out_of_memory, main
from lowtide.units import GiB
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
    reading, writing = Pipe(duplex=False)
    request = Request(
        name=name,
        recipe=recipe,
        record=folder / "record.json",
        tensorboard=folder / "tensorboard",
        experiment=experiment,
        import_paths=(str(folder), *sys.path),
        progress_fd=os.dup(writing.fileno()),
    )
    write_config(request, folder / "request.json")
    with reading, writing:
        main(str(folder / "request.json"))
        messages = []
        while reading.poll():
            messages.append(reading.recv())
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


BOARD_RECIPE = Recipe(model="gpt-tiny", steps=2)
STEPS = (
    Progress(words="preparing"),
    Progress(words="training", step=1, steps=2, loss=5.5, peak_bytes=2 * GiB, samples_per_s=3.0),
    Progress(words="evaluating after step 1", step=1, steps=2),
    Progress(words="evaluated", step=1, steps=2, evaluation_loss=4.75),
    Progress(words="training", step=2, steps=2, loss=5.0, peak_bytes=3 * GiB, samples_per_s=4.0),
    Progress(words="evaluating", step=2, steps=2),
)


def record() -> RunRecord:
    return RunRecord(
        name="one",
        outcome=Outcome.FINISHED,
        surroundings=named_surroundings("none"),
        recipe={},
        evaluation_loss=4.5,
        evaluations=((1, 4.75),),
    )


class Writer:
    """Stands for torch's, which needs the package."""

    fails_at = -1

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.scalars: list[tuple[str, float, int]] = []
        self.texts: dict[str, str] = {}
        self.is_closed = False

    def add_scalar(self, name: str, value: float, step: int) -> None:
        if step == self.fails_at:
            raise OSError("no space left on device")
        self.scalars.append((name, value, step))

    def add_text(self, name: str, text: str) -> None:
        self.texts[name] = text

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Writer]:
    """The writers that are made, with an installed package that is none."""
    made: list[Writer] = []

    class KeptWriter(Writer):
        def __init__(self, folder: str) -> None:
            super().__init__(folder)
            made.append(self)

    package = ModuleType("tensorboard")
    package.__spec__ = importlib.machinery.ModuleSpec("tensorboard", None)
    module = ModuleType("torch.utils.tensorboard.writer")
    module.SummaryWriter = KeptWriter
    monkeypatch.setitem(sys.modules, "tensorboard", package)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", ModuleType("torch.utils.tensorboard"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", module)
    return made


def tell(board: Board) -> None:
    for progress in STEPS:
        board.add(progress)
    board.finish(record())


def test_each_step_is_written_once(written: list[Writer], tmp_path: Path) -> None:
    board = Board(tmp_path / "run", BOARD_RECIPE)
    tell(board)
    (writer,) = written
    assert writer.folder == str(tmp_path / "run")
    assert writer.scalars == [
        ("loss", 5.5, 1),
        ("peak_gib", 2.0, 1),
        ("samples_per_s", 3.0, 1),
        ("evaluation_loss", 4.75, 1),  # at once, since the run may be killed before its end
        ("loss", 5.0, 2),
        ("peak_gib", 3.0, 2),
        ("samples_per_s", 4.0, 2),
        ("evaluation_loss", 4.5, 2),
    ]
    assert "    model: gpt-tiny" in writer.texts["recipe"]
    assert writer.is_closed
    assert board.remarks == []


def test_a_full_disk_costs_the_curves_and_not_the_run(
    written: list[Writer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Writer, "fails_at", 2)
    board = Board(tmp_path, BOARD_RECIPE)
    tell(board)
    assert len(written[0].scalars) == 4
    assert board.remarks == ["TensorBoard curves end at step 2: OSError: no space left on device"]


def test_an_import_that_fails_is_a_remark(
    written: list[Writer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    board = Board(tmp_path, BOARD_RECIPE)
    tell(board)
    assert written == []
    assert board.remarks[0].startswith("TensorBoard curves end at step 0: ModuleNotFoundError")


def test_without_the_package_a_remark_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    board = Board(tmp_path / "run", BOARD_RECIPE)
    tell(board)
    assert board.remarks == [NOT_INSTALLED]
    assert not (tmp_path / "run").exists()


def test_tensorboard_itself_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tell(Board(tmp_path, BOARD_RECIPE))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 5.5), (2, 5.0)]
    assert [event.value for event in events.Scalars("peak_gib")] == [2.0, 3.0]
    assert [(event.step, event.value) for event in events.Scalars("evaluation_loss")] == [(1, 4.75), (2, 4.5)]
    assert "recipe/text_summary" in events.Tags()["tensors"]
