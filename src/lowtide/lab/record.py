"""RunRecord: everything that is known about one run of a recipe, as one JSON file."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lowtide import config
from lowtide.errors import BadRecordError, ConfigError
from lowtide.plain_text import Plain, written_whole


def write_json(path: Path, plain: Mapping[str, object]) -> None:
    """Write a file in one piece, so that a run killed here leaves no half of it."""
    with written_whole(path) as file:
        file.write(json_text(plain).encode())


def json_text(plain: Mapping[str, object]) -> str:
    """JSON with a line for each field and for each row of a table: small, and a diff shows what differs."""
    return "{" + ",\n".join(f"{_compact(key)}:{_field_text(value)}" for key, value in plain.items()) + "}\n"


def _field_text(value: object) -> str:
    """A table has a line for each of its mappings, whether they are listed or named."""
    if isinstance(value, list | tuple) and value and all(isinstance(row, dict) for row in value):
        return "[\n" + ",\n".join(map(_compact, value)) + "\n]"
    if isinstance(value, dict) and value and all(isinstance(row, dict) for row in value.values()):
        return "{\n" + ",\n".join(f"{_compact(name)}:{_compact(row)}" for name, row in value.items()) + "\n}"
    return _compact(value)


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def read_json(path: Path, schema: str) -> dict[str, Any]:
    """What a file holds, without its schema.

    Raises:
        BadRecordError: It cannot be read, is no JSON, or is of another schema; the path is in the message.
    """
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadRecordError(f"{path}: cannot be read as JSON: {error}") from error
    found = plain.pop("schema", None) if isinstance(plain, dict) else type(plain).__name__
    if not isinstance(plain, dict) or found != schema:
        raise BadRecordError(f"{path}: the schema is {found!r}, not {schema!r}")
    return plain


SCHEMA = "lowtide.lab_run/1"
EVALUATION = "evaluation"
"""The one phase that is no part of a step."""


class Outcome(enum.StrEnum):
    """How a run ended."""

    FINISHED = "finished"
    OUT_OF_MEMORY = "out of memory"
    FAILED = "failed"
    """It ended with an error, which the message has."""
    KILLED = "killed"
    """It ended without a word: by a signal, the system's memory killer or a time limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Where and with what a run was made."""

    date: str
    """When it began, ISO 8601 with the zone."""
    commit: str
    """The commit of the sources; "unknown" for an installed package."""
    device: str
    """The GPU's name; `cpu, emulated` where the host stands in for one."""
    torch: str
    lowtide: str
    python: str
    platform: str
    processor: str = "unknown"
    """The host's processor, with the number of its cores."""
    memory_bytes: int | None = None
    """The host's memory; None in older records."""
    driver: str | None = None
    """Version of the GPU's driver; None where there is no GPU, or in older records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFigures:
    """Bytes of the device in the steady state, counted by the allocator, or by the emulation."""

    peak_bytes: int
    """`max_memory_allocated` over all steps and the evaluation; tracked bytes on an emulated device."""
    by_phase: dict[str, int]
    """The peak of each phase: forward, backward, update, evaluation."""
    reserved_bytes: int | None = None
    """`max_memory_reserved`; None on an emulated device."""
    host_bytes: int | None = None
    """The process's largest resident size."""
    at_peak: dict[str, int] = field(default_factory=dict)
    """The peak by category, from one more step that was watched; empty where none was."""
    timeline: tuple[tuple[str, int], ...] = ()
    """(phase, bytes) through that step, thinned out for drawing; empty where none was watched."""

    @property
    def training_peak_bytes(self) -> int | None:
        """The largest of all phases but the evaluation; None where no phase of training is known."""
        return max((num_bytes for phase, num_bytes in self.by_phase.items() if phase != EVALUATION), default=None)

    @property
    def peak_phase(self) -> str:
        """The phase with the largest peak; the first of equal ones."""
        return max(self.by_phase, key=self.by_phase.__getitem__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedFigures:
    """What the trace said before the run."""

    peak_bytes: int
    peak_phase: str
    at_peak: dict[str, int]
    reserved_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedFigures:
    """Seconds, by a clock that waits for the device at the end of each step."""

    step_s: tuple[float, ...]
    """The time of each step, the first with its compilation and first allocations."""
    samples_per_step: int
    evaluation_s: float | None = None
    """The time of the evaluation after the last step, with its own compilation where none was before; None where there was none, or
    it was not measured."""
    is_alone: bool = True
    """Whether no other work was on the device: only then do the times say how fast the run is."""

    @property
    def samples_per_s(self) -> float:
        """The speed over all steps, the first with its compilation among them."""
        return len(self.step_s) * self.samples_per_step / sum(self.step_s)

    @property
    def samples_per_s_with_evaluation(self) -> float | None:
        """The samples of all steps over the time of the steps and the evaluation, as published; None where that is not known."""
        if self.evaluation_s is None:
            return None
        return len(self.step_s) * self.samples_per_step / (sum(self.step_s) + self.evaluation_s)

    def warm_samples_per_s(self, skipped: int = 10) -> float | None:
        """The speed without the first steps; None for a run that has no more."""
        kept = self.step_s[skipped:]
        return len(kept) * self.samples_per_step / sum(kept) if kept else None

    def between_s(self, first: int = 10, last: int = 100) -> float | None:
        """Seconds from the end of the step numbered `first`, counted from 1, to that of `last`; None for a shorter run."""
        return sum(self.step_s[first:last]) if len(self.step_s) >= last else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """How one run was made, how it ended, and all that was measured."""

    name: str
    """The recipe's, such as `peak_memory/control`."""
    outcome: Outcome
    surroundings: Surroundings
    recipe: dict[str, Plain]
    """The recipe as it was run, with everything that it extends and every override in it."""
    message: str = ""
    """What the error said, if it did not finish."""
    parameters: int | None = None
    losses: tuple[float, ...] = ()
    evaluation_loss: float | None = None
    """After the last step: mean over the batches of the validation samples of each batch's mean."""
    evaluations: tuple[tuple[int, float], ...] = ()
    """(step, loss) of each evaluation before that one, as the recipe's `evaluation.after` asks for them."""
    memory: MemoryFigures | None = None
    predicted: PredictedFigures | None = None
    speed: SpeedFigures | None = None
    session: dict[str, Plain] | None = None
    """The session's statistics; None for plain torch."""
    remarks: tuple[str, ...] = ()
    """What a reader of the figures should know, such as that TensorBoard was not there."""


def perplexity(loss: float) -> float:
    """The perplexity of a mean loss in nats; infinite where it is beyond any float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def write_record(record: RunRecord, path: Path) -> None:
    """Write a record; whole or not at all, so that a run killed here leaves no half file."""
    # What is plain already goes as it is: a config has no place for data of any shape.
    body = config.to_plain(replace(record, recipe={}, session=None))
    write_json(path, {"schema": SCHEMA, **body, "recipe": record.recipe, "session": record.session})


def read_record(path: Path) -> RunRecord:
    """The record of a file.

    Raises:
        BadRecordError: It cannot be read, is no JSON, is of another kind, or lacks something; the path is in the message.
    """
    plain = read_json(path, SCHEMA)
    recipe, session = plain.pop("recipe", None), plain.pop("session", None)
    if not isinstance(recipe, dict) or not isinstance(session, dict | None):
        raise BadRecordError(f"{path}: 'recipe' and 'session' must be mappings")
    try:
        return replace(config.from_plain(RunRecord, {**plain, "recipe": {}}), recipe=recipe, session=session)
    except ConfigError as error:
        raise BadRecordError(f"{path}: {error}") from error
