"""`lowtide plan`: the fastest plan that fits, what it takes of each tier, how long its step takes, and what else would fit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rich.panel import Panel
from rich.table import Table as RichTable
from rich.text import Text

from lowtide import config
from lowtide.cli.console import OUT, progress, require_reports, write_reports
from lowtide.cli.trace import TraceRequest
from lowtide.errors import ConfigError
from lowtide.planning.budget_curve import BudgetPoint
from lowtide.planning.plan import plan_to_json
from lowtide.planning.search import Candidate
from lowtide.report.html import PlanSection
from lowtide.report.plan_tables import bound_words, budget_table
from lowtide.report.table import Table, make_table, number, size, words
from lowtide.runtime.planner import PlannedStep, plan
from lowtide.tracing.prediction.sandbox import shared_sandbox
from lowtide.units import format_bytes, format_count, format_seconds

_NUM_OTHERS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """One step of one model to be planned for some hardware."""

    model: str
    batch: str | None = None
    gpu: str = "h200"
    device_memory: str | None = None
    """What may be reserved of the device; what it has, less its context and 3%, where it is left out."""
    host_memory: str | None = None
    """The same of the host; this machine's where it is left out."""
    dtype: str | None = None
    optimizer: str = "adamw"
    torch: str | None = None
    precision: str | None = None
    """As for `lowtide.manage`: `bf16 exact`, ...; left out, the optimizer's own arithmetic."""
    moments: str = "fp32"
    schedule: str = "deferred"
    """`deferred` or `in_backward`."""
    max_grad_norm: float | None = None

    def solve(self, on_progress: Any) -> PlannedStep:
        """Plan the step."""
        shared_sandbox().warm()
        on_progress(f"building {self.model}")
        problem = TraceRequest(
            model=self.model,
            batch=self.batch,
            gpu=self.gpu,
            torch=self.torch,
            dtype=self.dtype,
            optimizer=self.optimizer,
        ).problem()
        if problem.optimizer is None:
            raise ConfigError(
                "a plan places what an optimizer needs; choose one, such as optimizer=adamw", key="optimizer"
            )
        return plan(
            problem.model,
            problem.batch,
            optimizer=problem.optimizer,
            device_memory=self.device_memory,
            host_memory=self.host_memory,
            hardware=problem.hardware,
            precision=self.precision,
            moments=self.moments,
            schedule=self.schedule,
            max_grad_norm=self.max_grad_norm,
            torch_version=self.torch,
            on_progress=on_progress,
        )


def plan_settable() -> str:
    """What `--set` takes, for the help text."""
    flags = ("model", "batch", "gpu", "device_memory", "host_memory")
    keys = ", ".join(f"`{each.name}`" for each in fields(PlanRequest) if each.name not in flags)
    return f"**--set** takes {keys}."


def make_plan_request(request: PlanRequest, overrides: list[str]) -> PlanRequest:
    """The request of a command line: its flags, then its `--set` overrides on the same fields."""
    return config.override(request, overrides)


def run_plan(request: PlanRequest, *, as_json: bool, reports: list[Path], pareto: bool = False) -> None:
    """Plan, and show the plan on one screen.

    Args:
        request: What to plan.
        as_json: For machines instead.
        reports: Files to write besides; a page has the curve of `pareto` in any case.
        pareto: Show the fastest step at each device budget too.
    """
    require_reports(reports)
    has_page = any(path.name.lower().endswith(".html") for path in reports)
    with progress("planning") as on_progress:
        found = request.solve(on_progress)
        points: tuple[BudgetPoint, ...] = ()
        if pareto or has_page:
            on_progress("memory against speed")
            points = found.by_budget()
    if as_json:
        print(json.dumps(summarise_plan(found, points), indent=2))
    else:
        OUT.print(plan_headline(request, found))
        if found.rejected:
            OUT.print(_others(found))
        if pareto:
            OUT.print(budget_table(points, found.num_tokens))
        OUT.print(Text(_code(request), style="dim"))
    others = (_others(found),) if found.rejected else ()
    write_reports(
        reports,
        PlanSection(
            found=found,
            name=f"{request.model} on {found.hardware.name}",
            points=points,
            code=_code(request).removeprefix("in your script: "),
            tables=others,
        ),
    )


def summarise_plan(found: PlannedStep, points: Sequence[BudgetPoint] = ()) -> dict[str, Any]:
    """The figures of a plan, and the plan itself."""
    return {
        "schema": "lowtide.planned_step/1",
        "hardware": found.hardware.name,
        "rates": found.hardware.rates_from,
        "step_s": found.step_s,
        "tokens_per_s": found.tokens_per_s,
        "bound_by": found.simulated.bound_by,
        "busy_s": {str(lane): seconds for lane, seconds in found.simulated.busy_s.items()},
        "peak_bytes": found.trace.peak_bytes,
        "peak_reserved_bytes": found.trace.peak_reserved_bytes,
        "host_bytes": found.trace.host_bytes,
        "pinned_bytes": found.trace.pinned_bytes,
        "in_backward_step_s": found.in_backward_s,
        "words": list(found.words),
        "others": [
            {"words": _placed(other), "step_s": other.step_s, "device_bytes": other.device_bytes}
            for other in found.rejected
        ],
        "by_budget": [
            {
                "device_bytes": point.budget_bytes,
                "step_s": point.step_s,
                "is_replayed": point.is_replayed,
                "num_resident": point.num_resident,
                "num_updated_there": point.num_updated_there,
                "activations": point.activations,
            }
            for point in points
        ],
        "plan": json.loads(plan_to_json(found.plan)),
    }


def plan_headline(request: PlanRequest, found: PlannedStep) -> Panel:
    """How long the step takes, what it takes of each tier, and what the plan does."""
    facts = RichTable.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    budgets = found.plan.budgets
    assert budgets.device_bytes is not None, "a search has a budget"
    assert budgets.host_bytes is not None, "a search has a budget"
    speed = Text(f"about {format_seconds(found.step_s)}", style="bold")
    if found.tokens_per_s is not None:
        speed.append(f"  {format_count(round(found.tokens_per_s))} tokens/s")
    speed.append(f"  bound by {bound_words(found.simulated)}", style="dim")
    facts.add_row("time of the step", speed)
    facts.add_row("rates", found.hardware.rates_from)
    facts.add_row(
        "device", f"{format_bytes(found.trace.peak_reserved_bytes)} of {format_bytes(budgets.device_bytes)} reserved"
    )
    facts.add_row(
        "host",
        f"{format_bytes(found.trace.host_bytes or 0)} of {format_bytes(budgets.host_bytes)}, "
        f"{format_bytes(found.trace.pinned_bytes or 0)} of it locked",
    )
    for index, sentence in enumerate(found.words):
        facts.add_row("plan" if index == 0 else "", Text(sentence))
    if found.in_backward_s is not None:
        facts.add_row(
            "faster",
            Text(
                f"schedule=in_backward: about {format_seconds(found.in_backward_s)}; it excludes clipping, scaling and "
                "accumulation"
            ),
        )
    title = Text.assemble((f"{request.model} on {found.hardware.name}", "bold"), f"  {found.num_tried} plans simulated")
    return Panel(facts, title=title, title_align="left", expand=False, padding=(1, 2))


def _others(found: PlannedStep) -> Table:
    return make_table(
        "What else fits: one choice for the whole model",
        found.rejected[:_NUM_OTHERS],
        words("weights, updates, activations", _placed),
        number("time a step", lambda other: format_seconds(other.step_s)),
        number("slower by", lambda other: f"{other.step_s / found.step_s - 1:.0%}"),
        number("device, estimated", lambda other: size(other.device_bytes)),
    )


def _placed(other: Candidate) -> str:
    shape = other.shape
    weights = "resident" if shape.num_resident else "streamed"
    return f"{weights}, {'device' if shape.num_device else 'host'}, {shape.fast}"


def _code(request: PlanRequest) -> str:
    """The call that does this in a script."""
    given = {
        "device_memory": request.device_memory,
        "host_memory": request.host_memory,
        "precision": request.precision,
        "schedule": None if request.schedule == "deferred" else request.schedule,
        "max_grad_norm": request.max_grad_norm,
    }
    words_given = "".join(f", {key}={value!r}" for key, value in given.items() if value is not None)
    return f"in your script: session = lowtide.prepare(model, optimizer, batch{words_given})"
