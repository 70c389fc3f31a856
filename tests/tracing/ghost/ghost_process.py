"""A process that has turned itself into a ghost machine, and runs functions of the tests in it.

Registering the ghost device changes torch for good, so the process that runs the tests must not do it.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from lowtide.tracing.prediction.sandbox import portable, receive, send

REPO = Path(__file__).resolve().parents[3]


class Lab:
    """What a function of the tests gets: a fresh trace on a card, in its forward phase."""

    def __init__(self, hardware: str = "h200", torch_version: str = "2.11.0") -> None:
        from lowtide.hardware import find_hardware
        from lowtide.tracing.ghost.machine import GhostMachine
        from lowtide.tracing.recorder import StorageRecorder
        from lowtide.tracing.step_trace import Phase

        self.machine = GhostMachine.get()
        self.recorder = StorageRecorder(root="Root")
        self.mode = self.machine.mode_for(self.recorder, find_hardware(hardware), torch_version)
        self.recorder.begin_phase(Phase.FORWARD)
        self.phase = Phase
        self.base = 0

    def ghost(self, *shape: int, dtype: torch.dtype = torch.float32, needs_grad: bool = False) -> Any:
        """A tensor on the card whose values are not known: a weight, say."""
        ghost = self.mode.place(torch.empty(shape, dtype=dtype, device="meta"))
        return ghost.requires_grad_() if needs_grad else ghost

    def known(self, values: Tensor) -> Any:
        """A tensor on the card whose values came along with the batch."""
        from lowtide.tracing.ghost.tensor import Known

        return self.mode.place(values.to("meta"), known=Known(values))

    def mark(self) -> None:
        """Forget what was logged so far."""
        self.base = len(self.recorder.log)

    @property
    def births(self) -> list[tuple[str, int]]:
        """(operator, requested bytes) of each allocation since the mark, scratch included."""
        lives = [self.recorder.lives[entry] for entry in self.recorder.log[self.base :] if entry >= 0]
        return [(life.op, life.requested_bytes) for life in lives]

    @property
    def outputs(self) -> list[tuple[str, int]]:
        """The same without scratch and library workspaces."""
        lives = [self.recorder.lives[entry] for entry in self.recorder.log[self.base :] if entry >= 0]
        return [(life.op, life.requested_bytes) for life in lives if life.category is None]

    @property
    def live_bytes(self) -> int:
        """Requested bytes on the card now, without library workspaces."""
        alive = [life for life in self.recorder.lives if life.died_event is None and life.on_device]
        return sum(life.requested_bytes for life in alive if life.category is None)

    @property
    def num_events(self) -> int:
        return len(self.recorder.log) - self.base

    @property
    def calls(self) -> list[str]:
        return [op.name for op in self.recorder.ops]


class GhostProcess:
    """Started when first called; `ghosts(function)` gives what `function(lab)` returns there, or raises what it raises."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, function: Callable[[Lab], Any], *, hardware: str = "h200", torch_version: str = "2.11.0") -> Any:
        if self._process is None:
            path = os.pathsep.join([str(REPO / "src"), str(REPO)])
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.tracing.ghost.ghost_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
                cwd=REPO,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        send(self._process.stdin, cloudpickle.dumps((function, hardware, torch_version)))
        is_error, content = receive(self._process.stdout)
        if is_error:
            raise content
        return content

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.close()
            self._process.wait(timeout=60)
            self._process.stdout.close()


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    while True:
        try:
            function, hardware, version = pickle.loads(receive(sys.stdin.buffer))
        except EOFError:
            os._exit(0)  # autograd's device thread does not survive an ordinary interpreter shutdown
        try:
            lab = Lab(hardware, version)
            with lab.mode:
                result = function(lab)
            send(answers, (False, result))
        except BaseException as error:
            send(answers, (True, portable(error)))


if __name__ == "__main__":
    main()
