"""The devices of a session: one, or several over which its model is replicated; movers and books lead to the current one.

See `passes.device_switch` for what is on each, and `passes.replicas` for how a batch is split over them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from lowtide.activations.policy import Offload
from lowtide.errors import ConfigError
from lowtide.memory.cuda_mover import CudaMover
from lowtide.memory.emulated_mover import EmulatedMover
from lowtide.memory.mover import Copied, Exchange, GradientCarrier, Ticket
from lowtide.memory.store import Books
from lowtide.memory.tier import DeviceLimit
from lowtide.planning.plan import Plan, Weights
from lowtide.runtime.emulation.memory import TrackedMemory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Device:
    """One device of a session."""

    name: str
    """For people: `cuda:1`, or `emulated 1`."""
    mover: GradientCarrier
    tracked: TrackedMemory | None
    """An emulated device's books; None on a real one."""
    budget_bytes: int | None
    """What a plan gives each device; None for all that it has."""

    @property
    def peak_bytes(self) -> int:
        """The most that was in use; on CUDA what the allocator has reserved."""
        if self.tracked is not None:
            return self.tracked.peak_bytes
        return torch.cuda.max_memory_reserved(self.mover.device)

    def include(self, memory: torch.Tensor) -> torch.Tensor:
        """Count a tensor as this device's; returns it."""
        if self.tracked is not None:
            self.tracked.include(memory)
        return memory


class DeviceSet:
    """The devices of a session, of which one is the current one: where movers and books lead."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = tuple(devices)
        self.index = 0
        self.mover = SwitchedMover(self)
        self._limits: list[DeviceLimit] = []
        for device in self.devices[1:]:
            if device.tracked is not None:
                device.tracked.pause()

    @property
    def current(self) -> Device:
        """The device on which groups open now."""
        return self.devices[self.index]

    def make_current(self, index: int) -> None:
        """From now on what the session does on a device happens on this one."""
        for number, device in enumerate(self.devices):
            if device.tracked is not None:
                device.tracked.resume() if number == index else device.tracked.pause()
        self.index = index
        if self.current.mover.device.type == "cuda":
            torch.cuda.set_device(self.current.mover.device)

    @contextlib.contextmanager
    def on(self, index: int) -> Iterator[Device]:
        """A context in which this device is the current one."""
        before = self.index
        self.make_current(index)
        try:
            yield self.current
        finally:
            self.make_current(before)

    def start(self, part_of_step: Callable[[], str | None]) -> None:
        """Keep the further devices to their budgets, by counting what operators make there or by the allocator."""
        for device in self.devices[1:]:
            if device.tracked is None:
                self._limits.append(DeviceLimit(device.mover.device, device.budget_bytes))
            else:
                device.tracked.count_steps(part_of_step)
                device.tracked.start()

    def stop(self) -> None:
        """Keep them to nothing any more. May be repeated."""
        while self._limits:
            self._limits.pop().lift()
        for device in self.devices[1:]:
            if device.tracked is not None:
                device.tracked.stop()

    def books(self, first: Books) -> Books:
        """Books that lead to those of the current device; `first` are those of the first device."""
        others = [device.tracked for device in self.devices[1:]]
        return _SwitchedBooks(self, [first, *[first if tracked is None else tracked for tracked in others]])


class _SwitchedBooks:
    def __init__(self, devices: DeviceSet, books: Sequence[Books]) -> None:
        self._devices, self._books = devices, tuple(books)

    def charge(self, num_bytes: int, owner: str) -> None:
        self._books[self._devices.index].charge(num_bytes, owner)

    def credit(self, num_bytes: int, owner: str) -> None:
        self._books[self._devices.index].credit(num_bytes, owner)

    def clear(self, owners: Collection[str]) -> None:
        self._books[self._devices.index].clear(owners)


class SwitchedMover:
    """A mover that leads to that of the current device. The host's buffers are the first mover's.

    A ticket belongs to the device on which it was given, and may be waited for on any.
    """

    def __init__(self, devices: DeviceSet) -> None:
        self._devices = devices

    @property
    def _mover(self) -> GradientCarrier:
        return self._devices.current.mover

    @property
    def device(self) -> torch.device:
        """The current device."""
        return self._mover.device

    def device_buffer(self, num_bytes: int) -> torch.Tensor:
        """See `Mover`."""
        return self._mover.device_buffer(num_bytes)

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """See `Mover`: locked memory is locked for all devices."""
        return self._devices.devices[0].mover.host_buffer(num_bytes)

    def free_host_buffer(self, buffer: torch.Tensor) -> None:
        """See `Mover`."""
        self._devices.devices[0].mover.free_host_buffer(buffer)

    def grow(self, buffer: torch.Tensor) -> None:
        """See `Mover`; the buffer is of the current device."""
        self._mover.grow(buffer)

    def shrink(self, buffer: torch.Tensor, after: Sequence[Ticket]) -> None:
        """See `Mover`; the buffer is of the current device."""
        self._mover.shrink(buffer, after)

    def to_device(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Ticket] = ()) -> Copied:
        """See `Mover`."""
        return self._mover.to_device(target, source, after)

    def to_host(
        self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Ticket] = (), *, keep: bool = True
    ) -> Copied:
        """See `Mover`."""
        return self._mover.to_host(target, source, after, keep=keep)

    def exchange(self, begin: Callable[[], Exchange], after: Sequence[Ticket]) -> Copied:
        """See `GradientCarrier`."""
        return self._mover.exchange(begin, after)

    def all_to_host(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], after: Sequence[Ticket] = ()
    ) -> Copied:
        """See `GradientCarrier`."""
        return self._mover.all_to_host(targets, sources, after)

    def expect(self, num_bytes: int) -> None:
        """See `GradientCarrier`."""
        self._mover.expect(num_bytes)

    def queue(self) -> object:
        """See `GradientCarrier`."""
        return self._mover.queue()

    def point_in(self, queue: object) -> Ticket:
        """See `GradientCarrier`."""
        return self._mover.point_in(queue)

    def now(self) -> Ticket:
        """See `Mover`."""
        return self._mover.now()

    def compute_after(self, ticket: Ticket) -> None:
        """See `Mover`."""
        self._mover.compute_after(ticket)

    def drain(self) -> None:
        """Wait for all devices."""
        for device in self._devices.devices:
            device.mover.drain()


def make_devices(
    replicas: int | Sequence[torch.device | str],
    target: torch.device,
    plan: Plan,
    *,
    owner: str,
    poison: bool,
    kept_bytes: int,
) -> DeviceSet:
    """The devices that `replicas` asks for, the first of them `target`.

    Raises:
        ConfigError: A device is none of this machine's, or the plan asks for what is not replicated.
    """
    found = [target, *_others(replicas, target)]
    _refuse_unreplicated(plan)
    budget_bytes = plan.budgets.device_bytes
    devices: list[Device] = []
    for number, device in enumerate(found):
        is_emulated = device.type != "cuda"
        tracked = TrackedMemory(budget_bytes, owner=f"{owner} on emulated device {number}") if is_emulated else None
        mover: GradientCarrier
        if is_emulated:
            mover = EmulatedMover(max_kept_bytes=kept_bytes)
        else:
            with torch.cuda.device(device):
                mover = CudaMover(device, max_kept_bytes=kept_bytes, poison=poison)
        name = f"emulated {number}" if is_emulated else str(device)
        devices.append(Device(name=name, mover=mover, tracked=tracked, budget_bytes=budget_bytes))
    return DeviceSet(devices)


def _others(replicas: int | Sequence[torch.device | str], target: torch.device) -> list[torch.device]:
    """All but the first."""
    if isinstance(replicas, int):
        if isinstance(replicas, bool) or replicas < 1:
            raise ConfigError(
                f"replicas is {replicas!r}; give the number of devices, or a list of CUDA devices", key="replicas"
            )
        if target.type != "cuda":
            return [target] * (replicas - 1)
        places = [index for index in range(torch.cuda.device_count()) if index != target.index]
        if len(places) < replicas - 1:
            raise ConfigError(
                f"replicas={replicas}, and torch sees {len(places) + 1} CUDA devices here; give at most as many",
                key="replicas",
            )
        return [torch.device("cuda", index) for index in places[: replicas - 1]]
    named = [torch.device(each) for each in replicas]
    if not named or any(each.type != "cuda" or each.index is None for each in named) or len({*named}) < len(named):
        raise ConfigError(
            f"replicas={[str(each) for each in named]} is not a list of different CUDA devices, such as ['cuda:0', 'cuda:1']; for "
            "emulated devices give their number",
            key="replicas",
        )
    if named[0] != target:
        raise ConfigError(
            f"replicas begins with {named[0]}, and the model is managed on {target}; give device={str(named[0])!r}",
            key="replicas",
        )
    if any(each.index >= torch.cuda.device_count() for each in named):
        raise ConfigError(
            f"replicas={[str(each) for each in named]}, and torch sees {torch.cuda.device_count()} CUDA devices here",
            key="replicas",
        )
    return named[1:]


def _refuse_unreplicated(plan: Plan) -> None:
    if plan.sharding is not None:
        raise ConfigError(
            "the plan spreads weights over several processes (sharding), and replicas= is for one process; leave one of them out",
            key="replicas",
        )
    for group in plan.groups:
        label = group.name or "(rest of the model)"
        if group.weights is Weights.HOST:
            raise ConfigError(
                f"group {label} stays on the host (weights='host'), whose looked-up rows go to one device; make it 'streamed' or "
                "'resident' to replicate the model",
                key="replicas",
            )
        if isinstance(group.activation, Offload):
            raise ConfigError(
                f"group {label} offloads activations, which come back ahead of their use, to the device that is in use then; give "
                "it 'recompute', 'selective' or 'keep' to replicate the model",
                key="replicas",
            )
