"""TrackedMemory: the bytes of an emulated device, exact after every operator, and its budget.

What counts: every storage that an operator of the starting thread makes, from birth to death, at its current size
(activations, gradients, temporaries, state); what `include` adds (resident weights and buffers); what `charge` adds
(memory that no operator brings); and what was made elsewhere, from the first operator that reads it together with the
device's memory: a batch that meets the weights. Such a storage counts by the bytes that were read, because a real run
would have brought only those. After `count_steps` an operator outside of a step that reads nothing of the device's makes
nothing there: that is what the user computes on the host, another model included. What a forward reads counts as well.

What does not: what `exclude` names and `on_host` makes, and what operators compute from such memory alone, because in a
real run they would compute it on the host. Operators of other threads are not seen: that is how a worker's updates of
host state stay off the books. Nor are scratch memory inside kernels, storages that compiled code makes and keeps for
its backward (its results count when an operator reads them), sparse tensors, and memory that two storages share.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from lowtide.errors import EmulatedOutOfMemoryError, OwnershipError
from lowtide.runtime.emulation.device import EmulatedDevice, Mark, Seen, living_trackers, mark_of, set_mark, storages_of
from lowtide.units import format_bytes

NUM_LARGEST = 3
"""How many storages an out-of-memory error names."""
_MAY_MIX_TIERS = frozenset({"aten.copy_", "aten.index", "aten.index_select"})
"""What reads memory of another tier: that a data set is indexed, or loaded from, does not make it the device's."""


class _Life(weakref.ref[torch.UntypedStorage]):
    """One storage on the books. Its death puts it in the queue that `on_death` appends to."""

    __slots__ = ("is_foreign", "key", "maker", "nbytes", "shape")

    def __new__(cls, storage: torch.UntypedStorage, on_death: Callable[[_Life], None], *details: object) -> _Life:
        del details
        return super().__new__(cls, storage, on_death)

    def __init__(
        self,
        storage: torch.UntypedStorage,
        on_death: Callable[[_Life], None],
        nbytes: int,
        maker: object,
        shape: tuple[int, ...],
        is_foreign: bool,
    ) -> None:
        del on_death
        self.key, self.nbytes, self.maker, self.shape, self.is_foreign = id(storage), nbytes, maker, shape, is_foreign


class TrackedMemory:
    """Counts the bytes of an emulated device and raises from the operator that goes over the budget.

    Holds no tensor. All trackers of a thread see all of its operators: one device, several models. Charges and
    inclusions belong to the tracker; exclusions hold for all. A tracker that is lost without `stop` sees nothing more.

    Args:
        budget_bytes: What the device has; None counts without a limit.
        owner: For messages: what has the budget.

    Example:
        >>> memory = TrackedMemory(1024)
        >>> memory.start()
        >>> ones = torch.ones(100)
        >>> memory.current_bytes
        400
        >>> del ones
        >>> memory.current_bytes, memory.peak_bytes
        (0, 400)
        >>> memory.stop()
    """

    def __init__(self, budget_bytes: int | None, owner: str | None = None) -> None:
        self.budget_bytes = budget_bytes
        self._owner = owner
        self._part_of_step: weakref.WeakMethod[Callable[[], str | None]] | None = None
        self._device: EmulatedDevice | None = None
        self._is_paused = False
        self._lives: dict[int, _Life] = {}
        # Storages die in any thread and at any time, in the middle of a sum too: the callback only appends, which is
        # atomic, and whoever counts next settles.
        self._dead: deque[_Life] = deque()
        self._charges: dict[str, int] = {}
        self._current_bytes = 0
        self._peak_bytes = 0
        # Re-entrant: the collector may run a destructor of the user's that computes something.
        self._lock = threading.RLock()

    # -- the books ---------------------------------------------------------------------------------------------------

    @property
    def current_bytes(self) -> int:
        """Bytes on the device now."""
        with self._lock:
            self._settle()
            return self._current_bytes

    @property
    def peak_bytes(self) -> int:
        """The most since the last `reset_peak`. What was refused for the budget's sake is not in it."""
        with self._lock:
            return self._peak_bytes

    def reset_peak(self) -> int:
        """Begin a new peak at the current bytes; returns the old one."""
        with self._lock:
            peak, self._peak_bytes = self._peak_bytes, self.current_bytes
            return peak

    @property
    def charged_bytes(self) -> int:
        """The part of the current bytes that `charge` added."""
        with self._lock:
            return sum(self._charges.values())

    # -- seeing ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """See the operators of the calling thread from now on. What exists already does not count by itself."""
        assert self._device is None, "already started"
        self._device = EmulatedDevice.of_this_thread()
        self._device.attach(self)

    def count_steps(self, part_of_step: Callable[[], str | None]) -> None:
        """In a part of a step all that operators make is the device's; elsewhere what they compute from its memory.

        What they read in a forward is so too, a batch that meets no weights first; an update reads counters of the host's.
        Asked at every operator that reads nothing of the device.
        """
        # Weak: the tracker may outlive the session, and must not keep it.
        self._part_of_step = weakref.WeakMethod(part_of_step)

    def pause(self) -> None:
        """See no operators until `resume`: they run on another device. Storages on the books still leave them when they die."""
        self._is_paused = True

    def resume(self) -> None:
        """See operators again."""
        self._is_paused = False

    def stop(self) -> None:
        """See no more operators; storages on the books still leave them when they die. May be repeated."""
        if self._device is not None:
            self._device.detach(self)
            self._device = None

    def on_host(self) -> AbstractContextManager[None]:
        """A context in which what the calling thread makes is memory of the host, as if `exclude` named each."""
        return EmulatedDevice.of_this_thread().on_host()

    # -- what counts -------------------------------------------------------------------------------------------------

    def include(self, memory: Tensor | torch.UntypedStorage, what: str = "included") -> None:
        """Count a storage that exists already, whole, until it dies; it may have been excluded before.

        Raises:
            EmulatedOutOfMemoryError: It does not fit. It is not counted then.
        """
        shape = tuple(memory.shape) if isinstance(memory, Tensor) else (memory.nbytes(),)
        with self._lock:
            self._settle()
            for storage in storages_of(memory):
                set_mark(storage, None)
                old = self._find(storage)
                grown_bytes = storage.nbytes() - (0 if old is None else old.nbytes)
                self._refuse_if_over(grown_bytes, what)
                if old is not None:
                    self._remove(old)
                self._add(storage, storage.nbytes(), what, shape)
            self._peak_bytes = max(self._peak_bytes, self._current_bytes)

    def exclude(self, memory: Tensor | torch.UntypedStorage) -> None:
        """Never count this storage, nor views of it: it stands for memory of the host."""
        self._exclude(memory, Mark.HOST)

    def exclude_charged(self, memory: Tensor | torch.UntypedStorage) -> None:
        """Do not count this storage, which is the device's, because its owner charges and credits its bytes."""
        self._exclude(memory, Mark.CHARGED)

    def charge(self, num_bytes: int, what: str) -> None:
        """Count bytes that no operator brings; call it before taking them.

        Raises:
            EmulatedOutOfMemoryError: They do not fit. Nothing is counted then.
        """
        assert num_bytes >= 0
        with self._lock:
            self._settle()
            self._refuse_if_over(num_bytes, what)
            self._charges[what] = self._charges.get(what, 0) + num_bytes
            self._current_bytes += num_bytes
            self._peak_bytes = max(self._peak_bytes, self._current_bytes)

    def credit(self, num_bytes: int, what: str) -> None:
        """Take charged bytes off the books; call it after giving them back.

        Raises:
            OwnershipError: More than is charged for `what`.
        """
        assert num_bytes >= 0
        with self._lock:
            charged_bytes = self._charges.get(what, 0)
            if num_bytes > charged_bytes:
                raise OwnershipError(
                    f"{format_bytes(num_bytes)} of {what!r} are given back, and only {format_bytes(charged_bytes)} are "
                    "charged; give back what was charged, under the same name, once"
                )
            if num_bytes == charged_bytes:
                self._charges.pop(what, None)
            else:
                self._charges[what] = charged_bytes - num_bytes
            self._current_bytes -= num_bytes

    def clear(self, owners: Collection[str]) -> None:
        """Strike out all that is charged for these, and count the rest anew: an exception may have left both half made."""
        with self._lock:
            for owner in owners:
                self._charges.pop(owner, None)
            self._dead.clear()
            for key, life in list(self._lives.items()):
                if life() is None:
                    del self._lives[key]
            self._current_bytes = sum(self._charges.values()) + sum(life.nbytes for life in self._lives.values())

    # -- told by the device ------------------------------------------------------------------------------------------

    def observe(self, func: Any, read: Sequence[Seen], made: Sequence[Seen]) -> EmulatedOutOfMemoryError | None:
        """Enter what an operator read and made; the error to raise where that is over the budget.

        Then its results are off the books, and whoever called must free them. Memory that is there to stay, an
        argument that has grown or a batch, stays on the books; a batch that does not fit by itself was not brought.
        """
        if self._is_paused:
            return None
        with self._lock:
            self._settle()
            before_bytes = self._current_bytes
            foreign, is_with_device = [], False
            brought: list[tuple[_Life, int]] = []
            for tensor, storage in read:
                life = self._find(storage)
                mark = mark_of(storage) if life is None else None
                if life is not None and not life.is_foreign:
                    is_with_device = True
                    self._resize(life, storage.nbytes())
                elif mark is None:
                    foreign.append((tensor, storage))
                elif mark is Mark.CHARGED:
                    is_with_device = True
            part_of_step = None if is_with_device or self._part_of_step is None else self._part_of_step()
            part = None if part_of_step is None else part_of_step()
            if foreign and (is_with_device or part == "forward") and _name_of(func) not in _MAY_MIX_TIERS:
                brought = [self._enter_foreign(tensor, storage, func) for tensor, storage in foreign]
            known = {id(storage) for _, storage in foreign}
            newborn = [
                self._add(storage, storage.nbytes(), func, tuple(tensor.shape))
                for tensor, storage in made
                if id(storage) not in known and self._find(storage) is None and mark_of(storage) is None
                if is_with_device or part is not None or self._part_of_step is None
            ]
            if self._current_bytes <= before_bytes:
                return None
            if self.budget_bytes is None or self._current_bytes <= self.budget_bytes:
                self._peak_bytes = max(self._peak_bytes, self._current_bytes)
                return None
            needed_bytes = self._current_bytes - before_bytes
            for life in newborn:
                self._remove(life)
            error = self._over(needed_bytes, before_bytes, _name_of(func))
            if self._current_bytes > self.budget_bytes:
                for life, nbytes in reversed(brought):
                    self._resize(life, nbytes)
            self._peak_bytes = max(self._peak_bytes, self._current_bytes)
            return error

    def hand_over(self, old: torch.UntypedStorage, new: torch.UntypedStorage) -> None:
        """Let a new storage take the place of one of the same size, which dies at once."""
        with self._lock:
            life = self._find(old)
            if life is not None and life.nbytes == new.nbytes():
                self._remove(life)
                # Not the life's own bytes: those are gone with it.
                self._add(new, new.nbytes(), life.maker, life.shape)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _exclude(self, memory: Tensor | torch.UntypedStorage, mark: Mark) -> None:
        for storage in storages_of(memory):
            set_mark(storage, mark)
            for tracker in (self, *living_trackers()):
                tracker.strike(storage)

    def strike(self, storage: torch.UntypedStorage) -> None:
        """Take a storage off the books, where it is on them."""
        with self._lock:
            self._settle()
            life = self._find(storage)
            if life is not None:
                self._remove(life)

    def _settle(self) -> None:
        while self._dead:
            self._remove(self._dead.popleft())

    def _find(self, storage: torch.UntypedStorage) -> _Life | None:
        life = self._lives.get(id(storage))
        # The one before it at this address may be dead and not settled yet.
        return life if life is not None and life() is storage else None

    def _add(
        self,
        storage: torch.UntypedStorage,
        nbytes: int,
        maker: object,
        shape: tuple[int, ...],
        is_foreign: bool = False,
    ) -> _Life:
        life = _Life(storage, self._dead.append, nbytes, maker, shape, is_foreign)
        self._lives[life.key] = life
        self._current_bytes += nbytes
        return life

    def _enter_foreign(self, tensor: Tensor, storage: torch.UntypedStorage, func: Any) -> tuple[_Life, int]:
        """Put a storage that came from elsewhere on the books. Returns its life, and the bytes that were counted for it before."""
        life = self._find(storage)
        if life is None:
            life = self._add(storage, 0, f"read by {_name_of(func)}", tuple(tensor.shape), is_foreign=True)
        before_bytes = life.nbytes
        self._resize(life, min(storage.nbytes(), max(life.nbytes, tensor.numel() * tensor.element_size())))
        return life, before_bytes

    def _resize(self, life: _Life, nbytes: int) -> None:
        self._current_bytes += nbytes - life.nbytes
        life.nbytes = nbytes

    def _remove(self, life: _Life) -> None:
        self._current_bytes -= life.nbytes
        life.nbytes = 0  # it may be in the queue of the dead as well
        if self._lives.get(life.key) is life:
            del self._lives[life.key]

    def _refuse_if_over(self, num_bytes: int, what: str) -> None:
        if self.budget_bytes is not None and num_bytes > 0 and self._current_bytes + num_bytes > self.budget_bytes:
            raise self._over(num_bytes, self._current_bytes, what)

    def _over(self, needed_bytes: int, current_bytes: int, what: str) -> EmulatedOutOfMemoryError:
        assert self.budget_bytes is not None
        largest = sorted(self._entries(), reverse=True)[:NUM_LARGEST]
        on_device = "; ".join(f"{name} {format_bytes(num_bytes)}" for num_bytes, name in largest) or "nothing"
        return EmulatedOutOfMemoryError(
            f"the emulated device is out of memory: {what} asked for {format_bytes(needed_bytes)} with "
            f"{format_bytes(current_bytes)} of {format_bytes(self.budget_bytes)} in use. Largest on the device: "
            f"{on_device}. Raise the device's budget, use a smaller batch, or let the plan stream or recompute more"
            + ("" if self._owner is None else f". It is the budget of {self._owner}, which its close() lifts"),
            tier="device",
            needed_bytes=needed_bytes,
            free_bytes=max(0, self.budget_bytes - current_bytes),
            budget_bytes=self.budget_bytes,
            owner=what,
        )

    def _entries(self) -> Iterator[tuple[int, str]]:
        for life in filter(lambda life: life.nbytes, self._lives.values()):
            yield life.nbytes, f"{_name_of(life.maker)} {list(life.shape)}"
        for what, num_bytes in self._charges.items():
            yield num_bytes, what


def _name_of(maker: object) -> str:
    """`aten.add` of `aten.add.Tensor`, whose overload says little; text as it is, a higher-order operator too."""
    return str(getattr(maker, "overloadpacket", maker))
