"""A run's folder: who may write, what stays, what is swept away, and what is loaded."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from lowtide.errors import CheckpointError, CheckpointWriteError, ConfigError, DamagedCheckpointError, FolderInUseError
from lowtide.runtime.checkpoints.disk import Disk
from lowtide.runtime.checkpoints.folder import Retention, RunFolder
from lowtide.runtime.checkpoints.format import CheckpointWriter
from lowtide.runtime.checkpoints.lock import FolderLock
from tests.runtime.checkpoints.power_cut import QuickDisk
from tests.runtime.checkpoints.saves import save, saved, saving, tensors_of, what_is_in, write


def hidden(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.name.startswith(".") and entry.name != ".lock")


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_an_empty_run_has_no_checkpoint(tmp_path: Path) -> None:
    assert RunFolder(tmp_path / "none").newest_good() is None
    assert RunFolder(tmp_path).checkpoints() == {}


def test_the_newest_comes_first(tmp_path: Path) -> None:
    saved(tmp_path / "deep" / "run", [3, 20, 100_000_000])
    run = RunFolder(tmp_path / "deep" / "run")
    assert [path.name for path in run.checkpoints().values()] == ["step-100000000", "step-00000020", "step-00000003"]
    reader = run.newest_good()
    assert reader is not None
    assert what_is_in(reader) == (100_000_000, 0)


@pytest.mark.parametrize(
    ("retention", "stay"),
    [
        (Retention(keep=1), [50]),
        (Retention(keep=2), [50, 40]),
        (Retention(keep=1, keep_every=20), [50, 40, 20, 0]),
        (Retention(keep=10), [50, 40, 30, 20, 10, 0]),
    ],
)
def test_retention(tmp_path: Path, retention: Retention, stay: list[int]) -> None:
    saved(tmp_path, range(0, 60, 10), retention)
    assert list(RunFolder(tmp_path).checkpoints()) == stay
    assert hidden(tmp_path) == []


@pytest.mark.parametrize(("key", "value"), [("keep", 0), ("keep_every", 0), ("keep_every", -1)])
def test_retention_of_nothing_is_refused(key: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{key} is {value}; give 1 or more"):
        Retention(**{key: value})


def test_a_step_that_exists_is_replaced(tmp_path: Path) -> None:
    saved(tmp_path, [10, 20])
    with RunFolder(tmp_path) as run:
        save(run, 20, variant=1)
        reader = run.newest_good()
    assert reader is not None
    assert what_is_in(reader) == (20, 1)
    assert hidden(tmp_path) == []


def test_retention_never_removes_the_only_good_one(tmp_path: Path) -> None:
    """Two later checkpoints are torn: they are no reason to remove the one that was saved just now, nor do they count."""
    saved(tmp_path, [10, 30, 40])
    for name in ("step-00000030", "step-00000040"):
        (tmp_path / name / "checkpoint.json").write_text("{")
    with (
        RunFolder(tmp_path, retention=Retention(keep=1)) as run,
        pytest.warns(UserWarning, match="step-000000.0") as warned,
    ):
        save(run, 20)
    assert any("It stays, and does not count as one of the 1 that are kept" in str(one.message) for one in warned)
    assert any("is of a later step than step-00000020" in str(one.message) for one in warned)
    assert list(RunFolder(tmp_path).checkpoints()) == [40, 30, 20]


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    saved(tmp_path, [10])
    notes = tmp_path / "step-00000010" / "notes.txt"
    notes.write_text("mine")
    (tmp_path / "step-5").mkdir()
    (tmp_path / ".step-00000010.partial").mkdir()
    (tmp_path / "best").symlink_to("step-00000010")
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / ".step-00000007.partial-a-1").symlink_to(elsewhere)
    saved(elsewhere, [7])
    (tmp_path / "step-00000007").symlink_to(elsewhere / "step-00000007")
    with (
        RunFolder(tmp_path, retention=Retention(keep=1)) as run,
        pytest.warns(UserWarning, match="stays") as warned,
    ):
        save(run, 20)
    texts = sorted(str(one.message).replace(str(tmp_path), "RUN") for one in warned)
    assert texts == [
        "step-00000007 in RUN stays: it is a link, and not Lowtide's",
        "step-00000010 in RUN stays: notes.txt in it is no file of a checkpoint; move that away",
    ]
    assert notes.read_text() == "mine"
    assert list(run.checkpoints()) == [20, 10, 7]
    assert {"step-5", ".step-00000010.partial", "best", ".step-00000007.partial-a-1"} <= {
        p.name for p in tmp_path.iterdir()
    }
    assert list(RunFolder(elsewhere).checkpoints()) == [7]


def test_what_stands_in_a_replaced_checkpoint_is_kept(tmp_path: Path) -> None:
    saved(tmp_path, [10])
    (tmp_path / "step-00000010" / "notes.txt").write_text("mine")
    with RunFolder(tmp_path) as run:
        with pytest.warns(UserWarning, match=r"notes.txt in .* is no file of a checkpoint, and stays"):
            save(run, 10, variant=1)
        save(run, 11)
    (left,) = tmp_path.glob(".step-00000010.removed-*")
    assert [path.name for path in left.iterdir()] == ["notes.txt"]
    assert list(run.checkpoints()) == [11, 10]


def test_leftovers_of_killed_writers_are_swept(tmp_path: Path) -> None:
    saved(tmp_path, [10])
    torn = tmp_path / ".step-00000020.partial-node_3-77"
    torn.mkdir()
    write(torn, 20)
    removed = tmp_path / ".step-00000005.removed-node_3-77"
    removed.mkdir()
    write(removed, 5)
    (removed / "model.safetensors").unlink(missing_ok=True)
    assert list(RunFolder(tmp_path).checkpoints()) == [10]
    RunFolder(tmp_path).lock()
    assert hidden(tmp_path) == []
    assert list(RunFolder(tmp_path).checkpoints()) == [10]


def test_killed_between_the_two_renames_of_a_replacement(tmp_path: Path) -> None:
    saved(tmp_path, [10, 20])
    (tmp_path / "step-00000020").rename(tmp_path / ".step-00000020.replaced-node_3-77")
    reader = RunFolder(tmp_path).newest_good()
    assert reader is not None
    assert what_is_in(reader) == (20, 0)
    with RunFolder(tmp_path) as run:
        assert (tmp_path / "step-00000020").is_dir()
        save(run, 20, variant=1)
    assert hidden(tmp_path) == []


def test_the_last_good_one_is_used_and_the_damaged_file_named(tmp_path: Path) -> None:
    saved(tmp_path, [10, 20, 30])
    damage(tmp_path / "step-00000030" / "model-00002-of-00002.safetensors")
    (tmp_path / "step-00000020" / "config.json").unlink()
    with pytest.warns(UserWarning, match="step-00000010 is used instead") as warned:
        reader = RunFolder(tmp_path).newest_good()
    assert reader is not None
    assert what_is_in(reader) == (10, 0)
    text = str(warned[0].message)
    assert "step-00000030/model-00002-of-00002.safetensors in" in text
    assert "the bytes of 'head.bias' are not those that were saved" in text
    assert "step-00000020/config.json in" in text


def test_a_forked_child_leaves_its_parents_save_alone(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        partial = run.begin(1)
        write(partial, 1)
        # What a fork does to the child's copy.
        held, run._lock = run._lock, FolderLock(tmp_path)
        with pytest.raises(CheckpointError, match="that was begun here"):
            run.publish(partial, 1)
        run.abandon(partial)
        assert partial.is_dir()
        run._lock = held


def test_no_good_one_is_an_error_not_a_new_run(tmp_path: Path) -> None:
    saved(tmp_path, [10])
    damage(tmp_path / "step-00000010" / "optimizer.safetensors")
    with pytest.raises(
        DamagedCheckpointError, match="none of the 1 checkpoints in .* can be used. step-00000010/optim"
    ):
        RunFolder(tmp_path).newest_good()


def test_a_checkpoint_under_another_steps_name_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, [10])
    (tmp_path / "step-00000010").rename(tmp_path / "step-00000030")
    with pytest.raises(DamagedCheckpointError, match="it is of step 10. Give the folder the name step-00000010 again"):
        RunFolder(tmp_path).newest_good()


def test_one_save_at_a_time(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        partial = run.begin(1)
        with pytest.raises(
            CheckpointError, match="is being written; publish or abandon it before the next save begins"
        ):
            run.begin(2)
        with pytest.raises(CheckpointError, match="is not a finished checkpoint of step 1 that was begun"):
            run.publish(partial, 1)
        write(partial, 7)
        with pytest.raises(
            CheckpointError, match="is not a finished checkpoint of step 1 that was begun here; begin, write and"
        ):
            run.publish(partial, 1)
        run.abandon(partial)
        assert hidden(tmp_path) == []
        save(run, 2)


def save_too_much(run: RunFolder) -> None:
    with saving(run, 1) as partial:
        CheckpointWriter(partial, {}).write("model_2", "weight", torch.zeros(1))


def test_a_save_that_raises_leaves_nothing(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        with pytest.raises(CheckpointError, match="no tensor 'weight' of model_2 was announced"):
            save_too_much(run)
        assert hidden(tmp_path) == []
        assert run.newest_good() is None


def test_what_stands_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").write_text("")
    (tmp_path / "step-00000002").symlink_to("nowhere")
    with RunFolder(tmp_path) as run:
        for step in (1, 2):
            with pytest.raises(
                CheckpointError, match=rf"step-0000000{step} in .* is no folder, and stands where step {step} is"
            ):
                run.begin(step)
        with pytest.raises(ConfigError, match="step is -1; steps count from 0"):
            run.begin(-1)


def test_two_writers_in_one_process(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        save(run, 1)
        expected = rf"this process, {os.getpid()} on .*, by another session or RunFolder, saves into .*; stop it, or give this run"
        with pytest.raises(FolderInUseError, match=expected):
            RunFolder(tmp_path).begin(2)
        assert RunFolder(tmp_path).newest_good() is not None, "reading needs no lock"
    with RunFolder(tmp_path):
        pass


@contextmanager
def another_process(path: Path, then: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that holds the lock, and the line that it prints after."""
    script = (
        "import sys, os, time, pathlib\n"
        "from lowtide.runtime.checkpoints.folder import RunFolder\n"
        "run = RunFolder(pathlib.Path(sys.argv[1])); run.lock()\n" + then
    )
    with subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline()
        finally:
            process.kill()


def test_two_processes(tmp_path: Path) -> None:
    saved(tmp_path, [1])
    with another_process(tmp_path, "print('held', flush=True); time.sleep(100)") as (process, _):
        with pytest.raises(FolderInUseError, match=rf"process {process.pid} on .* saves into .*; stop it") as caught:
            RunFolder(tmp_path).lock()
        assert (caught.value.pid, caught.value.host) == (process.pid, socket.gethostname())
        process.kill()
        process.wait()
        saved(tmp_path, [2])


def test_a_forked_child_does_not_hold_the_lock_of_its_killed_parent(tmp_path: Path) -> None:
    then = "if os.fork() == 0: print(os.getpid(), flush=True)\ntime.sleep(100)"
    with another_process(tmp_path, then) as (process, line):
        process.kill()
        process.wait()
        child = int(line)
        try:
            os.kill(child, 0)
            saved(tmp_path, [2])
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_folder_that_is_dropped_lets_go(tmp_path: Path) -> None:
    RunFolder(tmp_path).begin(1)
    with RunFolder(tmp_path):
        assert hidden(tmp_path) == []


def test_a_save_may_end_while_the_interpreter_does(tmp_path: Path) -> None:
    script = (
        "import atexit, sys\n"
        "from pathlib import Path\n"
        "atexit.register(lambda: run.publish(partial, 1))\n"  # registered first, it runs last
        "from lowtide.runtime.checkpoints.folder import RunFolder\n"
        "from tests.runtime.checkpoints.saves import write\n"
        "run = RunFolder(Path(sys.argv[1]))\n"
        "partial = run.begin(1)\n"
        "write(partial, 1)\n"
    )
    run = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert run.stderr == ""
    reader = RunFolder(tmp_path).newest_good()
    assert reader is not None
    assert what_is_in(reader) == (1, 0)


def test_closing_abandons_a_save_under_way(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    partial = run.begin(1)
    write(partial, 1)
    run.close()
    assert hidden(tmp_path) == []
    with pytest.raises(CheckpointError, match="is not a finished checkpoint of step 1 that was begun here"):
        run.publish(partial, 1)


def test_one_that_another_process_removes_meanwhile_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, [10, 20])
    run = RunFolder(tmp_path)
    before = run.checkpoints()
    shutil.rmtree(tmp_path / "step-00000020")
    shutil.rmtree(tmp_path / "step-00000010")
    saved(tmp_path, [30])
    listings = iter([before])
    listed = RunFolder.checkpoints
    monkeypatch.setattr(RunFolder, "checkpoints", lambda self: next(listings, None) or listed(self))
    reader = run.newest_good()
    assert reader is not None
    assert what_is_in(reader) == (30, 0)


def test_a_name_that_is_not_quite_a_steps_is_no_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path, [10])
    for name in ("step-000000010", "step-10", "step-00000010.bak", "old-step-00000010"):
        shutil.copytree(tmp_path / "step-00000010", tmp_path / name)
    assert list(RunFolder(tmp_path).checkpoints().values()) == [tmp_path / "step-00000010"]


class SmallDisk(QuickDisk):
    """Has room for so many bytes of files."""

    def __init__(self, num_bytes: int) -> None:
        self._free_bytes = num_bytes

    def create(self, path: Path, num_bytes: int) -> int:
        if num_bytes > self._free_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._free_bytes -= num_bytes
        return super().create(path, num_bytes)

    def unlink(self, path: Path) -> None:
        self._free_bytes += path.stat().st_size
        super().unlink(path)

    def free_bytes(self, path: Path) -> int:
        return self._free_bytes


def test_a_disk_that_holds_just_two_checkpoints(tmp_path: Path) -> None:
    """The newest one stays, and a save needs room for one more. With two that stay, the third save finds no room."""
    saved(tmp_path / "sized", [1_000_000])
    size = sum(file.stat().st_size for file in (tmp_path / "sized" / "step-01000000").iterdir())
    disk, path = SmallDisk(2 * size), tmp_path / "run"
    with RunFolder(path, retention=Retention(keep=1), disk=disk) as run:
        for step in (1_000_001, 1_000_002, 1_000_003, 1_000_003):
            save(run, step, disk=disk)
        assert list(run.checkpoints()) == [1_000_003]
    with RunFolder(path, retention=Retention(keep=2), disk=disk) as run:
        save(run, 1_000_004, disk=disk)
        with pytest.raises(
            CheckpointWriteError, match=r"cannot make room for .* \d+ B of the disk are free.* keep fewer chec"
        ):
            save(run, 1_000_005, disk=disk)
        assert list(run.checkpoints()) == [1_000_004, 1_000_003]
    with RunFolder(path, retention=Retention(keep=1), disk=disk) as run:
        shutil.rmtree(path / "step-01000003")
        disk = SmallDisk(size)
        save(run, 1_000_005, disk=disk)
        assert list(run.checkpoints()) == [1_000_005]


def test_what_cannot_be_taken_away_is_told_and_goes_with_the_next_save(tmp_path: Path) -> None:
    saved(tmp_path, [10])
    disk = RefusingDisk("unlink")
    with RunFolder(tmp_path, retention=Retention(keep=1), disk=disk) as run:
        text = r"\.step-00000010\.removed-.* in .* could not be taken away: .*Input/output error; the next save tries again"
        with pytest.warns(UserWarning, match=text):
            save(run, 20)
        assert list(run.checkpoints()) == [20]
        assert len(hidden(tmp_path)) == 1
        disk.refused = ""
        save(run, 30)
    assert hidden(tmp_path) == []


class RefusingDisk(QuickDisk):
    """Refuses to take files away, or to give a checkpoint its name."""

    def __init__(self, refused: str) -> None:
        self.refused = refused

    def unlink(self, path: Path) -> None:
        if self.refused == "unlink":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().unlink(path)

    def rename(self, old: Path, new: Path) -> None:
        if self.refused == "rename" and new.name.startswith("step-"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().rename(old, new)


def test_a_replacement_that_breaks_off_leaves_the_former_one(tmp_path: Path) -> None:
    saved(tmp_path, [10])
    disk = RefusingDisk("rename")
    with RunFolder(tmp_path, disk=disk) as run:
        with (
            pytest.raises(
                CheckpointWriteError, match=r"cannot rename \.step-00000010\.partial-.* Input/output error; .*"
            ),
            pytest.warns(UserWarning, match="could not be renamed back to step-00000010: .*; it is read as it is"),
        ):
            save(run, 10, variant=1)
        reader = run.newest_good()
        assert reader is not None
        assert what_is_in(reader) == (10, 0)
        disk.refused = ""
        save(run, 20)
    assert list(run.checkpoints()) == [20, 10]


def test_a_torn_one_stays_until_a_person_sees_to_it(tmp_path: Path) -> None:
    saved(tmp_path, [10])
    (tmp_path / "step-00000010" / "checkpoint.json").unlink()
    with (
        RunFolder(tmp_path, retention=Retention(keep=1)) as run,
        pytest.warns(
            UserWarning, match="step-00000010 in .* stays: it has no index by which its files could be told from"
        ),
    ):
        save(run, 20)
    assert (tmp_path / "step-00000010").is_dir()


def test_a_torn_one_is_replaced(tmp_path: Path) -> None:
    saved(tmp_path, [10])
    (tmp_path / "step-00000010" / "checkpoint.json").write_bytes(b"{")
    with RunFolder(tmp_path) as run:
        save(run, 10, variant=1)
    assert hidden(tmp_path) == []
    assert list(run.checkpoints()) == [10]


def test_a_run_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(CheckpointWriteError, match="cannot open .lock in .*: Not a directory; .* save to another one"):
        RunFolder(tmp_path / "run").lock()
    assert RunFolder(tmp_path / "run").newest_good() is None


def test_a_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(
        CheckpointError, match=r"\.lock in .* cannot be locked: .*; save to a file system that has flock"
    ):
        RunFolder(tmp_path).lock()


def test_a_holder_that_has_not_said_who_it_is(tmp_path: Path) -> None:
    with (tmp_path / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(
            FolderInUseError, match="another process, which has not said its number yet, saves into"
        ) as caught:
            RunFolder(tmp_path).lock()
    assert (caught.value.pid, caught.value.host) == (None, None)


@pytest.mark.parametrize(("number", "is_told"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_file_system_that_cannot_sync_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_told: bool
) -> None:
    """Some network file systems have no such call. Any other failure counts."""

    def fsync(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="Input/output") if is_told else contextlib.nullcontext():
        Disk().sync_folder(tmp_path)


def test_values_of_two_steps_differ() -> None:
    """Otherwise a mixture would not show."""
    one, other = tensors_of(1), tensors_of(2)
    assert all((one[file][name] != other[file][name]).any() for file in one for name in one[file])


def test_retention_that_a_kill_has_left_out_is_made_up_for_before_the_next_save(tmp_path: Path) -> None:
    """Killed between the name of the new one and the removal of the old one: a disk may hold two, and not three."""
    saved(tmp_path, [10, 20, 30], Retention(keep=3))
    with RunFolder(tmp_path, retention=Retention(keep=1, keep_every=20)) as run:
        assert list(run.checkpoints()) == [30, 20, 10], "not before a save, which knows what is to stay"
        run.abandon(run.begin(40))
        assert list(run.checkpoints()) == [30, 20]


def test_the_last_good_one_stays_when_a_newer_one_is_damaged(tmp_path: Path) -> None:
    """Its length is right, so that only reading it shows it."""
    saved(tmp_path, [10, 20], Retention(keep=2))
    damaged = next((tmp_path / "step-00000020").glob("optimizer*.safetensors"))
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    with RunFolder(tmp_path, retention=Retention(keep=1)) as run:
        with pytest.warns(UserWarning, match=r"step-00000020/optimizer.* It stays, and does not count as one of the 1"):
            run.abandon(run.begin(30))
        assert list(run.checkpoints()) == [20, 10]
