"""Runs that are killed and resumed again and again: nothing saved is lost, and each loss is that of the undisturbed run."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest

from tests.faults import small_runs
from tests.faults.forks import ForkServer
from tests.faults.kills import KINDS, Kill, Kind
from tests.faults.phases import KillAt
from tests.faults.small_runs import Journal, journal_of

QUICK = ("updates on the host", "train")
"""The other kinds are for CI; benchmarks.session.kills is the long form."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in KINDS]
)
def test_a_run_that_is_killed_again_and_again(server: ForkServer, tmp_path: Path, name: str) -> None:
    kind = Kind(server, KINDS[name], tmp_path)
    lives = list(kind.killed_runs(seed=2, num_kills=6))
    assert kind.tally.kills == sum(life.killed for life in lives) == 6
    assert kind.tally.in_a_save >= 3
    assert kind.tally.resumed >= 3
    assert kind.tally.runs == len(lives) - 6, "each came to its end"


def killed(server: ForkServer, tmp_path: Path) -> tuple[Kind, Path]:
    """A run that was killed in its third save, looked at."""
    kind = Kind(server, small_runs.RUNS["updates on the host"], tmp_path)
    folder = tmp_path / "run"
    life = kind.live(folder, Kill(at=KillAt(phase="renaming", number=2, where="before")))
    assert life.killed
    kind.look_at(folder)
    return kind, folder


def test_what_the_matrix_looks_at_can_fail(server: ForkServer, tmp_path: Path) -> None:
    """A lost checkpoint, another loss, a folder that was left over, a lock that is held: each is seen."""
    kind, folder = killed(server, tmp_path)
    journal = journal_of(folder)
    written = journal.read_text()
    with contextlib.closing(Journal(journal)) as appended:
        appended.add("loss", 9, 1.0)
    with pytest.raises(AssertionError, match="the loss of step 9 is 1.0"):
        kind.look_at(folder)
    journal.write_text(written)
    for number in range(2):
        (folder / f".step-00000009.partial-{number}").mkdir()
    with pytest.raises(AssertionError, match="partial-1"):
        kind.look_at(folder)
    for number in range(2):
        (folder / f".step-00000009.partial-{number}").rmdir()
    kind.look_at(folder)
    shutil.rmtree(folder / "step-00000006")
    with pytest.raises(AssertionError, match="step 6 was reported as saved, and the newest is 3"):
        kind.look_at(folder)
