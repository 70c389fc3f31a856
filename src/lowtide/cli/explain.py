"""`lowtide explain`: why the peak is there, and what each technique would really save on top of what is on."""

from __future__ import annotations

import json
from pathlib import Path

from lowtide.cli.console import OUT, progress, write_reports
from lowtide.cli.request import TraceRequest
from lowtide.cli.summary import summarise
from lowtide.report.html import Section
from lowtide.report.tables import trace_report, what_if_table
from lowtide.tracing.explain import explain


def run_explain(request: TraceRequest, *, as_json: bool, reports: list[Path]) -> None:
    """Trace, explain, re-trace with each technique, and show all of it."""
    raise NotImplementedError
