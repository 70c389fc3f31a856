"""ManagedGroup: one group at run time. Its parameters point to the device inside a window and to the host otherwise.

The Parameter objects are the user's own and stay the same for the whole session; what changes is where their data is.

Note [Where a streamed parameter points]
From the first window of a step to the end of its backward a streamed parameter keeps pointing to its device view, also
while the chunk is away: to point it back and forth would give it a new gradient accumulator each time on CUDA, and the
gradients of a parameter that is used twice would be added in another order than plain torch's. While the chunk is away
the parameter is pending, so that a read gives the host's value; see `parameters.pending`.

Note [Memory that the user holds]
`p.detach()`, `p.data`, a state dictionary or `p.numpy()` show the memory where the parameter rests, its home: the host's
bytes of a streamed parameter, the device's of a resident one. Such a tensor is not pending. While one is held, it shows what
it would in plain torch: `step()` waits for the updates and copies that change it, what is written to it reaches the next
use, and so no copies of a streamed group are kept on the device between its uses. The number of tensors on the home's storage
tells whether somebody holds one; if there are only our own, nothing is waited for.

`p.data = x` gives the parameter other memory. If no other tensor shows x or the home, the values go to the home at the next
use, and nobody can tell. Otherwise the parameter keeps x (`ManagedParameter.foreign`): windows get its values by a copy of
their own, and updates change x. So code that sets `p.data` to an average and back finds in each what it had.

Note [A parameter that is spread over ranks]
No rank has all of it between its uses, so it has no home: it always points to its place in the chunk on the device, and is
pending while its window is closed, so that a read is refused and never reaches memory that is not there. What this rank updates
is the leaf, a tensor of our own over its piece: averaged gradients come to it, and the optimizer steps it under the parameter's
name. The leaf is empty if the rank has nothing of the parameter, so that all ranks see the same list of gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from lowtide import compat
from lowtide.errors import GradientGoneError, ModelChangedError, SessionError
from lowtide.memory.chunk import Chunk, ParameterSpec, StoredGroup
from lowtide.memory.parts import Piece
from lowtide.planning.plan import Site
from lowtide.runtime.parameters.gradients import HostGradient
from lowtide.runtime.parameters.pending import SpreadGradient, beside, make_all_pending, make_all_plain, make_plain


class Visit(Protocol):
    """A forward call whose graph is alive; see `passes.forward`."""

    backward: int | None
    """The backward that opened it last."""


class ManagedParameter:
    """One managed parameter: the user's object and its two homes."""

    def __init__(
        self,
        parameter: nn.Parameter,
        spec: ParameterSpec,
        chunk: Chunk,
        site: Site,
        *,
        host_view: torch.Tensor | None,
        device_view: torch.Tensor,
        owners: Sequence[tuple[nn.Module, str]] = (),
        leaf: torch.Tensor | None = None,
        piece: Piece | None = None,
    ) -> None:
        self.parameter = parameter
        self.spec = spec
        self.leaf: torch.Tensor = parameter if leaf is None else leaf
        """What an update changes, with its gradient: the parameter, or see Note [A parameter that is spread over ranks]."""
        self.is_spread = leaf is not None
        """Whether each rank has a piece of it."""
        self.has_piece = leaf is None or piece is not None
        """Whether there is something to update: a rank may have nothing of a parameter that is spread."""
        self.piece = piece
        """What this rank has of a parameter that is spread over ranks; None if that is nothing, or all."""
        self.leaf_spec = spec if piece is None else piece.span.parameter
        self.first_element = 0 if piece is None else piece.begin
        """Where the leaf begins in the parameter's memory."""
        self.original: torch.Tensor | None = None
        """The whole value from before the session, until it has begun on all ranks; then no rank has it."""
        self.chunk = chunk
        self.site = site
        self.host_view = host_view
        self.device_view = device_view
        self.set_home(device_view if host_view is None else host_view)
        self.host_target: torch.Tensor | None = None
        """What the host updates: it shares the host's memory, and the parameter's version if that is the parameter's data."""
        self.num_own_views = 1
        """Tensors of our own on the home's storage: the home, and the host target where it is another tensor there."""
        self.host_gradient: HostGradient | None = None
        """The gradient that goes to the host; None where the device updates the parameter."""
        self.has_gradient = False
        """Whether this backward brought a gradient, which neither an update nor the user has yet."""
        self.is_gradient_awaited = False
        """Whether another one comes, from the next part of this backward."""
        self.is_hook_awaited = False
        """Whether hooks of the user's on the gradient are still to run in this backward; they may write to the weights."""
        self.is_written_in_backward = False
        """Whether such hooks wrote to the parameter, or may have."""
        self._version_in_backward = 0
        self._is_hooked = False
        self._hook: torch.utils.hooks.RemovableHandle | None = None
        self.owners = tuple(owners)
        """Modules and names under which the model has it."""
        self.foreign: torch.Tensor | None = None
        """What the parameter shows instead of its home; see Note [Memory that the user holds]."""

    def update_through(self, host_target: torch.Tensor, gradient_home: torch.Tensor | None = None) -> None:
        """The host updates the parameter through this tensor: a view of streamed weights, or the host's copy of resident ones.

        A deferred gradient lands in `gradient_home`.
        """
        self.host_target = host_target
        if self.host_gradient is None:
            self.host_gradient = HostGradient(self.leaf, self.leaf_spec, self.chunk, host_target.device, gradient_home)
        self.num_own_views = 1 if host_target is self.host_view else 2

    @property
    def gradient(self) -> torch.Tensor | None:
        """What the next update uses; asked where reads of parameters are not noticed."""
        return self.leaf.grad

    def add_piece(self, gradient: torch.Tensor) -> None:
        """Add an average to the gradient of the piece."""
        if self.leaf.grad is None:
            self.leaf.grad = gradient.to(self.leaf.device)  # one that is empty may be updated on the host
        else:
            self.leaf.grad.add_(gradient)

    def shown_gradient(self) -> torch.Tensor | None:
        """What `p.grad` is, if the parameter is spread over ranks."""
        gradient = self.leaf.grad
        if gradient is None:
            with compat.without_torch_function():
                return self.parameter.grad  # this rank's own, of a backward under no_sync
        if self.host_gradient is not None:
            self.host_gradient.settle()
            self.host_gradient.mark_seen()
        with compat.without_torch_function():
            shown: SpreadGradient = gradient.detach().as_subclass(SpreadGradient)
        assert self.chunk.exchange is not None
        shown.shared, shown.label = self.chunk.exchange, self.spec.name
        return shown

    def set_gradient(self, value: torch.Tensor | None) -> None:
        """Clear the gradient, here and of backwards under no_sync; no rank can give it another."""
        if value is not None:
            raise SessionError(
                f"the gradient of {self.spec.name} was set, and the parameter is spread over the ranks; make its group resident, "
                "or change gradients in a hook on the parameter, which sees this rank's own"
            )
        with compat.without_torch_function():
            self.parameter.grad = None
        self.leaf.grad = None

    def forget_piece(self) -> None:
        """The gradient of the piece is used up, or cleared."""
        self.leaf.grad = None

    def keep_original(self, original: torch.Tensor | None) -> None:
        """Keep the value from before the session, or None to let it go."""
        self.original = original

    def make_whole(self, value: torch.Tensor | None) -> None:
        """The session ends: the parameter has this value in memory of its own, or none, on meta."""
        make_plain(self.parameter)
        with compat.without_torch_function():
            self.parameter.grad = None
            if value is None:
                empty = nn.Parameter(
                    torch.empty_strided(self.spec.shape, self.spec.stride, dtype=self.spec.dtype, device="meta"),
                    requires_grad=self.parameter.requires_grad,
                )
                try:
                    compat.exchange_contents(self.parameter, empty)
                except RuntimeError:  # a graph that is alive has it
                    nan = torch.full((), torch.nan, dtype=self.spec.dtype, device="cpu")
                    self.parameter.data = nan.expand(self.spec.shape)
            else:
                self.parameter.data = value
        self.leaf.grad = None

    def move_piece(self, piece: torch.Tensor) -> None:
        """The arena has moved this rank's piece here."""
        with torch.no_grad():
            self.leaf.data = piece
        self.host_view = piece
        self.set_home(piece)
        if self.host_gradient is not None:
            self.update_through(self.leaf.detach())

    def move_host_view(self, host_view: torch.Tensor) -> None:
        """The arena has moved the host's bytes here."""
        self.host_view = host_view

    def forget_device(self) -> None:
        """The chunk has given up its memory on the device."""
        self.device_view = self.chunk.device

    def use_device_view(self, device_view: torch.Tensor, *, is_home: bool) -> None:
        """The session goes on on another device, where the parameter is here. A resident parameter has its home there."""
        self.device_view = device_view
        if is_home:
            self.set_home(device_view)

    def set_home(self, home: torch.Tensor) -> None:
        """The parameter's home is this memory: the device's for a resident one, else the host's."""
        self.home = home
        self.home_address = home.data_ptr()
        # Kept, because every window asks about it, and torch makes a new object for each question.
        self.home_storage = home.untyped_storage()
        self.home_key = compat.storage_key(home)

    def is_home_held(self) -> bool:
        """Whether another tensor shows the home's memory. The caller switches off what notices reads; no update may be running."""
        num_others = compat.num_owners(self.home_storage) - self.num_own_views
        if num_others != 1:
            return num_others > 1
        return compat.storage_key(self.parameter) != self.home_key  # as a rule it is the parameter

    # -- told by the backward pass -------------------------------------------------------------------------------------

    def watch(self, on_gradient: Callable[[torch.Tensor], None]) -> torch.utils.hooks.RemovableHandle:
        """Call `on_gradient` when the gradient is complete, after hooks of the user's."""
        self._hook = self.parameter.register_post_accumulate_grad_hook(on_gradient)
        return self._hook

    def enter_backward(self, version: int, *, is_resident: bool, is_averaged: bool) -> bool:
        """A backward uses the parameter in this version. Returns whether hooks of the user's on its gradient are still to run.

        Where its gradients are averaged over ranks, the sum with older ones is made on the device, by all ranks alike.
        """
        self.has_gradient = self.is_gradient_awaited = False
        has_other_hooks = self._hook is not None and compat.make_last_gradient_hook(self.parameter, self._hook)
        self._is_hooked = has_other_hooks or (not is_resident and compat.has_gradient_hooks(self.parameter))
        self.is_hook_awaited = self._is_hooked
        self.is_written_in_backward = False
        self._version_in_backward = version
        if self.host_gradient is not None:
            # A piece adds averages up where they are used.
            self.host_gradient.set_aside(is_summed_on_device=not self.is_spread and (has_other_hooks or is_averaged))
        if self.host_gradient is not None or self.is_spread:
            return self._is_hooked
        gradient = self.parameter.grad
        if gradient is not None and gradient.device != self.parameter.device:
            # From a use outside of the module's call, on the host: autograd adds to it here.
            self.parameter.grad = gradient.to(self.parameter.device)
        return self._is_hooked

    def may_be_written(self) -> bool:
        """Whether hooks of the user's have run on the gradient, or somebody wrote to the parameter in this backward."""
        return self._is_hooked or compat.version_of(self.parameter) != self._version_in_backward

    def is_written(self) -> bool:
        """Whether somebody wrote to the parameter since the backward reached it."""
        return compat.version_of(self.parameter) != self._version_in_backward

    def note_hooks(self, *, has_written: bool) -> None:
        """Hooks of the user's on the gradient have run."""
        self.is_written_in_backward = has_written
        self.is_hook_awaited = False

    def stop_awaiting_hooks(self) -> None:
        """No hook of the user's will run in this backward any more."""
        self.is_hook_awaited = False

    def forget_writes(self) -> None:
        """What the hooks wrote was copied to where the true values are."""
        self.is_written_in_backward = False

    def mark_gradient(self) -> bool:
        """The gradient of this backward is complete. Returns whether this is the first time."""
        was_missing = self.is_gradient_awaited or not self.has_gradient
        self.has_gradient, self.is_gradient_awaited = True, False
        return was_missing

    def await_gradient(self) -> None:
        """Another part of this backward may bring a gradient too, and hooks of the user's on it."""
        self.is_gradient_awaited = True
        self.is_hook_awaited = self._is_hooked

    def forget_gradient(self) -> None:
        """The gradient was used up, or shown to the user."""
        self.has_gradient = False

    def take_average(self, gradient: torch.Tensor) -> None:
        """The ranks' average takes the place of the gradient that this rank has sent."""
        with compat.without_torch_function():
            self.parameter.grad = gradient

    @property
    def version_in_backward(self) -> int:
        """The parameter's version when the backward reached it."""
        return self._version_in_backward


class ManagedGroup:
    """One group with its parameters. A read of a pending parameter settles the group."""

    def __init__(
        self, group: StoredGroup, members: list[ManagedParameter], *, is_resident: bool, is_on_host: bool = False
    ) -> None:
        self.stored = group
        self.name = group.name
        self.members = members
        self.parameters = tuple([managed.parameter for managed in members])
        self._members_in: dict[str, list[ManagedParameter]] = {chunk.spec.name: [] for chunk in group.chunks}
        for managed in members:
            self._members_in[managed.chunk.spec.name].append(managed)
        for managed in members:
            make_plain(managed.parameter)  # a session that was forgotten may have left it so
            if is_resident:
                managed.set_home(managed.device_view)
        self.is_resident = is_resident
        self.is_spread = group.is_spread
        """Whether each rank has a part of it; see Note [A parameter that is spread over ranks]."""
        self.is_on_host = is_on_host
        """Whether its weights never come to the device, and it has no window: its module computes on the host."""
        self.generation = 0
        """Counts updates: a visit remembers the generation of the weights that it saw."""
        self.visits: set[weakref.ref[Visit]] = set()
        """Forward calls whose graph still lives and whose backward has not passed."""
        self.consumed: set[str] = set()
        """Chunks that a backward has updated, whose gradients are used up. Until `step()`, a second backward and reading a gradient
        are refused.
        """
        self.dropped: set[str] = set()
        """Parameters that the optimizer does not hold, whose gradients a backward dropped. Until `step()`, reading is refused."""
        self.num_tasks = 0
        """Backwards that have opened the group and not ended."""
        self.points_to_device = is_resident or self.is_spread
        self.shown_memory: tuple[int, ...] = ()
        """Addresses of foreign memory that parameters show instead of their homes; none as a rule."""
        self.awaits_hooks = False
        """Whether hooks of the user's on gradients are still to run in this backward."""
        self.is_change_awaited = False
        """Whether somebody holds memory that an update or a copy under way changes: `step()` waits for it."""
        self.place = 0
        """Its place in the order in which the last forward first used groups; before the first forward, in the layout's order."""
        self._num_missing = dict.fromkeys(self._members_in, 0)
        """By chunk, how many gradients of trained parameters are still to come in this backward."""
        self._is_updated_on_device = not self.is_spread and any(
            managed.site is not Site.HOST for managed in members if managed.spec.requires_grad
        )
        self._versions: list[int] = []
        """The parameters' versions when their window opened."""
        self._are_pending: bool | None = False
        """Whether the parameters are pending; None if an exception has left some of them so."""
        self._settler: Settler | None = None
        self.note_homes()

    def note_homes(self) -> None:
        """Remember the parameters' homes, which have changed, for `is_held`, which each window asks."""
        self._homes = {
            chunk: ([managed.home_key for managed in members], [managed.num_own_views for managed in members])
            for chunk, members in [(None, self.members), *self._members_in.items()]
        }

    @property
    def is_consumed(self) -> bool:
        """Whether a backward has updated some of the group's weights, and `step()` has not been called since."""
        return bool(self.consumed)

    @property
    def is_updated_on_host(self) -> bool:
        """Whether gradients of the group go to the host."""
        return any(managed.host_gradient is not None for managed in self.members)

    @property
    def guards_gradients(self) -> bool:
        """Whether reading a gradient must be refused until `step()`."""
        return bool(self.consumed or self.dropped)

    # -- told by the passes and the updates ----------------------------------------------------------------------------

    def note_place(self, place: int) -> None:
        """The forward used the group first at this place in its order."""
        self.place = place

    def enter_backward(self, *, is_averaged: bool = False) -> None:
        """One more backward uses the group: gradients on the host are set aside, so that autograd starts afresh."""
        self.num_tasks += 1
        if self.num_tasks == 1:
            self.awaits_hooks = False
            self._num_missing = dict.fromkeys(self._members_in, 0)
            is_resident = self.is_resident
            for managed, version in zip(self.members, compat.versions_of(self.parameters), strict=True):
                if self.is_spread:
                    # A group that this rank has not used is pending, and nobody reads a value.
                    with compat.without_torch_function():
                        has_hooks = managed.enter_backward(version, is_resident=is_resident, is_averaged=is_averaged)
                else:
                    has_hooks = managed.enter_backward(version, is_resident=is_resident, is_averaged=is_averaged)
                if has_hooks:
                    self.awaits_hooks = True
                if managed.parameter.requires_grad:
                    self._num_missing[managed.chunk.spec.name] += 1

    def await_gradients(self) -> None:
        """Another part of this backward follows: a chunk is complete when that has brought its gradients too."""
        self._num_missing = dict.fromkeys(self._members_in, 0)
        for managed in self.members:
            managed.await_gradient()
            if managed.parameter.requires_grad:
                self._num_missing[managed.chunk.spec.name] += 1
        self.awaits_hooks = any(managed.is_hook_awaited for managed in self.members)

    def count_gradient(self, managed: ManagedParameter) -> bool:
        """The parameter's gradient of this backward is complete. Returns whether all gradients of its chunk are."""
        name = managed.chunk.spec.name
        if managed.mark_gradient():
            self._num_missing[name] -= 1
        return self._num_missing[name] <= 0

    def has_complete_chunk(self) -> bool:
        """Whether a chunk of the group has all its gradients."""
        return min(self._num_missing.values()) <= 0

    def awaits_update_on_device(self) -> bool:
        """Whether gradients are still to come with which the device updates streamed weights."""
        return self._is_updated_on_device and not self.is_resident and max(self._num_missing.values()) > 0

    def leave_backward(self) -> bool:
        """One backward less uses the group. Returns whether none does any more."""
        self.num_tasks -= 1
        return self.num_tasks == 0

    def note_hooks(self, managed: ManagedParameter, *, has_written: bool) -> None:
        """Hooks of the user's on the parameter's gradient have run."""
        managed.note_hooks(has_written=has_written)
        self.awaits_hooks = any(other.is_hook_awaited for other in self.members)

    def stop_awaiting_hooks(self) -> None:
        """No hook of the user's will run in this backward any more."""
        self.awaits_hooks = False
        for managed in self.members:
            managed.stop_awaiting_hooks()

    def written_by_hooks(self) -> list[Chunk]:
        """Chunks that hooks of the user's have written to and will not write to again. Each chunk is returned once."""
        found: list[Chunk] = []
        for chunk in self.stored.chunks:
            members = self._members_in[chunk.spec.name]
            if any(managed.is_written_in_backward for managed in members) and not any(
                managed.is_hook_awaited for managed in members
            ):
                for managed in members:
                    managed.forget_writes()
                found.append(chunk)
        return found

    def members_to_update(self, chunk: Chunk, *, is_last: bool) -> list[ManagedParameter]:
        """The chunk's parameters with a gradient, if the chunk can be updated: no gradient of it is missing, or none will come
        any more (`is_last`). Otherwise none.
        """
        name = chunk.spec.name
        if self._num_missing[name] > 0 and not is_last:
            return []
        fired = [managed for managed in self._members_in[name] if managed.has_gradient]
        if fired:
            with compat.without_torch_function():  # parameters may be guarded; nobody reads a value here
                fired = [managed for managed in fired if managed.parameter.requires_grad]
        return fired

    def enter(self, visit: Visit) -> None:
        """A forward call used the group, and made a graph."""
        self.visits.add(weakref.ref(visit, self.visits.discard))

    def leave(self, visit: Visit) -> None:
        """The backward has passed the visit."""
        self.visits.discard(weakref.ref(visit))

    def is_used_beside(self, backward: int) -> bool:
        """Whether a graph is alive of a call that this backward has not reached, or that another backward has."""
        for reference in tuple(self.visits):
            visit = reference()
            if visit is not None and visit.backward != backward:
                return True
        return False

    def count_update(self) -> None:
        """The weights are about to change: a backward through the old ones will be refused."""
        self.generation += 1

    def mark_consumed(self, chunk: str) -> None:
        """A backward is about to update the chunk, and to use up its gradients."""
        self.consumed.add(chunk)

    def unmark_consumed(self, chunk: str) -> None:
        """The backward did not update the chunk after all: it is as before."""
        self.consumed.discard(chunk)

    def drop_gradient(self, name: str) -> None:
        """A backward dropped the gradient of this parameter."""
        self.dropped.add(name)

    def forget_backward(self) -> None:
        """The step is over, or given up: gradients may come and be read again."""
        self.consumed.clear()
        self.dropped.clear()

    def await_change(self) -> None:
        """Note that somebody holds memory that an update or a copy under way changes."""
        self.is_change_awaited = True

    def forget_change(self) -> None:
        """That update or copy is done."""
        self.is_change_awaited = False

    def be_settled_by(self, settler: Settler) -> None:
        """The settler is called when somebody reads a pending parameter."""
        self._settler = settler

    @property
    def label(self) -> str:
        """The name for people."""
        return self.stored.name or "(rest of the model)"

    def remember_versions(self) -> None:
        """A window opens: remember the parameters' versions, because a forward may write to its own weights."""
        self._versions = compat.versions_of(self.parameters)

    def written_chunks(self) -> list[Chunk]:
        """Chunks with a parameter that was written to since `remember_versions`."""
        versions = compat.versions_of(self.parameters)
        if versions == self._versions:
            return []
        changed = zip(self.members, versions, self._versions, strict=True)
        return list({id(managed.chunk): managed.chunk for managed, now, before in changed if now != before}.values())

    def keep_late_writes(self) -> None:
        """After an exception, copy to the host what user code wrote to parameters while their window was still open, such as a
        checkpoint that was loaded at once. No copy may be under way, nor work on the host.
        """
        if self.is_spread:
            return  # the other ranks do not know of it, and the step is lost anyway
        if self._settler is not None:
            self._settler.before_change(self)
        with compat.without_torch_function(), torch.no_grad():
            is_in_backward = bool(self.num_tasks)
            # If no window has opened yet, nothing was written in one.
            versions = self._versions or compat.versions_of(self.parameters)
            for managed, version in zip(self.members, versions, strict=True):
                chunk = managed.chunk
                # If the host has updated a streamed chunk, the host's bytes are newer, and the update counts as a write.
                is_old = not self.is_resident and (chunk.host_work is not None or chunk.spec.name in self.consumed)
                if managed.host_view is None or is_old or not chunk.is_on_device:
                    continue
                if managed.foreign is not None and self.is_resident:
                    continue  # the parameter shows memory of the user's
                if compat.version_of(managed.parameter) != (managed.version_in_backward if is_in_backward else version):
                    (managed.host_view if managed.foreign is None else managed.foreign).copy_(managed.parameter)

    def point_to_device(self) -> None:
        """Point the parameters to the open chunks, and make them plain."""
        was_pending = self._are_pending
        self.make_plain()
        if self.is_resident:
            self.adopt_foreign_data()
        elif not self.points_to_device:
            if not was_pending:  # else nobody can have changed it since the chunks were fetched
                self.adopt_foreign_data()
            # Set before the change, so that `point_to_host` undoes it after an exception.
            self.points_to_device = True
            for managed in self.members:
                managed.parameter.data = managed.device_view

    def fill_in_foreign_data(self) -> None:
        """The chunks have just come, with the values of the homes: put in the values that the user has given instead."""
        for managed in self.members:
            if managed.foreign is not None:
                with torch.no_grad():
                    managed.device_view.copy_(managed.foreign)

    def adopt_foreign_data(self) -> None:
        """User code may have given parameters other memory (`p.data = x`, `model.cuda()`). Copy the values home and
        point there again, or keep that memory: see Note [Memory that the user holds].
        """
        if self.points_to_device and not self.is_resident:
            return
        with compat.without_torch_function():
            foreign = self._with_foreign_data()
            if foreign:
                # Set before the change: some of them may keep the foreign memory.
                self.shown_memory = tuple(managed.parameter.data_ptr() for managed in foreign)
            for managed in foreign:
                self._adopt(managed)
        if foreign or self.shown_memory:
            self.shown_memory = tuple(
                managed.foreign.data_ptr() for managed in self.members if managed.foreign is not None
            )

    def take_foreign_data(self) -> None:
        """Copy memory that the user has given to parameters of a spread group to their places in the window."""
        with compat.without_torch_function(), torch.no_grad():
            for managed in self.members:
                parameter, place = managed.parameter, managed.device_view
                if parameter.data_ptr() != place.data_ptr():
                    if parameter.shape != place.shape or parameter.dtype != place.dtype:
                        raise ModelChangedError(
                            f"parameter {managed.spec.name} of group {self.label} became {parameter.dtype} "
                            f"{tuple(parameter.shape)} under session.gathered(), and is managed as {place.dtype} "
                            f"{tuple(place.shape)}; call session.close(), change the model, and manage it again"
                        )
                    place.copy_(parameter.data)
                    parameter.data = place

    def point_to_host(self) -> None:
        """Point the parameters to the host's bytes."""
        if self.points_to_device and not (self.is_resident or self.is_spread):
            self.make_plain()
            for managed in self.members:
                assert managed.host_view is not None
                managed.parameter.data = managed.host_view if managed.foreign is None else managed.foreign
            self.points_to_device = False

    def is_held(self, chunk: Chunk | None = None) -> bool:
        """Whether another tensor shows the home of a parameter, of this chunk or of all."""
        if self.is_spread:
            return False
        name = None if chunk is None else chunk.spec.name
        keys, nums_of_own = self._homes[name]
        if not self.shown_memory and compat.nums_of_owners(keys) == nums_of_own:
            return False  # not even the parameters point there
        with compat.without_torch_function():
            for managed in self.members if name is None else self._members_in[name]:
                if managed.foreign is not None or managed.is_home_held():
                    return True
        return False

    def rebuild(self) -> None:
        """After an exception, point streamed parameters to the host; or all of them to the device, if a graph is alive.

        A parameter to which user code gave other memory keeps it. `Residency.guard` must be called afterwards.
        """
        self.num_tasks = 0
        self.awaits_hooks = False
        if self.is_resident or self.is_on_host or self.is_spread:
            return
        with compat.without_torch_function():
            on_device = [
                managed
                for managed in self.members
                if compat.storage_key(managed.parameter) == compat.storage_key(managed.chunk.device)
            ]
            self.points_to_device = bool(self.visits) and len(on_device) == len(self.members)
            for managed in on_device if not self.points_to_device else ():
                assert managed.host_view is not None
                managed.parameter.data = managed.host_view if managed.foreign is None else managed.foreign

    def forget_device(self) -> None:
        """The chunks have given up their memory on the device, for good."""
        for managed in self.members:
            managed.forget_device()

    def make_pending(self) -> None:
        """From now on reading a parameter settles the group first."""
        if not self._are_pending:
            self._are_pending = None
            make_all_pending(self.parameters, self)
            self._are_pending = True

    def make_plain(self) -> None:
        """Reading a parameter needs nothing any more."""
        if self._are_pending is not False:
            self._are_pending = None
            make_all_plain(self.parameters)
            self._are_pending = False

    def settle(self) -> None:
        """User code reads one of the parameters: wait until their values are final."""
        assert self._settler is not None
        if self.is_spread:
            raise spread_parameter(self)
        self._settler.before_change(self)
        self._settler.settle_group(self)

    def check_gradient(self) -> None:
        """Refuse to read a gradient that was used up or dropped."""
        if self.is_consumed and not self.num_tasks:
            raise GradientGoneError(
                f"the gradients of group {self.label} were used up in backward, where its weights were updated; they "
                "cannot be read, clipped, scaled or set between backward() and step(). Weights and optimizer are those "
                "of the new step. Use the schedule 'deferred' to work on gradients"
            )
        if self.dropped and not self.num_tasks:
            raise GradientGoneError(
                f"the gradient of {min(self.dropped)} was dropped in backward: the optimizer does not hold the parameter, and "
                "the schedule 'in_backward' keeps no gradient for later. Give it to the optimizer, freeze it with "
                "requires_grad_(False), or use the schedule 'deferred'"
            )

    def piece_of(self, parameter: torch.Tensor) -> ManagedParameter | None:
        """The parameter, if it is spread over ranks and a user asks for its gradient: that of its piece is elsewhere."""
        if not self.is_spread or self.num_tasks:
            return None
        return next(managed for managed in self.members if managed.parameter is parameter)

    def wait_for_device(self) -> None:
        """Nothing to do: `settle` waits for all that parameters need."""

    def given_instead(self) -> list[torch.Tensor]:
        """Tensors that modules have instead of the group's parameters: `functional_call` gives them for one call."""
        found = [
            module._parameters.get(name)
            for managed in self.members
            for module, name in managed.owners
            if _is_given(managed, module, name)
        ]
        return [tensor for tensor in found if tensor is not None]

    @property
    def is_wholly_given(self) -> bool:
        """Whether modules have other tensors for all of the group's parameters."""
        return all(_is_given(managed, module, name) for managed in self.members for module, name in managed.owners)

    def check_unchanged(self, *, may_be_given: bool = False) -> None:
        """Refuse a model whose parameters are not the managed ones any more, unless `may_be_given`: it may have others for one
        call.
        """
        for managed in self.members:
            for module, name in () if may_be_given else managed.owners:
                if module._parameters.get(name) is not managed.parameter:
                    raise ModelChangedError(
                        f"parameter {managed.spec.name} of group {self.label} was replaced after the model was managed "
                        f"({type(module).__name__}.{name} is another object now); call session.close(), change the "
                        "model, and manage it again. Nothing was updated"
                    )
            # Reading `requires_grad` of a pending parameter settles nothing.
            if not managed.spec.requires_grad and managed.parameter.requires_grad:
                raise ModelChangedError(
                    f"parameter {managed.spec.name} of group {self.label} was frozen when the model was managed, and is "
                    "trained now, for which the plan has no room; call session.close(), make a plan for the model as it "
                    "is, and manage it again. Nothing was updated"
                )

    def _with_foreign_data(self) -> list[ManagedParameter]:
        """Members whose parameters do not point to their homes."""
        found: list[ManagedParameter] = []
        for managed in self.members:
            parameter, home = managed.parameter, managed.home
            if parameter.data_ptr() == managed.home_address and parameter.dtype == home.dtype:
                managed.foreign = None
                continue
            if parameter.shape != home.shape or parameter.dtype != home.dtype:
                raise ModelChangedError(
                    f"parameter {managed.spec.name} of group {self.label} became {parameter.dtype} "
                    f"{tuple(parameter.shape)} after the model was managed as {home.dtype} {tuple(home.shape)}; call "
                    "session.close(), change the model, and manage it again. Nothing was updated"
                )
            found.append(managed)
        return found

    def _adopt(self, managed: ManagedParameter) -> None:
        parameter, home = managed.parameter, managed.home
        managed.foreign = None
        # A graph that is alive refers to the memory as it is: in plain torch that memory would stay.
        is_kept = compat.num_storage_owners(parameter) > 1 or managed.is_home_held() or bool(self.visits)
        with torch.no_grad():
            if not is_kept:
                home.copy_(parameter.data)
                parameter.data = home
                return
            if self.is_resident and (parameter.device != home.device or parameter.stride() != home.stride()):
                # The model computes where the home is, in its strides.
                parameter.data = beside(home).copy_(parameter.data)
            managed.foreign = parameter.data


def spread_parameter(group: ManagedGroup) -> SessionError:
    """The error for a read of what no rank has as a whole."""
    return SessionError(
        f"a parameter of group {group.label} was read outside of its module's call, and the group is spread over the ranks: this "
        "one has a part of it only. Read or change parameters under `with session.gathered():` on all ranks, save with "
        "session.save(), or make the group resident"
    )


def _is_given(managed: ManagedParameter, module: nn.Module, name: str) -> bool:
    return module._parameters.get(name) is not managed.parameter


def chunks_in(groups: Iterable[ManagedGroup]) -> list[Chunk]:
    """All chunks of all groups."""
    return [chunk for group in groups for chunk in group.stored.chunks]


def members_of(groups: Mapping[str, ManagedGroup]) -> list[ManagedParameter]:
    """All parameters of all groups."""
    return [managed for group in groups.values() for managed in group.members]


class Settler(Protocol):
    """What a group calls when somebody reads one of its parameters."""

    def before_change(self, group: ManagedGroup) -> None:
        """Somebody may be about to write to the group's weights."""

    def settle_group(self, group: ManagedGroup) -> None:
        """Wait for the group's final values, and make its parameters plain."""
