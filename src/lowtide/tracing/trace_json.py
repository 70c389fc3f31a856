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
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

import numpy as np

from lowtide.errors import BadRecordError
from lowtide.tracing.step_trace import SCHEMA_VERSION, Allocation, Category, Event, Op, Phase, StepTrace, Target

K = TypeVar("K", bound=Hashable)
_FORMAT = "lowtide.step_trace"
_SCALARS = ("model", "origin", "num_parameters", "start_allocated_bytes", "start_reserved_bytes")
_TARGET = ("card", "torch_version", "context_bytes", "capacity_bytes")
_TABLES = {
    "ops": ("name", "module", "source", "phase", "seconds"),
    "allocations": (
        *("requested_bytes", "bytes", "category", "module", "op", "source", "shape", "dtype"),
        *("phase", "born", "died", "num_uses"),
    ),
    "events": ("allocation", "is_free", "op", "phase", "allocated_change", "reserved_change"),
}
_KEYS = ("format", "schema_version", *_SCALARS, "target", "settings", "notes", *_TABLES, "uses", "strings", "shapes")
_ABOUT = "about"
_ON_HOST = ("host_bytes", "pinned_bytes")
_LATER: dict[str, object] = {_ABOUT: {}, **dict.fromkeys(_ON_HOST)}
"""The parts that older files do not have, and what they stand for there."""
_AGAIN = "save the trace again, or take it from an undamaged copy"
T = TypeVar("T")
_Decoder = Callable[[object], T]


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
        "format": _FORMAT,
        "schema_version": trace.schema_version,
        **{key: getattr(trace, key) for key in _SCALARS},
        "target": {key: getattr(trace.target, key) for key in _TARGET},
        "settings": trace.settings,
        "notes": list(trace.notes),
        _ABOUT: dict(trace.about),
        **{key: getattr(trace, key) for key in _ON_HOST},
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
    return _TraceReader(record, source).trace()


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
    """Takes one record apart.

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
        self.num_rows = {name: self._count_rows(name) for name in _TABLES}
        strings = self._each("strings", self.record["strings"], _exactly(str))
        shapes = self._each("shapes", self.record["shapes"], _shape)
        self.text = _looked_up(dict(enumerate(strings)), "string")
        self.shape = _looked_up(dict(enumerate(shapes)), "shape")
        phases, categories = {p.value: p for p in Phase}, {c.value: c for c in Category}
        self.phase = _looked_up({i: phases[text] for i, text in enumerate(strings) if text in phases}, "phase")
        self.category = _looked_up(
            {i: categories[text] for i, text in enumerate(strings) if text in categories}, "category"
        )

    def trace(self) -> StepTrace:
        """Put together again.

        Raises:
            BadRecordError: Something is missing, of the wrong type or out of range.
        """
        record, target = self.record, self._keyed("target", self.record["target"], _TARGET)
        return StepTrace(
            model=self._one("model", record["model"], str),
            origin=self._one("origin", record["origin"], str),
            target=Target(
                card=self._one("target.card", target["card"], str),
                torch_version=self._one("target.torch_version", target["torch_version"], str),
                context_bytes=self._one("target.context_bytes", target["context_bytes"], int),
                capacity_bytes=self._one("target.capacity_bytes", target["capacity_bytes"], int),
            ),
            settings=self._one("settings", record["settings"], dict),
            num_parameters=self._one("num_parameters", record["num_parameters"], int),
            start_allocated_bytes=self._one("start_allocated_bytes", record["start_allocated_bytes"], int),
            start_reserved_bytes=self._one("start_reserved_bytes", record["start_reserved_bytes"], int),
            ops=tuple(self._ops()),
            allocations=tuple(self._allocations()),
            events=tuple(self._events()),
            notes=tuple(self._each("notes", record["notes"], _exactly(str))),
            about=self._words(_ABOUT),
            host_bytes=self._each("host_bytes", [record["host_bytes"]], _or_none(_exactly(int)))[0],
            pinned_bytes=self._each("pinned_bytes", [record["pinned_bytes"]], _or_none(_exactly(int)))[0],
        )

    def _words(self, name: str) -> dict[str, str]:
        found = self._one(name, self.record[name], dict)
        self._each(name, list(found.values()), _exactly(str))
        return found

    def _ops(self) -> Iterator[Op]:
        names, modules, sources = (self._column("ops", name, self.text) for name in ("name", "module", "source"))
        phases = self._column("ops", "phase", self.phase)
        seconds = self._column("ops", "seconds", _exactly(float))
        for name, module, source, phase, time in zip(names, modules, sources, phases, seconds, strict=True):
            yield Op(name=name, module=module, source=source, phase=phase, seconds=time)

    def _allocations(self) -> Iterator[Allocation]:
        event = _or_none(_index_below(self.num_rows["events"]))
        num_uses = self._column("allocations", "num_uses", _exactly(int))
        uses = self._each("uses", self.record["uses"], _index_below(self.num_rows["ops"]))
        if min(num_uses, default=0) < 0 or sum(num_uses) != len(uses):
            self._fail(f"allocations.num_uses sums to {sum(num_uses)} and there are {len(uses)} uses")
        columns = zip(
            *(self._column("allocations", name, _exactly(int)) for name in ("requested_bytes", "bytes")),
            self._column("allocations", "category", self.category),
            *(self._column("allocations", name, self.text) for name in ("module", "op", "source", "dtype")),
            self._column("allocations", "shape", self.shape),
            self._column("allocations", "phase", _or_none(self.phase)),
            *(self._column("allocations", name, event) for name in ("born", "died")),
            num_uses,
            strict=True,
        )
        rest = iter(uses)
        for requested, block, category, module, op, source, dtype, shape, phase, born, died, count in columns:
            yield Allocation(
                requested_bytes=requested,
                bytes=block,
                category=category,
                module=module,
                op=op,
                source=source,
                shape=shape,
                dtype=dtype,
                phase=phase,
                born=born,
                died=died,
                uses=tuple(islice(rest, count)),
            )

    def _events(self) -> Iterator[Event]:
        columns = zip(
            self._column("events", "allocation", _index_below(self.num_rows["allocations"])),
            self._column("events", "is_free", _index_below(2)),
            # -1: an event before the first op.
            self._column("events", "op", _index_below(self.num_rows["ops"], first=-1)),
            self._column("events", "phase", self.phase),
            self._running_sum("allocated"),
            self._running_sum("reserved"),
            strict=True,
        )
        for allocation, is_free, op, phase, allocated, reserved in columns:
            yield Event(
                allocation=allocation,
                is_free=bool(is_free),
                op=op,
                phase=phase,
                allocated_bytes=allocated,
                reserved_bytes=reserved,
            )

    def _running_sum(self, name: str) -> Iterator[int]:
        start = self._one(f"start_{name}_bytes", self.record[f"start_{name}_bytes"], int)
        changes = self._column("events", f"{name}_change", _exactly(int))
        return islice(accumulate(changes, initial=start), 1, None)

    def _column(self, table: str, column: str, decode: _Decoder[T]) -> list[T]:
        return self._each(f"{table}.{column}", self.tables[table][column], decode)

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
