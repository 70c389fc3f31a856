"""How many files somebody opens to follow one behaviour, and how much `import lowtide` loads: counted, so that it only falls."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import lowtide

ROOT = str(Path(lowtide.__file__).parent)
EMULATION = ("/runtime/emulation/", "/memory/emulated_mover.py")
"""Stands for the device in tests; a reader who follows a step does not open it."""
MOST_OF_A_STEP = 20
MOST_OF_MANAGE = 30
MOST_IMPORTED = 120


@contextmanager
def files_that_run() -> Iterator[set[str]]:
    """The package's files of which a function is called inside, in any thread that starts there."""
    found: set[str] = set()

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(ROOT) and not any(part in name for part in EMULATION):
            found.add(name.removeprefix(ROOT))

    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # as documented


def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize("update", ["host", "device"])
@pytest.mark.parametrize("schedule", ["deferred", "in_backward"])
def test_a_streamed_step_and_manage_itself(update: str, schedule: str) -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters())
    plan = lowtide.make_plan(model, weights="streamed", update=update, schedule=schedule)
    step = loop(model, optimizer)
    manage = lowtide.manage  # loaded at its first use, by the package's own `__getattr__`
    with files_that_run() as in_manage:
        session = manage(model, optimizer, plan, device="cpu")
    with session:
        step()
        # Which files a single step runs through depends on how far the worker is; these are all that a step may need.
        in_step: set[str] = set()
        for _ in range(8):
            with files_that_run() as found:
                step()
            session.settle()
            in_step |= found
            with files_that_run() as found:
                step()
            in_step |= found
    assert len(in_step) <= MOST_OF_A_STEP, sorted(in_step)
    assert len(in_manage) <= MOST_OF_MANAGE, sorted(in_manage)


def test_the_import_is_small() -> None:
    code = (
        "import sys, lowtide; own = [name for name in sys.modules if name.partition('.')[0] == 'lowtide'];"
        "print(len(own), *sorted({'scipy', 'matplotlib', 'rich', 'typer', 'transformers'} & set(sys.modules)))"
    )
    count, *heavy = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert heavy == []
    assert int(count) <= MOST_IMPORTED
