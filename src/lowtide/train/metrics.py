"""What a run leaves for machines: a row of JSON for each step and event, and curves for TensorBoard.

Rows are appended whole, in the order of what happened. A run that goes on from an earlier step first cuts the rows after it, so
that each step has one row however often the run was killed; a line that a kill has torn is cut too.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lowtide.errors import MissingExtraError
from lowtide.plain_text import Plain

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

_CURVES = ("loss", "lr", "grad_norm", "tokens_per_s", "step_s", "device_peak_bytes", "host_peak_bytes")


class MetricsLog:
    """`metrics.jsonl`: rows with a `kind` and the `step` that they belong to.

    Args:
        path: The file; made where it is missing.
        step: Where the run begins; rows of later steps are cut.
    """

    def __init__(self, path: Path, *, step: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        end = whole_bytes(path, step)
        if end < path.stat().st_size:
            os.truncate(path, end)
        self._file = path.open("ab", buffering=0)

    def add(self, kind: str, step: int, **values: Plain) -> None:
        """Append a row; numbers that are not finite become null, which is all that JSON has for them."""
        row = {"kind": kind, "step": step, "time": round(time.time(), 3)} | {key: _held(values[key]) for key in values}
        # One write for the whole line: only a machine that loses power can tear it.
        self._file.write(json.dumps(row, allow_nan=False).encode() + b"\n")

    def sync(self) -> None:
        """Bring the rows to the disk, so that no checkpoint is newer than them."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """End. May be repeated."""
        self._file.close()


class Unlogged(MetricsLog):
    """The log of a rank that writes nothing: rank 0 does."""

    def __init__(self) -> None:
        pass

    def add(self, kind: str, step: int, **values: Plain) -> None:
        """Nothing."""

    def sync(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def whole_bytes(path: Path, step: int) -> int:
    """Bytes of the rows up to that step; a row that is torn or no JSON ends them, as a row of a later step does."""
    end = 0
    with path.open("rb") as file:
        for line in file:
            row = _row(line)
            if row is None or int(row["step"]) > step:
                break
            end += len(line)
    return end


def _row(line: bytes) -> dict[str, int] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    is_whole = line.endswith(b"\n") and isinstance(row, dict) and isinstance(row.get("step"), int)
    return row if is_whole else None


def _held(value: Plain) -> Plain:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def require_tensorboard() -> None:
    """Find out before the work begins whether curves can be written.

    Raises:
        MissingExtraError: TensorBoard is not installed.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise MissingExtraError("tensorboard", "log.tensorboard")


class Curves:
    """TensorBoard's files; steps after the one that the run begins with are taken back.

    Args:
        folder: Gets the files.
        step: Where the run begins.
    """

    def __init__(self, folder: Path, *, step: int = 0) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter  # a second of imports

        self._writer: SummaryWriter = SummaryWriter(str(folder), purge_step=step + 1)

    def add(self, step: int, values: Mapping[str, Plain]) -> None:
        """The figures of a step that have a curve."""
        for name in _CURVES:
            value = values.get(name)
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)

    def add_evaluation(self, step: int, loss: float) -> None:
        """The loss on what is held out."""
        self._writer.add_scalar("evaluation_loss", loss, step)

    def close(self) -> None:
        """End."""
        self._writer.close()
