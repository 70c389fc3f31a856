"""`lowtide demo`: the main job on what this machine has.

Predicts a large model for a card the machine does not have and explains its peak; then trains a small GPT here, really,
while observing it; writes one report with both.
"""

from __future__ import annotations

from pathlib import Path

import torch
from rich.rule import Rule

from lowtide.cli.console import ERR, OUT, progress
from lowtide.cli.request import TraceRequest
from lowtide.models import resolve_model
from lowtide.report.html import Section, render_page
from lowtide.report.tables import category_table, comparison_table, headline, phase_table
from lowtide.tracing.compare import compare
from lowtide.tracing.explain import explain
from lowtide.tracing.observe import observe
from lowtide.tracing.settings import Implementation, StepSettings
from lowtide.tracing.step_trace import StepTrace
from lowtide.tracing.trace import trace

LARGE = TraceRequest(model="llama-8b", batch="1x2048", gpu="rtx-4090")
SMALL, SMALL_BATCH, SMALL_STEPS = "gpt-tiny", "8x128", 20


def run_demo(report: Path) -> None:
    """Both halves, and the report."""
    OUT.print(Rule(f"1. {LARGE.model}, batch {LARGE.batch}, on an {LARGE.gpu}: a card this machine need not have"))
    with progress(f"predicting {LARGE.model}") as on_progress:
        large = LARGE.run(on_progress)
    story = explain(large).text
    OUT.print(headline(large), category_table(large), story, "")
    OUT.print(Rule(f"2. {SMALL}, batch {SMALL_BATCH}: predicted, then trained here and observed"))
    predicted, observed, losses = _train_small()
    OUT.print(f"loss {losses[0]:.3f} before, {losses[-1]:.3f} after {len(losses)} steps of training on one batch")
    rows = compare(predicted, observed).differences
    if observed.target.card == "cpu":
        rows = tuple(row for row in rows if row.what != "peak reserved")
    OUT.print(phase_table(observed), comparison_table(rows))
    sections = [Section(trace=large, explanation=story), Section(trace=predicted, observed=observed)]
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text(render_page(sections, title="Lowtide demo"), encoding="utf-8")
    ERR.print(f"wrote {report}: open it in a browser")


def _train_small() -> tuple[StepTrace, StepTrace, list[float]]:
    """A small GPT predicted, trained for some steps and observed, on a GPU where there is one."""
    source = resolve_model(SMALL)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch = {key: value.to(device) for key, value in source.make_batch(SMALL_BATCH).items()}
    with progress(f"predicting {SMALL}") as on_progress:
        predicted = trace(
            source.build(torch.float32),
            source.make_batch(SMALL_BATCH),
            optimizer=torch.optim.AdamW,
            hardware="h200" if device == "cuda" else "cpu",
            # On the host torch updates one parameter after the other, and nothing is reserved ahead.
            settings=StepSettings(implementation=None if device == "cuda" else Implementation.LOOP),
            name=SMALL,
            on_progress=on_progress,
        )
    torch.manual_seed(0)
    model = source.build(torch.float32).to_empty(device=device)
    model.reset_parameters()  # type: ignore[operator]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    with progress(f"training {SMALL}") as on_progress:
        for step in range(SMALL_STEPS):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            on_progress(f"step {step + 1} of {SMALL_STEPS}, loss {losses[-1]:.3f}")
    with progress(f"observing {SMALL}") as on_progress:
        observed = observe(model, batch, optimizer=optimizer, name=SMALL, on_progress=on_progress)
    return predicted, observed, losses
