"""What a run tells while it goes on: progress, its sum so far, and the messages between the runner and the worker of one run.

A request goes through a file, and messages through a pipe that is the worker's own, so that nothing a model prints can
stand between them.
"""

from __future__ import annotations

import datetime as dt
import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lowtide.hardware.machine import find_commit, lowtide_version, this_machine
from lowtide.lab.recipe import Recipe
from lowtide.lab.record import Surroundings
from lowtide.lab.training import find_device
from lowtide.units import GiB, MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is."""

    words: str
    """What is being done: `preparing the corpus`, `training`, `evaluating`."""
    step: int = 0
    """How many updates are made."""
    steps: int = 0
    """How many updates the whole run has."""
    loss: float | None = None
    peak_bytes: int | None = None
    """The device's peak so far."""
    samples_per_s: float | None = None
    """The speed of the last step."""
    evaluation_loss: float | None = None
    """The loss of an evaluation that is over; the one after the last update is in the record only."""


OnProgress = Callable[[Progress], None]


class SoFar:
    """What a run has told so far, for the record of one that could not write its own."""

    def __init__(self) -> None:
        self.last: Progress | None = None
        self._losses: list[float] = []
        self._evaluations: list[tuple[int, float]] = []

    def add(self, progress: Progress) -> None:
        """Take in one more word from the run."""
        self.last = progress
        # A loss counts once, and only where none before it is missing: its place says of which step it is.
        if progress.loss is not None and progress.step == len(self._losses) + 1:
            self._losses.append(progress.loss)
        if progress.evaluation_loss is not None:
            self._evaluations.append((progress.step, progress.evaluation_loss))

    @property
    def losses(self) -> tuple[float, ...]:
        """The losses of the first steps, up to one that was not told or is not finite, which no record can hold."""
        return finite_part(self._losses)

    @property
    def evaluations(self) -> tuple[tuple[int, float], ...]:
        """(step, loss) of each that was told, up to one that is not finite."""
        return finite_evaluations(self._evaluations)

    @property
    def words(self) -> str:
        """The last progress, in words."""
        return "nothing was heard of it" if self.last is None else f"last heard: {describe(self.last)}"


def describe(progress: Progress) -> str:
    """Progress in words: `training, step 3 of 100, loss 5.1234, peak 3.975 GiB, 6.1 samples/s`."""
    parts = [progress.words]
    if progress.steps:
        parts.append(f"step {progress.step} of {progress.steps}")
    return ", ".join([*parts, *figures(progress)])


def figures(progress: Progress) -> list[str]:
    """The numbers that are known, each in words."""
    peak = None if progress.peak_bytes is None else shown_bytes(progress.peak_bytes)
    pairs: tuple[tuple[str, object], ...] = (
        ("loss {:.4f}", progress.loss),
        ("peak {}", peak),
        ("{:.4g} samples/s", progress.samples_per_s),
        ("evaluation loss {:.4f}", progress.evaluation_loss),
    )
    return [words.format(figure) for words, figure in pairs if figure is not None]


def shown_bytes(num_bytes: int) -> str:
    """Bytes with the digits that such tables are published with.

    Example:
        >>> shown_bytes(22_725_752_832), shown_bytes(23_000_000)
        ('21.165 GiB', '21.935 MiB')
    """
    return f"{num_bytes / GiB:.3f} GiB" if num_bytes >= GiB // 10 else f"{num_bytes / MiB:.3f} MiB"


def finite_part(losses: list[float] | tuple[float, ...]) -> tuple[float, ...]:
    """The losses before the first that is not finite."""
    end = next((step for step, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
    return tuple(losses[:end])


def finite_evaluations(evaluations: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """The evaluations before the first whose loss is not finite."""
    return tuple(evaluations[: len(finite_part([loss for _, loss in evaluations]))])


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One run, as the worker is asked for it."""

    name: str
    """The name of the recipe."""
    recipe: Recipe
    record: Path
    """Where the record goes; whole, or not at all."""
    tensorboard: Path
    """The folder for the run's TensorBoard files."""
    experiment: str
    """What runs it, as `package.module:function`; called as `lowtide.lab.experiment.run_experiment` is."""
    import_paths: tuple[str, ...]
    """`sys.path` of the asker, for models of its own."""
    progress_fd: int
    """The end of the pipe that the worker writes to."""
    is_alone: bool = True
    """Whether the asker knows of no other work on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The record is written; what is left is to end the process."""


Message = Surroundings | Progress | Done


def find_surroundings(device: str | None) -> Surroundings:
    """Where and with what a run is made that begins now on a recipe's device. On CUDA its name is asked, which begins to use it.

    Raises:
        ConfigError: It is no device that a run can have.
        HardwareError: It is not here.
    """
    found = find_device(device)
    return named_surroundings(torch.cuda.get_device_name(found) if found.type == "cuda" else "cpu, emulated")


def named_surroundings(device: str) -> Surroundings:
    """Where and with what a run is made that begins now on a device of that name; no device is touched."""
    machine = this_machine()
    return Surroundings(
        date=dt.datetime.now(dt.UTC).astimezone().isoformat(timespec="seconds"),
        commit=find_commit(),
        device=device,
        torch=torch.__version__,
        lowtide=lowtide_version(),
        python=platform.python_version(),
        platform=platform.platform(),
        processor=machine.processor,
        memory_bytes=machine.memory_bytes,
        driver=machine.driver,
    )
