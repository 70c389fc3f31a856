"""`torchrun -m lowtide train`: the run of several ranks is that of one process, also after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lowtide import config, plain_text
from lowtide.errors import ConfigError
from tests.ranks import on_ranks
from tests.train.rank_jobs import resume_where_one_sees_nothing
from tests.train.runs import small_recipe, train

pytestmark = pytest.mark.slow


def written(folder: Path, *settings: str) -> Path:
    """A recipe without dropout, whose random numbers would differ with the number of ranks."""
    recipe = small_recipe(
        folder, "model_settings.dropout=0.0", "batch=4x32", "dtype=float32", "device_memory=1500KiB", *settings
    )
    path = folder / "recipe.yaml"
    path.write_text(plain_text.render(config.to_plain(recipe), "yaml"), encoding="utf-8")
    return path


def start(num_ranks: int, *arguments: str, max_restarts: int = 0) -> subprocess.Popen[str]:
    """`lowtide train`, by torchrun where there are several ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    launcher += ["--max-restarts", str(max_restarts)]
    command = [sys.executable, *(launcher if num_ranks > 1 else []), "-m", "lowtide", "train", *arguments]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def run(num_ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    process = start(num_ranks, *arguments)
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def rows(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in rows(folder, "step")]


def test_two_ranks_train_the_run_of_one(tmp_path: Path) -> None:
    recipe = written(tmp_path, "accumulation=2", "evaluation.every=4", "max_grad_norm=1.0")
    ways = {"one": [], "two": [], "spread": ["--set", "sharding=one to all"]}
    for name, more in ways.items():
        done = run(1 if name == "one" else 2, str(recipe), "--out", str(tmp_path / name), "--json", *more)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["is_finished"]  # of rank 0 alone: two of them would be no JSON
    one, *others = (
        ([row["loss"] for row in rows(tmp_path / name, "evaluation")], losses(tmp_path / name)) for name in ways
    )
    for evaluations, found in others:
        assert found == pytest.approx(one[1], rel=1e-5)
        # What is held out has an odd number of batches, and ranks that share weights must call the model as often.
        assert evaluations == pytest.approx(one[0], rel=1e-5)
    assert "over 2 ranks (one to all)" in rows(tmp_path / "spread", "start")[0]["plan"]
    for name in ("two", "spread"):
        assert (tmp_path / name / "model" / "model.safetensors").exists()


def test_a_killed_run_of_spread_weights_goes_on(tmp_path: Path) -> None:
    """Its losses are those of one process, and after a kill those of the run that was not disturbed."""
    recipe = written(tmp_path, "steps=40", "checkpoints.every=5", "max_grad_norm=1.0")
    one, whole, killed = (tmp_path / name for name in ("one", "whole", "killed"))
    alone = run(1, str(recipe), "--out", str(one))
    assert alone.returncode == 0, alone.stderr
    spread = ("--set", "sharding=gather")
    undisturbed = run(2, str(recipe), "--out", str(whole), *spread)
    assert undisturbed.returncode == 0, undisturbed.stderr
    assert "has no effect" not in undisturbed.stderr, "of an allowance for its saves"
    assert "over 2 ranks (gather)" in rows(whole, "start")[0]["plan"]
    assert losses(whole) == pytest.approx(losses(one), rel=1e-5)
    process = start(2, str(recipe), "--out", str(killed), *spread, max_restarts=1)
    kill_a_rank(process, killed)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert losses(killed) == losses(whole)
    assert len(rows(killed, "start")) == 2
    assert (killed / "model" / "model.safetensors").read_bytes() == (whole / "model" / "model.safetensors").read_bytes()
    resumed = run(1, str(killed), "--resume", "--set", "steps=42", "--set", "sharding=null")
    assert resumed.returncode == 0, resumed.stderr
    assert len(losses(killed)) == 42


def test_one_process_spreads_nothing(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, "sharding=auto")
    with pytest.raises(
        ConfigError, match="sharding is 'auto', which spreads weights over several .* start it with torchrun"
    ):
        train(recipe, tmp_path / "run")
    assert not (tmp_path / "run" / "recipe.yaml").exists()


def kill_a_rank(process: subprocess.Popen[str], folder: Path) -> None:
    """As soon as the run has saved."""
    while not any((folder / "checkpoints").glob("step-*")):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True).stdout
    os.kill(int(children.split()[-1]), signal.SIGKILL)


def test_a_killed_rank_ends_the_run_which_goes_on(tmp_path: Path) -> None:
    recipe = written(tmp_path, "steps=400", "checkpoints.every=5", "scheduler.decay=none")
    folder = tmp_path / "run"
    process = start(2, str(recipe), "--out", str(folder))
    kill_a_rank(process, folder)
    began_s = time.monotonic()
    process.communicate(timeout=60)
    assert process.returncode
    assert time.monotonic() - began_s < 60
    saved = max(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))
    done = run(2, str(folder), "--resume", "--set", f"steps={saved + 3}")
    assert done.returncode == 0, done.stderr
    whole = run(2, str(recipe), "--out", str(tmp_path / "whole"), "--set", f"steps={saved + 3}")
    assert whole.returncode == 0, whole.stderr
    assert losses(folder) == losses(tmp_path / "whole")
    assert len(losses(folder)) == saved + 3


def test_torchrun_restarts_the_run_where_it_was_saved(tmp_path: Path) -> None:
    recipe = written(tmp_path, "steps=60", "checkpoints.every=5")
    process = start(2, str(recipe), "--out", str(tmp_path / "run"), max_restarts=1)
    kill_a_rank(process, tmp_path / "run")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    whole = run(2, str(recipe), "--out", str(tmp_path / "whole"))
    assert whole.returncode == 0, whole.stderr
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert len(rows(tmp_path / "run", "start")) == 2


def test_the_example_runs(tmp_path: Path) -> None:
    example = Path(__file__).parent.parent.parent / "examples" / "two_ranks.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(example)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    told = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(told) == 10
    assert told[-1] < told[0]


def test_ranks_that_see_other_checkpoints_do_not_begin(tmp_path: Path) -> None:
    for kind, message in on_ranks(resume_where_one_sees_nothing, 2, str(tmp_path)):
        assert kind == "RanksDifferError"
        assert "last checkpoint is of step 0 there, and of step 2 on rank 0" in message


@pytest.mark.parametrize(
    ("settings", "words"),
    [(["batch=3x32"], "batch has 3 rows, which 2 ranks cannot divide evenly"), (["device_memory=1KiB"], "1.0 KiB")],
)
def test_what_cannot_be_trained_is_one_sentence(tmp_path: Path, settings: list[str], words: str) -> None:
    recipe = written(tmp_path, *settings)
    done = run(2, str(recipe), "--out", str(tmp_path / "run"))
    assert done.returncode
    assert words in done.stderr
    assert not (tmp_path / "run" / "recipe.yaml").exists()
