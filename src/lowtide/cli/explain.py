"""`lowtide explain`: why the peak is there, and what each technique would really save on top of what is on."""

from __future__ import annotations

import json
from pathlib import Path

from rich.markup import escape
from rich.padding import Padding

from lowtide.cli.console import OUT, progress, write_reports
from lowtide.cli.request import TraceRequest
from lowtide.cli.summary import summarise
from lowtide.planning.what_if import WhatIf, what_if
from lowtide.report.html import Section
from lowtide.report.tables import alive_table, category_table, headline, notes, what_if_table
from lowtide.tracing.attention.use import is_on_attention
from lowtide.tracing.explanation.explain import explain
from lowtide.tracing.prediction.sandbox import shared_sandbox


def run_explain(request: TraceRequest, *, as_json: bool, reports: list[Path]) -> None:
    """Trace, explain, trace again with each technique, and show all of it."""
    shared_sandbox().warm()
    with progress("tracing") as on_progress:
        problem = request.problem()
        base = problem.trace(on_progress)
    explanation = explain(base)
    with progress("what if") as on_progress:
        answer = what_if(
            problem, base, on_progress=lambda step: on_progress(f"{step.technique} ({step.number} of {step.total})")
        )
    if as_json:
        print(json.dumps({**summarise(base), "explanation": list(explanation.sentences), **_plain(answer)}, indent=2))
    else:
        OUT.print(headline(base), category_table(base), alive_table(base))
        if told := [note for note in base.notes if not is_on_attention(note)]:
            OUT.print(notes(told))
        for sentence in explanation.sentences:
            OUT.print(Padding(escape(sentence), (0, 0, 1, 0)), highlight=False)
        OUT.print(what_if_table(answer.rows))
        for skipped in answer.skipped:
            OUT.print(f"[dim]not tried: {escape(skipped.technique)}: {escape(skipped.reason)}[/]", highlight=False)
    section = Section(trace=base, explanation=explanation.text, what_if=answer.rows)
    write_reports(reports, section, title=f"{base.model} on {base.target.card}")


def _plain(answer: WhatIf) -> dict[str, object]:
    return {
        "what_if": [
            {
                "technique": row.technique,
                "before_bytes": row.before_bytes,
                "after_bytes": row.after_bytes,
                "saved_bytes": row.saved_bytes,
                "reason": row.reason,
            }
            for row in answer.rows
        ],
        "not_tried": [{"technique": skipped.technique, "reason": skipped.reason} for skipped in answer.skipped],
    }
