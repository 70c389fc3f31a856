"""The process of one run: does what its request file says, tells how it goes, and writes the record.

Started by the runner as `python -m lowtide.lab.worker REQUEST.json`. Whatever is raised in here becomes a record.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lowtide import config, plain_text
from lowtide.errors import BudgetError, ConfigError
from lowtide.lab.progress import (
    Done,
    Message,
    Progress,
    Request,
    SoFar,
    find_surroundings,
    finite_evaluations,
    finite_part,
    named_surroundings,
)
from lowtide.lab.recipe import Recipe
from lowtide.lab.record import Outcome, RunRecord, Surroundings, write_record
from lowtide.units import GiB

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter


Send = Callable[[Message], None]
TRACEBACK_LINES = 12
"""How many lines of the end of a traceback a record's message has."""


class RunnerGoneError(BaseException):
    """The process that started the run is gone and reads no progress; the device must be free for the next one.

    No `Exception`, so that nothing that a model or a library catches on the way holds it up.
    """


def main(request_path: str) -> None:
    """Run the request of a file."""
    request = config.read_config(Request, request_path)
    # cuBLAS reads it when its first handle is made, long after torch is imported. A recipe that names none gets the
    # library's default, whatever the shell says: the recipe holds everything that changes the numbers.
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    if request.recipe.cublas_workspace is not None:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = request.recipe.cublas_workspace
    sys.path[:] = [*request.import_paths, *(path for path in sys.path if path not in request.import_paths)]
    # Processes that the run starts must not keep the pipe open after it.
    os.set_inheritable(request.progress_fd, False)
    pipe = Connection(request.progress_fd, readable=False)

    def send(message: Message) -> None:
        try:
            pipe.send(message)
        except BrokenPipeError as error:
            raise RunnerGoneError from error

    _write(_run(request, send), request)
    send(Done())


def _run(request: Request, send: Send) -> RunRecord:
    so_far = SoFar()
    surroundings = _surroundings(request.recipe)
    board = Board(request.tensorboard, request.recipe)

    def on_progress(progress: Progress) -> None:
        so_far.add(progress)
        board.add(progress)
        send(progress)

    try:
        send(surroundings)
        module, _, function = request.experiment.partition(":")
        experiment: Callable[..., RunRecord] = getattr(importlib.import_module(module), function)
        record = _checked(experiment(request.recipe, name=request.name, on_progress=on_progress))
    except BaseException as error:  # a model may even call sys.exit
        record = _failed_record(request, error, so_far, surroundings)
    board.finish(record)
    if record.speed is not None:
        record = replace(record, speed=replace(record.speed, is_alone=request.is_alone))
    return replace(record, remarks=(*record.remarks, *board.remarks))


def _surroundings(recipe: Recipe) -> Surroundings:
    try:
        return find_surroundings(recipe.device)
    except Exception:  # the experiment meets the same error, and there it becomes the record's message
        return named_surroundings("unknown")


def _write(record: RunRecord, request: Request) -> None:
    try:
        write_record(record, request.record)
    except ConfigError as error:
        # Something in it that JSON cannot hold: a record that says so is better than none.
        bare = _failed_record(request, error, SoFar(), record.surroundings)
        losses, evaluations = finite_part(record.losses), finite_evaluations(record.evaluations)
        write_record(replace(bare, losses=losses, evaluations=evaluations), request.record)


def _checked(record: RunRecord) -> RunRecord:
    """A run whose loss left the numbers has failed, even if it went on to its last step. Its other figures stay."""
    losses, evaluations = finite_part(record.losses), finite_evaluations(record.evaluations)
    last = record.evaluation_loss
    if len(losses) < len(record.losses):
        message = f"the loss of step {len(losses) + 1} is {record.losses[len(losses)]}"
    elif len(evaluations) < len(record.evaluations):
        step, loss = record.evaluations[len(evaluations)]
        message = f"the evaluation's loss after step {step} is {loss}"
    elif last is not None and not math.isfinite(last):
        message = f"the evaluation's loss is {last}"
    else:
        return record
    return replace(
        record,
        outcome=Outcome.FAILED,
        message=f"{message}; lower optimizer.settings.lr, set max_grad_norm, or use another dtype",
        losses=losses,
        evaluation_loss=last if last is not None and math.isfinite(last) else None,
        evaluations=evaluations,
    )


def _failed_record(request: Request, error: BaseException, so_far: SoFar, surroundings: Surroundings) -> RunRecord:
    """The record of a run that ended with an error, with what it had told before."""
    if isinstance(error, RunnerGoneError):
        outcome, message = Outcome.KILLED, f"the process that had started the run ended before it; {so_far.words}"
    else:
        outcome = Outcome.OUT_OF_MEMORY if is_out_of_memory(error) else Outcome.FAILED
        # Without the last line, which is the error itself.
        trail = "".join(traceback.format_tb(error.__traceback__)).splitlines()[-TRACEBACK_LINES:]
        message = "\n".join([f"{type(error).__name__}: {error}", so_far.words, *trail])
    return RunRecord(
        name=request.name,
        outcome=outcome,
        surroundings=surroundings,
        recipe=config.to_plain(request.recipe),
        message=message,
        losses=so_far.losses,
        evaluations=so_far.evaluations,
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device, or an emulated one, had too little memory: in this error, or in one that led to it."""
    return any(
        isinstance(link, torch.OutOfMemoryError)
        or (isinstance(link, BudgetError) and link.tier.startswith("device"))
        # cuBLAS and cuDNN say so when there is no room for what they keep themselves; torch has no class for it.
        or (isinstance(link, RuntimeError) and "_STATUS_ALLOC_FAILED" in str(link))
        for link in _chain(error)
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


NOT_INSTALLED = 'no TensorBoard curves: its package is not installed (pip install "lowtide[tensorboard]")'


class Board:
    """Writes scalars as they come. Whatever goes wrong here costs the curves, never the run.

    Args:
        folder: The run's own; made where it is missing.
        recipe: Written as text beside the curves.
    """

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self.remarks: list[str] = []
        """What the record should say about the curves; empty where they are whole."""
        self._writer: SummaryWriter | None = None
        self._step = 0
        if importlib.util.find_spec("tensorboard") is None:
            self.remarks.append(NOT_INSTALLED)
            return
        try:
            # Seconds of import, and only where the package is there.
            from torch.utils.tensorboard.writer import SummaryWriter

            self._writer = SummaryWriter(str(folder))
            text = plain_text.render(config.to_plain(recipe), "yaml")
            self._writer.add_text("recipe", "\n".join(f"    {line}" for line in text.splitlines()))
        except Exception as error:
            self._give_up(error)

    def add(self, progress: Progress) -> None:
        """The figures of a step, once, and those of an evaluation after it."""
        self._add_scalars({"evaluation_loss": progress.evaluation_loss}, progress.step)
        if progress.step <= self._step:
            return
        self._step = progress.step
        peak_gib = None if progress.peak_bytes is None else progress.peak_bytes / GiB
        scalars = {"loss": progress.loss, "peak_gib": peak_gib, "samples_per_s": progress.samples_per_s}
        self._add_scalars(scalars, self._step)

    def finish(self, record: RunRecord) -> None:
        """The last evaluation's loss, and the end of the files."""
        self._add_scalars({"evaluation_loss": record.evaluation_loss}, self._step)
        try:
            if self._writer is not None:
                self._writer.close()
        except Exception as error:
            self._give_up(error)

    def _add_scalars(self, scalars: dict[str, float | None], step: int) -> None:
        try:
            for name, value in scalars.items():
                if self._writer is not None and value is not None:
                    self._writer.add_scalar(name, value, step)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        # A full disk, or a TensorBoard that does not go with this torch: hours of training are worth more.
        self._writer = None
        self.remarks.append(f"TensorBoard curves end at step {self._step}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main(sys.argv[1])
