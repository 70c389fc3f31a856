"""`lowtide train`: a whole run from a recipe, with what a person sees of it on the terminal."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import typer
from rich.live import Live
from rich.text import Text

from lowtide.cli.console import ERR, OUT, require_writable
from lowtide.errors import ConfigError, UnknownNameError
from lowtide.train.folder import OutputFolder
from lowtide.train.progress import RunStatus
from lowtide.train.recipe import TrainRecipe, read_train_recipe
from lowtide.train.run import RunResult, Watcher, run_training
from lowtide.train.stopping import Leave, StopRequests
from lowtide.train.team import launched_rank, num_restarts
from lowtide.train.view import RunView, plain_line

FOLDER = Path("lowtide-train")
SCHEMA = "lowtide.train/1"


class Display(Watcher, Protocol):
    """Tells a person how a run goes on."""

    def __enter__(self) -> Display: ...
    def __exit__(self, *_: object) -> None: ...


def run_train(name: str, overrides: Sequence[str], out: Path | None, *, resume: bool, as_json: bool) -> None:
    """Train a recipe, or go on with a run that is in a folder; ends with where the result is."""
    folder, recipe = read_request(name, overrides, out)
    require_writable("--out", [folder.path], are_folders=True)
    is_first = not launched_rank()
    if num_restarts():
        resume = folder.has_run
    shown = display_of(f"{recipe.model} → {folder.path}", recipe) if is_first else Silence()
    with shown as display, told_by(display):
        stop = StopRequests(recipe.faults.grace_s, leave=leave_with(display, folder), on_request=lambda: _ask(display))
        with stop.watching():
            result = run_training(recipe, folder, resume=resume, watcher=display, stop=stop)
    if as_json and is_first:
        print(json.dumps(result_row(result), indent=2))
    elif is_first:
        OUT.print(*last_words(result, folder), sep="\n", highlight=False, soft_wrap=True)
    if not result.is_finished:
        raise typer.Exit(stop.exit_code)


def read_request(name: str, overrides: Sequence[str], out: Path | None) -> tuple[OutputFolder, TrainRecipe]:
    """The run's folder and its recipe: of a recipe by name or file, or of the run that is in a folder."""
    here = OutputFolder(Path(name))
    if here.has_run:
        if out is not None and out.resolve() != here.path.resolve():
            raise ConfigError(f"{name} is the folder of a run, which goes on there: leave --out out", key="out")
        return here, here.recipe(overrides)
    try:
        recipe = read_train_recipe(name, overrides)
    except UnknownNameError as error:
        if not here.path.is_dir():
            raise
        raise ConfigError(
            f"{name} is a folder, and no run has begun there: begin one with `lowtide train RECIPE --out {name}`",
            key="out",
        ) from error
    return OutputFolder(FOLDER / Path(name).stem if out is None else out), recipe


@contextlib.contextmanager
def told_by(display: Display) -> Iterator[None]:
    """Inside, warnings and Lowtide's own log are notes, which do not tear the view."""
    handler = logging.Handler()
    # That a save failed the run says itself, with what becomes of it.
    handler.addFilter(lambda record: record.module != "saving")
    handler.emit = lambda record: display.note(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lowtide")
    logger.addHandler(handler)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: display.note(f"warning: {message}")
        try:
            yield
        finally:
            logger.removeHandler(handler)


def _ask(display: Display) -> None:
    display.note("stopping: this step ends, and the run is saved; once more leaves at once")


def leave_with(display: Display, folder: OutputFolder) -> Leave:
    """Ends the process where it stands, whatever its threads are doing."""

    def leave(code: int, why: str) -> None:
        # In a thread of its own: the main one may hold what the view waits for.
        closing = threading.Thread(target=display.__exit__, daemon=True)
        closing.start()
        closing.join(timeout=1.0)
        words = f"left at once ({why}); checkpoints are as they were: {folder.resume_command}"
        if not folder.has_run:
            words = f"left at once ({why})"
        # Past the console, whose lock the main thread may have.
        os.write(2, f"{words}\n".encode())
        os._exit(code)

    return leave


def last_words(result: RunResult, folder: OutputFolder) -> list[Text]:
    """Where the result is, and what to type next."""
    if not result.is_finished:
        saved = "nothing is saved yet" if result.saved_step is None else f"step {result.saved_step:,} is saved"
        return [
            Text.assemble((f"stopped after step {result.step:,} of {result.steps:,}", "bold"), f": {saved}"),
            Text(f"go on: {folder.resume_command}"),
        ]
    figures = [] if result.loss is None else [f"loss {result.loss:.4f}"]
    figures += [] if result.evaluation_loss is None else [f"held out {result.evaluation_loss:.4f}"]
    told = f": {', '.join(figures)}" if figures else ""
    return [
        Text.assemble((f"trained {result.steps:,} steps", "bold green"), told),
        Text(f"the model: {result.model}"),
        Text(f"train longer: {folder.resume_command} --set steps={2 * result.steps}"),
    ]


def result_row(result: RunResult) -> dict[str, object]:
    """The result for machines."""
    return {
        "schema": SCHEMA,
        "folder": str(result.folder),
        "step": result.step,
        "steps": result.steps,
        "is_finished": result.is_finished,
        "saved_step": result.saved_step,
        "model": None if result.model is None else str(result.model),
        "loss": result.loss,
        "evaluation_loss": result.evaluation_loss,
    }


def display_of(title: str, recipe: TrainRecipe) -> Display:
    """A live view on a terminal, else plain lines."""
    return LiveDisplay(title) if ERR.is_terminal else LineDisplay(recipe.log.every)


class Silence:
    """The display of a rank that is not the first: that one shows the run of all."""

    def say(self, words: str) -> None:
        """Nothing."""

    def show(self, status: RunStatus) -> None:
        """Nothing."""

    def note(self, sentence: str) -> None:
        """Nothing."""

    def __enter__(self) -> Silence:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class LiveDisplay:
    """A view that is drawn again four times a second; notes stay above it."""

    def __init__(self, title: str) -> None:
        self._view = RunView(title)
        self._live = Live(self._view, console=ERR, refresh_per_second=4, transient=False)

    def say(self, words: str) -> None:
        """What is being done."""
        self._view.say(words)

    def show(self, status: RunStatus) -> None:
        """How far the training is."""
        self._view.show(status)

    def note(self, sentence: str) -> None:
        """A line that stays."""
        self._live.console.print(sentence, markup=False, highlight=False)

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._view.end()
        self._live.stop()


class LineDisplay:
    """Plain lines, one for so many steps.

    Args:
        every: Steps between two lines.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._said = ""
        self._shown: int | None = None

    def say(self, words: str) -> None:
        """What is being done, once."""
        if words != self._said:
            self._said = words
            self._print(words)

    def show(self, status: RunStatus) -> None:
        """A line at the first step, at the last, and at each so many."""
        is_due = status.step % self._every == 0 or status.step in (1, status.steps)
        if status.words == "training" and is_due and status.step and status.step != self._shown:
            self._shown = status.step
            self._print(plain_line(status))

    def note(self, sentence: str) -> None:
        """A line of its own."""
        self._print(sentence)

    def _print(self, line: str) -> None:
        ERR.print(line, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> LineDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        pass
