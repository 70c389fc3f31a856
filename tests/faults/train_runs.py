"""Runs of `lowtide train` without its search for a plan, which takes seconds: a plan by hand takes its place."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lowtide
from lowtide.runtime.session import Session
from lowtide.train import folder as folder_module
from lowtide.train import model as model_module
from lowtide.train import run as run_module
from lowtide.train.folder import OutputFolder
from lowtide.train.run import run_training
from lowtide.train.stopping import StopRequests
from tests.faults.phases import Watch
from tests.train.runs import Heard, small_recipe

PUBLISHING = "publishing the model"
STOPPED = 3
"""Exit code of a run that ended on request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRun:
    """What of a recipe the fault matrix varies."""

    name: str
    steps: int = 20
    every: int = 3
    settings: tuple[str, ...] = ()
    text: str = ""
    """The folder of the text that all runs read."""


RUNS = {
    run.name: run
    for run in (
        TrainRun(
            name="train",
            settings=("max_grad_norm=1.0", "accumulation=2", "evaluation.every=5", "checkpoints.allowance=64KiB"),
        ),
        TrainRun(
            name="train in backward",
            settings=("schedule=in_backward", "dtype=bfloat16", "precision=bf16 stochastic", "moments=8bit"),
        ),
    )
}


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, **settings: Any) -> Session:
    """In place of `lowtide.prepare`: streamed weights, updates on the host."""
    kept = ("device", "precision", "moments", "max_grad_norm", "weights", "seed")
    plan = lowtide.make_plan(model, weights="streamed", update="host", schedule=settings["schedule"])
    return lowtide.manage(model, optimizer, plan, **{key: settings[key] for key in kept})


def train(run: TrainRun, out: Path, watch: Watch, fault: Callable[[], object] | None = None) -> None:
    """The run from its newest checkpoint to its end, as the command does it.

    Args:
        run: What is trained.
        out: The run's folder.
        watch: Told where it is.
        fault: Makes something go wrong later on.
    """
    settings = (f"steps={run.steps}", f"checkpoints.every={run.every}", *run.settings)
    recipe = small_recipe(Path(run.text), *settings)
    folder = OutputFolder(out)
    stop = StopRequests(recipe.faults.grace_s, leave=lambda code, _: os._exit(code))
    with _instrumented(watch):
        if fault is not None:
            fault()
        watch.page.phase = "loading"
        with stop.watching():
            result = run_training(recipe, folder, resume=folder.has_run, watcher=Heard(), stop=stop)
    if not result.is_finished:
        raise SystemExit(STOPPED)


@contextlib.contextmanager
def _instrumented(watch: Watch) -> Iterator[None]:
    """The plan is made by hand, and the page told of what a run does beside its saves."""
    model_module.prepare = by_hand  # type: ignore[assignment]  # it takes what a run gives

    def training(run: Callable[..., None], *args: Any) -> None:
        watch.page.phase = "training"
        run(*args)

    watch.wrap(run_module.Run, "_train", training)
    watch.wrap(folder_module.shutil, "copyfile", functools.partial(watch.operation, PUBLISHING))
    watch.wrap(OutputFolder, "publish", functools.partial(watch.operation, PUBLISHING))
    yield
