"""EmulatedDevice: the dispatch mode that sees every storage of a thread, where the host plays the device.

One per thread, however many models are managed there: it goes below all other modes when the first `TrackedMemory` asks
for it and is taken away after the last. Where it cannot be taken away at once (another thread asks, an operator is
running in it) it stays, inert, and the next that asks finds it there.
"""

from __future__ import annotations

import enum
import gc
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from lowtide import compat
from lowtide.errors import EmulatedOutOfMemoryError

Seen = tuple[Tensor, torch.UntypedStorage]
"""A tensor and the storage that holds its bytes."""


class Mark(enum.Enum):
    """Why a storage is not counted as the device's memory when an operator brings it."""

    HOST = "host"
    """The storage stands for memory of the host. Results that are computed from such storages alone are on the host too."""
    CHARGED = "charged"
    """The storage is the device's, and is counted by the code that grows and shrinks it."""


class _Marked(weakref.ref[torch.UntypedStorage]):
    __slots__ = ("key", "mark")

    def __new__(cls, storage: torch.UntypedStorage, mark: Mark) -> _Marked:
        del mark
        return super().__new__(cls, storage, _unmark)

    def __init__(self, storage: torch.UntypedStorage, mark: Mark) -> None:
        self.key, self.mark = id(storage), mark


# A fact about the storage and not about one tracker: the host memory of one model is host memory to all.
_marks: dict[int, _Marked] = {}


def _unmark(marked: weakref.ref[torch.UntypedStorage]) -> None:
    # Runs before the dead storage's `id` can be given to another.
    assert isinstance(marked, _Marked)
    if _marks.get(marked.key) is marked:
        del _marks[marked.key]


def mark_of(storage: torch.UntypedStorage) -> Mark | None:
    """The storage's mark; None for one that operators bring to the device."""
    marked = _marks.get(id(storage))
    return None if marked is None else marked.mark


def set_mark(storage: torch.UntypedStorage, mark: Mark | None) -> None:
    """Mark a storage for as long as it lives, or take its mark away."""
    if mark is None:
        _marks.pop(id(storage), None)
    else:
        _marks[id(storage)] = _Marked(storage, mark)


class Tracker(Protocol):
    """Counts the memory of one session; a `TrackedMemory`."""

    def hand_over(self, old: torch.UntypedStorage, new: torch.UntypedStorage) -> None:
        """A new storage takes the place of one of the same size, which dies at once."""

    def observe(self, func: Any, read: Sequence[Seen], made: Sequence[Seen]) -> EmulatedOutOfMemoryError | None:
        """An operator has run; the error where its memory does not fit."""

    def strike(self, storage: torch.UntypedStorage) -> None:
        """Take a storage off the books, where it is on them."""


class EmulatedDevice(compat.WatchingMode):
    """Runs every operator as it is, and tells the trackers which storages it read and made. Holds no tensor.

    Note [Sums of gradients]
    Where autograd holds the only reference to a gradient it adds the next one in place, but not under a dispatch mode.
    The sum is computed as autograd asks for it, and takes over the bytes of its first term, which nobody reads again.
    So the bytes are those of an unwatched step. A mode of the user's on top hides whose sum it is; then the first term
    counts until it is freed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self._trackers: tuple[weakref.ref[Tracker], ...] = ()
        self._host_depth = 0
        _devices.add(self)

    @classmethod
    def of_this_thread(cls) -> EmulatedDevice:
        """The thread's device, made at the first call."""
        device: EmulatedDevice | None = getattr(_of_thread, "device", None)
        if device is None:
            device = _of_thread.device = cls()
        return device

    def attach(self, tracker: Tracker) -> None:
        """Tell the tracker of this thread's operators from now on, until `detach` or the tracker's end."""
        compat.num_sole_references()
        self._trackers = (*self._trackers, weakref.ref(tracker, self._drop))
        if not compat.has_mode(self):
            compat.push_mode_below(self)

    def detach(self, tracker: Tracker) -> None:
        """Tell it no longer. May be called from any thread."""
        self._trackers = tuple(reference for reference in self._trackers if reference() not in (None, tracker))
        if not self._trackers:
            compat.remove_mode(self)

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """What operators make inside is memory of the host."""
        self._host_depth += 1
        try:
            yield
        finally:
            self._host_depth -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._trackers:
            return func(*args, **kwargs)
        # A wrapper subclass first takes itself apart; its inner tensors come back here and are the ones with memory.
        if types and any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        summed = _storage_of_sum(func, args)
        result = func(*args, **kwargs)
        error = self._tell(func, args, kwargs, result, summed)
        if error is None:
            return result
        # The traceback holds this frame: nothing in it may keep the failed operator's result or arguments, nor the error
        # itself, which would be a cycle that holds all of the caller's frames until the collector comes.
        del result, args, kwargs, summed
        try:
            raise error
        finally:
            del error

    def _tell(
        self, func: Any, args: Any, kwargs: Any, result: Any, summed: torch.UntypedStorage | None
    ) -> EmulatedOutOfMemoryError | None:
        # After the operator: `out=` and `resize_` may have given an argument its memory.
        read: list[Seen] = []
        _collect(args, read)
        if kwargs:
            _collect(tuple(kwargs.values()), read)
        made: list[Seen] = []
        _collect(result, made)
        if summed is not None and made:
            read = [seen for seen in read if seen[1] is not summed]
        if self._host_depth or (_marks and read and all(mark_of(storage) is Mark.HOST for _, storage in read)):
            known = {id(storage) for _, storage in read}
            for _, storage in made:
                if id(storage) not in known and mark_of(storage) is None:
                    set_mark(storage, Mark.HOST)
        refusals: list[tuple[weakref.ref[Tracker], EmulatedOutOfMemoryError]] = []
        for reference in self._trackers:
            tracker = reference()
            if tracker is not None:
                if summed is not None and made:
                    tracker.hand_over(summed, made[0][1])
                error = tracker.observe(func, read, made)
                refusals += [] if error is None else [(reference, error)]
        tracker = None  # a strong reference would make it look alive
        return _meant(refusals) if refusals else None

    def _drop(self, reference: weakref.ref[Tracker]) -> None:
        self._trackers = tuple(other for other in self._trackers if other is not reference)


def _meant(
    refusals: list[tuple[weakref.ref[Tracker], EmulatedOutOfMemoryError]],
) -> EmulatedOutOfMemoryError | None:
    """The last refusal by a tracker that is still somebody's.

    A model and its session hold each other: one that was dropped without `close` lives until the collector comes. Its
    budget is nobody's any more, and must not stop what others compute.
    """
    gc.collect()
    return next((error for reference, error in reversed(refusals) if reference() is not None), None)


_of_thread = threading.local()
_devices: weakref.WeakSet[EmulatedDevice] = weakref.WeakSet()


def living_trackers() -> list[Tracker]:
    """All trackers that have started, in any thread."""
    references = [reference for device in list(_devices) for reference in device._trackers]
    return [tracker for tracker in (reference() for reference in references) if tracker is not None]


def _leave_to_parent() -> None:
    # A forked data loader's worker collates on the host, and its bytes are not those of the parent's device.
    for device in _devices:
        device._trackers = ()


os.register_at_fork(after_in_child=_leave_to_parent)


def storages_of(memory: Tensor | torch.UntypedStorage) -> list[torch.UntypedStorage]:
    """The storages behind a tensor, those of the inner tensors for a wrapper subclass; none for sparse and meta ones."""
    if isinstance(memory, torch.UntypedStorage):
        return [memory]
    if hasattr(type(memory), "__tensor_flatten__"):
        names, _ = memory.__tensor_flatten__()  # type: ignore[attr-defined]  # a protocol that torch gives no type
        return [storage for name in names for storage in storages_of(getattr(memory, name))]
    storage = compat.plain_storage(memory)
    return [] if storage is None else [storage]


_PLAIN = (Tensor, torch.nn.Parameter)


def _fast_storage(tensor: Tensor) -> torch.UntypedStorage | None:
    # Ten times as fast as `plain_storage`, which guards against what only a subclass could do.
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def _subclass_storage(tensor: Tensor) -> torch.UntypedStorage | None:
    return None if hasattr(type(tensor), "__tensor_flatten__") else compat.plain_storage(tensor)


def _collect(value: Any, found: list[Seen]) -> None:
    if isinstance(value, Tensor):
        storage = _fast_storage(value) if type(value) in _PLAIN else _subclass_storage(value)
        if storage is not None and storage.device.type == "cpu":
            found.append((value, storage))
    elif isinstance(value, list | tuple):
        for item in value:
            _collect(item, found)


# -- the engine's sums ------------------------------------------------------------------------------------------------

_PLUMBING = (__file__, compat.DISPATCH_FILE)


def _storage_of_sum(func: Any, args: Sequence[Any]) -> torch.UntypedStorage | None:
    """The storage that autograd would have added to in place, were it not watched. See Note [Sums of gradients]."""
    if func is not torch.ops.aten.add.Tensor or not compat.is_called_from_engine(_PLUMBING, has_own_thread=False):
        return None
    return compat.plain_storage(args[0]) if compat.would_sum_in_place(args) else None
