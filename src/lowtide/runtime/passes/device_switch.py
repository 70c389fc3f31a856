"""DeviceSwitch: the devices of one session, of which one at a time is where its groups open.

One process replicates a model over several devices by running the parts of each batch one after the other through the one
session (`passes.replicas`), each on a device of its own. Between two parts the session's device side is switched:

- **Streamed groups** have one copy, the host's. Each device fetches it over its own link into its own buffers, inside the same
  window as without replication; what is left of it on a device goes when the session leaves that device.
- **Resident groups**, unmanaged parameters and buffers have a copy on each further device. The first device's is the true one,
  and is copied to another device at each forward there, as torch's DataParallel does. What a forward changes in such a copy,
  BatchNorm's statistics for example, is dropped.
- **Gradients** that go to the host go from any device. Others are added up on the first device, part by part.

So each device needs one window, what its part of the batch takes, and its copies. Only the first has updates and their state.
The computation is queued part by part: on CUDA a part runs on its device while the loop queues the next one for another.

The `DeviceSet` belongs to the session, a `DeviceSwitch` to one of its plan runs, like the groups.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn

from lowtide import compat
from lowtide.memory.chunk import view_of
from lowtide.memory.store import ChunkStore
from lowtide.runtime.parameters.group import ManagedGroup
from lowtide.runtime.parameters.pending import own_storage
from lowtide.runtime.passes.devices import Device, DeviceSet


class _Weights:
    """A managed group's chunks on one device, and the views of its parameters there."""

    def __init__(self, group: ManagedGroup, chunks: dict[str, torch.Tensor], views: Sequence[torch.Tensor]) -> None:
        self.group, self.chunks, self.views = group, chunks, tuple(views)

    def refresh(self) -> None:
        """Copy resident weights from the first device, on which they are current."""
        with torch.no_grad():
            for chunk in self.group.stored.chunks:
                self.chunks[chunk.spec.name].copy_(chunk.device)
            for managed, view in zip(self.group.members, self.views, strict=True):
                if managed.foreign is not None:
                    view.copy_(managed.foreign)


class DeviceSwitch:
    """Moves a session's device side from one device to another.

    It owns the memory on the further devices, from its making to `release`.

    Args:
        devices: Of the session; the first is the current one.
        model: The managed model.
        groups: Bound to the first device.
        exclude: Told of buffers whose bytes are charged here.
    """

    def __init__(
        self,
        devices: DeviceSet,
        model: nn.Module,
        groups: Iterable[ManagedGroup],
        exclude: Callable[[torch.Tensor], None],
    ) -> None:
        self.devices = devices
        self.copied_bytes = [0] * len(devices.devices)
        """What was copied from the first device to each other one and back so far: resident weights, buffers, rows, gradients."""
        self._model = model
        self._groups = tuple(groups)
        self._charged: dict[int, dict[str, int]] = {}
        self._weights: list[list[_Weights]] = [[_first_weights(group) for group in self._groups]]
        managed = {id(member.parameter) for group in self._groups for member in group.members}
        self._rest = [parameter for parameter in model.parameters() if id(parameter) not in managed]
        self._by_autograd = [
            *[member.parameter for group in self._groups for member in group.members if member.host_gradient is None],
            *self._rest,
        ]
        """Parameters whose gradients autograd adds up where the parameter is."""
        self._copies: list[dict[int, tuple[torch.Tensor, int, torch.Tensor]]] = [{} for _ in devices.devices]
        """By device, copies of buffers and unmanaged parameters: of which tensor, in which version."""
        self._at_home: list[tuple[nn.Module, str, torch.Tensor]] = []
        """Buffers of the first device, while modules have those of another."""
        self._shown: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Parameters with the memory that they show on the first device, while they show that of another."""
        try:
            for index in range(1, len(devices.devices)):
                self._weights.append([self._make_weights(index, group, exclude) for group in self._groups])
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Give up the memory on the further devices. May be repeated."""
        self.return_home()
        for index, charged in self._charged.items():
            tracked = self.devices.devices[index].tracked
            if tracked is not None:
                tracked.clear(charged)
        self._charged.clear()
        del self._weights[1:]
        for copies in self._copies:
            copies.clear()

    # -- switching -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def forward_on(self, index: int, store: ChunkStore) -> Iterator[Device]:
        """A context for one part's forward on this device."""
        if index:
            self._refresh(index, store)
        with self._switched(index, store):
            yield self.devices.current

    @contextlib.contextmanager
    def backward_on(self, index: int, store: ChunkStore) -> Iterator[Device]:
        """A context for one part's backward on this device; gradients that it leaves there are added to those of the first."""
        aside = self._set_aside() if index else []
        try:
            with self._switched(index, store):
                yield self.devices.current
        finally:
            self._add_to(aside, index)

    def return_home(self) -> None:
        """After an exception everything was put in order on the device where it happened: go on with the first one."""
        if self.devices.index:
            self._move(0)

    @contextlib.contextmanager
    def _switched(self, index: int, store: ChunkStore) -> Iterator[None]:
        self._leave(store, index)
        try:
            yield
        finally:
            # Where a backward broke off, windows stand open: they are closed before the next call, and that returns home.
            if not any(group.stored.num_open for group in self._groups):
                self._leave(store, 0)
            elif self.devices.current.mover.device.type == "cuda":
                torch.cuda.set_device(self.devices.devices[0].mover.device)

    def _leave(self, store: ChunkStore, index: int) -> None:
        if index == self.devices.index:
            return
        store.leave_device()
        self._move(index)
        store.prefetch()

    def _move(self, index: int) -> None:
        self._put_back()
        self.devices.make_current(index)
        with compat.without_torch_function():
            for weights in self._weights[index]:
                self._point(weights)
        if index:
            self._put_in(index)

    def _point(self, weights: _Weights) -> None:
        group = weights.group
        for chunk in group.stored.chunks:
            if not group.is_resident:
                chunk.use_device(weights.chunks[chunk.spec.name])
        for managed, view in zip(group.members, weights.views, strict=True):
            managed.use_device_view(view, is_home=group.is_resident)
            if not group.is_resident:
                if group.points_to_device:
                    managed.parameter.data = view
            elif self.devices.index:  # at home it shows again what it did, which may be memory of the user's
                self._shown.append((managed.parameter, managed.parameter.data))
                managed.parameter.data = view
        group.note_homes()

    def _put_in(self, index: int) -> None:
        copies = self._copies[index]
        with compat.without_torch_function():
            for parameter in self._rest:
                if id(parameter) in copies:
                    self._shown.append((parameter, parameter.data))
                    parameter.data = copies[id(parameter)][2]
        for module, name, buffer in _buffers(self._model):
            if id(buffer) in copies:
                self._at_home.append((module, name, buffer))
                module._buffers[name] = copies[id(buffer)][2]

    def _put_back(self) -> None:
        while self._at_home:
            module, name, buffer = self._at_home[-1]
            module._buffers[name] = buffer
            self._at_home.pop()
        with compat.without_torch_function():
            while self._shown:
                parameter, data = self._shown[-1]
                parameter.data = data
                self._shown.pop()

    # -- copies --------------------------------------------------------------------------------------------------------

    def copy_to(self, device: Device, source: torch.Tensor, *, between: int) -> torch.Tensor:
        """A copy of a tensor on the current device, on whose books it is; `between` the first device and this one."""
        # An emulated device does not count what `copy_` reads: it is another device's.
        with torch.no_grad():
            copied = torch.empty_like(source, device=device.mover.device, requires_grad=False)
            device.include(copied)
            copied.copy_(source, non_blocking=True)
        self.copied_bytes[between] += copied.nbytes
        return copied

    def _refresh(self, index: int, store: ChunkStore) -> None:
        for weights in self._weights[index]:
            group = weights.group
            if group.is_resident:
                store.refresh(group.name)
                with self.devices.on(index):
                    weights.refresh()
                self.copied_bytes[index] += sum(chunk.spec.nbytes for chunk in group.stored.chunks)
        known, copies = self._copies[index], {}
        with compat.without_torch_function():
            for tensor in [*self._rest, *(buffer for _, _, buffer in _buffers(self._model))]:
                entry = known.get(id(tensor))
                # A new copy and not new values: a graph that is alive may need the old ones.
                is_known = entry is not None and entry[0] is tensor and entry[1] == compat.version_of(tensor)
                if entry is None or not is_known or isinstance(tensor, nn.Parameter):
                    with self.devices.on(index) as device:
                        entry = (
                            tensor,
                            compat.version_of(tensor),
                            self.copy_to(device, tensor.detach(), between=index),
                        )
                copies[id(tensor)] = entry
        self._copies[index] = copies

    def _make_weights(self, index: int, group: ManagedGroup, exclude: Callable[[torch.Tensor], None]) -> _Weights:
        buffers: dict[str, torch.Tensor] = {}
        views: dict[str, torch.Tensor] = {}
        charged = self._charged.setdefault(index, {})
        with self.devices.on(index) as device:
            for chunk in group.stored.chunks:
                name, num_bytes = chunk.spec.name, chunk.spec.nbytes
                if device.tracked is not None:
                    device.tracked.charge(num_bytes, name)
                    charged[name] = num_bytes
                buffer = buffers[name] = device.mover.device_buffer(num_bytes)
                exclude(buffer)
                for span in chunk.spec.spans:
                    view = view_of(buffer, span.offset_bytes, span.parameter)
                    views[span.parameter.name] = own_storage(view) if group.is_resident else view
                if not group.is_resident:
                    device.mover.shrink(buffer, [])
                    if device.tracked is not None:
                        device.tracked.credit(num_bytes, name)
        return _Weights(group, buffers, [views[managed.spec.name] for managed in group.members])

    # -- gradients -----------------------------------------------------------------------------------------------------

    def _set_aside(self) -> list[tuple[nn.Parameter, torch.Tensor | None]]:
        """Take gradients from the parameters: autograd could not add to them on another device."""
        with compat.without_torch_function():
            aside = [(parameter, parameter.grad) for parameter in self._by_autograd if parameter.requires_grad]
            for parameter, _ in aside:
                parameter.grad = None
        return aside

    def _add_to(self, aside: Iterable[tuple[nn.Parameter, torch.Tensor | None]], index: int) -> None:
        """Add the gradients that a part has left to those that were set aside; all is on the first device again. A part that broke
        off, and left windows open elsewhere, has lost the step with its gradients.
        """
        is_lost = bool(self.devices.index)
        device = self.devices.devices[0]
        with compat.without_torch_function(), torch.no_grad():
            for parameter, before in aside:
                made, parameter.grad = parameter.grad, None
                if made is None or is_lost:
                    parameter.grad = None if is_lost else before
                    continue
                brought = (
                    self.copy_to(device, made, between=index)
                    if made.layout is torch.strided
                    else made.to(device.mover.device)
                )
                parameter.grad = brought if before is None else before.add_(brought)


def _first_weights(group: ManagedGroup) -> _Weights:
    chunks = {chunk.spec.name: chunk.device for chunk in group.stored.chunks}
    return _Weights(group, chunks, [managed.device_view for managed in group.members])


def _buffers(model: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor]]:
    return [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
