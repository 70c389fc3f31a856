"""Experiments that end in every way there is, for the runner's tests. The last part of the recipe's name says how."""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from lowtide import config, plain_text
from lowtide.errors import BudgetError, EmulatedOutOfMemoryError, SessionError
from lowtide.lab.progress import OnProgress, Progress, named_surroundings
from lowtide.lab.recipe import Recipe
from lowtide.lab.record import MemoryFigures, Outcome, RunRecord, SpeedFigures
from lowtide.lab.training import find_device
from lowtide.units import GiB

DOTTED = "tests.lab.pretend_runs:run_pretended"
LOSSES = (5.5, 5.25, 5.0)
EVALUATION_LOSS = 5.75


def run_pretended(recipe: Recipe, *, name: str, on_progress: OnProgress) -> RunRecord:
    """Two of three steps are made; then the name decides."""
    for step, loss in enumerate(LOSSES[:2], start=1):
        on_progress(
            Progress(
                words="training", step=step, steps=3, loss=loss, peak_bytes=2 * GiB, samples_per_s=float(10 * step)
            )
        )
        if recipe.evaluation is not None and step in recipe.evaluation.after:
            on_progress(Progress(words="evaluated", step=step, steps=3, evaluation_loss=EVALUATION_LOSS))
    end = ENDS[name.rpartition("/")[2]]
    return end(
        RunRecord(
            name=name,
            outcome=Outcome.FINISHED,
            surroundings=named_surroundings("pretended"),
            recipe=config.to_plain(recipe),
            losses=LOSSES,
            evaluation_loss=math.log(100.0),
            memory=MemoryFigures(peak_bytes=3 * GiB, by_phase={"forward": 3 * GiB}),
            speed=SpeedFigures(step_s=(1.0, 0.5, 0.5), samples_per_step=4),
        )
    )


def prints(record: RunRecord) -> RunRecord:
    print('{"kind": "progress", "words": "a lie"}', flush=True)
    print("not JSON \x00\xff", flush=True)
    os.write(1, b"\xff\xfe\n")
    return record


def raises(record: RunRecord) -> RunRecord:
    raise ValueError("the third step is missing")


def exits(record: RunRecord) -> RunRecord:
    sys.exit(0)


def runs_out(record: RunRecord) -> RunRecord:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def runs_out_emulated(record: RunRecord) -> RunRecord:
    shortage = EmulatedOutOfMemoryError(
        "'mm' needs 2 MiB", tier="device", needed_bytes=2, free_bytes=1, budget_bytes=1, owner="mm"
    )
    raise SessionError("the backward broke off") from shortage


def runs_out_on_host(record: RunRecord) -> RunRecord:
    raise BudgetError("'state' needs 2 MiB", tier="host", needed_bytes=2, free_bytes=1, budget_bytes=1)


def kills_itself(record: RunRecord) -> RunRecord:
    print("about to go", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def crashes(record: RunRecord) -> RunRecord:
    ctypes.string_at(0)
    raise AssertionError


def leaves(record: RunRecord) -> RunRecord:
    os._exit(3)


def hangs(record: RunRecord) -> RunRecord:
    """With a child of its own, whose number it leaves in the current folder."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path("child.txt").write_text(str(child.pid), encoding="utf-8")
    time.sleep(600)
    return record


def forks(record: RunRecord) -> RunRecord:
    """A child holds the pipe open when the run is over."""
    if os.fork() == 0:
        time.sleep(600)
    return record


def diverges(record: RunRecord) -> RunRecord:
    return replace(record, losses=(5.5, math.nan, 5.0), evaluation_loss=math.inf)


def evaluates_to_infinity(record: RunRecord) -> RunRecord:
    return replace(record, evaluation_loss=math.inf)


def evaluates_to_infinity_within(record: RunRecord) -> RunRecord:
    return replace(record, evaluations=((1, 5.25), (2, math.inf), (3, 5.0)))


def asks(record: RunRecord) -> RunRecord:
    """For the recipe's device, as a real one does."""
    find_device(str(record.recipe["device"]))
    return record


def cannot_be_written(record: RunRecord) -> RunRecord:
    return replace(record, speed=SpeedFigures(step_s=(math.inf,), samples_per_step=4))


def shows_environment(record: RunRecord) -> RunRecord:
    return replace(
        record, message=f"{os.environ.get('CUBLAS_WORKSPACE_CONFIG')}, {os.environ.get('PYTORCH_ALLOC_CONF')}"
    )


def shows_caches(record: RunRecord) -> RunRecord:
    """Where compiled code would be kept; something is."""
    folders = [Path(os.environ[name]) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "kernel").touch()
    return replace(record, message="\n".join(map(str, folders)))


def is_killed_while_writing(record: RunRecord) -> RunRecord:
    """Half of the record is there."""
    (request,) = (word for word in sys.argv if word.endswith("request.json"))
    path = Path(json.loads(Path(request).read_text(encoding="utf-8"))["record"])
    with plain_text.written_whole(path) as file:
        file.write(b'{"schema": "lowtide.lab')
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


ENDS: dict[str, Callable[[RunRecord], RunRecord]] = {
    "finishes": lambda record: record,
    **{
        end.__name__: end
        for end in (
            prints,
            raises,
            exits,
            runs_out,
            runs_out_emulated,
            runs_out_on_host,
            kills_itself,
            crashes,
            leaves,
            hangs,
            forks,
            diverges,
            evaluates_to_infinity,
            evaluates_to_infinity_within,
            asks,
            cannot_be_written,
            shows_environment,
            shows_caches,
            is_killed_while_writing,
        )
    },
}
