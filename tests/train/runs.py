"""Small whole runs for tests: seconds each, most of them for the plan."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lowtide.config import override
from lowtide.train import run as run_module
from lowtide.train.folder import OutputFolder
from lowtide.train.model import Subject, Trained
from lowtide.train.progress import RunStatus
from lowtide.train.recipe import DataRecipe, TrainRecipe
from lowtide.train.run import RunResult, run_training
from lowtide.train.stopping import StopRequests
from lowtide.train.team import Team

TEXT = "The tide goes out, and the tide comes in; what it leaves on the sand is another thing each day.\n"


def small_recipe(folder: Path, *settings: str) -> TrainRecipe:
    """A GPT of two layers on the bytes of a text, whose plan streams some of its groups."""
    text = folder / "text.txt"
    if not text.exists():
        lines = (f"{number}. {TEXT}" for number in range(60))
        text.write_text("".join(lines), encoding="utf-8")
    recipe = TrainRecipe(
        model="gpt-tiny",
        model_settings={"num_layers": 2, "hidden_size": 32, "num_heads": 2, "context_length": 32, "dropout": 0.1},
        data=DataRecipe(text=text, held_out_share=0.1),
        batch="2x32",
        steps=8,
        device="cpu",
        device_memory="450KiB",
    )
    return override(replace(recipe, seed=3), settings)


class Heard:
    """A watcher that remembers, and may act at a step."""

    def __init__(self, at_step: Callable[[int], None] = lambda _: None) -> None:
        self.words: list[str] = []
        self.notes: list[str] = []
        self.statuses: list[RunStatus] = []
        self._at_step = at_step

    def say(self, words: str) -> None:
        self.words.append(words)

    def show(self, status: RunStatus) -> None:
        self.statuses.append(status)
        if status.words == "training":
            self._at_step(status.step)

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)


def ask_to_stop(stop: StopRequests, at: int, number: signal.Signals = signal.SIGINT) -> Heard:
    """A watcher that has the signal sent after a step, and waits until it is heard of."""

    def act(step: int) -> None:
        if step == at and not stop.is_requested:
            signal.raise_signal(number)
            while not stop.is_requested:
                time.sleep(0.001)

    return Heard(act)


def refuse_to_leave(code: int, why: str) -> None:
    raise AssertionError(f"the process would have left with {code}: {why}")


def train(
    recipe: TrainRecipe,
    out: Path,
    *,
    resume: bool = False,
    heard: Heard | None = None,
    stop: StopRequests | None = None,
) -> RunResult:
    """A run in this process; signals are watched where `stop` is given."""
    watcher = Heard() if heard is None else heard
    if stop is None:
        stop = StopRequests(recipe.faults.grace_s, refuse_to_leave)
        return run_training(recipe, OutputFolder(out), resume=resume, watcher=watcher, stop=stop)
    with stop.watching():
        return run_training(recipe, OutputFolder(out), resume=resume, watcher=watcher, stop=stop)


def rows(out: Path, kind: str) -> list[dict[str, Any]]:
    """The rows of one kind; each line of the file must be whole."""
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for line in lines if (row := json.loads(line))["kind"] == kind]


def losses(out: Path) -> list[tuple[int, float]]:
    """(step, loss) of each row of a step."""
    return [(row["step"], row["loss"]) for row in rows(out, "step")]


@contextmanager
def trained_with(change: Callable[[Trained], None]) -> Iterator[None]:
    """Inside, the model of each start is changed once it is managed: a hook put on it, say."""
    real = run_module.prepared

    @contextmanager
    def changed(subject: Subject, team: Team, say: Callable[[str], None]) -> Iterator[Trained]:
        with real(subject, team, say) as trained:
            change(trained)
            yield trained

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "prepared", changed)
        yield
