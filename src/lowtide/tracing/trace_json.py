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
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

from lowtide import plain_text
from lowtide.errors import BadRecordError
from lowtide.tracing.step_trace import SCHEMA_VERSION, Allocation, Category, Event, Op, Phase, StepTrace, Target

T = TypeVar("T")
_Decoder = Callable[[object], T]
_FORMAT = "lowtide.step_trace"
# fmt: off
_SCALARS = {
    "model": str, "origin": str, "num_parameters": int, "start_allocated_bytes": int, "start_reserved_bytes": int,
}
_TARGET = {
    "card": str, "torch_version": str, "context_bytes": int, "capacity_bytes": int, "launch_s": float,
    "is_context_assumed": bool,
}
_TABLES = {
    "ops": {"name": "text", "module": "text", "source": "text", "phase": "phase", "seconds": "float"},
    "allocations": {
        "requested_bytes": "int", "bytes": "int", "category": "category", "module": "text", "op": "text", "source": "text",
        "shape": "shape", "dtype": "text", "phase": "phase or None", "born": "event or None", "died": "event or None",
        "num_uses": "int",
    },
    "events": {
        "allocation": "allocation", "is_free": "flag", "op": "op", "phase": "phase",
        "allocated_change": "int", "reserved_change": "int",
    },
}
# fmt: on
"""The columns of each table, and what their values are."""
_KEYS = ("format", "schema_version", *_SCALARS, "target", "settings", "notes", *_TABLES, "uses", "strings", "shapes")
_LATER: dict[str, object] = {
    "about": {},
    "host_bytes": None,
    "pinned_bytes": None,
    "offloaded_bytes": {},
    "simulated_s": None,
}
_LATER_TARGET: dict[str, object] = {"launch_s": 0.0, "is_context_assumed": False}
"""The parts that older files do not have, and what they stand for there."""
_AGAIN = "save the trace again, or take it from an undamaged copy"


def save_trace(trace: StepTrace, path: str | os.PathLike[str]) -> Path:
    """Write a trace to `path`, compressed when the name ends in `.gz`, and return the path.

    A save that is killed leaves the old file, never half of a new one. Folders that do not exist are made.

    Raises:
        BadRecordError: The trace's settings hold something JSON cannot.
    """
    target = Path(path)
    try:
        payload = json.dumps(
            trace_to_dict(trace), separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=_plain_number
        ).encode()
    except (TypeError, ValueError) as error:
        raise BadRecordError(
            f"the trace cannot be written to {target}: {error}; keep its numbers finite, and its settings to numbers, "
            "strings, lists and dicts"
        ) from error
    if target.suffix == ".gz":
        # mtime=0: the same trace gives the same bytes, so that saved traces can be compared and cached.
        payload = gzip.compress(payload, compresslevel=6, mtime=0)
    with plain_text.written_whole(target) as file:
        file.write(payload)
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
            raise BadRecordError(f"{source} cannot be decompressed ({error}); {_AGAIN}") from error
    try:
        record = json.loads(payload, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise BadRecordError(f"{source} is not whole JSON ({error}; it has {len(payload)} bytes); {_AGAIN}") from error
    return trace_from_dict(record, source=str(source))


def trace_to_dict(trace: StepTrace) -> dict[str, object]:
    """The trace as plain lists, dicts, strings and numbers, ready for JSON.

    `settings` is passed on as it is. JSON turns tuples into lists, so a trace with tuples there compares unequal after
    a trip through a file.
    """
    strings: dict[str, int] = {}
    shapes: dict[tuple[int, ...], int] = {}

    def encode(value: Any, kind: str) -> object:
        match kind:
            case "text" | "phase" | "category":
                return strings.setdefault(str(value), len(strings))
            case "shape":
                return shapes.setdefault(value, len(shapes))
            case "flag":
                return int(value)
        return float(value) if kind == "float" else value

    allocated = [trace.start_allocated_bytes, *(event.allocated_bytes for event in trace.events)]
    reserved = [trace.start_reserved_bytes, *(event.reserved_bytes for event in trace.events)]
    computed = {
        "num_uses": [len(allocation.uses) for allocation in trace.allocations],
        "allocated_change": [after - before for before, after in pairwise(allocated)],
        "reserved_change": [after - before for before, after in pairwise(reserved)],
    }

    def column(rows: Iterable[object], name: str, kind: str) -> list[object]:
        kind = kind.removesuffix(" or None")
        values = computed[name] if name in computed else [getattr(row, name) for row in rows]
        return [None if value is None else encode(value, kind) for value in values]

    return {
        "format": _FORMAT,
        "schema_version": trace.schema_version,
        **{key: getattr(trace, key) for key in _SCALARS},
        "target": {key: getattr(trace.target, key) for key in _TARGET},
        "settings": trace.settings,
        "notes": list(trace.notes),
        **{key: getattr(trace, key) for key in _LATER},
        "about": dict(trace.about),
        "offloaded_bytes": dict(trace.offloaded_bytes),
        **{
            table: {name: column(getattr(trace, table), name, kind) for name, kind in columns.items()}
            for table, columns in _TABLES.items()
        },
        "uses": [use for allocation in trace.allocations for use in allocation.uses],
        "strings": list(strings),
        "shapes": [list(shape) for shape in shapes],
    }


def trace_from_dict(record: object, *, source: str = "the record") -> StepTrace:
    """The trace that `trace_to_dict` took apart; `source` names the record in errors.

    Raises:
        BadRecordError: Something is missing, of the wrong type or out of range.
    """
    return _TraceReader(record, source).trace()


def _plain_number(item: object) -> object:
    # Sizes computed with numpy are ints to every reader of a trace, but not to the json module.
    if isinstance(item, np.generic):
        return item.item()
    raise TypeError(f"{item!r} of type {type(item).__name__} has no form in JSON")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number that JSON allows")


# A decoder checks one value and turns it into what the trace holds. Its ValueError says what was expected; the reader
# adds where.


def _exactly(kind: type[T]) -> _Decoder[T]:
    def decode(item: object) -> T:
        if type(item) is not kind:  # not isinstance: True must not pass for 1
            raise ValueError(kind.__name__)
        return item

    return decode


def _index_below(length: int, *, first: int = 0) -> _Decoder[int]:
    def decode(item: object) -> int:
        if type(item) is not int or not first <= item < length:
            raise ValueError(f"an index from {first} to {length - 1}")
        return item

    return decode


def _looked_up(values: Mapping[int, T], noun: str) -> _Decoder[T]:
    def decode(item: object) -> T:
        if type(item) is not int or item not in values:
            raise ValueError(f"the index of a {noun}")
        return values[item]

    return decode


def _or_none(decode: _Decoder[T]) -> _Decoder[T | None]:
    return lambda item: None if item is None else decode(item)


def _shape(item: object) -> tuple[int, ...]:
    if not isinstance(item, list) or not all(type(size) is int for size in item):
        raise ValueError("a list of sizes")
    return tuple(item)


class _TraceReader:
    """Reads a trace from its JSON record.

    Args:
        record: As JSON gives it.
        source: Its name, for errors.

    Raises:
        BadRecordError: It is not a trace, or of another schema version.
    """

    def __init__(self, record: object, source: str) -> None:
        self.source = source
        if not isinstance(record, dict) or record.get("format") != _FORMAT:
            self._fail(f"it does not say that it is of format {_FORMAT!r}")
        if record.get("schema_version") != SCHEMA_VERSION:
            found = record.get("schema_version")
            self._fail(
                f"its schema version is {found!r} and this version of lowtide reads {SCHEMA_VERSION}",
                advice="trace the step again, or read it with the version of lowtide that wrote it",
            )
        self.record = self._keyed("the record", {**_LATER, **record}, (*_KEYS, *_LATER))
        self.tables = {name: self._keyed(name, self.record[name], columns) for name, columns in _TABLES.items()}
        num_rows = {name: self._count_rows(name) for name in _TABLES}
        strings = self._each("strings", self.record["strings"], _exactly(str))
        shapes = self._each("shapes", self.record["shapes"], _shape)
        self.use = _index_below(num_rows["ops"])
        self.decoders: dict[str, _Decoder[Any]] = {
            "int": _exactly(int),
            "float": _exactly(float),
            "flag": _index_below(2),
            "text": _looked_up(dict(enumerate(strings)), "string"),
            "shape": _looked_up(dict(enumerate(shapes)), "shape"),
            "phase": _looked_up({i: Phase(text) for i, text in enumerate(strings) if text in list(Phase)}, "phase"),
            "category": _looked_up(
                {i: Category(text) for i, text in enumerate(strings) if text in list(Category)}, "category"
            ),
            "event": _index_below(num_rows["events"]),
            "allocation": _index_below(num_rows["allocations"]),
            "op": _index_below(num_rows["ops"], first=-1),  # -1: an event before the first op
        }

    def trace(self) -> StepTrace:
        """The trace that the record describes.

        Raises:
            BadRecordError: Something is missing, of the wrong type or out of range.
        """
        record = self.record
        target = self._keyed("target", {**_LATER_TARGET, **self._one("target", record["target"], dict)}, _TARGET)
        about = self._one("about", record["about"], dict)
        self._each("about", list(about.values()), _exactly(str))
        scalars: dict[str, Any] = {key: self._one(key, record[key], kind) for key, kind in _SCALARS.items()}
        return StepTrace(
            **scalars,
            settings=self._one("settings", record["settings"], dict),
            target=Target(**{key: self._one(f"target.{key}", target[key], kind) for key, kind in _TARGET.items()}),
            ops=tuple(Op(**row) for row in self._rows("ops")),
            allocations=tuple(self._allocations()),
            events=tuple(self._events()),
            notes=tuple(self._each("notes", record["notes"], _exactly(str))),
            about=about,
            host_bytes=self._each("host_bytes", [record["host_bytes"]], _or_none(_exactly(int)))[0],
            pinned_bytes=self._each("pinned_bytes", [record["pinned_bytes"]], _or_none(_exactly(int)))[0],
            offloaded_bytes=self._numbers("offloaded_bytes", record["offloaded_bytes"], int),
            simulated_s=self._simulated(record["simulated_s"]),
        )

    def _simulated(self, item: object) -> dict[str, float] | None:
        if item is None:
            return None
        found = self._numbers("simulated_s", item, float)
        if "step" not in found:
            self._fail("simulated_s lacks step")
        return found

    def _numbers(self, name: str, item: object, kind: type[T]) -> dict[str, T]:
        found: dict[str, object] = self._one(name, item, dict)
        return dict(zip(found, self._each(name, list(found.values()), _exactly(kind)), strict=True))

    def _allocations(self) -> Iterator[Allocation]:
        uses = self._each("uses", self.record["uses"], self.use)
        rows = self._rows("allocations")
        counts = [row.pop("num_uses") for row in rows]
        if min(counts, default=0) < 0 or sum(counts) != len(uses):
            self._fail(f"allocations.num_uses sums to {sum(counts)} and there are {len(uses)} uses")
        remaining = iter(uses)
        for row, count in zip(rows, counts, strict=True):
            yield Allocation(**row, uses=tuple(islice(remaining, count)))

    def _events(self) -> Iterator[Event]:
        start = self.record["start_allocated_bytes"], self.record["start_reserved_bytes"]
        allocated, reserved = (self._one("a size before the step", size, int) for size in start)
        for row in self._rows("events"):
            allocated += row.pop("allocated_change")
            reserved += row.pop("reserved_change")
            is_free = bool(row.pop("is_free"))
            yield Event(**row, is_free=is_free, allocated_bytes=allocated, reserved_bytes=reserved)

    def _rows(self, table: str) -> list[dict[str, Any]]:
        columns = []
        for name, kind in _TABLES[table].items():
            decode = self.decoders[kind.removesuffix(" or None")]
            decode = _or_none(decode) if kind.endswith(" or None") else decode
            columns.append(self._each(f"{table}.{name}", self.tables[table][name], decode))
        return [dict(zip(_TABLES[table], row, strict=True)) for row in zip(*columns, strict=True)]

    def _each(self, name: str, items: object, decode: _Decoder[T]) -> list[T]:
        decoded: list[T] = []
        for item in self._one(name, items, list):
            try:
                decoded.append(decode(item))
            except ValueError as error:
                self._fail(f"{name}[{len(decoded)}] is {item!r}, expected {error}")
        return decoded

    def _one(self, name: str, item: object, kind: type[T]) -> T:
        if type(item) is not kind:
            self._fail(f"{name} is {str(item)[:40]!r}, expected {kind.__name__}")
        return item

    def _keyed(self, name: str, item: object, keys: Iterable[str]) -> dict[str, object]:
        found: dict[str, object] = self._one(name, item, dict)
        missing, unknown = sorted(set(keys) - set(found)), sorted(set(found) - set(keys))
        if missing:
            self._fail(f"{name} lacks {', '.join(missing)}")
        if unknown:
            self._fail(f"{name} has unknown parts {', '.join(unknown)}")
        return found

    def _count_rows(self, table: str) -> int:
        lengths = {
            column: len(self._one(f"{table}.{column}", items, list)) for column, items in self.tables[table].items()
        }
        if len(set(lengths.values())) != 1:
            self._fail(f"the columns of {table} have different lengths {lengths}")
        return next(iter(lengths.values()))

    def _fail(self, what: str, *, advice: str = _AGAIN) -> NoReturn:
        raise BadRecordError(f"{self.source} cannot be read as a trace: {what}; {advice}")
