"""Ends a run when somebody asks: Ctrl-C, and SIGTERM from a scheduler that will kill the process soon.

The first request lets the step under way end, and the run is saved. The second one leaves at once, as does the end of the time
that SIGTERM leaves, whatever the main thread is doing: checkpoints are whole or not there, so that nothing is lost by it. That is
why a thread watches: Python runs a handler of its own only between two of its instructions, and a save or a product of matrices
is one of them.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator

WATCHED = (signal.SIGINT, signal.SIGTERM)
_MARGIN_S = 2.0
"""Before the end of the grace, for leaving."""
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
"""Exit codes, as shells have them."""

Leave = Callable[[int, str], None]


class StopRequests:
    """Whether a run is to end, and how long it may take.

    Args:
        grace_s: Seconds from SIGTERM to the end of the process.
        leave: Ends the process with an exit code, and says why in some words.
        on_request: Told once, when the first request has come.
    """

    def __init__(self, grace_s: float, leave: Leave, on_request: Callable[[], None] = lambda: None) -> None:
        self._grace_s = grace_s
        self._leave = leave
        self._on_request = on_request
        self._deadline_s: float | None = None
        self._is_guarded = False
        self.signal: signal.Signals | None = None
        """The first that came; None before."""

    @property
    def is_requested(self) -> bool:
        """Whether the run is to end after the step under way."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """Of a process that ends on request."""
        return TERMINATED if self.signal is signal.SIGTERM else INTERRUPTED

    @property
    def left_s(self) -> float | None:
        """Seconds that are left for saving; None where there is no limit."""
        return None if self._deadline_s is None else self._deadline_s - time.monotonic()

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Inside, the first request waits for the loop. Outside there is nothing to save, and it leaves at once."""
        self._is_guarded = True
        try:
            yield
        finally:
            self._is_guarded = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[StopRequests]:
        """Watch the signals; outside of the main thread, which alone may, nothing is watched."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        # Handlers that do nothing: Python's own raises KeyboardInterrupt wherever the loop is.
        handlers = {number: signal.signal(number, lambda *_: None) for number in WATCHED}
        old_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        thread = threading.Thread(target=self._watch, args=(reader,), name="lowtide-signals", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            signal.set_wakeup_fd(old_fd)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            os.close(writer)  # which ends the thread
            thread.join()
            os.close(reader)

    def _watch(self, reader: int) -> None:
        while True:
            left_s = self.left_s
            ready, _, _ = select.select([reader], [], [], None if left_s is None else max(0.0, left_s))
            if not ready:
                self._leave(TERMINATED, f"{self._grace_s:g} s after SIGTERM are nearly over")
                return
            received = os.read(reader, 64)
            if not received:
                return
            for number in received:
                if number in WATCHED:
                    self._take(signal.Signals(number))

    def _take(self, number: signal.Signals) -> None:
        is_first = self.signal is None
        if is_first:
            self.signal = number
        if number is signal.SIGTERM and self._deadline_s is None:
            self._deadline_s = time.monotonic() + max(0.0, self._grace_s - _MARGIN_S)
        elif not is_first:
            self._leave(self.exit_code, "asked a second time")
        if not self._is_guarded:
            self._leave(self.exit_code, "nothing is to be saved now")
        elif is_first:
            # In a thread of its own: whatever holds it up must not hold up the next request.
            threading.Thread(target=self._on_request, daemon=True).start()
