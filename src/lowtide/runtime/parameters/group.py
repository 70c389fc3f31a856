"""ManagedGroup: one group at run time. Its parameters look at the device inside a window and at the host otherwise.

The Parameter objects are the user's own and stay the same for the whole session; what changes is where their data is.

Note [Where a streamed parameter looks]
From the first window of a step to the end of its backward a streamed parameter keeps looking at its device view, also
while the chunk is away: to look back and forth would give it a new gradient accumulator at each turn on CUDA, and the
gradients of a parameter that is used twice would be added in another order than plain torch's. While the chunk is away
the parameter is pending, so that whoever looks gets the host's value; see `parameters.pending`.

Note [Memory that the user holds]
`p.detach()`, `p.data`, a state dictionary or `p.numpy()` show the memory where the parameter rests, its home: the host's
bytes of a streamed parameter, the device's of a resident one. Such a tensor is not pending. While one is held, it shows what
it would in plain torch: `step()` waits for the updates and copies that change it, what is written to it reaches the next
use, and so no copies of a streamed group are kept on the device between its uses. Who holds what is told by the number of
tensors on the home's storage; nothing is waited for where there are only our own.

`p.data = x` gives the parameter other memory. Where nobody else shows x nor the home, the values go to the home at the next
use, and nobody can tell. Else the parameter keeps x (`ManagedParameter.foreign`): windows get its values by a copy of
their own, and updates change x. So code that sets `p.data` to an average and back finds in each what it had.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import nn

from lowtide import compat
from lowtide.errors import GradientGoneError, ModelChangedError
from lowtide.memory.chunk import Chunk, StoredGroup
from lowtide.memory.layout import ParameterSpec
from lowtide.memory.mover import Ticket
from lowtide.planning.plan import Site
from lowtide.runtime.emulation.device import mark_of, set_mark
from lowtide.runtime.parameters.pending import PendingValue, make_all_pending, make_all_plain, make_plain
from lowtide.runtime.updates.worker import Job


class Visit(Protocol):
    """A forward call whose graph is alive; see `passes.window`."""

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
    ) -> None:
        self.parameter = parameter
        self.spec = spec
        self.chunk = chunk
        self.site = site
        self.host_view = host_view
        self.device_view = device_view
        self.rest_at(device_view if host_view is None else host_view)
        self.host_target: torch.Tensor | None = None
        """What the host updates: shares the host's memory, and the parameter's version where that is its data."""
        self.num_own_views = 1
        """Tensors of our own on the home's storage: the home, and the host target where it is another tensor there."""
        self.gradient_home: torch.Tensor | None = None
        """Where a deferred gradient lands on the host."""
        self.lent: weakref.ref[torch.UntypedStorage] | None = None
        """The user's last gradient in that home; while it lives, somebody may hold it."""
        self.pending_gradient: PendingValue | None = None
        """What the user's gradient waits for, while it is pending."""
        self.hook: torch.utils.hooks.RemovableHandle | None = None
        """Tells when the gradient is complete."""
        self.is_whole = False
        """Whether this backward adds to the gradient from before it on the device, for hooks of the user's to see."""
        self.stashed: torch.Tensor | None = None
        """The gradient on the host from before this backward, set aside while the parameter looks at the device."""
        self.gradient: torch.Tensor | None = None
        """The gradient on the host that this backward is making."""
        self.num_takes = 0
        """Counts what came to the gradient on the host: a norm is of one moment."""
        self.is_gradient_held = False
        """Whether somebody else holds the gradient's memory on the host, to which this backward adds."""
        self.was_seen = False
        """Whether somebody has looked at the gradient on the host since it began, and may write to it through a view."""
        self.norm: tuple[int, torch.Tensor] | None = None
        """The norm of the gradient on the host, and after which take."""
        self.pending: list[Ticket | Job] = []
        """What must happen before the gradient on the host is complete."""
        self.version = 0
        """The parameter's version when its window opened."""
        self.is_hook_awaited = False
        """Whether hooks of the user's on the gradient are still to run in this backward; they may write to the weights."""
        self.is_hooked = False
        """Whether there are such hooks."""
        self.version_in_backward = 0
        """The parameter's version when the backward reached it."""
        self.is_written_in_backward = False
        """Whether such hooks wrote to the parameter, or may have."""
        self.has_fired = False
        """Whether this backward brought a gradient."""
        self.owners: list[tuple[nn.Module, str]] = []
        """Modules and names under which the model has it."""
        self.foreign: torch.Tensor | None = None
        """What the parameter shows instead of its home; see Note [Memory that the user holds]."""

    def update_through(self, host_target: torch.Tensor) -> None:
        """The host updates the parameter through this tensor: a view of streamed weights, or the host's copy of resident ones."""
        self.host_target = host_target
        self.num_own_views = 1 if host_target is self.host_view else 2

    def rest_at(self, home: torch.Tensor) -> None:
        """The parameter rests in this memory: the device's for a resident one, else the host's."""
        self.home = home
        self.home_address = home.data_ptr()
        # Kept, because it is asked about at every window: the object is made anew for each question otherwise.
        self.home_storage = home.untyped_storage()

    def is_home_held(self) -> bool:
        """Whether somebody else shows the home's memory; not while an update runs on it."""
        num_others = compat.num_owners(self.home_storage) - self.num_own_views
        if num_others != 1:
            return num_others > 1
        with compat.without_torch_function():  # as a rule the parameter
            return compat.storage_key(self.parameter) != compat.storage_key(self.home)

    @property
    def known_norm(self) -> torch.Tensor | None:
        """The norm of the gradient as it is now; None where it is not known, or not yet."""
        is_known = self.norm is not None and self.norm[0] == self.num_takes and not self.was_seen
        return self.norm[1] if self.norm is not None and is_known else None

    def inner_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """A tensor of our own over a gradient of the user's, which may be pending and is the user's alone to hold."""
        home = self.gradient_home
        with compat.without_torch_function():
            is_at_home = home is not None and gradient.data_ptr() == home.data_ptr()
        return same_memory(home if is_at_home and home is not None else gradient)

    def settle_gradient(self) -> None:
        """Wait until the gradient on the host is complete."""
        while self.pending:
            first = self.pending[0]
            try:
                first.wait()
            except Exception:
                self.pending.remove(first)
                raise
            # Not before: an interrupted wait must not forget it.
            if self.pending and self.pending[0] is first:
                self.pending.pop(0)


class ManagedGroup:
    """One group with its parameters; also what they settle by while they are pending."""

    def __init__(
        self, group: StoredGroup, members: list[ManagedParameter], *, is_resident: bool, is_on_host: bool = False
    ) -> None:
        self.stored = group
        self.name = group.name
        self.members = members
        self.parameters = tuple([managed.parameter for managed in members])
        for managed in members:
            make_plain(managed.parameter)  # a session that was forgotten may have left it so
            if is_resident:
                managed.rest_at(managed.device_view)
        self.is_resident = is_resident
        self.is_on_host = is_on_host
        """Its weights never come to the device, nor does it have a window: its module computes on the host."""
        self.generation = 0
        """Counts updates: a visit remembers which weights it saw."""
        self.visits: weakref.WeakSet[Visit] = weakref.WeakSet()
        """Forward calls whose graph still lives and whose backward has not passed."""
        self.consumed: set[str] = set()
        """Chunks updated in backward; until `step()` no second backward and no look at a gradient."""
        self.dropped: set[str] = set()
        """Parameters that the optimizer does not hold, whose gradients a backward dropped; until `step()` no look at one."""
        self.num_tasks = 0
        """Backwards that have opened it and not ended."""
        self.looks_at_device = is_resident
        self.shown_memory: tuple[int, ...] = ()
        """Addresses of memory that parameters show instead of their homes; none as a rule."""
        self.awaits_hooks = False
        """Whether hooks of the user's on gradients are still to run in this backward."""
        self.is_awaited = False
        """Whether somebody holds memory that an update or a copy under way changes: `step()` waits for it."""
        self.place = 0
        """In the order in which the last forward first used groups; before the first, that of the layout."""
        self.awaited: dict[str, ManagedParameter] = {}
        """By chunk, a trained parameter whose gradient was still to come in this backward when that was last asked."""
        self.settler: Settler | None = None

    @property
    def is_consumed(self) -> bool:
        """Whether a backward has updated some of its weights, and `step()` has not been called since."""
        return bool(self.consumed)

    @property
    def guards_gradients(self) -> bool:
        """Whether a look at a gradient must be refused until `step()`."""
        return bool(self.consumed or self.dropped)

    def forget_backward(self) -> None:
        """The step is over, or given up: gradients may come and be looked at again."""
        self.consumed.clear()
        self.dropped.clear()

    @property
    def label(self) -> str:
        """The name for people."""
        return self.stored.name or "(rest of the model)"

    def remember_versions(self) -> None:
        """As of the opening of a window: a forward may write to its own weights."""
        for managed, version in zip(self.members, compat.versions_of(self.parameters), strict=True):
            managed.version = version

    def written_chunks(self) -> list[Chunk]:
        """Chunks of which a parameter was written to since."""
        written = [
            managed.chunk
            for managed, version in zip(self.members, compat.versions_of(self.parameters), strict=True)
            if version != managed.version
        ]
        return list({id(chunk): chunk for chunk in written}.values()) if written else written

    def keep_late_writes(self) -> None:
        """Take what user code wrote to parameters after an exception, while their window still stood open, to the host: a
        checkpoint that is loaded at once, say. No copy may be under way, nor work on the host.
        """
        with compat.without_torch_function(), torch.no_grad():
            for managed in self.members:
                chunk = managed.chunk
                # Where the host has updated a streamed chunk its bytes are the newer ones, and the update counts as a write.
                is_old = not self.is_resident and (chunk.host_work is not None or chunk.spec.name in self.consumed)
                if managed.host_view is None or is_old or not chunk.is_on_device:
                    continue
                if managed.foreign is not None and self.is_resident:
                    continue  # the parameter shows memory of the user's
                version = managed.version_in_backward if self.num_tasks else managed.version
                if compat.version_of(managed.parameter) != version:
                    (managed.host_view if managed.foreign is None else managed.foreign).copy_(managed.parameter)

    def look_at_device(self) -> None:
        """Point the parameters to the open chunk and let the model see plain ones."""
        self.make_plain()
        if self.is_resident:
            self.adopt_foreign_data()
        elif not self.looks_at_device:
            self.adopt_foreign_data()
            # Before the first: where an exception comes in between, `look_at_host` takes back those that were pointed there.
            self.looks_at_device = True
            for managed in self.members:
                managed.parameter.data = managed.device_view

    def fill_in_foreign_data(self) -> None:
        """The chunks have just come, with what lies in the homes: put in what the user has given parameters instead."""
        for managed in self.members:
            if managed.foreign is not None:
                with torch.no_grad():
                    managed.device_view.copy_(managed.foreign)

    def adopt_foreign_data(self) -> None:
        """User code may have given parameters other memory (`p.data = x`, `model.cuda()`). Take the values over and look at
        home again, or keep that memory: see Note [Memory that the user holds].
        """
        if self.looks_at_device and not self.is_resident:
            return
        with compat.without_torch_function():
            foreign = self._with_foreign_data()
            for managed in foreign:
                self._adopt(managed)
        if foreign or self.shown_memory:
            self.shown_memory = tuple(
                managed.foreign.data_ptr() for managed in self.members if managed.foreign is not None
            )

    def look_at_host(self) -> None:
        """Point the parameters to the host's bytes."""
        if self.looks_at_device and not self.is_resident:
            self.make_plain()
            for managed in self.members:
                assert managed.host_view is not None
                managed.parameter.data = managed.host_view if managed.foreign is None else managed.foreign
            self.looks_at_device = False

    def is_held(self, chunk: Chunk | None = None) -> bool:
        """Whether somebody else shows memory where the parameters rest, of this chunk or of all."""
        members = self.members if chunk is None else [managed for managed in self.members if managed.chunk is chunk]
        counts = compat.nums_of_owners([managed.home_storage for managed in members])
        for managed, num_owners in zip(members, counts, strict=True):
            if managed.foreign is not None or (num_owners > managed.num_own_views and managed.is_home_held()):
                return True
        return False

    def rebuild(self) -> None:
        """After an exception: streamed parameters look at the host, or all of them at the device for a graph that lives.

        One that user code gave other memory keeps it. Afterwards `Residency.guard` must be asked.
        """
        self.num_tasks = 0
        self.awaits_hooks = False
        if self.is_resident or self.is_on_host:
            return
        with compat.without_torch_function():
            on_device = [
                managed
                for managed in self.members
                if compat.storage_key(managed.parameter) == compat.storage_key(managed.chunk.device)
            ]
            self.looks_at_device = bool(self.visits) and len(on_device) == len(self.members)
            for managed in on_device if not self.looks_at_device else ():
                assert managed.host_view is not None
                managed.parameter.data = managed.host_view if managed.foreign is None else managed.foreign

    def make_pending(self) -> None:
        """From now on a look at a parameter settles the group first."""
        make_all_pending(self.parameters, self)

    def make_plain(self) -> None:
        """Parameters are what they seem."""
        make_all_plain(self.parameters)

    def settle(self) -> None:
        """Make the values of the group's parameters true: user code looks at one of them."""
        assert self.settler is not None
        self.settler.settle_group(self)

    def check_gradient(self) -> None:
        """Refuse a look at a gradient that was used up."""
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

    def wait_for_device(self) -> None:
        """Parameters are settled by other means."""

    def given_instead(self) -> list[torch.Tensor]:
        """Tensors that modules have in the place of the group's parameters: `functional_call` gives them for one call."""
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
        """Refuse a model whose parameters are not the managed ones any more, unless it may have others for one call."""
        with compat.without_torch_function():
            self._check_unchanged(may_be_given)

    def _check_unchanged(self, may_be_given: bool) -> None:
        for managed in self.members:
            for module, name in () if may_be_given else managed.owners:
                if module._parameters.get(name) is not managed.parameter:
                    raise ModelChangedError(
                        f"parameter {managed.spec.name} of group {self.label} was replaced after the model was managed "
                        f"({type(module).__name__}.{name} is another object now); call session.close(), change the "
                        "model, and manage it again. Nothing was updated"
                    )
            if not managed.spec.requires_grad and managed.parameter.requires_grad:
                raise ModelChangedError(
                    f"parameter {managed.spec.name} of group {self.label} was frozen when the model was managed, and is "
                    "trained now, for which the plan has no room; call session.close(), make a plan for the model as it "
                    "is, and manage it again. Nothing was updated"
                )

    def _with_foreign_data(self) -> list[ManagedParameter]:
        """Those whose parameters do not look at home."""
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
        # A graph that is alive is through the memory as it was: in plain torch it keeps that.
        is_kept = compat.num_storage_owners(parameter) > 1 or managed.is_home_held() or bool(self.visits)
        with torch.no_grad():
            if not is_kept:
                home.copy_(parameter.data)
                parameter.data = home
                return
            if self.is_resident and (parameter.device != home.device or parameter.stride() != home.stride()):
                # The model computes with it where it is.
                parameter.data = beside(home).copy_(parameter.data)
            managed.foreign = parameter.data


def _is_given(managed: ManagedParameter, module: nn.Module, name: str) -> bool:
    return module._parameters.get(name) is not managed.parameter


def chunks_in(groups: Iterable[ManagedGroup]) -> list[Chunk]:
    """All chunks of all groups."""
    return [chunk for group in groups for chunk in group.stored.chunks]


class Settler(Protocol):
    """What a group calls when somebody looks at one of its parameters."""

    def settle_group(self, group: ManagedGroup) -> None:
        """Make the group's parameters true and plain."""


def same_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor object over the same memory, outside of autograd, with a version of its own."""
    with compat.without_torch_function():
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
        )


def own_storage(view: torch.Tensor) -> torch.Tensor:
    """Another tensor over the same memory, with a storage that ends where the view does, and that keeps the memory alive.

    What torch saves and pickles is the storage: a view of a large buffer would carry its neighbours along. And as long
    as such a storage lives, somebody may look at the memory. The view must be dense.
    """
    with compat.without_torch_function():
        num_bytes, start = view.numel() * view.element_size(), view.storage_offset() * view.element_size()
        flat = torch.empty(0, dtype=torch.uint8, device=view.device)
        flat.set_(view.untyped_storage(), start, (num_bytes,), (1,))
        storage = compat.storage_over(flat)
        set_mark(storage, mark_of(view.untyped_storage()))
        return torch.empty(0, dtype=view.dtype, device=view.device).set_(storage, 0, view.size(), view.stride())


def beside(tensor: torch.Tensor) -> torch.Tensor:
    """New memory of the same tier and shape, which holds nothing yet."""
    with compat.without_torch_function(), compat.without_modes():
        made = torch.empty_like(tensor, requires_grad=False)
        set_mark(made.untyped_storage(), mark_of(tensor.untyped_storage()))
    return made
