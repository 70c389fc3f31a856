"""What a child of the fork server does."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which the first optimizer imports: seconds, paid once in the server

from tests.faults import small_runs, train_runs
from tests.faults.forks import Page
from tests.faults.phases import KillAt, Watch


def run(job: dict[str, Any], page: Page) -> None:
    """Train as the job says, from the newest checkpoint to the end.

    Args:
        job: `folder`; `session`, a `SmallRun`, or `train`, a `TrainRun`; `kill`, a `KillAt`; `fault`, `module:function` that is
            called with the training, or with nothing under `lowtide train`, before the first step.
        page: Told where it is.
    """
    torch.set_num_threads(1)
    folder = Path(job["folder"])
    watch = Watch(page, None if job.get("kill") is None else KillAt(**job["kill"]))
    watch.install()
    if "train" in job:
        train_runs.train(train_runs.TrainRun(**job["train"]), folder, watch, _fault(job))
        return
    if "warnings_are_shown" in str(job.get("fault")):
        warnings.simplefilter("ignore")
    training = small_runs.Training(small_runs.SmallRun(**job["session"]), folder)
    with contextlib.closing(training.journal):
        page.phase = "loading"
        training.resume()
        page.phase = "training"
        fault = _fault(job)
        training.to_the_end(*([] if fault is None else [fault(training)]))


def _fault(job: dict[str, Any]) -> Any:
    if job.get("fault") is None:
        return None
    module, _, name = job["fault"].partition(":")
    return getattr(importlib.import_module(module), name)
