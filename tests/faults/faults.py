"""What goes wrong in a run: each function gets the training and gives what is called before each step, or changes what it calls."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowtide.errors import CheckpointWriteError, EmulatedOutOfMemoryError, NonFiniteGradientError
from lowtide.runtime.checkpoints import snapshot
from lowtide.runtime.checkpoints.disk import Disk
from lowtide.runtime.updates.kernel_optimizer import KernelOptimizer
from lowtide.train.folder import OutputFolder
from tests.faults.small_runs import Training

AT = 8
"""The step that meets the fault; a save of step 6 is whole or under way."""
Beside = Callable[[Training], None]


def when_due(act: Callable[[Training], object]) -> Beside:
    """Acts once, before the step."""

    def beside(training: Training) -> None:
        if training.session.num_steps == AT - 1:
            act(training)

    return beside


def _replace(owner: object, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    setattr(owner, name, make(getattr(owner, name)))


def _raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


# -- disks -------------------------------------------------------------------------------------------------------------


def full_disk(training: Training) -> Beside:
    """No file finds room."""
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return when_due(lambda _: setattr(Disk, "create", _raising(error)))


def full_disk_for_a_while(training: Training) -> Beside:
    """The same, until a save has failed; the loop catches the error, and saves again when the next one is due."""
    create, save = Disk.create, training.save

    def saving() -> None:
        try:
            save()
            training.session.wait_for_save()
        except CheckpointWriteError as error:
            training.journal.add("not saved", training.session.num_steps, str(error))
            training.pending = None
            Disk.create = create  # type: ignore[method-assign]

    training.save = saving  # type: ignore[method-assign]  # as a loop with a `try`
    return full_disk(training)


def disk_that_fills(training: Training) -> Beside:
    """Room is there when a file is made, and is not when it is written."""
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return when_due(lambda _: setattr(Disk, "write", _raising(error)))


def no_large_files(training: Training) -> Beside:
    """The system itself refuses, as it does beyond a quota."""
    return when_due(lambda _: resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY)))


def broken_writer(training: Training) -> Beside:
    """An exception that nobody expects, in a thread that writes."""
    return when_due(lambda _: setattr(Disk, "write", _raising(ZeroDivisionError("the writer broke"))))


def broken_reader(training: Training) -> Beside:
    """The same in a thread that copies."""
    return when_due(lambda _: setattr(snapshot._Tensor, "read", _raising(ZeroDivisionError("the reader broke"))))


# -- the user's code ---------------------------------------------------------------------------------------------------


def hook_in_forward(training: Training) -> Beside:
    """A hook raises in the middle of a forward."""
    return when_due(
        lambda _: training.model.get_submodule("layers.1").register_forward_hook(_raising(KeyError("my own hook")))
    )


def hook_in_backward(training: Training) -> Beside:
    """A hook raises in a backward, when the last layers have been updated, if that is the schedule."""
    return when_due(
        lambda _: training.model.get_submodule("layers.0").register_full_backward_hook(
            _raising(KeyError("my own hook"))
        )
    )


class _Tokens(torch.utils.data.Dataset[torch.Tensor]):
    """Tokens by number, one of which cannot be read."""

    def __getitem__(self, number: int) -> torch.Tensor:
        if number == 3:
            raise OSError("batch 3 is gone")
        return torch.randint(32, (8,), generator=torch.Generator().manual_seed(number))

    def __len__(self) -> int:
        return 100


def data_worker(training: Training) -> Beside:
    """A worker process, forked beside a save, gives batches and then raises; the run itself draws its own."""
    batches: Iterator[torch.Tensor] | None = None

    def beside(training: Training) -> None:
        nonlocal batches
        step = training.session.num_steps
        if batches is None and step == AT - 5:
            # With a generator of its own, as the run has the others.
            own = torch.Generator().manual_seed(0)
            batches = iter(torch.utils.data.DataLoader(_Tokens(), num_workers=1, timeout=20, generator=own))
        if batches is not None:
            next(batches)

    return beside


# -- numbers and memory ------------------------------------------------------------------------------------------------


def nan_gradient(training: Training) -> Beside:
    """One gradient is not a number."""
    parameter = training.model.get_parameter("layers.1.mlp.up.weight")
    return when_due(lambda _: parameter.register_hook(lambda gradient: gradient * float("nan")))


def no_memory_in_forward(training: Training) -> Beside:
    """A layer takes more of the device than there is."""

    def take(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + torch.zeros(1 << 20).sum()

    return when_due(lambda _: training.model.get_submodule("layers.1").register_forward_hook(take))


class _Inflate(torch.autograd.Function):
    """Nothing in forward, and more than there is in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient + torch.zeros(1 << 20).sum()


def no_memory_in_backward(training: Training) -> Beside:
    """The backward of the first layer takes more of the device than there is."""
    layer = training.model.get_submodule("layers.0")
    return when_due(lambda _: layer.register_forward_hook(lambda module, args, output: _Inflate.apply(output)))


def _again(error: type[Exception], fault: Callable[[Training], Beside]) -> Callable[[Training], Beside]:
    """The fault in a loop that catches the error, and takes the step again."""

    def install(training: Training) -> Beside:
        step, layers = training.step, [training.model.get_submodule(f"layers.{number}") for number in range(2)]

        def stepping() -> None:
            numbers, tokens = torch.get_rng_state(), training.generator.get_state()
            try:
                step()
            except error:
                training.journal.add("again", training.session.num_steps)
                training.optimizer.zero_grad()
                for layer in layers:
                    layer._forward_hooks.clear()
                training.model.get_parameter("layers.1.mlp.up.weight")._backward_hooks = None
                torch.set_rng_state(numbers)
                training.generator.set_state(tokens)
                step()

        training.step = stepping  # type: ignore[method-assign]
        return fault(training)

    return install


no_memory_in_forward_and_again = _again(EmulatedOutOfMemoryError, no_memory_in_forward)
no_memory_in_backward_and_again = _again(EmulatedOutOfMemoryError, no_memory_in_backward)
nan_gradient_and_again = _again(NonFiniteGradientError, nan_gradient)


def broken_update(training: Training) -> Beside:
    """The update raises in the thread that runs beside the loop."""

    def failing(step: Callable[..., Any]) -> Callable[..., Any]:
        def update(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                raise ArithmeticError("the rule is broken")
            return step(*args, **kwargs)

        return update

    def break_all(_: Training) -> None:
        for owner, name in ((torch.optim.AdamW, "step"), (KernelOptimizer, "_step")):
            _replace(owner, name, failing)

    return when_due(break_all)


def warnings_are_shown(training: Training) -> Beside:
    """No fault: warnings are what they are for a user."""
    return lambda _: None


# -- signals -----------------------------------------------------------------------------------------------------------


def in_a_write(number: int, act: Callable[[], object]) -> None:
    """Acts once, in the write of that number."""
    count = 0

    def acting(write: Callable[..., int]) -> Callable[..., int]:
        def written(*args: Any) -> int:
            nonlocal count
            count += 1
            if count == number:
                act()
            return write(*args)

        return written

    _replace(Disk, "write", acting)


def stopped_for_a_while(training: Training) -> Beside:
    """The whole process stands still in the middle of a write, for a second."""

    def stop() -> None:
        training.journal.add("stopped", training.session.num_steps)
        subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        training.journal.add("continued", training.session.num_steps)

    in_a_write(100, stop)
    return lambda _: None


def _signalled(*numbers: signal.Signals, after_s: float = 0.0) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)
        # The thread that watches takes them one by one.
        time.sleep(after_s)


def sigterm_in_a_save() -> None:
    """A scheduler asks the process to end, in the middle of a save."""
    in_a_write(100, lambda: _signalled(signal.SIGTERM))


def ctrl_c_in_a_save() -> None:
    """Somebody presses Ctrl-C in the middle of a save."""
    in_a_write(100, lambda: _signalled(signal.SIGINT))


def ctrl_c_twice_in_a_save() -> None:
    """And once more, half a second later, before the save is over."""
    in_a_write(100, lambda: _signalled(signal.SIGINT, signal.SIGINT, after_s=0.5))


def sigterm_and_a_save_that_takes_long() -> None:
    """The grace is over before the save is."""
    in_a_write(100, lambda: _signalled(signal.SIGTERM, after_s=30.0))


def killed_with_an_empty_folder() -> None:
    """The system kills the process when the folder is made and nothing is in it."""
    _replace(OutputFolder, "begin", lambda _: lambda *_: os.kill(os.getpid(), signal.SIGKILL))


def killed_between_recipe_and_data() -> None:
    """And when the first of the two files of a run's folder is written."""

    def killing(replace: Callable[..., Any]) -> Callable[..., Any]:
        def replaced(path: Path, target: Path) -> None:
            replace(path, target)
            os.kill(os.getpid(), signal.SIGKILL)

        return replaced

    _replace(Path, "replace", killing)


def killed_in_the_recipe() -> None:
    """Or before the first of them has its name."""
    _replace(Path, "replace", lambda _: lambda *_: os.kill(os.getpid(), signal.SIGKILL))


def full_disk_for_three_files() -> None:
    """The files of the second save and the third find no room."""
    _full_disk(range(3, 6))


def full_disk_for_good() -> None:
    """No file finds room."""
    _full_disk(range(10**9))


def _full_disk(files: range) -> None:
    count = -1

    def creating(create: Callable[..., int]) -> Callable[..., int]:
        def created(*args: Any) -> int:
            nonlocal count
            count += 1
            if count in files:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return create(*args)

        return created

    _replace(Disk, "create", creating)


def ctrl_c_beside_a_save(training: Training) -> Beside:
    """In a loop of the user's own, which does not handle it."""
    in_a_write(100, lambda: _signalled(signal.SIGINT))
    return lambda _: None


def sigterm_beside_a_save(training: Training) -> Beside:
    """The same, with what ends a process that does not handle it at once."""
    in_a_write(100, lambda: _signalled(signal.SIGTERM))
    return lambda _: None


def ctrl_c_twice_beside_a_save(training: Training) -> Beside:
    """The second while the interpreter ends, which waits for a save whose disk does not answer."""

    def hang() -> None:
        _signalled(signal.SIGINT, signal.SIGINT, after_s=1.5)
        time.sleep(600)

    in_a_write(100, hang)
    return lambda _: None
