"""The runner: runs that end in every way there is leave a record each, and the next one begins."""

from __future__ import annotations

import datetime as dt
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from lowtide.errors import ConfigError
from lowtide.lab import runner
from lowtide.lab.progress import Progress
from lowtide.lab.recipe import Recipe
from lowtide.lab.recipe_parts import EvaluationRecipe, Stories
from lowtide.lab.record import Outcome, RunRecord, read_record
from lowtide.lab.records import collect
from lowtide.lab.runner import EndedRun, Run, run_all
from lowtide.units import GiB
from tests.lab.pretend_runs import DOTTED, EVALUATION_LOSS, LOSSES

RECIPE = Recipe(model="gpt-tiny", batch="2x16", device="cpu", steps=3, seed=7, cublas_workspace=":4096:2:16:8")

ENDS = ("finishes", "prints", "raises", "runs_out", "kills_itself", "crashes", "leaves", "forks", "shows_environment")


def run_list(*names: str, recipe: Recipe = RECIPE) -> list[Run]:
    return [Run(name=f"pretended/{name}", recipe=recipe) for name in names]


class Listener:
    def __init__(self) -> None:
        self.heard: list[tuple[str, Progress]] = []

    def __call__(self, run: Run, progress: Progress) -> None:
        self.heard.append((run.name, progress))


@pytest.fixture(scope="module")
def listener() -> Listener:
    return Listener()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lab")


@pytest.fixture(scope="module")
def ended(folder: Path, listener: Listener) -> dict[str, EndedRun]:
    """One list with all of them, each after one that ended badly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
        patch.setenv("PYTORCH_ALLOC_CONF", "garbage_collection_threshold:0.9")
        results = list(run_all(run_list(*ENDS), folder, on_progress=listener, experiment=DOTTED))
    assert [result.run.name for result in results] == [f"pretended/{name}" for name in ENDS]
    return {result.run.name.rpartition("/")[2]: result for result in results}


def test_all_have_records_that_can_be_read_again(ended: dict[str, EndedRun], folder: Path) -> None:
    for name, result in ended.items():
        assert result.path.parent == folder / "records" / "pretended" / name
        assert result.path.name.startswith("seed-7_20")
        assert read_record(result.path) == result.record
        assert result.record.recipe["seed"] == 7
    collection = collect([folder])
    assert len(collection.records) == len(ENDS)
    assert collection.skipped == ()


def test_a_run_that_finishes_keeps_its_figures(ended: dict[str, EndedRun]) -> None:
    record = ended["finishes"].record
    assert record.outcome is Outcome.FINISHED
    assert record.losses == LOSSES
    assert record.memory is not None
    assert record.memory.peak_bytes == 3 * GiB
    assert record.surroundings.device == "pretended"


def test_progress_is_heard_in_order(ended: dict[str, EndedRun], listener: Listener) -> None:
    words = [(progress.words, progress.step) for name, progress in listener.heard if name == "pretended/finishes"]
    assert words == [("starting", 0), ("training", 1), ("training", 2)]
    assert [name for name, progress in listener.heard if progress.words == "starting"] == [
        f"pretended/{name}" for name in ENDS
    ]


def test_prints_do_not_disturb_and_are_kept(ended: dict[str, EndedRun], listener: Listener, folder: Path) -> None:
    assert ended["prints"].record.outcome is Outcome.FINISHED
    assert all(progress.words in ("starting", "training") for _, progress in listener.heard)
    (log,) = (folder / "logs" / "pretended" / "prints").glob("*.out")
    assert b"not JSON" in log.read_bytes()


def test_logs_without_a_word_are_taken_away(ended: dict[str, EndedRun], folder: Path) -> None:
    assert list((folder / "logs" / "pretended" / "finishes").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "outcome", "parts"),
    [
        ("raises", Outcome.FAILED, ("ValueError: the third step is missing\n", "pretend_runs.py", "in raises")),
        ("runs_out", Outcome.OUT_OF_MEMORY, ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n",)),
        ("kills_itself", Outcome.KILLED, ("the run was ended by SIGKILL, as the system's memory killer does, after ",)),
        ("kills_itself", Outcome.KILLED, ("\nits last errors:\nabout to go",)),
        ("crashes", Outcome.KILLED, ("the run was ended by SIGSEGV after ", "Segmentation fault", "in crashes")),
        ("leaves", Outcome.KILLED, ("the run ended without a record, with exit code 3, after ",)),
    ],
)
def test_bad_ends_say_what_happened_and_keep_what_was_known(
    ended: dict[str, EndedRun], name: str, outcome: Outcome, parts: tuple[str, ...]
) -> None:
    record = ended[name].record
    assert record.outcome is outcome
    for part in (*parts, "last heard: training, step 2 of 3, loss 5.2500, peak 2.000 GiB, 20 samples/s"):
        assert part in record.message
    assert record.losses == LOSSES[:2]
    # The worker had told them before it died.
    assert record.surroundings.device == "cpu, emulated"


def test_a_child_that_holds_the_pipe_does_not_hold_up_the_list(ended: dict[str, EndedRun]) -> None:
    assert ended["forks"].record.outcome is Outcome.FINISHED


def test_the_environment_is_the_recipes_and_otherwise_the_users(ended: dict[str, EndedRun]) -> None:
    assert ended["shows_environment"].record.message == ":4096:2:16:8, garbage_collection_threshold:0.9"


@pytest.mark.slow
def test_no_run_finds_what_another_has_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listener: Listener
) -> None:
    # As torch leaves it in a process that has looked for its cache.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "shared"))
    results = list(run_all(run_list("shows_caches", "shows_caches"), tmp_path, on_progress=listener, experiment=DOTTED))
    folders = [Path(line) for result in results for line in result.record.message.splitlines()]
    assert len(set(folders)) == 4
    assert tmp_path / "shared" not in folders
    assert not any(folder.exists() for folder in folders)


def test_half_a_record_is_taken_away(tmp_path: Path, listener: Listener) -> None:
    (result,) = run_all(run_list("is_killed_while_writing"), tmp_path, on_progress=listener, experiment=DOTTED)
    assert result.record.outcome is Outcome.KILLED
    assert [file.name for file in result.path.parent.iterdir()] == [result.path.name]


@pytest.mark.slow
def test_a_limit_kills_the_run_and_its_children_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    child = tmp_path / "child.txt"
    passed_s = 0.0

    # The clock leaps as soon as the run hangs: a real limit would be too short on a busy machine, or too long to wait for.
    def leap(run: Run, progress: Progress) -> None:
        nonlocal passed_s
        if run.name == "pretended/hangs" and progress.step == 2:
            while not child.exists() or not child.read_text(encoding="utf-8"):
                time.sleep(0.05)
            passed_s += 700.0

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s, sleep=time.sleep)
    monkeypatch.setattr(runner, "time", clock)
    runs = run_list("hangs", "finishes")
    first, second = run_all(runs, tmp_path, on_progress=leap, limit_s=600.0, experiment=DOTTED)
    assert first.record.outcome is Outcome.KILLED
    assert first.record.message.startswith("the run was killed at its limit of 10 min 00 s after 11 min ")
    assert "last heard: training, step 2 of 3" in first.record.message
    assert second.record.outcome is Outcome.FINISHED
    number = int(child.read_text(encoding="utf-8"))
    assert not psutil.pid_exists(number) or psutil.Process(number).status() == psutil.STATUS_ZOMBIE


def test_an_interrupt_ends_the_worker_writes_its_record_and_goes_on_up(tmp_path: Path) -> None:
    def interrupt(run: Run, progress: Progress) -> None:
        if progress.step == 2:
            raise KeyboardInterrupt

    before = set(psutil.Process().children())
    results: list[EndedRun] = []
    runs = run_all(run_list("hangs", "finishes"), tmp_path, on_progress=interrupt, experiment=DOTTED)
    with pytest.raises(KeyboardInterrupt):
        results.extend(runs)
    assert [result.record.outcome for result in results] == [Outcome.KILLED]
    assert results[0].record.message.startswith("the run was interrupted from the keyboard after ")
    assert read_record(results[0].path) == results[0].record
    assert set(psutil.Process().children()) == before


def test_what_a_listener_raises_ends_the_worker_too(tmp_path: Path) -> None:
    def fails(run: Run, progress: Progress) -> None:
        if progress.step == 2:
            raise RuntimeError("no room for the bar")

    before = set(psutil.Process().children())
    with pytest.raises(RuntimeError, match="no room for the bar"):
        list(run_all(run_list("hangs"), tmp_path, on_progress=fails, experiment=DOTTED))
    assert set(psutil.Process().children()) == before


@pytest.mark.slow
def test_a_worker_whose_runner_is_gone_ends_and_says_so(tmp_path: Path) -> None:
    script = f"""
import os, signal
from pathlib import Path
from lowtide.lab.recipe import Recipe
from lowtide.lab.runner import Run, run_all
recipe = Recipe(model="gpt-tiny", device="cpu")
def on_progress(run, progress):
    if progress.words == "waiting":
        os.kill(os.getpid(), signal.SIGKILL)
runs = [Run(name="slow", recipe=recipe)]
list(run_all(runs, Path({str(tmp_path)!r}), on_progress=on_progress, experiment="slow_run:run"))
"""
    (tmp_path / "slow_run.py").write_text(
        "import time\n"
        "from lowtide.lab.progress import Progress\n"
        "def run(recipe, *, name, on_progress):\n"
        "    for step in range(600):\n"
        "        try:\n"
        "            on_progress(Progress(words='waiting', step=step))\n"
        "        except Exception:\n"
        "            pass\n"
        "        time.sleep(0.1)\n",
        encoding="utf-8",
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", script], env=environment, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    record = wait_for_record(tmp_path)
    assert record.outcome is Outcome.KILLED
    assert record.message.startswith("the process that had started the run ended before it; last heard: waiting")


def wait_for_record(folder: Path) -> RunRecord:
    for _ in range(600):
        for path in folder.rglob("records/**/*.json"):
            return read_record(path)
        time.sleep(0.1)
    raise AssertionError("no record was written")


def test_evaluations_before_a_run_was_killed_are_known(tmp_path: Path, listener: Listener) -> None:
    stories = Stories(num_stories=60, num_validation=5, vocab_size=300)
    recipe = replace(
        RECIPE, data=stories, model_settings={"vocab_size": 300}, evaluation=EvaluationRecipe(samples=5, after=(2,))
    )
    (result,) = run_all(run_list("kills_itself", recipe=recipe), tmp_path, on_progress=listener, experiment=DOTTED)
    assert result.record.outcome is Outcome.KILLED
    assert result.record.evaluations == ((2, EVALUATION_LOSS),)


def test_a_run_that_lacks_something_is_not_started_and_the_rest_goes_on(tmp_path: Path, listener: Listener) -> None:
    lacking = replace(RECIPE, device="cuda:99", seed=1)
    runs = [Run(name="pretended/raises", recipe=lacking), *run_list("finishes")]
    heard: list[str] = []
    first, second = run_all(runs, tmp_path, on_progress=lambda run, progress: heard.append(run.name), experiment=DOTTED)
    assert first.record.outcome is Outcome.FAILED
    assert first.record.message.startswith("it cannot run here: it needs the device 'cuda:99', and torch sees ")
    assert first.record.surroundings.device == "cuda:99"
    assert second.record.outcome is Outcome.FINISHED
    assert set(heard) == {"pretended/finishes"}


def test_what_all_lack_is_found_before_the_first_is_run(tmp_path: Path, listener: Listener) -> None:
    runs = [*run_list("finishes"), Run(name="bad", recipe=replace(RECIPE, device="gpu"))]
    with pytest.raises(ConfigError, match="'gpu' is no device"):
        list(run_all(runs, tmp_path, on_progress=listener, experiment=DOTTED))
    assert list(tmp_path.rglob("*.json")) == []


@pytest.mark.parametrize("limit_s", [0.0, -1.0, float("nan")])
def test_a_limit_that_leaves_no_time_is_refused(tmp_path: Path, listener: Listener, limit_s: float) -> None:
    with pytest.raises(ConfigError, match="give more than 0"):
        list(run_all(run_list("finishes"), tmp_path, on_progress=listener, limit_s=limit_s))


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, listener: Listener) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="records cannot go to .*file"):
        list(run_all(run_list("finishes"), tmp_path / "file", on_progress=listener))


def test_two_runs_of_one_second_keep_both_records(tmp_path: Path, listener: Listener) -> None:
    lacking = run_list("finishes", recipe=replace(RECIPE, device="cuda:99"))
    paths = {result.path for result in run_all([*lacking, *lacking], tmp_path, on_progress=listener)}
    assert len(paths) == 2
    assert all(path.is_file() for path in paths)
    assert not any(path.is_file() for path in (tmp_path / "logs").rglob("*"))


def test_two_runners_of_one_second_have_a_name_each(tmp_path: Path) -> None:
    (run,) = run_list("finishes")
    now = dt.datetime(2026, 3, 1, tzinfo=dt.UTC)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "dt", SimpleNamespace(datetime=SimpleNamespace(now=lambda zone: now), UTC=dt.UTC))
        names = [runner._free_name(tmp_path, run) for _ in range(3)]
        # One whose log was empty and is gone has its record.
        (tmp_path / "logs" / f"{names[1]}.out").rename(tmp_path / "record.json")
        (tmp_path / "records" / "pretended" / "finishes").mkdir(parents=True)
        (tmp_path / "record.json").rename(tmp_path / "records" / f"{names[1]}.json")
        names.append(runner._free_name(tmp_path, run))
    first = "pretended/finishes/seed-7_2026-03-01T000000Z"
    assert names == [first, f"{first}-2", f"{first}-3", f"{first}-4"]
    assert sorted(path.name for path in (tmp_path / "logs" / "pretended" / "finishes").iterdir()) == [
        f"{Path(name).name}.out" for name in (f"{first}-3", f"{first}-4", first)
    ]


def test_a_worker_that_does_not_end_after_its_record_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listener: Listener
) -> None:
    monkeypatch.setattr(runner, "CLOSING_LIMIT_S", 0.0)
    (tmp_path / "stubborn_run.py").write_text(
        "import threading, time\n"
        "from tests.lab.pretend_runs import run_pretended\n"
        "def run(recipe, *, name, on_progress):\n"
        "    threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "    return run_pretended(recipe, name=name, on_progress=on_progress)\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    (result,) = run_all(run_list("finishes"), tmp_path, on_progress=listener, experiment="stubborn_run:run")
    assert result.record.outcome is Outcome.FINISHED


def test_a_worker_process_that_cannot_be_started_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listener: Listener
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    open_before = psutil.Process().num_fds()
    with pytest.raises(FileNotFoundError):
        list(run_all(run_list("finishes"), tmp_path, on_progress=listener))
    assert psutil.Process().num_fds() == open_before
