"""The command `lowtide`, or `python -m lowtide` where scripts are not on the path."""

from __future__ import annotations

import gc
import sys

from lowtide.tracing.prediction.sandbox import shared_sandbox

_TRACING = frozenset({"trace", "explain", "plan", "demo"})


def run() -> None:
    """Run the command line. The subprocess that traces imports torch while this one does."""
    is_for_help = {"-h", "--help"} & set(sys.argv)
    if sys.argv[1:2] and sys.argv[1] in _TRACING and not is_for_help:
        shared_sandbox().warm()
        # What these make has no cycles worth looking for, and a search makes much: collections took 0.7 s of 14.
        gc.disable()
    from lowtide.cli.main import app

    app(prog_name="lowtide")


if __name__ == "__main__":
    run()
