"""StepTrace on disk: compact, columnar JSON that gives back exactly the trace that was saved.

A trace holds tens of thousands of small records that repeat the same few hundred names. So each kind of record is a
table of columns, names and shapes are indices into two lists, and the byte curves are differences. 10,000 ops and
30,000 events take 2.5 MB, and a tenth of that as `.json.gz`.

The file describes itself (phases and categories are stored by name), and nothing in it is trusted: whatever does not
fit raises `BadRecordError` with the name of the file and of the part that is wrong.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Hashable
from itertools import pairwise
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

import numpy as np

from lowtide.errors import BadRecordError
from lowtide.tracing.step_trace import StepTrace
from lowtide.tracing.trace_format import ABOUT, AGAIN, FORMAT, SCALARS, TARGET
from lowtide.tracing.trace_reader import TraceReader

K = TypeVar("K", bound=Hashable)


def save_trace(trace: StepTrace, path: str | os.PathLike[str]) -> Path:
    """Write a trace to `path`, compressed when the name ends in `.gz`, and return the path.

    The file is written aside and renamed, so that a save that is killed leaves the old file, never half of a new one.
    Folders that do not exist are made.

    Raises:
        BadRecordError: The trace's settings hold something JSON cannot.
    """
    target = Path(path)
    payload = _dump(trace_to_dict(trace), str(target)).encode()
    if target.suffix == ".gz":
        # mtime=0: the same trace gives the same bytes, so that saved traces can be compared and cached.
        payload = gzip.compress(payload, compresslevel=6, mtime=0)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with aside.open("wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)
    return target


def load_trace(path: str | os.PathLike[str]) -> StepTrace:
    """The trace that `save_trace` wrote.

    Raises:
        BadRecordError: The file is cut short, corrupt, not a trace, or of another schema version.
        OSError: There is no such file, or it cannot be read.
    """
    source = Path(path)
    payload = source.read_bytes()
    if source.suffix == ".gz":
        try:
            payload = gzip.decompress(payload)
        except (EOFError, OSError, zlib.error) as error:
            raise BadRecordError(f"{source} cannot be decompressed ({error}); {AGAIN}") from error
    try:
        record = json.loads(payload, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise BadRecordError(f"{source} is not whole JSON ({error}; it has {len(payload)} bytes); {AGAIN}") from error
    return trace_from_dict(record, source=str(source))


def trace_to_dict(trace: StepTrace) -> dict[str, object]:
    """The trace as plain lists, dicts, strings and numbers, ready for JSON.

    `settings` is passed on as it is. JSON turns tuples into lists, so a trace with tuples there compares unequal after
    a trip through a file.
    """
    strings, shapes = _Interned[str](), _Interned[tuple[int, ...]]()
    ops, allocations, events = trace.ops, trace.allocations, trace.events
    allocated = [trace.start_allocated_bytes, *(event.allocated_bytes for event in events)]
    reserved = [trace.start_reserved_bytes, *(event.reserved_bytes for event in events)]
    tables = {
        "ops": {
            "name": [strings(op.name) for op in ops],
            "module": [strings(op.module) for op in ops],
            "source": [strings(op.source) for op in ops],
            "phase": [strings(op.phase.value) for op in ops],
            "seconds": [float(op.seconds) for op in ops],
        },
        "allocations": {
            "requested_bytes": [allocation.requested_bytes for allocation in allocations],
            "bytes": [allocation.bytes for allocation in allocations],
            "category": [strings(allocation.category.value) for allocation in allocations],
            "module": [strings(allocation.module) for allocation in allocations],
            "op": [strings(allocation.op) for allocation in allocations],
            "source": [strings(allocation.source) for allocation in allocations],
            "shape": [shapes(allocation.shape) for allocation in allocations],
            "dtype": [strings(allocation.dtype) for allocation in allocations],
            "phase": [None if a.phase is None else strings(a.phase.value) for a in allocations],
            "born": [allocation.born for allocation in allocations],
            "died": [allocation.died for allocation in allocations],
            "num_uses": [len(allocation.uses) for allocation in allocations],
        },
        "events": {
            "allocation": [event.allocation for event in events],
            "is_free": [int(event.is_free) for event in events],
            "op": [event.op for event in events],
            "phase": [strings(event.phase.value) for event in events],
            "allocated_change": [after - before for before, after in pairwise(allocated)],
            "reserved_change": [after - before for before, after in pairwise(reserved)],
        },
    }
    return {
        "format": FORMAT,
        "schema_version": trace.schema_version,
        **{key: getattr(trace, key) for key in SCALARS},
        "target": {key: getattr(trace.target, key) for key in TARGET},
        "settings": trace.settings,
        "notes": list(trace.notes),
        ABOUT: dict(trace.about),
        **tables,
        "uses": [use for allocation in allocations for use in allocation.uses],
        "strings": strings.values,
        "shapes": [list(shape) for shape in shapes.values],
    }


def trace_from_dict(record: object, *, source: str = "the record") -> StepTrace:
    """The trace that `trace_to_dict` took apart; `source` names the record in errors.

    Raises:
        BadRecordError: Something is missing, of the wrong type or out of range.
    """
    return TraceReader(record, source).trace()


class _Interned(Generic[K]):
    """Values in order of first sight, each kept once; calling it gives a value's index."""

    def __init__(self) -> None:
        self._index: dict[K, int] = {}

    def __call__(self, value: K) -> int:
        return self._index.setdefault(value, len(self._index))

    @property
    def values(self) -> list[K]:
        return list(self._index)


def _dump(record: dict[str, object], name: str) -> str:
    try:
        return json.dumps(record, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=_plain_number)
    except (TypeError, ValueError) as error:
        raise BadRecordError(
            f"the trace cannot be written to {name}: {error}; keep its numbers finite, and its settings to numbers, "
            "strings, lists and dicts"
        ) from error


def _plain_number(item: object) -> object:
    # Sizes computed with numpy are ints to every reader of a trace, but not to the json module.
    if isinstance(item, np.generic):
        return item.item()
    raise TypeError(f"{item!r} of type {type(item).__name__} has no form in JSON")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number that JSON allows")
