"""Keeps Python's garbage collector from stopping the training loop.

A full collection walks through every object of the process: with torch and a model library loaded that is 0.2 to 0.3
seconds, in which nothing is launched and the device runs dry. What a session records makes one due every dozen steps.
So what exists when a session starts is set aside; collections then look at what is made since, in milliseconds.
"""

from __future__ import annotations

import gc
import threading

_LOCK = threading.Lock()
_NUM_SESSIONS = 0
_IS_OURS = False


def set_objects_aside() -> None:
    """Collect once, and keep what is left out of later collections until `bring_objects_back`."""
    global _NUM_SESSIONS, _IS_OURS
    with _LOCK:
        if _NUM_SESSIONS == 0:
            # Where the user has set objects aside already, they stay so.
            _IS_OURS = gc.get_freeze_count() == 0
        elif _IS_OURS:
            # What was forgotten since the session before can go.
            gc.unfreeze()
        _NUM_SESSIONS += 1
        gc.collect()
        gc.freeze()


def bring_objects_back() -> None:
    """A session has ended; after the last one everything is collected as before."""
    global _NUM_SESSIONS
    with _LOCK:
        _NUM_SESSIONS -= 1
        if _NUM_SESSIONS == 0 and _IS_OURS:
            gc.unfreeze()
