"""Curves for TensorBoard: what is written where its package is there, and what is said where it is not."""

from __future__ import annotations

import importlib.machinery
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lowtide.lab.progress import Progress
from lowtide.lab.recipe import Recipe
from lowtide.lab.record import Outcome, RunRecord
from lowtide.lab.surroundings import named_surroundings
from lowtide.lab.tensorboard import NOT_INSTALLED, Board
from lowtide.units import GiB

RECIPE = Recipe(model="gpt-tiny", steps=2)
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
    board = Board(tmp_path / "run", RECIPE)
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
    board = Board(tmp_path, RECIPE)
    tell(board)
    assert len(written[0].scalars) == 4
    assert board.remarks == ["TensorBoard curves end at step 2: OSError: no space left on device"]


def test_an_import_that_fails_is_a_remark(
    written: list[Writer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    board = Board(tmp_path, RECIPE)
    tell(board)
    assert written == []
    assert board.remarks[0].startswith("TensorBoard curves end at step 0: ModuleNotFoundError")


def test_without_the_package_a_remark_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    board = Board(tmp_path / "run", RECIPE)
    tell(board)
    assert board.remarks == [NOT_INSTALLED]
    assert not (tmp_path / "run").exists()


def test_tensorboard_itself_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tell(Board(tmp_path, RECIPE))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 5.5), (2, 5.0)]
    assert [event.value for event in events.Scalars("peak_gib")] == [2.0, 3.0]
    assert [(event.step, event.value) for event in events.Scalars("evaluation_loss")] == [(1, 4.75), (2, 4.5)]
    assert "recipe/text_summary" in events.Tags()["tensors"]
