"""`lowtide explain`: why the peak is there, and what each technique would really save on top of what is on."""

from __future__ import annotations

from pathlib import Path

from lowtide.cli.request import TraceRequest


def run_explain(request: TraceRequest, *, as_json: bool, reports: list[Path]) -> None:
    """Trace, explain, re-trace with each technique, and show all of it."""
    raise NotImplementedError
