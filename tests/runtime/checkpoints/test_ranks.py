"""Checkpoints of several ranks: the same bits after a resume, other numbers of ranks, and ranks that die."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from lowtide.errors import RankFailedError
from tests.ranks import on_ranks
from tests.runtime.rank_jobs import Resumed, resumed, save_where_rank_0_cannot, train_and_be_killed

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("precision", "allowance"), [(None, None), (None, "64KiB"), ("bf16 stochastic", None)])
def test_resume_on_as_many_ranks_is_exact(tmp_path: Path, precision: str | None, allowance: str | None) -> None:
    """Each rank goes on with its own random numbers."""
    run = Resumed(folder=str(tmp_path), has_dropout=True, first=4, precision=precision, allowance=allowance)
    undisturbed = on_ranks(resumed, 2, run)
    again = on_ranks(resumed, 2, replace(run, first=0))
    for (losses, _, _), (found, told, is_exact) in zip(undisturbed, again, strict=True):
        assert found == losses
        assert is_exact
        assert told == []


@pytest.mark.parametrize("size", [1, 2, 3])
def test_four_ranks_are_resumed_by_others(tmp_path: Path, size: int) -> None:
    run = Resumed(folder=str(tmp_path), has_dropout=False, first=4, num_saved=4)
    (undisturbed, _, _), *_ = on_ranks(resumed, 4, run)
    for rank, (losses, told, is_exact) in enumerate(on_ranks(resumed, size, replace(run, first=0))):
        assert losses == pytest.approx(undisturbed, rel=1e-10)
        assert not is_exact
        assert len(told) == (1 if rank == 0 else 0)
        assert all(f"saved by 4 ranks and is loaded by {size}" in each for each in told)


def test_one_process_is_resumed_by_ranks(tmp_path: Path) -> None:
    run = Resumed(folder=str(tmp_path), has_dropout=False, first=4, num_saved=1)
    ((undisturbed, _, _),) = on_ranks(resumed, 1, run)
    for losses, _, _ in on_ranks(resumed, 2, replace(run, first=0)):
        assert losses == pytest.approx(undisturbed, rel=1e-10)


def test_a_save_that_fails_fails_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    first, second = on_ranks(save_where_rank_0_cannot, 2, str(tmp_path / "file"))
    assert first[0] == "CheckpointWriteError"
    assert second[0] == "RanksDifferError"
    assert "rank 0 could not save a checkpoint, and so rank 1 does not either" in second[1]
    assert first[2]
    assert second[2]


def test_a_killed_rank_ends_the_others_and_the_restart_goes_on(tmp_path: Path) -> None:
    undisturbed = on_ranks(train_and_be_killed, 2, str(tmp_path / "whole"), None)
    began_s = time.monotonic()
    with pytest.raises(RankFailedError, match="rank 1 of 2: it ended with exit code -9") as raised:
        on_ranks(train_and_be_killed, 2, str(tmp_path / "killed"), 5)
    assert time.monotonic() - began_s < 60
    assert "RankLostError: rank 0 of 2" in "".join(raised.value.__notes__)
    again = on_ranks(train_and_be_killed, 2, str(tmp_path / "killed"), None)
    for whole, rest in zip(undisturbed, again, strict=True):
        assert rest == whole[4:]
