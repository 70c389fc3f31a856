"""alone: of several threads one at a time is told what happened."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Locked(Protocol):
    """Has a lock, which it may share with others.

    Autograd runs nodes on the host in the loop's thread, beside those on the device in its own: where a loss has a part
    on the host, both reach hooks at once.
    """

    _lock: threading.RLock


L = TypeVar("L", bound=Locked)


def alone(method: Callable[Concatenate[L, P], R]) -> Callable[Concatenate[L, P], R]:
    """The method holds the object's lock while it runs."""

    @wraps(method)
    def locked(self: L, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            return method(self, *args, **kwargs)

    return locked
