"""Interrupts: an interrupt (SIGINT, Ctrl-C) that arrives while a session changes its condition is delivered when it has.

Note [When an interrupt arrives]
Python calls the handler of a signal between two bytecodes of the main thread, and the handler raises there. So what must
not be left half-way is a section, `with HELD:`, in which a handler of our own remembers the signal; the outermost section
sends it again at its end, to the handler that was there before. To exchange handlers is a call of the operating system,
and a step has hundreds of sections: the first one of a forward, a backward or a `step()` puts our handler in, and `rest`
takes it out at the end. Between sections, and where an exception kept `rest` from being called, it passes all on at once.

In other threads, such as autograd's for a CUDA device, handlers never run, and sections do nothing. A second interrupt
while one is held is delivered at once: who waits for a section that does not end gets out. It is an exception like any
other then; see Note [After an exception] in `runtime.backward_pass`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

# What these wrap: both turn numbers into enumerations at each call, which takes longer than all the rest.
_get_handler: Callable[[int], Any] = getattr(signal.getsignal, "__wrapped__", signal.getsignal)
_set_handler: Callable[[int, Any], Any] = getattr(signal.signal, "__wrapped__", signal.signal)
_SIGINT = int(signal.SIGINT)


class HeldInterrupts:
    """The context of sections; there is one, `HELD`, as there is one main thread. Sections may be nested."""

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

    def rest(self) -> None:
        """Put the handler back that was there; in the last section of a forward, a backward or a step, or after it."""
        if threading.get_ident() == self._main and self._is_installed:
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
        signal.raise_signal(signal.SIGINT)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        while frame is not None and frame is not self._owner:
            frame = frame.f_back
        if self._depth and frame is not None and not self._has_come:
            self._has_come = True
            return
        if frame is None:
            # An exception has left the outermost section without its end.
            self._depth, self._owner = 0, None
        self._deliver()

    def _follow_fork(self) -> None:
        self._main, self._depth, self._has_come, self._owner = threading.get_ident(), 0, False, None


HELD = HeldInterrupts()
