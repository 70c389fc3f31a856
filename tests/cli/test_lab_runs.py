"""What is shown while runs go on, on a terminal and in a log."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from lowtide.cli import lab
from lowtide.cli.lab import BarDisplay, LineDisplay, display_of, run_table
from lowtide.lab.progress import Progress, named_surroundings
from lowtide.lab.recipe import Recipe
from lowtide.lab.record import MemoryFigures, Outcome, RunRecord
from lowtide.lab.runner import EndedRun, Run
from lowtide.units import GiB

RUN = Run(name="peak_memory/control", recipe=Recipe(model="gpt-tiny", steps=100))
OTHER = Run(name="peak_memory/[bold]", recipe=Recipe(model="gpt-tiny", steps=100, seed=1))


def console(*, is_terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=is_terminal, width=80, color_system=None)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def ended(run: Run, outcome: Outcome, message: str = "", peak_bytes: int | None = None) -> EndedRun:
    memory = None if peak_bytes is None else MemoryFigures(peak_bytes=peak_bytes, by_phase={"update": peak_bytes})
    record = RunRecord(
        name=run.name,
        outcome=outcome,
        surroundings=named_surroundings("none"),
        recipe={},
        message=message,
        memory=memory,
    )
    return EndedRun(run=run, record=record, path=Path("record.json"))


def training(step: int) -> Progress:
    return Progress(words="training", step=step, steps=100, loss=5.0, peak_bytes=2 * GiB, samples_per_s=3.0)


def test_lines_at_each_tenth_and_at_each_new_thing() -> None:
    log = console(is_terminal=False)
    with display_of([RUN, OTHER], log) as display:
        assert isinstance(display, LineDisplay)
        display.progressed(RUN, Progress(words="starting"))
        for step in range(1, 101):
            display.progressed(RUN, training(step))
        for batch in range(1, 64):
            words = f"evaluating, batch {batch} of 63"
            display.progressed(RUN, Progress(words=words, step=100, steps=100))
        display.ended(ended(RUN, Outcome.FINISHED, peak_bytes=3 * GiB))
        display.ended(ended(OTHER, Outcome.OUT_OF_MEMORY, "OutOfMemoryError: no room\nand a traceback"))
    title = "[1/2] peak_memory/control, seed 0"
    figures = "loss 5.0000, peak 2.000 GiB, 3 samples/s"
    steps = [f"{title}: training, step {step} of 100, {figures}" for step in (1, *range(10, 101, 10))]
    assert shown(log).splitlines() == [
        f"{title}: starting",
        *steps,
        f"{title}: evaluating, batch 1 of 63, step 100 of 100",
        f"{title}: finished, peak 3.000 GiB",
        "[2/2] peak_memory/[bold], seed 1: out of memory: OutOfMemoryError: no room",
    ]


def test_a_line_also_after_a_long_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    log = console(is_terminal=False)
    display = LineDisplay([RUN], log)
    now_s = 1000.0
    monkeypatch.setattr(lab.time, "monotonic", lambda: now_s)
    display.progressed(RUN, training(1))
    now_s += 29.0
    display.progressed(RUN, training(2))
    now_s += 2.0
    display.progressed(RUN, training(3))
    assert [line.partition("step ")[2][:1] for line in shown(log).splitlines()] == ["1", "3"]


def test_a_bar_on_a_terminal() -> None:
    terminal = console(is_terminal=True)
    with display_of([OTHER, RUN], terminal) as display:
        assert isinstance(display, BarDisplay)
        display.progressed(OTHER, Progress(words="starting"))
        display.ended(ended(OTHER, Outcome.KILLED, "the run was ended by SIGKILL"))
        display.progressed(RUN, training(40))
        display.progressed(RUN, training(41))
        (task,) = display._bar.tasks
        assert (task.completed, task.total) == (41, 101)
        display.progressed(RUN, training(100))
        assert not task.finished
        display.progressed(RUN, training(41))
        display._bar.refresh()
        display.ended(ended(RUN, Outcome.FINISHED))
        assert display._bar.tasks == []
    text = shown(terminal)
    assert "[2/2] peak_memory/control, seed 0" in text
    assert "training 41/100 loss 5.0000 peak 2.000 GiB 3 samples/s" in text
    assert "[1/2] peak_memory/[bold], seed 1: killed: the run was ended by SIGKILL" in text
    assert "[2/2] peak_memory/control, seed 0: finished" in text


def test_the_table_of_runs_says_how_each_ended_on_a_narrow_terminal() -> None:
    long = Run(name="peak_memory_tiny/compile_per_layer_fused", recipe=Recipe(model="gpt-tiny"))
    runs = [
        ended(long, Outcome.FINISHED, peak_bytes=22_000_000),
        ended(RUN, Outcome.OUT_OF_MEMORY),
        ended(OTHER, Outcome.KILLED),
    ]
    narrow = console(is_terminal=False)
    narrow.print(run_table(runs))
    for words in ("finished", "out of memory", "killed", "20.981 MiB"):
        assert words in shown(narrow)
