"""What the runner and the worker of one run say to each other: a request in a file, and lines through a pipe.

The pipe is the worker's own, so that nothing a model prints can stand between the lines.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from lowtide.lab.progress import Progress
from lowtide.lab.recipe import Recipe
from lowtide.lab.record import Surroundings


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One run, as the worker is asked for it."""

    name: str
    """The recipe's."""
    recipe: Recipe
    record: Path
    """Where the record goes; whole, or not at all."""
    tensorboard: Path
    """The run's own folder."""
    experiment: str
    """What runs it, as `package.module:function`; called as `lowtide.lab.experiment.run_experiment` is."""
    import_paths: tuple[str, ...]
    """`sys.path` of the asker, for models of its own."""
    progress_fd: int
    """The pipe's end for writing."""
    is_alone: bool = True
    """Whether the asker knows of no other work on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The record is written; what is left is to end the process."""


Message = Surroundings | Progress | Done
_KINDS: dict[str, type[Surroundings] | type[Progress] | type[Done]] = {
    "surroundings": Surroundings,
    "progress": Progress,
    "done": Done,
}


def encode(message: Message) -> bytes:
    """One line. Numbers that are not finite stay what they are, as Python's JSON allows."""
    kind = next(name for name, known in _KINDS.items() if isinstance(message, known))
    return json.dumps({"kind": kind, **asdict(message)}).encode() + b"\n"


def decode(line: bytes) -> Message | None:
    """The message of a line; None for anything else, such as the half line of a process that died in it."""
    try:
        plain = json.loads(line)
        return _KINDS[plain.pop("kind")](**plain)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
