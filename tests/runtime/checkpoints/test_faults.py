"""A save is cut off after each of its operations, or the disk fails at each: one whole checkpoint is always found."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from lowtide.errors import CheckpointError, CheckpointWriteError, DamagedCheckpointError
from lowtide.runtime.checkpoints.folder import Retention, RunFolder
from lowtide.units import format_bytes
from tests.runtime.checkpoints.power_cut import FaultyDisk, Left, Operation, QuickDisk, RecordedDisk, replay
from tests.runtime.checkpoints.saves import save, saved, what_is_in

Step = tuple[int, int] | None
"""A step and its variant; None before the first save."""
HISTORY: Sequence[tuple[int, int]] = [(10, 0), (20, 0), (20, 1), (30, 0)]
"""The first save, one that removes the former, one that replaces the same step, and one more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    operations: Sequence[Operation]
    ends: Sequence[int]
    """After how many operations each save had returned."""

    def may_be_found(self, count: int) -> set[Step]:
        """The checkpoint of the last save that had returned, and that of the save under way."""
        done = sum(end <= count for end in self.ends)
        steps: list[Step] = [None, *HISTORY]
        return {*steps[done : done + 2]}


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    root = tmp_path_factory.mktemp("recorded")
    disk, ends = RecordedDisk(root), []
    with RunFolder(root, retention=Retention(keep=1), disk=disk) as run:
        for step, variant in HISTORY:
            save(run, step, variant=variant, disk=disk)
            ends.append(len(disk.operations))
    return Recording(operations=disk.operations, ends=ends)


def found_in(path: Path) -> Step:
    reader = RunFolder(path).newest_good()
    return None if reader is None else what_is_in(reader)


def hidden(path: Path) -> list[str]:
    return [entry.name for entry in path.iterdir() if entry.name.startswith(".") and entry.name != ".lock"]


@pytest.mark.parametrize("how", ["all", "synced"])
def test_every_prefix_of_a_save_loads(recording: Recording, tmp_path: Path, how: Left) -> None:
    """Warnings are errors here: no state that a cut leaves looks damaged. The next save then works, and leaves no rest."""
    for count in range(len(recording.operations) + 1):
        path = tmp_path / str(count)
        replay(recording.operations[:count], path, how)
        found = found_in(path)
        assert found in recording.may_be_found(count), f"after {count} operations"
        with RunFolder(path, retention=Retention(keep=1), disk=QuickDisk()) as run:
            assert hidden(path) == [], f"what {count} operations left is swept"
            assert found_in(path) == found
            save(run, 40, disk=QuickDisk())
        assert (found_in(path), list(run.checkpoints()), hidden(path)) == ((40, 0), [40], [])
        shutil.rmtree(path)


def test_every_prefix_loads_whatever_the_disk_wrote_of_the_rest(recording: Recording, tmp_path: Path) -> None:
    for count in range(len(recording.operations) + 1):
        for seed in range(4):
            path = tmp_path / f"{count}-{seed}"
            replay(recording.operations[:count], path, "some", seed)
            assert found_in(path) in recording.may_be_found(count), f"after {count} operations, seed {seed}"
            shutil.rmtree(path)


@pytest.mark.parametrize("left_out", ["sync", "sync_folder"])
def test_without_its_syncs_a_save_would_not_survive(recording: Recording, tmp_path: Path, left_out: str) -> None:
    """The model of a power cut can tell: a save that leaves a sync out fails the test above."""
    num_lost = 0
    for count in range(len(recording.operations) + 1):
        path = tmp_path / str(count)
        replay([op for op in recording.operations[:count] if op.kind != left_out], path, "some", count)
        try:
            num_lost += found_in(path) not in recording.may_be_found(count)
        except (DamagedCheckpointError, UserWarning):
            num_lost += 1
        shutil.rmtree(path)
    assert num_lost > 10


def test_the_former_checkpoint_goes_after_the_new_one_is_safe(recording: Recording) -> None:
    """In the second save: all syncs, then the rename, its sync, and only then the former one loses its name and its files."""
    kinds = [op.kind for op in recording.operations[recording.ends[0] : recording.ends[1]]]
    rename = kinds.index("rename")
    assert kinds[rename : rename + 4] == ["rename", "sync_folder", "rename", "sync_folder"]
    assert set(kinds[rename + 4 :]) == {"unlink", "remove_folder"}
    assert kinds[rename - 2 : rename] == ["sync", "sync_folder"]
    assert kinds[:rename].count("sync") == kinds.count("create") == kinds.count("unlink") == 6


def failing(number: int) -> Callable[[], int]:
    def fault() -> int:
        raise OSError(number, os.strerror(number))

    return fault


def taking(count: int) -> Callable[[], int]:
    def fault() -> int:
        return count

    return fault


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one checkpoint."""
    path = tmp_path_factory.mktemp("former")
    saved(path, [10])
    return path


def num_operations(former: Path, path: Path, step: int) -> int:
    shutil.copytree(former, path)
    disk = FaultyDisk(1 << 62, taking(0))
    with RunFolder(path, retention=Retention(keep=1), disk=disk) as run:
        save(run, step, variant=1, disk=disk)
    return disk.count


@pytest.mark.parametrize("step", [10, 20], ids=["replacing", "next"])
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
@pytest.mark.parametrize(
    "fault", [failing(errno.ENOSPC), failing(errno.EIO), taking(0)], ids=["full", "broken", "none_taken"]
)
def test_a_fault_at_every_operation(
    former: Path, tmp_path: Path, fault: Callable[[], int], lasting: bool, step: int
) -> None:
    total = num_operations(former, tmp_path / "counted", step)
    failures = []
    for number in range(total):
        path = tmp_path / str(number)
        shutil.copytree(former, path)
        disk = FaultyDisk(number, fault, lasting=lasting)
        with warnings.catch_warnings():
            # Leftovers that cannot be taken away now are told by a warning.
            warnings.filterwarnings("ignore", message=".* could not be (taken away|renamed back)", category=UserWarning)
            with RunFolder(path, retention=Retention(keep=1), disk=disk) as run:
                may_be_found = {(step, 1)}
                try:
                    save(run, step, variant=1, disk=disk)
                except CheckpointWriteError as error:
                    failures.append(error)
                    may_be_found.add((10, 0))
                assert found_in(path) in may_be_found, f"operation {number}"
                disk.heal()
                save(run, 30, disk=disk)
        assert (found_in(path), list(run.checkpoints()), hidden(path)) == ((30, 0), [30], []), f"operation {number}"
    assert len(failures) > 5
    for failure in failures:
        assert f"{failure.file} in " in str(failure)
        assert failure.free_bytes is not None
        assert f"{format_bytes(failure.free_bytes)} of the disk are free" in str(failure)


def test_a_short_write_is_continued(former: Path, tmp_path: Path) -> None:
    for number in range(num_operations(former, tmp_path / "counted", 20)):
        path = tmp_path / str(number)
        shutil.copytree(former, path)
        disk = FaultyDisk(number, taking(5))
        with RunFolder(path, retention=Retention(keep=1), disk=disk) as run:
            save(run, 20, disk=disk)
        assert found_in(path) == (20, 0)


def test_a_full_disk_says_what_is_needed(former: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(former, path)
    disk = FaultyDisk(1, failing(errno.ENOSPC))
    expected = (
        r"cannot make room for \.step-00000020\.partial-.*/model-00001-of-00002\.safetensors in .*: No space left on device; "
        r".*B of the disk are free, and the checkpoint takes 888 B\. The checkpoints that were there before are as they "
        "were; free some room, or keep fewer checkpoints, and save again"
    )
    with RunFolder(path, disk=disk) as run, pytest.raises(CheckpointWriteError, match=expected):
        save(run, 20, disk=disk)


def test_a_broken_disk_is_told_from_a_full_one(former: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(former, path)
    disk = FaultyDisk(3, failing(errno.EIO))
    with (
        RunFolder(path, disk=disk) as run,
        pytest.raises(CheckpointWriteError, match="Input/output error; .* see to the disk, or save to another one"),
    ):
        save(run, 20, disk=disk)


KILLED = """
import os, signal, sys, warnings
from pathlib import Path
from lowtide.runtime.checkpoints.folder import Retention, RunFolder
from tests.runtime.checkpoints.power_cut import FaultyDisk
from tests.runtime.checkpoints.saves import save, what_is_in

warnings.simplefilter("error", UserWarning)
path, last, num_kills = Path(sys.argv[1]), (0, 0), 0
for number in range(200):
    before = RunFolder(path).newest_good()
    before = before and what_is_in(before)
    saves = [(number + 1, 0), (number + 1, 1)]
    child = os.fork()
    if child == 0:
        disk = FaultyDisk(number, lambda: os.kill(os.getpid(), signal.SIGKILL))
        with RunFolder(path, retention=Retention(keep=1), disk=disk) as run:
            for step, variant in saves:
                save(run, step, variant=variant, disk=disk)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    found = RunFolder(path).newest_good()
    found = found and what_is_in(found)
    assert found in (before, *saves), (number, before, found)
    if not os.WIFSIGNALED(status):
        assert found == saves[-1]
        break
    num_kills += 1
print(num_kills)
"""


def test_killed_at_every_operation(tmp_path: Path) -> None:
    """Children of one process that are killed in a save and in a replacement: no checkpoint is lost, and none is half."""
    run = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert 60 < int(run.stdout) < 200


def test_a_checkpoint_that_cannot_be_read_now_is_no_damaged_one(former: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many open files say nothing about the checkpoint: to go back to an older one would lose steps."""

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(
        CheckpointError, match="cannot read step-00000010/checkpoint.json in .*Too many open files"
    ) as caught:
        RunFolder(former).newest_good()
    assert not isinstance(caught.value, DamagedCheckpointError)


def test_a_disk_that_cannot_read_a_file_is_named(former: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(
        DamagedCheckpointError, match="step-00000010/checkpoint.json in .* the disk cannot read it. Load an"
    ):
        RunFolder(former).newest_good()
