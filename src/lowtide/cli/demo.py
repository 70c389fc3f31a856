"""`lowtide demo`: the main job on what this machine has.

Predicts a large model for hardware the machine does not have, explains its peak and plans how it fits; then trains a small
GPT here twice, plainly and prepared for a device budget that is a fraction of what the plain run takes, and shows that the
losses are the same and the budget held; writes one report with both. Without a GPU the device is emulated in host memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.rule import Rule

from lowtide.cli.console import ERR, OUT, progress
from lowtide.cli.plan import PlanRequest, plan_headline
from lowtide.cli.trace import TraceRequest
from lowtide.lab.experiment import metered
from lowtide.models.gpt import GPT, GPTConfig
from lowtide.planning.timeline import Timeline
from lowtide.report.html import Section, SessionSection, render_page
from lowtide.report.table import Table, make_table, number, words
from lowtide.report.terminal import headline, session_report
from lowtide.report.trace_tables import category_table
from lowtide.runtime.planner import prepare
from lowtide.runtime.statistics.session_stats import SessionStats
from lowtide.tracing.explanation.explain import explain
from lowtide.units import format_bytes, format_seconds, parse_bytes

LARGE = TraceRequest(model="llama-8b", batch="1x2048", gpu="rtx-4090")
PLANNED = PlanRequest(
    model=LARGE.model,
    batch=LARGE.batch,
    gpu=LARGE.gpu,
    host_memory="128GiB",
    precision="bf16 exact",
    schedule="in_backward",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What the second half trains, and inside how much."""

    config: GPTConfig
    batch: tuple[int, int]
    budget: str
    """The device's budget, a fraction of what the plain run takes."""
    steps: int = 12


ON_HOST = Training(
    config=GPTConfig(vocab_size=512, context_length=64, num_layers=12, hidden_size=256, num_heads=8),
    batch=(2, 32),
    budget="30MiB",
)
ON_GPU = Training(
    config=GPTConfig(vocab_size=8192, context_length=256, num_layers=24, hidden_size=1280, num_heads=20),
    batch=(4, 256),
    budget="2GiB",
    steps=20,
)


@dataclass(frozen=True, slots=True)
class Run:
    """One of the two runs."""

    losses: list[float]
    peak_bytes: int
    seconds: float


def run_demo(report: Path) -> None:
    """Predict, train, and write the report."""
    OUT.print(Rule(f"1. {LARGE.model}, batch {LARGE.batch}, on an {LARGE.gpu}: hardware this machine need not have"))
    with progress(f"predicting {LARGE.model}") as on_progress:
        large = LARGE.run(on_progress)
    story = explain(large).text
    OUT.print(headline(large), category_table(large), story, "")
    with progress("planning") as on_progress:
        planned = PLANNED.solve(on_progress)
    OUT.print(plan_headline(PLANNED, planned), "")
    training = ON_GPU if torch.cuda.is_available() else ON_HOST
    device = "GPU" if torch.cuda.is_available() else "device, emulated in host memory"
    OUT.print(Rule(f"2. a small GPT, trained here inside {training.budget} of a {device}"))
    with progress("plain PyTorch") as on_progress:
        plain = _train_plainly(training, on_progress)
    with progress("managed") as on_progress:
        managed, stats, timeline = _train_managed(training, on_progress)
    verdict = _verdict(training, plain, managed)
    OUT.print(_side_by_side(plain, managed), verdict, "", session_report(stats))
    session = SessionSection(stats=stats, timeline=timeline, name="A small GPT, managed", notes=(verdict,))
    report.parent.mkdir(parents=True, exist_ok=True)
    page = render_page([Section(trace=large, explanation=story), session], title="Lowtide demo")
    report.write_text(page, encoding="utf-8")
    ERR.print(f"wrote {report}: open it in a browser")


def _train_plainly(training: Training, on_progress: Callable[[str], None]) -> Run:
    """Train as PyTorch does it, all on the device; without a GPU, bytes are counted as on an emulated one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, optimizer = _build(training)
    model.to(device)
    with metered(model, None, device) as take_peak:
        take_peak()
        run = _loop(model, optimizer, training, on_progress)
        return replace(run, peak_bytes=take_peak())


def _train_managed(training: Training, on_progress: Callable[[str], None]) -> tuple[Run, SessionStats, Timeline]:
    """The same loop, prepared for the budget."""
    model, optimizer = _build(training)
    with prepare(model, optimizer, _batch(training), device_memory=training.budget, on_progress=on_progress) as session:
        run = _loop(model, optimizer, training, on_progress)
        stats, timeline = session.stats(), session.timeline()
    return replace(run, peak_bytes=stats.tiers[0].peak_bytes), stats, timeline


def _build(training: Training) -> tuple[GPT, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = GPT(training.config)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def _batch(training: Training) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, training.config.vocab_size, training.batch, generator=generator)
    ids = ids.to("cuda" if torch.cuda.is_available() else "cpu")
    return {"input_ids": ids, "labels": ids}


def _loop(model: GPT, optimizer: torch.optim.Optimizer, training: Training, on_progress: Callable[[str], None]) -> Run:
    """The loop that both runs share."""
    batch = _batch(training)
    torch.manual_seed(2)
    losses = []
    begun = time.perf_counter()
    for step in range(training.steps):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        on_progress(f"step {step + 1} of {training.steps}, loss {losses[-1]:.3f}")
    return Run(losses, 0, time.perf_counter() - begun)


def _side_by_side(plain: Run, managed: Run) -> Table:
    return make_table(
        "The same loop, the same seed",
        [("plain PyTorch", plain), ("Lowtide", managed)],
        words("", lambda row: row[0]),
        number("first loss", lambda row: f"{row[1].losses[0]:.6f}"),
        number("last loss", lambda row: f"{row[1].losses[-1]:.6f}"),
        number("device peak", lambda row: format_bytes(row[1].peak_bytes)),
        number("time a step", lambda row: format_seconds(row[1].seconds / len(row[1].losses))),
    )


def _verdict(training: Training, plain: Run, managed: Run) -> str:
    budget = parse_bytes(training.budget)
    if plain.losses == managed.losses:
        same = f"All {len(plain.losses)} losses are the same, bit for bit"
    else:
        largest = max(abs(one - other) for one, other in zip(plain.losses, managed.losses, strict=True))
        same = f"The losses differ by at most {largest:.2g}"
    held = "the budget held" if managed.peak_bytes <= budget else "THE BUDGET WAS EXCEEDED"
    return (
        f"{same}; {held}: {format_bytes(managed.peak_bytes)} of {format_bytes(budget)}, where plain PyTorch takes "
        f"{format_bytes(plain.peak_bytes)}, {plain.peak_bytes / budget:.1f} times the budget."
    )
