"""The forward pass: windows around modules' calls, which open their groups before and close them after.

A `Window` stands around the call of a module and calls the `ForwardPass`; a `Visit` stays in the call's graph and calls
the backward pass. This also holds when a checkpoint calls a module again during a backward, then in autograd's thread.

Note [When a group's backward starts and ends]
It starts when the gradient of one of the module's outputs is complete: a hook on each of them opens the groups. It ends
when the oldest node of the module's graph has run. Autograd runs what is ready in the order of creation, latest first,
so all other nodes of the module have run by then; only the accumulation of the last gradients is still to come. Nothing
is put into the graph for this: a view around an input would group the sum of a gradient that comes from several places
in another way, and round it otherwise than plain torch. A call whose oldest node is never reached, because its output
is not used, ends with the backward. Where only some gradients are asked for (`torch.autograd.grad`, `backward(inputs=)`)
the oldest node may have nothing to do and not run; then the call ends when the backward reaches an earlier one.
What comes with those last gradients, hooks of the user's and an update of streamed weights on the device, finds the groups
still open: they close when the backward reaches the next call, a checkpoint makes one, or it ends.

Note [Recomputation]
A checkpoint around the module calls it again in the middle of its backward, and may break the call off by an exception
when it has what it needs. The groups are open then already, and stay open until the first call's inputs are reached:
the second call's graph is never run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from lowtide import compat
from lowtide.errors import ModelChangedError, SessionError
from lowtide.memory.mover import Mover, Ticket
from lowtide.memory.store import AccessOrder
from lowtide.planning.plan import Schedule
from lowtide.runtime.parameters.group import ManagedGroup
from lowtide.runtime.parameters.pending import is_pending, settle
from lowtide.runtime.parameters.residency import Residency
from lowtide.runtime.passes.lock import HELD_INTERRUPTS, SessionLock, locked, refuse_running_wrapper
from lowtide.runtime.statistics.observer import StepObserver
from lowtide.runtime.statistics.recording import Recorder
from lowtide.runtime.updates.norms import GradientWatch, LossJudge
from lowtide.runtime.updates.worker import HostWorker


class Visit:
    """One forward call with a graph. Only hooks in that graph refer to it, so it is freed with the graph."""

    def __init__(self, window: Window, listener: BackwardListener) -> None:
        self.window = window
        self.groups_as_used = [(group, group.generation, group.shown_memory) for group in window.groups]
        """Each group of the window, with its generation and the foreign memory that its parameters showed during the call."""
        self.backward: int | None = None
        """The backward that opened it last; it may be run again by another, where the graph was retained."""
        self.is_open = False
        self.first_node = compat.next_node_number()
        """Number of the call's first node."""
        self.next_node = self.first_node
        """Number of the first node after the call."""
        self._listener = listener

    def watch(self, outputs: Iterable[torch.Tensor]) -> bool:
        """Hook the call's graph; False if the call has made no graph that could need its weights."""
        self.next_node = compat.next_node_number()
        reached = [tensor for tensor in outputs if tensor.requires_grad and tensor.grad_fn is not None]
        oldest = self.window.oldest_node.find([tensor.grad_fn for tensor in reached], self.first_node)
        if oldest is None:
            return False
        for tensor in reached:
            tensor.register_hook(self._on_output_gradient)
        oldest.register_hook(self._on_oldest_node)
        return True

    def _on_output_gradient(self, gradient: torch.Tensor) -> None:
        self._listener.reached(self, gradient)

    def _on_oldest_node(self, inputs: object, outputs: object) -> None:
        del inputs, outputs
        self._listener.passed(self)


class Call:
    """One call of a module, from `begins` to `ends`."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.started: Ticket | None = None
        """When its groups were open; None before."""
        self.is_over = False


class BackwardListener(Protocol):
    """Opens and closes the groups in a backward."""

    def reached(self, visit: Visit, gradient: torch.Tensor) -> None:
        """A gradient arrived at an output of the visit."""

    def passed(self, visit: Visit) -> None:
        """The backward has passed the visit: the oldest node of its call has run."""


Gate = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Takes the function that runs the module, with its arguments; returns the module's output."""


_REFUSAL = partial(
    SessionError,
    "torch.compile around a managed model would take in the moments at which weights come and go; compile its blocks, before "
    "you manage it: for block in model.layers: block.compile(). Nothing was run",
)


class Window:
    """Stands around one module: `module(...)` goes through it, hooks and compiled code inside.

    Args:
        path: Of the module, "" for the whole model.
        groups: The groups that the module needs.
        forward: Told of the module's calls.
        backward: Told of backwards through them.
        inside: For the whole model, the windows on its modules.
    """

    def __init__(
        self,
        module: nn.Module,
        path: str,
        groups: tuple[ManagedGroup, ...],
        forward: ForwardPass,
        backward: BackwardListener,
        inside: Sequence[Window] = (),
    ) -> None:
        self.module = module
        self.path = path
        self.groups = groups
        self._forward = forward
        self._backward = backward
        self._inside = tuple(inside)
        self._inner: Callable[..., Any] | None = None
        self._is_installed = False
        self.oldest_node = compat.OldestNode()
        self._known: dict[int, str] = {}
        self._known_ids: set[int] = set()
        self._streamed: dict[int, ManagedGroup] | None = None
        """By the storage of a chunk on the device, which is the same for the whole session; made at the first call."""
        self.is_given = False
        """Whether it is for one call only, in which `functional_call` gives the module tensors of the user's."""
        self._gate: Gate | None = None

    @property
    def name(self) -> str:
        """The name of its first group, if it has one, else its path; samples of memory are recorded under it."""
        return self.groups[0].name if self.groups else self.path

    def install(self) -> None:
        """Take the module's calls."""
        self._known = {id(parameter): name for name, parameter in self.module.named_parameters()}
        self._known_ids = compat.parameter_ids(self.module)
        # Set before the change, so that `remove` undoes it after an interrupt.
        self._inner = compat.call_of(self.module)
        self._is_installed = True
        compat.replace_call(self.module, self._call)
        if self.path == "":
            # A compilation of another module is found at the next call of the model, which goes through here.
            compat.guard_compile(self.module, _REFUSAL)

    def remove(self) -> None:
        """Give the module's calls back."""
        if self._is_installed:
            if self.path == "":
                compat.unguard_compile(self.module, _REFUSAL)
            compat.replace_call(self.module, self._inner)
            self._is_installed = False

    def go_through(self, gate: Gate | None) -> None:
        """The gate decides how calls go on, until it is None."""
        self._gate = gate

    def check_model(self) -> None:
        """Refuse a model with other parameters than it had, or one whose modules' calls no longer come here."""
        self._check_parameters()
        for window in (*self._inside, self):
            window.check_in_place()

    def _check_parameters(self) -> None:
        if compat.parameter_ids(self.module) == self._known_ids:
            return
        # The full list: a module's own `parameters()` may name others than it holds.
        now = {id(parameter) for parameter in self.module.parameters()}
        if now == self._known.keys():
            return
        named = {id(parameter): name for name, parameter in self.module.named_parameters()}
        new = [name for key, name in named.items() if key not in self._known]
        gone = [name for key, name in self._known.items() if key not in now]
        replaced = [name for name in gone if name in new]
        added = [name for name in new if name not in replaced]
        removed = [name for name in gone if name not in replaced]
        changes = [
            f"{len(names)} {word} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
            for names, word in ((replaced, "replaced"), (added, "added"), (removed, "removed"))
            if names
        ]
        shards = [kind for kind in map(compat.sharding_of, self.module.parameters()) if kind is not None]
        by_whom = f", by {shards[0]}, and a session is for one process" if shards else ""
        raise ModelChangedError(
            f"the parameters of the model are not those that were managed: {', '.join(changes)}{by_whom}; call session.close(), "
            "change the model, make a plan for it, and manage it again. Nothing was updated"
        )

    def check_in_place(self) -> None:
        """Refuse a module whose calls no longer come here: its weights would not be brought."""
        if compat.call_of(self.module) != self._call:
            raise ModelChangedError(
                f"module {self.path or '(the model)'} was compiled in place (or its call replaced) after the model was "
                "managed, so that its weights would not come; call session.close(), compile the blocks before you manage "
                "the model, and manage it again. Nothing was updated"
            )

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if self.path == "" and compat.is_compiled_around():
            raise _REFUSAL()
        self._forward.call_begins()
        went_well = False
        try:
            output = self._run(*args, **kwargs) if self._gate is None else self._gate(self._run, args, kwargs)
            went_well = True
        finally:
            self._forward.call_over(went_well)
        return output

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self.groups and compat.is_in_transform():
            return self._part()._run_given(args, kwargs)
        call = Call(self)
        try:
            output = self._run_open(call, args, kwargs)
        except ModelChangedError:
            if call.started is not None or not compat.is_functional_call():
                raise
            return self._part()._run_given(args, kwargs)
        if self.path == "":
            self._forward.model_returned(output)
        return output

    def _run_open(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inner = self._inner or compat.plain_call(self.module)
        try:
            try:
                self._forward.begins(call)
                makes_graph = torch.is_grad_enabled() and bool(self.groups)
                output = self._visit(inner, args, kwargs) if makes_graph else inner(*args, **kwargs)
            finally:
                self._forward.ends(call)
        finally:
            # Once more: an interrupt may have come before the first `ends` began, or have stopped it.
            if not call.is_over:
                self._forward.ends(call)
        self._refuse_weights_in(output)
        return output

    def _part(self) -> Window:
        """For one call: a window on the groups of which the module has a parameter of the session's in this call."""
        rest: list[ManagedGroup] = []
        for group in self.groups:
            if not group.is_wholly_given:
                rest.append(group)
            for tensor in group.given_instead():
                self._check_given(group, compat.unwrapped(tensor))
        part = Window(self.module, self.path, tuple(rest), self._forward, self._backward)
        part._inner, part.is_given = self._inner, True
        return part

    def _check_given(self, group: ManagedGroup, tensor: torch.Tensor) -> None:
        """Check a tensor that the user gives for a parameter. If it is itself a parameter of the session's, wait for its value."""
        device = group.members[0].device_view.device
        if is_pending(tensor):
            with compat.outside_transforms():
                settle(tensor)
        if tensor.device != device:
            raise SessionError(
                f"functional_call gives {type(self.module).__name__} at {self.path or 'the top'} a tensor "
                f"{tuple(tensor.shape)} on {tensor.device}, and the model computes on {device}; bring it there: "
                f"tensor.to({str(device)!r}). Streamed weights, and what is made from them, are on the host"
            )

    def _run_given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.groups:
            return (self._inner or compat.plain_call(self.module))(*args, **kwargs)
        if compat.is_in_transform():
            raise SessionError(
                f"a transform of torch.func calls {type(self.module).__name__} at {self.path or 'the top'}, around whose "
                f"calls the session moves weights (group {self.groups[0].label}); give it weights of your own for the call: "
                "torch.func.functional_call(model, {name: value.detach().clone() for name, value in "
                "model.named_parameters()}, ...), or make the group resident and update it on the device. Nothing was updated"
            )
        output = self._run_open(Call(self), args, kwargs)
        if self.path == "" and not torch.is_grad_enabled():
            self._forward.model_returned(output)
        return output

    def _refuse_weights_in(self, output: object) -> None:
        """Refuse an output that shares memory with streamed weights: it would be read after they have left the device."""
        if self._streamed is None:
            self._streamed = {
                compat.storage_key(chunk.device): group
                for group in self.groups
                if not group.is_resident
                for chunk in group.stored.chunks
            }
        streamed = self._streamed
        for tensor in compat.tensors_in(output) if streamed else ():
            group = streamed.get(compat.storage_key(tensor)) if tensor.layout is torch.strided else None
            if group is not None:
                raise SessionError(
                    f"{type(self.module).__name__} at {self.path or 'the top'} returns its own weights or a view of them "
                    f"({tuple(tensor.shape)}), and group {group.label} is streamed: they leave the device after the call. "
                    "Make the group resident, or return a copy. Nothing was updated"
                )

    def _visit(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        visit = Visit(self, self._backward)
        # The nodes are kept too: a module may write to its argument and return it.
        entered = {id(tensor): tensor.grad_fn for tensor in compat.tensors_in((args, kwargs))}
        output = inner(*args, **kwargs)
        # An argument that is returned unchanged has no node of the module; its gradient comes after the module's.
        if visit.watch(
            [
                tensor
                for tensor in compat.tensors_in(output)
                if id(tensor) not in entered or tensor.grad_fn is not entered[id(tensor)]
            ]
        ):
            for group in self.groups:
                group.enter(visit)
        return output


class BackwardCondition(Protocol):
    """What a forward asks about backwards."""

    @property
    def is_under_way(self) -> bool:
        """Whether a backward has begun and not ended, well or not."""

    def check_broken(self) -> None:
        """Put everything back where it belongs, if the last backward broke off."""

    def refuse_beside(self, what: str) -> None:
        """Refuse what this thread begins while another runs a backward."""

    def watch_output(self, output: object) -> None:
        """Notice a backward as soon as it reaches an output of the model."""

    def close_late(self) -> None:
        """Close the groups that stayed open for a last gradient in the backward of this thread."""


class ForwardPass:
    """Opens and closes groups when windows say that their modules are called.

    Args:
        residency: Opens and closes the groups.
        backward: Asked whether the last one broke off.
        loss: Told what the model returned.
        gradient_watch: Asked at the start of each call whether it knows of gradients that were not finite.
        observer: Asked at each opening and closing of a window; None costs nothing.
        lock: Shared with the backward pass.
    """

    def __init__(
        self,
        residency: Residency,
        mover: Mover,
        worker: HostWorker,
        recorder: Recorder,
        *,
        backward: BackwardCondition,
        loss: LossJudge,
        gradient_watch: GradientWatch,
        observer: StepObserver | None,
        lock: SessionLock,
    ) -> None:
        self._residency = residency
        self._mover = mover
        self._worker = worker
        self._recorder = recorder
        self._backward = backward
        self._loss = loss
        self._gradient_watch = gradient_watch
        self._observer = observer
        self._lock = lock
        self._running: list[Call] = []
        self._orders: dict[tuple[bool, bool], AccessOrder] = {}
        self._is_later_part = False
        self._used: set[str] | None = None
        """Groups that this forward has used so far; None unless the whole model was called to be trained."""
        self.was_called = False
        """Whether the model, or a module of it, has been called at all."""
        self.has_raised = False
        """Whether the last call of the model, or the last step, has raised."""

    @property
    def is_under_way(self) -> bool:
        """Whether a module is being called."""
        return bool(self._running)

    @locked
    def begins(self, call: Call) -> None:
        """A module's call begins: open its groups."""
        window = call.window
        is_in_backward = compat.backward_number() is not None
        if not is_in_backward and not self._running:
            self._backward.check_broken()
            self._worker.check()
            self._gradient_watch.check(waits=False)
            if window.path == "" and not window.is_given and not self._is_later_part:
                self._begin_cycle(window)
            self._recorder.phases.enter("forward")
        elif is_in_backward:
            self._backward.close_late()
        # Before the groups open, so that `ends` finds the call there whatever happens.
        self._running.append(call)
        self._recorder.phase = "backward" if is_in_backward else "forward"
        for group in window.groups:
            group.check_unchanged(may_be_given=window.is_given)
        self._residency.open_all(window.groups)
        if not is_in_backward:
            for group in window.groups:
                self._note_first_use(group)
                if group.stored.num_open == 1:
                    group.remember_versions()
        call.started = self._mover.now()
        if self._observer is not None:
            self._observer.take_sample(window.name, self._recorder.phase)

    @locked
    def ends(self, call: Call) -> None:
        """A module's call ends: close its groups, if they were opened."""
        if self._lock.is_broken or call.started is None:
            self._give_up(call)
        else:
            try:
                if self._observer is not None:
                    self._observer.take_sample(call.window.name, self._recorder.phase)
            finally:
                self._leave(call)
        call.is_over = True

    @contextlib.contextmanager
    def later_part(self) -> Iterator[None]:
        """A context in which the model is called for another part of the same batch, on another device."""
        self._is_later_part = True
        try:
            yield
        finally:
            self._is_later_part = False

    def forget_calls(self) -> None:
        """The session ends, or starts afresh: calls that are under way will find nothing to close."""
        self._running.clear()

    def call_begins(self) -> None:
        """Refuse a call beside one of another thread. A call in a backward is a checkpoint's, and belongs to that backward."""
        # Most calls are of modules inside of a module that has asked already.
        if not self._lock.is_in_call() and compat.backward_number() is None:
            self._backward.refuse_beside("a forward")
            self._lock.begin_call("a forward")

    def call_over(self, went_well: bool) -> None:
        """Remember whether the last call raised. A nested call, or one in a backward, that succeeds does not clear the flag."""
        self.was_called = True
        if compat.backward_number() is not None:
            return
        if not self._running:
            self._lock.end_call()
        if not (went_well and self._running):
            self.has_raised = not went_well

    def model_returned(self, output: object) -> None:
        """Remember the loss, if the model computes it: a step on a loss that is not finite is refused."""
        if compat.backward_number() is not None:
            return
        if torch.is_grad_enabled():
            self._loss.remember(output)
            self._backward.watch_output(output)
            return
        self._loss.forget_loss()
        if not self._running and not self._backward.is_under_way:
            self._residency.point_idle_to_host()

    def _leave(self, call: Call) -> None:
        window = call.window
        running = self._running[-1]
        assert running is call, f"the call of {window.path} ended before that of {running.window.path} inside it"
        assert call.started is not None
        if window.groups:
            ended = self._mover.now()
            self._recorder.on_compute(window.groups[0].name, self._recorder.phase, call.started, ended)
            is_in_backward = compat.backward_number() is not None
            for group in window.groups:
                if not is_in_backward and group.stored.num_open == 1:
                    self._residency.keep_writes(group)
                self._residency.close(group, ended)
        self._running.pop()
        if not self._running:
            self._end_forward()

    def _give_up(self, call: Call) -> None:
        """This call, or one inside of it, raised: when the outermost call is left, everything is put in order."""
        while call in self._running:
            self._running.pop()
        if compat.backward_number() is None and call.started is not None:
            for group in call.window.groups:
                # What the module wrote to its own weights before it raised is kept, as in plain torch.
                with contextlib.suppress(Exception):
                    self._residency.keep_writes(group)
        if not self._running and compat.backward_number() is None:
            self._backward.check_broken()
        self._end_forward()

    def _end_forward(self) -> None:
        """End the forward, unless this was a call inside of another."""
        if not self._running and compat.backward_number() is None:
            self._recorder.phases.leave("forward")
            HELD_INTERRUPTS.restore_handler()

    def _note_first_use(self, group: ManagedGroup) -> None:
        """The host updates groups in the order in which a forward first uses them, not in that of the model's list of modules."""
        if self._used is not None and group.name not in self._used:
            group.note_place(len(self._used))
            self._used.add(group.name)

    def _begin_cycle(self, window: Window) -> None:
        """The whole model is called: check that it is the managed one, and count a step."""
        window.check_model()
        refuse_running_wrapper(window.module.parameters())
        for group in self._residency.groups.values():
            if group.is_resident:  # others are checked when their own windows open
                group.check_unchanged()
        self._used = set() if torch.is_grad_enabled() else None
        key = (window.module.training, torch.is_grad_enabled())
        store = self._residency.store
        store.order.end_cycle()
        store.order = self._orders.setdefault(key, store.order if not self._orders else AccessOrder())
        self._recorder.begin_step()


def make_windows(
    model: nn.Module,
    groups: Iterable[ManagedGroup],
    schedule: Schedule,
    forward: ForwardPass,
    backward: BackwardListener,
) -> list[Window]:
    """A window for each module whose calls must be known, not installed yet; the one of the whole model is the last.

    Resident groups that the device updates need none.
    """
    by_path: dict[str, list[ManagedGroup]] = {}
    needs_model = schedule is Schedule.IN_BACKWARD
    for group in groups:
        needs_model = needs_model or group.is_on_host
        if group.is_on_host or (group.is_resident and not group.is_updated_on_host):
            continue
        for path in group.stored.spec.modules:
            by_path.setdefault(path, []).append(group)
    if not by_path and not needs_model:
        return []
    of_model = by_path.pop("", [])
    inside = [
        Window(model.get_submodule(path), path, tuple(groups), forward, backward) for path, groups in by_path.items()
    ]
    return [*inside, Window(model, "", tuple(of_model), forward, backward, inside)]
