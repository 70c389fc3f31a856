"""Work in other threads beside torch's compiler.

Checked in torch 2.13: while any thread traces or compiles, `torch.compiler.is_compiling()` is true in all of them, and the
optimizers of `torch.optim` then compute their bias corrections with tensors instead of Python's numbers: the same update
rounds differently. The compiler holds `torch._dynamo.convert_frame.compile_lock` meanwhile.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_POLL_S = 0.02
_guard = threading.Lock()
_num_waiting = 0
"""Threads that compile and wait for work of another one: that must not wait for the compiler in turn."""


def _compile_lock() -> Any:
    """The compiler's lock; None as long as nothing was compiled."""
    return getattr(sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None)


@contextmanager
def without_compilation() -> Iterator[None]:
    """Run functions that were given to `torch.compile` as they are: what is called once on small tensors is not worth it."""
    if "torch._dynamo" not in sys.modules:  # nobody has compiled, and to import it takes a second
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def outside_compilation() -> Iterator[None]:
    """While no other thread compiles. Where a thread that compiles waits for this one, it goes on beside it."""
    lock = _compile_lock()
    is_held = False
    while lock is not None and not is_held and not _num_waiting:
        is_held = lock.acquire(timeout=_POLL_S)
    try:
        yield
    finally:
        if is_held:
            lock.release()


@contextmanager
def waiting() -> Iterator[None]:
    """Around a wait for work that may be `outside_compilation`, so that it cannot be a wait for oneself."""
    global _num_waiting
    lock = _compile_lock()
    is_compiling = lock is not None and lock._is_owned()
    with _guard:
        _num_waiting += is_compiling
    try:
        yield
    finally:
        with _guard:
            _num_waiting -= is_compiling


def uncompiled_hook(hook: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The hook, for use around compiled code, which would compile the hook too when it calls it.

    Checked in torch 2.13: compiled, a hook sees versions of tensors that are not those of the real ones.
    """
    # As long as nothing was compiled there is nothing to hide from, and asking would import the compiler.
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return hook
    hidden: Callable[Arguments, Result] = dynamo.disable(hook)
    return hidden
