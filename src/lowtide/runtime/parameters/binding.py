"""Bind a model's parameters to chunks: make the chunks' memory, copy the values into it, and unbind them at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from lowtide import compat
from lowtide.errors import SessionError
from lowtide.memory.chunk import Chunk, ChunkSpec, ChunkState, GroupSpec, Layout, ParameterSpec, StoredGroup, view_of
from lowtide.memory.mover import Mover
from lowtide.memory.store import Books
from lowtide.planning.plan import GroupPlan, Plan, Schedule, Site, Weights
from lowtide.runtime.host_memory import HostPool
from lowtide.runtime.parameters.group import ManagedGroup, ManagedParameter
from lowtide.runtime.parameters.pending import make_plain, own_storage
from lowtide.runtime.passes.spread import ChunkParts

Fill = Callable[[ParameterSpec, nn.Parameter, torch.Tensor], None]
"""Writes a parameter's values into a view: from the parameter itself, or from a file."""


def copy_values(spec: ParameterSpec, parameter: nn.Parameter, target: torch.Tensor) -> None:
    """Fill from the parameter itself."""
    del spec
    target.copy_(parameter.data)


class Binder:
    """Makes the groups of one session, group by group, so that no second copy of the whole model ever exists."""

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        plan: Plan,
        mover: Mover,
        pool: HostPool,
        books: Books,
        *,
        has_optimizer: bool,
        on_device_buffer: Callable[[torch.Tensor], None],
        on_host_memory: Callable[[torch.Tensor], None],
        parts: Mapping[str, ChunkParts],
    ) -> None:
        self._parts = parts
        """By the name of each chunk that is spread over ranks."""
        self._plan = plan
        self._layout = layout
        self._mover = mover
        self._pool = pool
        self._books = books
        self._has_optimizer = has_optimizer
        self._on_device_buffer = on_device_buffer
        self._on_host_memory = on_host_memory
        self.members: list[ManagedParameter] = []
        """The parameters that have their memory so far, also in the middle of a group."""
        self._parameters = dict(model.named_parameters())
        self._owners: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self._owners.setdefault(id(parameter), []).append((module, name))

    def bind(self, spec: GroupSpec, plan: GroupPlan, fill: Fill) -> ManagedGroup:
        """Make one group's chunks, and point its parameters to them."""
        if plan.weights is Weights.HOST:
            return self._bind_table(spec, fill)
        is_resident = plan.weights is Weights.RESIDENT
        chunks: list[Chunk] = []
        members: list[ManagedParameter] = []
        for chunk_spec, site in zip(self._layout.chunks_of(spec.name), plan.sites, strict=True):
            if (shared := self._parts.get(chunk_spec.name)) is not None:
                chunk, managed = self._bind_part(chunk_spec, shared, site, fill, plan.weights)
            else:
                chunk, managed = self._bind_chunk(chunk_spec, site, fill, is_resident=is_resident)
            chunks.append(chunk)
            members += managed
        return ManagedGroup(StoredGroup(spec, chunks), members, is_resident=is_resident)

    def _bind_table(self, spec: GroupSpec, fill: Fill) -> ManagedGroup:
        """A table that never leaves the host: memory of its own, not locked, because only looked-up rows are copied."""
        (chunk_spec,) = self._layout.chunks_of(spec.name)
        (span,) = chunk_spec.spans
        host = torch.empty(chunk_spec.nbytes, dtype=torch.uint8, device="cpu")
        self._on_host_memory(host)
        chunk = Chunk(chunk_spec, host, self._mover.device_buffer(0))
        parameter = self._parameters[span.parameter.name]
        view = own_storage(view_of(host, span.offset_bytes, span.parameter))
        with torch.no_grad():
            fill(span.parameter, parameter, view)
        _give_data(parameter, view)
        managed = ManagedParameter(
            parameter,
            span.parameter,
            chunk,
            Site.HOST,
            host_view=view,
            device_view=view,
            owners=self._owners[id(parameter)],
        )
        if self._has_optimizer and span.parameter.requires_grad:
            managed.update_through(parameter.detach())
        self.members.append(managed)
        return ManagedGroup(StoredGroup(spec, [chunk]), [managed], is_resident=False, is_on_host=True)

    def _bind_chunk(
        self, spec: ChunkSpec, site: Site, fill: Fill, *, is_resident: bool
    ) -> tuple[Chunk, list[ManagedParameter]]:
        is_updated_on_host = self._has_optimizer and site is Site.HOST and spec.spans[0].parameter.requires_grad
        host = (
            self._pool.allocate(f"weights {spec.name}", spec.nbytes) if is_updated_on_host or not is_resident else None
        )
        self._books.charge(spec.nbytes, spec.name)
        device = self._mover.device_buffer(spec.nbytes)
        self._on_device_buffer(device)
        gradient_homes = (
            self._pool.allocate(f"gradients {spec.name}", spec.nbytes)
            if is_updated_on_host and self._plan.schedule is Schedule.DEFERRED
            else None
        )
        chunk = Chunk(spec, host, device)
        members: list[ManagedParameter] = []
        for span in spec.spans:
            parameter = self._parameters[span.parameter.name]
            host_view = None if host is None else own_storage(view_of(host, span.offset_bytes, span.parameter))
            device_view = view_of(device, span.offset_bytes, span.parameter)
            if is_resident:
                device_view = own_storage(device_view)
            assert isinstance(parameter, nn.Parameter)
            with torch.no_grad():
                fill(span.parameter, parameter, device_view if host_view is None else host_view)
                if is_resident and host_view is not None:
                    device_view.copy_(host_view)
            home = device_view if is_resident else host_view
            assert home is not None
            _give_data(parameter, home)
            managed = ManagedParameter(
                parameter,
                span.parameter,
                chunk,
                site,
                host_view=host_view,
                device_view=device_view,
                owners=self._owners[id(parameter)],
            )
            if is_updated_on_host:
                assert host_view is not None
                gradient_home = (
                    None if gradient_homes is None else view_of(gradient_homes, span.offset_bytes, span.parameter)
                )
                managed.update_through(host_view if is_resident else parameter.detach(), gradient_home)
            members.append(managed)
            self.members.append(managed)
        if is_resident:
            chunk.become(ChunkState.RESIDENT)
        else:
            self._mover.shrink(device, [])
            self._books.credit(spec.nbytes, spec.name)
        return chunk, members

    def _bind_part(
        self, spec: ChunkSpec, parts: ChunkParts, site: Site, fill: Fill, weights: Weights
    ) -> tuple[Chunk, list[ManagedParameter]]:
        """A chunk of which this rank keeps a part. The whole is on the device for as long as it takes to fill it."""
        is_trained = self._has_optimizer and spec.spans[0].parameter.requires_grad
        self._books.charge(spec.nbytes, spec.name)
        device = self._mover.device_buffer(spec.nbytes)
        self._on_device_buffer(device)
        home = self._home_of(spec, parts, weights)
        gradient_homes = (
            self._pool.allocate(f"gradients {spec.name}", parts.mine.nbytes)
            if is_trained and site is Site.HOST and self._plan.schedule is Schedule.DEFERRED and parts.mine.nbytes
            else None
        )
        chunk = Chunk(spec, home, device, parts)
        pieces = {piece.whole.name: piece for piece in parts.mine.pieces}
        members: list[ManagedParameter] = []
        for span in spec.spans:
            parameter, piece = self._parameters[span.parameter.name], pieces.get(span.parameter.name)
            if parameter.grad is not None:
                raise SessionError(
                    f"{span.parameter.name} has a gradient from before, and its group is spread over the ranks, which would "
                    "average it in; call optimizer.zero_grad() before the model is managed"
                )
            device_view = view_of(device, span.offset_bytes, span.parameter)
            original = None if parameter.is_meta else parameter.data
            with torch.no_grad():
                fill(span.parameter, parameter, device_view)
            if piece is None:
                leaf = home.view(span.parameter.dtype)[:0] if home.nbytes else _empty(span.parameter, home)
            else:
                leaf = view_of(home, piece.span.offset_bytes, piece.span.parameter)
            _give_data(parameter, device_view)
            managed = ManagedParameter(
                parameter,
                span.parameter,
                chunk,
                site,
                host_view=leaf,
                device_view=device_view,
                owners=self._owners[id(parameter)],
                leaf=leaf,
                piece=piece,
            )
            managed.keep_original(original)
            if is_trained and site is Site.HOST and piece is not None:
                gradient_home = (
                    None
                    if gradient_homes is None
                    else view_of(gradient_homes, piece.span.offset_bytes, piece.span.parameter)
                )
                managed.update_through(leaf.detach(), gradient_home)
            members.append(managed)
            self.members.append(managed)
        with torch.no_grad():
            home.copy_(device[parts.begin : parts.end])
        self._mover.shrink(device, [self._mover.now()])
        self._books.credit(spec.nbytes, spec.name)
        return chunk, members

    def _home_of(self, spec: ChunkSpec, parts: ChunkParts, weights: Weights) -> torch.Tensor:
        """Memory for this rank's part, which may be none."""
        if weights is Weights.STREAMED:
            if not parts.mine.nbytes:
                return torch.empty(0, dtype=torch.uint8, device="cpu")
            return self._pool.allocate(f"weights {spec.name}", parts.mine.nbytes)
        self._books.charge(parts.mine.nbytes, f"part of {spec.name}")
        home = self._mover.device_buffer(parts.mine.nbytes)
        self._on_device_buffer(home)
        return home


def _empty(spec: ParameterSpec, home: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=spec.dtype, device=home.device)


def _give_data(parameter: nn.Parameter, home: torch.Tensor) -> None:
    if parameter.is_meta:
        # The object stays the user's; a meta tensor cannot be given real data.
        compat.exchange_contents(parameter, nn.Parameter(home, requires_grad=parameter.requires_grad))
    else:
        parameter.data = home


def move_part(groups: dict[str, ManagedGroup], key: str, flat: torch.Tensor) -> None:
    """The arena moved a chunk's weights or gradients on the host: point everything to the new memory."""
    kind, _, name = key.partition(" ")
    for group in groups.values():
        for managed in group.members:
            chunk = managed.chunk
            if chunk.spec.name != name:
                continue
            if not managed.has_piece:
                continue
            offset = next(span.offset_bytes for span in chunk.spans if span.parameter.name == managed.spec.name)
            view = view_of(flat, offset, managed.leaf_spec)
            if kind == "gradients":
                if managed.host_gradient is not None:
                    managed.host_gradient.move_home(view)
                continue
            chunk.move_host(flat)
            if managed.is_spread:
                managed.move_piece(view)
                continue
            view = own_storage(view)
            managed.move_host_view(view)
            if not group.is_resident and not group.points_to_device:
                managed.parameter.data = view
                managed.set_home(view)
            if managed.host_target is not None and (group.is_resident or not group.points_to_device):
                managed.update_through(view if group.is_resident else managed.parameter.detach())
            group.note_homes()


def place_gradient(managed: ManagedParameter, *, is_copied: bool) -> None:
    """Move a gradient that was there before the session to where the plan has it.

    Args:
        managed: Bound already.
        is_copied: Copy a gradient of the device in any case: on an emulated device its memory may have been the host's.
    """
    parameter = managed.parameter
    gradient = parameter.grad
    if gradient is None:
        return
    data = parameter.data
    is_for_host = managed.host_target is not None
    home = managed.host_view if is_for_host else data
    assert home is not None
    if gradient.device == home.device and (is_for_host or not is_copied):
        return
    parameter.grad = None
    # A parameter on the device may have a gradient on the host, but not be given one.
    parameter.data = home
    parameter.grad = gradient.detach().to(home.device, copy=True)
    parameter.data = data


def unbind(members: Iterable[ManagedParameter], original: dict[int, torch.device]) -> None:
    """Give parameters memory of their own again, on the device that they were on before."""
    for managed in members:
        if managed.is_spread:
            managed.make_whole(managed.original)
            continue
        parameter = managed.parameter
        make_plain(parameter)
        if managed.host_gradient is not None:
            managed.host_gradient.make_plain()
        device = original.get(id(parameter), parameter.device)
        gradient = parameter.grad
        parameter.grad = None
        parameter.data = parameter.data.to(device, copy=True)
        if gradient is not None:
            parameter.grad = gradient.detach().to(device, copy=True)
