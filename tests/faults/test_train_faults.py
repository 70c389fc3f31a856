"""`lowtide train` is asked to end in the middle of a save, stands beside another process, and meets disks that refuse."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from lowtide.runtime.checkpoints.folder import RunFolder
from tests.faults.forks import ForkServer
from tests.faults.kills import KINDS, Kill, Kind, newest_step
from tests.faults.phases import KillAt
from tests.faults.train_runs import PUBLISHING, STOPPED

pytestmark = pytest.mark.slow  # half a minute

CTRL_C, SIGTERM = 130, 143
"""Exit codes of a process that leaves at once."""


@pytest.fixture(scope="module")
def kind(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    """With its undisturbed run."""
    return Kind(server, KINDS["train"], tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("fault", ["sigterm_in_a_save", "ctrl_c_in_a_save"])
def test_a_request_in_a_save_lets_it_end_and_saves_the_step(kind: Kind, tmp_path: Path, fault: str) -> None:
    out = tmp_path / "out"
    life = kind.live(out, fault=fault)
    assert (life.killed, life.code, life.is_hung) == (False, STOPPED, False), life.error
    kind.look_at(out)
    reached = len(kind.told(out).losses)
    assert newest_step(out / "checkpoints") == reached < kind.run.steps
    assert kind.live(out).code == 0
    kind.look_at_the_end(out)


@pytest.mark.parametrize(
    ("fault", "settings", "code"),
    [
        ("ctrl_c_twice_in_a_save", (), CTRL_C),
        ("sigterm_and_a_save_that_takes_long", ("faults.grace_s=3",), SIGTERM),
    ],
)
def test_a_second_request_or_the_end_of_the_grace_leaves_the_save(
    kind: Kind, tmp_path: Path, fault: str, settings: tuple[str, ...], code: int
) -> None:
    out = tmp_path / "out"
    life = kind.live(out, fault=fault, settings=(*kind.run.settings, *settings))
    assert (life.killed, life.code, life.is_hung) == (False, code, False), life.error
    assert life.seconds < 20
    kind.look_at(out)
    assert newest_step(out / "checkpoints") < len(kind.told(out).losses), "the save under way was left"
    assert kind.live(out).code == 0
    kind.look_at_the_end(out)


def test_two_processes_on_one_folder(kind: Kind, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert kind.live(out, Kill(at=KillAt(phase="renaming", number=2, where="after"))).killed
    with RunFolder(out):
        life = kind.live(out)
    assert life.code == 1
    assert re.search(rf"FolderInUseError: process {os.getpid()} on .* saves into {out}; stop it", life.error), (
        life.error
    )
    kind.look_at(out)
    assert kind.live(out).code == 0
    kind.look_at_the_end(out)


@pytest.mark.parametrize(
    "fault", ["killed_with_an_empty_folder", "killed_between_recipe_and_data", "killed_in_the_recipe"]
)
def test_a_run_that_is_killed_before_it_has_begun_begins_again(kind: Kind, tmp_path: Path, fault: str) -> None:
    """With its folder made and its lock taken, with one of its two files written, or with half of one."""
    out = tmp_path / "out"
    assert kind.live(out, fault=fault).killed
    assert out.exists()
    again = kind.live(out)
    assert again.code == 0, again.error
    kind.look_at_the_end(out)


@pytest.mark.parametrize(("number", "where"), [(1, "before"), (1, "after"), (0, "after")])
def test_killed_while_the_model_is_copied(kind: Kind, tmp_path: Path, number: int, where: str) -> None:
    """The copy that was begun is taken away, and another one takes its place."""
    out = tmp_path / "out"
    assert kind.live(out, Kill(at=KillAt(phase=PUBLISHING, number=number, where=where))).killed
    assert kind.live(out).code == 0
    assert [path.name for path in out.iterdir() if path.name.startswith(".")] == [".lock"]
    kind.look_at_the_end(out)


def test_a_full_disk_is_told_and_the_training_goes_on(kind: Kind, tmp_path: Path) -> None:
    """Saves fail for a while; rows say so, and the last save is whole."""
    out = tmp_path / "out"
    life = kind.live(out, fault="full_disk_for_three_files")
    assert life.code == 0, life.error
    rows = (out / "metrics.jsonl").read_text()
    assert rows.count('"kind": "not saved"') >= 1
    assert "No space left on device" in rows
    kind.look_at_the_end(out)


def test_a_disk_that_stays_full_ends_the_run_with_what_is_saved(kind: Kind, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert kind.live(out, Kill(at=KillAt(phase="renaming", number=2, where="after"))).killed
    newest = newest_step(out / "checkpoints")
    life = kind.live(out, fault="full_disk_for_good")
    assert life.code == 1
    words = rf"RunStoppedError: the run stopped: step 20 .*No space left on device.*Step {newest} is saved; go on by"
    assert re.search(words, life.error), life.error
    kind.look_at(out)
    assert kind.live(out).code == 0
    kind.look_at_the_end(out)
