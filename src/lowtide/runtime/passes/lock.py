"""Who may call a session: one thread of one process at a time, and no rank; an interrupt waits until nothing is half done.

Note [When an interrupt arrives]
Python calls the handler of a signal between two bytecodes of the main thread, and the handler raises there. So code
that must not stop half-way is a section, `with HELD_INTERRUPTS:`, in which a handler of our own remembers the signal; the
outermost section sends it again at its end, to the handler that was there before. To exchange handlers is a call of the
operating system, and a step has hundreds of sections: the first one of a forward, a backward or a `step()` puts our handler in, and
`restore_handler` takes it out at the end. Between sections, and where an exception kept `restore_handler` from being called,
our handler passes every signal on at once.

In other threads, such as autograd's for a CUDA device, handlers never run, and sections do nothing. A second interrupt
while one is held is delivered at once, so that a user can leave a section that does not end. It is then an exception like any
other; see Note [After an exception] in `passes.backward`.

Note [Threads]
Threads may use a session one after the other: an evaluation in another thread is fine while the loop does nothing. A call
that comes while another thread is in a forward, a backward or a step is refused: windows open and close in order, and a
device budget is for one call. Autograd's own threads belong to the backward that they run.

Note [Forked processes]
A child has the session's objects but not its worker's thread: to wait for an update there would never end, and a lock
that another thread held stays locked. So whatever goes through the session is refused in a child. A data loader's
workers do not touch it.

Note [Ranks]
Models that are spread over several processes or devices are refused. A session takes gradients away and updates weights
by itself, one model on one device. DistributedDataParallel averages gradients where autograd leaves them: where the
session takes them first, ranks would not train, or drift apart, in silence. So neither may be around the other,
whichever came first.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lowtide import compat
from lowtide.errors import ModelChangedError, SessionError, StepLostError, TwoThreadsError

# What these wrap: both turn numbers into enumerations at each call, which takes longer than all the rest.
_get_handler: Callable[[int], Any] = getattr(signal.getsignal, "__wrapped__", signal.getsignal)
_set_handler: Callable[[int, Any], Any] = getattr(signal.signal, "__wrapped__", signal.signal)
_SIGINT = int(signal.SIGINT)


class HeldInterrupts:
    """The context of sections; there is one, `HELD_INTERRUPTS`, as there is one main thread. Sections may be nested."""

    def __init__(self) -> None:
        self._handler = self._on_signal  # one object: it is asked for by identity
        self._before: Any = None
        self._is_installed = False
        self._depth = 0
        self._has_come = False
        self._owner: FrameType | None = None
        """Where the outermost section is."""
        self._main = threading.main_thread().ident
        os.register_at_fork(after_in_child=self._follow_fork)

    def __enter__(self) -> None:
        if threading.get_ident() != self._main:
            return
        if not self._depth:
            if not self._is_installed:
                self._install()
            self._owner = sys._getframe(1)
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() != self._main:
            return
        self._depth -= 1
        if self._depth <= 0:
            self._depth, self._owner = 0, None
            if self._has_come:
                self._deliver()

    def restore_handler(self) -> None:
        """Put back the handler of before; called in the last section of a forward, a backward or a step, or after it."""
        if threading.get_ident() != self._main:
            return
        if self._owner is not None and not self._is_inside(sys._getframe(1)):
            self._depth, self._owner = 0, None
        if self._is_installed:
            self._is_installed = False
            # Else somebody has set another one meanwhile.
            if _get_handler(_SIGINT) is self._handler:
                _set_handler(_SIGINT, self._before)

    def _install(self) -> None:
        before = _get_handler(_SIGINT)
        if before is not None and before is not self._handler:  # else it was set in C, and cannot be put back
            self._before = before
            _set_handler(_SIGINT, self._handler)
        self._is_installed = True

    def _deliver(self) -> None:
        self._has_come = self._is_installed = False
        if _get_handler(_SIGINT) is self._handler:
            _set_handler(_SIGINT, self._before)
        handler = _get_handler(_SIGINT)
        if callable(handler):
            # Not the signal again: whoever listens by a wakeup descriptor would count two.
            handler(_SIGINT, sys._getframe(1))
        else:
            signal.raise_signal(signal.SIGINT)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        is_inside = self._is_inside(frame)
        if self._depth and is_inside and not self._has_come:
            self._has_come = True
            return
        if not is_inside:
            self._depth, self._owner = 0, None
        self._deliver()

    def _is_inside(self, frame: FrameType | None) -> bool:
        """Whether the outermost section is under way in this frame; else an exception has left it without its end."""
        while frame is not None and frame is not self._owner:
            frame = frame.f_back
        return frame is not None

    def _follow_fork(self) -> None:
        self._main, self._depth, self._has_come, self._owner = threading.get_ident(), 0, False, None


HELD_INTERRUPTS = HeldInterrupts()


P = ParamSpec("P")
R = TypeVar("R")


class Process:
    """The process in which it was made."""

    num_forks = 0
    """How often this process or one before it was forked; costs nothing to ask, unlike its number."""

    def __init__(self) -> None:
        self.number = Process.num_forks

    @property
    def is_this(self) -> bool:
        """Whether it is the running one, and not one that it was forked from."""
        return self.number == Process.num_forks

    def require(self) -> None:
        """Refuse a forked one.

        Raises:
            SessionError: It says what to do.
        """
        if not self.is_this:
            raise SessionError(
                f"process {os.getpid()} was forked from the one that manages this model, and has neither the thread that "
                "updates its weights nor its device. Start it with 'spawn' (torch.multiprocessing.get_context('spawn')), or "
                "fork before lowtide.manage, and let each process build and manage a model of its own. The session in the "
                "other process goes on"
            )

    @classmethod
    def count_fork(cls) -> None:
        """Called in the child of a fork."""
        cls.num_forks += 1


os.register_at_fork(after_in_child=Process.count_fork)


class SessionLock:
    """The lock of one session: held for moments, and taken by one thread for the length of a call."""

    def __init__(self) -> None:
        self.process = Process()
        self.momentary = threading.RLock()
        """For a `with` block that is over soon. In a forked process it may be held for ever: ask `process` first."""
        self._call: tuple[int, str] | None = None
        """The thread that is in a forward or a step, and the words for it."""
        self.is_broken = False
        """Whether an exception came out of what holds the lock, and nothing has been put in order since."""
        self.is_backward_broken = False
        """Whether that was in a backward."""

    def broke_off(self, *, is_in_backward: bool = False) -> None:
        """An exception comes out of what holds the lock."""
        self.is_broken = True
        if is_in_backward or compat.backward_number() is not None:
            self.is_backward_broken = True

    def put_in_order(self) -> None:
        """The session was put in order: everything is where it belongs."""
        self.is_broken = self.is_backward_broken = False

    def begin_call(self, what: str) -> None:
        """This thread begins a forward or a step.

        Raises:
            SessionError: Another thread is in one, or in a backward.
        """
        self.process.require()
        with self.momentary:
            self.refuse_beside(what)
            self._call = (threading.get_ident(), what)

    def end_call(self) -> None:
        """This thread's forward or step is over."""
        self._call = None

    @contextmanager
    def call(self, what: str) -> Iterator[None]:
        """A call of this thread from beginning to end; it may lie inside of another."""
        before = self._call
        self.begin_call(what)
        try:
            yield
        finally:
            self._call = before

    def is_in_call(self) -> bool:
        """Whether this thread is in a call."""
        return self._call is not None and self._call[0] == threading.get_ident()

    def is_taken_elsewhere(self) -> bool:
        """Whether another thread is in a call, and not gone."""
        call = self._call
        return call is not None and call[0] != threading.get_ident() and call[0] in _other_frames()

    def refuse_beside(self, what: str) -> None:
        """Refuse what this thread begins while another is in a call.

        Raises:
            SessionError: It names both.
        """
        if self.is_taken_elsewhere():
            assert self._call is not None
            raise two_threads(what, self._call[0], self._call[1])


def other_threads_in_backward() -> set[int]:
    """Threads other than this one that have called `backward` and wait for it."""
    return {number for number, frame in _other_frames().items() if _is_in_engine(frame)}


def _is_in_engine(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == compat.ENGINE_FUNCTION:
            return True
        frame = frame.f_back
    return False


def _other_frames() -> dict[int, FrameType]:
    frames = sys._current_frames()
    # Its own frame would hold itself, and all that the frames below it hold, until the collector comes.
    frames.pop(threading.get_ident(), None)
    return frames


def two_threads(what: str, other: int, doing: str) -> TwoThreadsError:
    """The error for a thread that begins something of a session while another thread is in it."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return TwoThreadsError(
        f"thread {threading.current_thread().name!r} began {what} of a managed model while thread "
        f"{names.get(other, str(other))!r} is in {doing} of it; a session is used by one thread at a time. Put a lock around "
        "the calls of both, wait for the other thread, or give this one a model of its own"
    )


class Locked(Protocol):
    """Has a lock, which it may share with others.

    Autograd runs nodes on the host in the loop's thread, beside those on the device in its own: where a loss has a part
    on the host, both reach hooks at once.
    """

    _lock: SessionLock


L = TypeVar("L", bound=Locked)


def locked(method: Callable[Concatenate[L, P], R]) -> Callable[Concatenate[L, P], R]:
    """The method holds the object's lock while it runs; an interrupt waits for its end, and an exception is noted."""

    @wraps(method)
    def run(self: L, /, *args: P.args, **kwargs: P.kwargs) -> R:
        lock = self._lock
        if lock.process.number != Process.num_forks:
            lock.process.require()
        with HELD_INTERRUPTS, lock.momentary:
            try:
                return method(self, *args, **kwargs)
            except (ModelChangedError, TwoThreadsError):
                raise  # refused before anything was changed
            except BaseException:
                lock.broke_off()
                raise

    return run


_ADVICE = (
    "a session averages gradients by itself. Manage the plain model, without the wrapper, with ranks= (such as "
    "torch.distributed.group.WORLD), or train it under the wrapper without Lowtide"
)


def refuse_parallel(model: nn.Module) -> None:
    """Refuse a model that is in, around or of a parallel wrapper, or whose parameters are shards.

    Raises:
        SessionError: It names the wrapper.
    """
    wrappers = compat.parallel_wrappers()
    for path, module in model.named_modules():
        if isinstance(module, wrappers) and _spreads(module):
            where = f"the model's {path}" if path else "the model"
            raise SessionError(f"{where} is a {_name(module)}, and {_ADVICE}")
    for name, parameter in model.named_parameters():
        kind = compat.sharding_of(parameter)
        if kind is not None:
            raise SessionError(f"parameter {name} is a shard, made by {kind}, and {_ADVICE}")
    own = {id(parameter) for parameter in model.parameters()}
    for wrapper in _wrappers_in_process(wrappers):
        if _spreads(wrapper) and any(id(parameter) in own for parameter in wrapper.parameters()):
            raise SessionError(f"the model is inside of a {_name(wrapper)}, and {_ADVICE}")


def refuse_wrapping(wrapper: nn.Module, module: nn.Module, managed_ids: Callable[[], set[int]]) -> None:
    """Refuse a parallel wrapper that is being made around managed modules or parameters.

    Raises:
        SessionError: From the wrapper's constructor.
    """
    if not isinstance(wrapper, compat.parallel_wrappers()):
        return
    # Its devices are not known yet. On one card, or none, it calls the model and does nothing else.
    if isinstance(wrapper, nn.DataParallel) and torch.cuda.device_count() <= 1:
        return
    managed = managed_ids()
    has_parameters = any(id(parameter) in managed for parameter in module.parameters())
    if has_parameters or any(id(each) in managed for each in module.modules()):
        # FSDP takes the parameters before it takes the module.
        rest = (
            "nothing was changed" if has_parameters else "the wrapper has its parameters already: build the model again"
        )
        raise SessionError(
            f"a {_name(wrapper)} is being made around a managed model, and {_ADVICE}: session.close() gives the plain model "
            f"back ({rest})"
        )


def refuse_running_wrapper(parameters: Iterable[torch.Tensor]) -> None:
    """Refuse a call through a DistributedDataParallel that neither `manage` nor its constructor could be seen by.

    Raises:
        SessionError: Before the model is run.
    """
    running = compat.running_data_parallel()
    if running is None:
        return
    spread = {id(parameter) for parameter in running.parameters()}
    # A managed model that is called in another one's forward, and is no part of it, is nobody's concern.
    if any(id(parameter) in spread for parameter in parameters):
        raise SessionError(
            f"the managed model was called by a {_name(running)} around it, and {_ADVICE}: session.close() gives the plain "
            "model back. Nothing was updated"
        )


class ProcessListener(Protocol):
    """Called when the process does something with modules and optimizers that are not the session's."""

    optimizer: torch.optim.Optimizer | None
    """The session's optimizer."""

    def module_registered(self, module: nn.Module, submodule: nn.Module) -> None:
        """A module has got a submodule."""

    def other_optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer that is not the listener's is about to step."""


def watch_process(listener: weakref.ref[ProcessListener]) -> list[Any]:
    """Hooks on all modules and all optimizers: what others do with managed parameters is noticed."""

    def module_registered(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        del name
        living = listener()
        if living is not None and submodule is not None:
            living.module_registered(module, submodule)

    def optimizer_steps(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        del args, kwargs
        living = listener()
        if living is not None and optimizer is not living.optimizer:
            living.other_optimizer_steps(optimizer)

    return [
        register_module_module_registration_hook(module_registered),
        register_optimizer_step_pre_hook(optimizer_steps),
    ]


def remove_all(hooks: Iterable[Any]) -> None:
    """Take hooks off again. May be repeated."""
    for hook in hooks:
        hook.remove()


def _wrappers_in_process(wrappers: tuple[type[nn.Module], ...]) -> Iterator[nn.Module]:
    """All wrappers that exist. A module does not know what it is in, and torch keeps no list: Python's collector has one.

    Takes a tenth of a second for a million objects, and is done only if there can be a wrapper that matters.
    """
    has_ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not has_ranks and torch.cuda.device_count() <= 1:
        return
    for found in gc.get_objects():
        # Not `isinstance`: it asks the object itself, and some answer with a warning.
        if issubclass(type(found), wrappers):
            yield found


def _spreads(wrapper: nn.Module) -> bool:
    """Whether the wrapper does more than to call the module: `DataParallel` on one card, or none, does not."""
    return not isinstance(wrapper, nn.DataParallel) or len(wrapper.device_ids) > 1


def _name(wrapper: nn.Module) -> str:
    kind = next(kind for kind in compat.parallel_wrappers() if isinstance(wrapper, kind))
    return "module under fully_shard" if kind.__name__ == "FSDPModule" else kind.__name__


class LostStep:
    """Why the last step is lost, and which groups it had moved, until the user gives it up."""

    def __init__(self) -> None:
        self.reason: str | None = None
        """Why the last step must be repeated; None where nothing broke."""
        self._is_untold = False
        """Whether it has moved some groups and not others, and the user has not been told which."""
        self._has_moved = False

    def lose(self, moved: Sequence[str], num_groups: int, where: str, *, is_torn: bool, is_whole: bool) -> None:
        """Remember that the step broke off there after these groups moved. If all moved completely, it was as good as over."""
        self.reason = why_step_is_lost(moved, num_groups, where, is_torn=is_torn)
        self._is_untold = bool(moved) and (is_torn or not is_whole)
        self._has_moved = bool(moved)

    def lose_to_thread(self, *, has_moved: bool) -> None:
        """Remember that another thread began a backward in the middle of the step."""
        if has_moved:
            condition = "weights may have taken both. Load a checkpoint, or call zero_grad() to go on"
        else:
            condition = "weights and optimizer are as before the step. Call zero_grad() and repeat the step"
        self.reason = (
            "another thread began a backward in the middle of this step, and was refused: gradients may hold a part of it; "
            + condition
        )
        self._has_moved = has_moved

    def lose_to_load(self, reason: str) -> None:
        """A checkpoint was loaded in part, for which the reason has the words."""
        self.reason = reason

    def refuse(self) -> None:
        """Refuse an update after a step that broke off.

        Raises:
            StepLostError: It did. The message says which groups moved.
        """
        if self.reason is not None:
            self._is_untold = False
            raise StepLostError(self.reason, has_moved=self._has_moved)

    def tell(self, raised: BaseException | None = None) -> None:
        """The user gives up a step of which some groups have moved, without having asked `step()` about it: warn.

        Args:
            raised: The exception that ends the session, if one does: it gets a note instead.
        """
        if self._is_untold and self.reason is not None:
            self._is_untold = False
            if raised is not None:
                raised.add_note(self.reason)
            else:
                warnings.warn(self.reason, RuntimeWarning, stacklevel=2)

    def be_told(self) -> None:
        """Note that the user is told in another way."""
        self._is_untold = False

    def forget(self) -> None:
        """The user has given the step up."""
        self.reason = None


def why_step_is_lost(
    moved: Sequence[str], num_groups: int, where: str = "the backward of this step", *, is_torn: bool = False
) -> str:
    """After a backward, or a `step()`, that raised when it had updated these groups, of so many.

    Where it `is_torn`, it raised in the middle of an update on the device.
    """
    if moved:
        by_half = ", one of them perhaps by half" if is_torn else ""
        return (
            f"{where} raised after it had updated "
            f"{len(moved)} of {num_groups} groups ({', '.join(moved[:8])}{', ...' if len(moved) > 8 else ''}); "
            f"these have taken the step{by_half}, the others have not. Load a checkpoint, or call zero_grad() to go on"
        )
    return (
        f"{where} raised, so its gradients are incomplete; weights and optimizer are as "
        "before the step. Call zero_grad() and repeat the step"
    )
