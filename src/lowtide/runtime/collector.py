"""Keeps Python's garbage collector from stopping the training loop.

A full collection walks through every object of the process: with torch and a model library loaded that is 0.2 to 0.3
seconds, in which nothing is launched and the device runs dry. What a session records makes one due every dozen steps.
So what exists when a session starts is set aside; collections then look at what is made since, in milliseconds.
"""

from __future__ import annotations

import gc
import threading
import weakref

_FEW = 10_000
"""Python 3.12 starts with some hundreds set aside; a user who does it has torch loaded, a hundred thousand and more."""
_LOCK = threading.RLock()
"""Taken again by a finaliser, where a collection inside finds a forgotten session."""
_NUM_SESSIONS = 0
_IS_OURS = False


class ObjectsAside:
    """Collects once, and keeps what is left out of later collections until `bring_back`, or until this is forgotten."""

    def __init__(self) -> None:
        _set_aside()
        self._bring_back = weakref.finalize(self, _bring_back)
        self._bring_back.atexit = False

    def bring_back(self) -> None:
        """The session has ended; after the last one everything is collected as before. May be repeated."""
        self._bring_back()


def _set_aside() -> None:
    global _NUM_SESSIONS, _IS_OURS
    with _LOCK:
        if _NUM_SESSIONS == 0:
            # Where the user has set objects aside already, they stay so.
            _IS_OURS = gc.get_freeze_count() < _FEW
        elif _IS_OURS:
            # What was forgotten since the session before can go.
            gc.unfreeze()
        _NUM_SESSIONS += 1
    # Without the lock: a collection may find a forgotten session, which comes here to end.
    gc.collect()
    gc.freeze()


def _bring_back() -> None:
    global _NUM_SESSIONS
    with _LOCK:
        _NUM_SESSIONS -= 1
        if _NUM_SESSIONS == 0 and _IS_OURS:
            gc.unfreeze()
