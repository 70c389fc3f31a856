"""Things go wrong in a loop of the user's own: a clear error, no hang, nothing saved lost, and the next run has the same losses."""

from __future__ import annotations

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lowtide.errors import FolderInUseError
from lowtide.runtime.checkpoints.folder import RunFolder
from tests.faults.forks import ForkServer
from tests.faults.kills import KINDS, Kill, Kind, told_by_journal
from tests.faults.phases import KillAt, leftovers
from tests.faults.small_runs import Journal, journal_of

pytestmark = pytest.mark.slow  # a minute on two cores

DEFERRED, IN_BACKWARD = "updates on the host", "in backward"


@pytest.fixture(scope="module")
def kinds(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kind]:
    """Each with its undisturbed run."""
    root = tmp_path_factory.mktemp("faults")
    return {name: Kind(server, KINDS[name], root) for name in (DEFERRED, IN_BACKWARD)}


ROOM = r"No space left on device; .* of the disk are free"
FAULTS = [
    ("full_disk", rf"CheckpointWriteError: cannot make room for \.step-00000009.*{ROOM}.*free some room"),
    ("disk_that_fills", rf"CheckpointWriteError: cannot write \.step-00000009.*{ROOM}.*were there before are as they were"),
    ("no_large_files", r"CheckpointWriteError: cannot make room for \.step-00000009.*File too large.*free some room"),
    ("broken_writer", r"CheckpointError: the save of step 9 .* failed: ZeroDivisionError: the writer broke\. Training and"),
    ("broken_reader", r"CheckpointError: the save of step 9 .* failed: ZeroDivisionError: the reader broke\. Training and"),
    ("hook_in_forward", r"KeyError: 'my own hook'"),
    ("hook_in_backward", r"KeyError: 'my own hook'"),
    ("data_worker", r"OSError: Caught OSError in DataLoader worker process 0(.|\n)*batch 3 is gone"),
    ("nan_gradient", r"NonFiniteGradientError: .*layers\.1\.(mlp\.up|attention)"),
    ("no_memory_in_forward", r"EmulatedOutOfMemoryError: .*aten\.zeros asked for 4\.0 MiB.*1\.0 MiB"),
    ("no_memory_in_backward", r"EmulatedOutOfMemoryError: .*aten\.zeros asked for 4\.0 MiB.*1\.0 MiB"),
    ("broken_update", r"ArithmeticError: the rule is broken\n.*thread that updates weights on the host"),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "words"), FAULTS, ids=[name for name, _ in FAULTS])
@pytest.mark.parametrize("name", [DEFERRED, IN_BACKWARD])
def test_a_fault_ends_the_process_and_the_next_goes_on(
    kinds: dict[str, Kind], tmp_path: Path, name: str, fault: str, words: str
) -> None:
    kind, folder = kinds[name], tmp_path / "run"
    life = kind.live(folder, fault=fault)
    assert not life.is_hung, life.error
    assert (life.killed, life.code) == (False, 1), life.error
    assert re.search(words, life.error), life.error
    kind.look_at(folder)
    # Whoever could write takes away what it had begun.
    assert leftovers(folder) == []
    again = kind.live(folder)
    assert again.code == 0, again.error
    kind.look_at_the_end(folder)


def test_a_disk_that_was_full_is_tried_again(kinds: dict[str, Kind], tmp_path: Path) -> None:
    """A loop that catches the error trains on, and its next save goes well."""
    kind, folder = kinds[DEFERRED], tmp_path / "run"
    life = kind.live(folder, fault="full_disk_for_a_while")
    assert life.code == 0, life.error
    kind.look_at_the_end(folder)
    not_saved = [value for what, _, value in Journal.lines(journal_of(folder)) if what == "not saved"]
    assert len(not_saved) == 1
    assert "No space left on device" in not_saved[0]


@pytest.mark.parametrize("fault", ["no_memory_in_forward", "no_memory_in_backward", "nan_gradient"])
def test_a_loop_that_takes_the_step_again_has_the_same_losses(
    kinds: dict[str, Kind], tmp_path: Path, fault: str
) -> None:
    """Deferred: `zero_grad()`, the same random numbers, the same batch; a save is under way beside it."""
    kind, folder = kinds[DEFERRED], tmp_path / "run"
    life = kind.live(folder, fault=f"{fault}_and_again")
    assert life.code == 0, life.error
    kind.look_at(folder)
    kind.look_at_the_end(folder)
    assert [step for what, step, _ in Journal.lines(journal_of(folder)) if what == "again"] == [7]


def test_a_host_budget_that_a_save_does_not_fit(kinds: dict[str, Kind], tmp_path: Path) -> None:
    kind, folder = kinds[DEFERRED], tmp_path / "run"
    life = kind.live(folder, host_memory="160KiB")
    assert life.code == 1
    words = (
        r"BudgetError: .*staging of a checkpoint.* 64\.0 KiB of the host tier, which has 20\.5 KiB free of 160\.0 KiB"
    )
    assert re.search(words, life.error), life.error
    again = kind.live(folder, host_memory="160KiB", allowance="8KiB")
    assert again.code == 0, again.error
    kind.look_at_the_end(folder)


def test_a_host_budget_that_the_training_does_not_fit(kinds: dict[str, Kind], tmp_path: Path) -> None:
    kind, folder = kinds[DEFERRED], tmp_path / "run"
    assert kind.live(folder, Kill(at=KillAt(phase="renaming", number=1, where="after"))).killed
    life = kind.live(folder, host_memory="100KiB")
    assert life.code == 1
    assert re.search(r"Error: .*100\.0 KiB", life.error), life.error
    kind.look_at(folder)
    assert kind.live(folder).code == 0
    kind.look_at_the_end(folder)


def test_a_process_that_stands_still_in_a_write(kinds: dict[str, Kind], tmp_path: Path) -> None:
    """SIGSTOP and SIGCONT: meanwhile nobody else may write there, and afterwards it goes on as if nothing had been."""
    kind, folder = kinds[DEFERRED], tmp_path / "run"
    with ThreadPoolExecutor(1) as pool:
        life = pool.submit(kind.live, folder, fault="stopped_for_a_while")
        end_s = time.monotonic() + 30
        while not any(what == "stopped" for what, _, _ in Journal.lines(journal_of(folder))):
            assert time.monotonic() < end_s, "it never stood still"
            time.sleep(0.02)
        with pytest.raises(
            FolderInUseError, match=r"process \d+ on .* saves into .*; stop it, or give this run a folder"
        ):
            RunFolder(folder).lock()
    assert life.result().code == 0, life.result().error
    assert any(what == "continued" for what, _, _ in Journal.lines(journal_of(folder)))
    kind.look_at_the_end(folder)


@pytest.mark.parametrize("fault", ["ctrl_c_beside_a_save", "sigterm_beside_a_save"])
def test_a_signal_ends_a_loop_that_does_not_handle_it(kinds: dict[str, Kind], tmp_path: Path, fault: str) -> None:
    kind, folder = kinds[DEFERRED], tmp_path / "run"
    life = kind.live(folder, fault=fault)
    assert not life.is_hung, life.error
    if fault.startswith("ctrl_c"):
        assert life.code == 1
        assert life.error.rstrip().endswith("KeyboardInterrupt"), life.error
        assert leftovers(folder) == [], "the save under way came to its end"
    else:
        assert (life.killed, life.code) == (False, None), "by the signal"
    kind.look_at(folder)
    assert kind.live(folder).code == 0
    kind.look_at_the_end(folder)


def test_a_second_ctrl_c_leaves_a_save_whose_disk_does_not_answer(kinds: dict[str, Kind], tmp_path: Path) -> None:
    kind, folder = kinds[DEFERRED], tmp_path / "run"
    life = kind.live(folder, fault="ctrl_c_twice_beside_a_save")
    assert (life.code, life.is_hung) == (1, False), life.error
    kind.look_at(folder)
    assert kind.live(folder).code == 0
    kind.look_at_the_end(folder)


def test_two_processes_on_one_folder(kinds: dict[str, Kind], tmp_path: Path) -> None:
    """The second is refused at its first save, and has harmed nothing."""
    kind, folder = kinds[DEFERRED], tmp_path / "run"
    assert kind.live(folder, Kill(at=KillAt(phase="renaming", number=2, where="after"))).killed
    with RunFolder(folder):
        life = kind.live(folder)
    assert life.code == 1
    assert re.search(rf"FolderInUseError: process {os.getpid()} on .* saves into {folder}", life.error), life.error
    kind.look_at(folder)
    assert kind.live(folder).code == 0
    kind.look_at_the_end(folder)


@pytest.mark.parametrize("damage", ["cut", "flipped", "missing"])
@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "checkpoint.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    kinds: dict[str, Kind], tmp_path: Path, file: str, damage: str
) -> None:
    kind, folder = kinds[DEFERRED], tmp_path / "run"
    assert kind.live(folder, Kill(at=KillAt(phase="renaming", number=4, where="after"))).killed
    newest, before, *_ = RunFolder(folder).checkpoints().values()
    path = newest / file
    if damage == "missing":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data if damage == "flipped" else data[:-7])
    # What is only a warning for a user ends the child: its text has the file, and what was used instead.
    life = kind.live(folder)
    assert life.code == 1
    assert re.search(rf"UserWarning: {newest.name}/{file} in .* {before.name} is used instead", life.error), life.error
    again = kind.live(folder, fault="warnings_are_shown")
    assert again.code == 0, again.error
    told = told_by_journal(folder, lost=int(newest.name[-8:]))
    assert told.by_step == kind.expected.by_step
    assert told.end == kind.expected.end
