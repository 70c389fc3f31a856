"""`lowtide plan`: the fastest plan that fits, what it takes of each tier, how long its step takes, and what else would fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from rich.panel import Panel
from rich.table import Table as RichTable
from rich.text import Text

from lowtide import config
from lowtide.cli.console import OUT, progress, require_reports, write_reports
from lowtide.cli.trace import TraceRequest
from lowtide.errors import ConfigError, PlanError
from lowtide.planning.budget_curve import BudgetPoint
from lowtide.planning.changes import Option, options
from lowtide.planning.plan import plan_to_json
from lowtide.planning.search import Limits
from lowtide.report.html import PlanSection
from lowtide.report.plan_tables import bound_words, budget_table, milliseconds
from lowtide.report.table import Table, Tone, Value, make_table, number, size, words
from lowtide.runtime.feasibility import HardwareRow, LargestBatch, Remedy, largest, rank, remedies, smallest_change
from lowtide.runtime.plan_problem import PlannedStep, PlanProblem
from lowtide.runtime.planner import pose
from lowtide.runtime.rank_ways import RankSettings
from lowtide.tracing.prediction.sandbox import shared_sandbox
from lowtide.tracing.settings import StepSettings
from lowtide.units import format_bytes, format_count, format_seconds

ANY = "any"
"""Stands for all known hardware."""
ANY_STANDS_FOR = "b200"
"""The largest that is NVIDIA's, so that its memory limits nothing."""
_NUM_OTHERS, _NUM_TOO_LARGE = 5, 3
_NUM_RANKED = 32
"""With the names of the rest, one screen."""


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
    allow: str = ""
    """What may change the arithmetic, with commas between: `tables`."""

    ranks: RankSettings = field(default_factory=RankSettings)
    """Several ranks, each with a batch of this size."""
    step: StepSettings = field(default_factory=StepSettings)
    """What a plan leaves to the step: a chunked loss, micro-batches, autocast."""

    def pose(self, on_progress: Callable[[str], None]) -> tuple[PlanProblem, Limits]:
        """The step to be planned, and what it may take."""
        shared_sandbox().warm()
        on_progress(f"building {self.model}")
        problem = TraceRequest(
            model=self.model,
            batch=self.batch,
            gpu=ANY_STANDS_FOR if self.gpu == ANY else self.gpu,
            torch=self.torch,
            dtype=self.dtype,
            optimizer=self.optimizer,
        ).problem()
        if problem.optimizer is None:
            raise ConfigError(
                "a plan places what an optimizer needs; choose one, such as optimizer=adamw", key="optimizer"
            )
        return pose(
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
            allow=[word.strip() for word in self.allow.split(",") if word.strip()],
            loss=problem.loss,
            settings=self.step,
            torch_version=self.torch,
            on_progress=on_progress,
        )

    def solve(self, on_progress: Callable[[str], None]) -> PlannedStep:
        """Plan the step."""
        problem, limits = self.pose(on_progress)
        return problem.fastest(limits)


def plan_settable() -> str:
    """What `--set` takes, for the help text."""
    flags = ("model", "batch", "gpu", "device_memory", "host_memory", "ranks", "step")
    own = [each.name for each in fields(PlanRequest) if each.name not in flags]
    keys = ", ".join(f"`{key}`" for key in (*own, "step.chunked_loss", "step.accumulate", "step.autocast"))
    ranks = ", ".join(f"`ranks.{each.name}`" for each in fields(RankSettings) if each.name != "count")
    return f"**--set** takes {keys}; with --ranks also {ranks}."


def make_plan_request(request: PlanRequest, overrides: list[str]) -> PlanRequest:
    """The request of a command line: its flags, then its `--set` overrides on the same fields."""
    return config.override(request, overrides)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What is shown beside the plan."""

    is_full: bool = False
    """All hardware, where it is ranked."""
    pareto: bool = False
    """The fastest step at each device budget."""
    max_batch: bool = False
    """The plan of the largest batch that fits, instead of the one that was given."""


def run_plan(request: PlanRequest, *, as_json: bool, reports: list[Path], shown: Shown) -> None:
    """Plan, and show the plan on one screen; a page has the curve of `pareto` in any case."""
    require_reports(reports)
    if request.gpu == ANY:
        if reports or shown.pareto or shown.max_batch:
            raise ConfigError(
                "--gpu any shows a table only; name one GPU for a report, --pareto or --max-batch", key="gpu"
            )
        run_rank(request, as_json=as_json, is_full=shown.is_full)
        return
    # The search takes as long as the traces, which are made elsewhere: one is made while the other runs.
    with ThreadPoolExecutor(max_workers=1) as beside, progress("planning") as on_progress:
        problem, limits = request.pose(on_progress)
        changing: Future[Remedy | None] | None = None
        try:
            if shown.max_batch:
                most = largest(problem, limits)
                found = most.found
            else:
                most = None
                priced = replace(problem, tell=lambda _: None, known=problem.priced)
                changing = beside.submit(smallest_change, priced, limits)
                found = problem.fastest(limits)
        except PlanError:
            for way in () if as_json else remedies(problem, limits):
                OUT.print(_remedy(way, limits, request, "would fit"), soft_wrap=True)
            raise
    if not as_json:  # at once: what follows takes a while
        OUT.print(plan_headline(request, found, most))
        OUT.print(_others(found))
    has_page = any(path.name.lower().endswith(".html") for path in reports)
    change = None if changing is None else changing.result()
    with progress("planning") as on_progress:
        on_progress("memory against speed")
        points = found.by_budget() if shown.pareto or has_page else ()
    if as_json:
        print(json.dumps(summarise_plan(request, found, points, most=most, change=change), indent=2))
    else:
        if change is not None:
            OUT.print(_remedy(change, limits, request, "fewest changes"), soft_wrap=True)
        if shown.pareto:
            OUT.print(budget_table(points, found.num_tokens))
        OUT.print(Text(_code(request), style="dim"), soft_wrap=True)
    write_reports(
        reports,
        PlanSection(
            found=found,
            name=f"{request.model} on {found.hardware.name}",
            points=points,
            code=_code(request).removeprefix("in your script: "),
            tables=(_others(found),),
        ),
    )


def run_rank(request: PlanRequest, *, as_json: bool, is_full: bool = False) -> None:
    """The step on all known hardware."""
    with progress("planning") as on_progress:
        problem, limits = request.pose(on_progress)
        rows = rank(problem, limits, device_memory=request.device_memory)
    if as_json:
        said = [{**asdict(row), "hardware": row.hardware.name} for row in rows]
        print(json.dumps({"schema": "lowtide.ranked_hardware/1", "hardware": said}, indent=2))
        return
    shown = rows if is_full else rows[:_NUM_RANKED]
    OUT.print(_ranking(f"{request.model} on all known hardware, estimated", shown))
    rest = rows[len(shown) :]
    for fits, words_before in ((True, "fits too, slower"), (False, "does not fit")):
        names = [row.hardware.name for row in rest if (row.step_s is not None) is fits]
        if names:
            OUT.print(Text(f"{words_before}: {', '.join(names)}", style="dim"))
    OUT.print(Text("lowtide plan --gpu NAME replays the plan of one of them with the allocator", style="dim"))


def _ranking(caption: str, rows: Sequence[HardwareRow]) -> Table:
    return make_table(
        caption,
        rows,
        words("hardware", lambda row: row.hardware.name),
        number("memory", lambda row: size(row.hardware.memory_bytes)),
        words("", lambda row: _verdict(row)),
        number("a step", lambda row: "" if row.step_s is None else milliseconds(row.step_s)),
        number("tokens/s", lambda row: "" if row.tokens_per_s is None else format_count(round(row.tokens_per_s))),
        words("bound by", lambda row: row.bound_by),
    )


def _verdict(row: HardwareRow) -> Value:
    if row.step_s is not None:
        return Value("fits", tone=Tone.GOOD)
    return Value("the host is short" if row.is_host_short else f"needs {format_bytes(row.device_bytes)}", tone=Tone.BAD)


def summarise_plan(
    request: PlanRequest,
    found: PlannedStep,
    points: Sequence[BudgetPoint] = (),
    *,
    most: LargestBatch | None = None,
    change: Remedy | None = None,
) -> dict[str, Any]:
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
        "with_tables_step_s": found.with_tables_s,
        "words": list(found.words),
        "largest_batch": None if most is None else {"samples": most.num_samples, "next_bytes": most.next_bytes},
        "fewest_changes": None if change is None else _remedy_for_machines(change, found.source.limits, request),
        "others": [
            {
                "words": _placed(other),
                "step_s": other.candidate.step_s,
                "device_bytes": other.candidate.device_bytes,
                "over_bytes": max(0, other.over_bytes),
            }
            for other in _alternatives(found)
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


def _remedy_for_machines(way: Remedy, limits: Limits, request: PlanRequest) -> dict[str, Any]:
    return {
        "changes": dict(way.choice.changed),
        "step_s": way.step_s,
        "peak_reserved_bytes": way.reserved_bytes,
        "flags": way.flags,
        "code": way.code(limits.device_bytes, for_manage(request)),
    }


def _remedy(way: Remedy, limits: Limits, request: PlanRequest, title: str) -> Text:
    """What to turn on, and the words that do it."""
    takes = f"{way.words}; it reserves {format_bytes(way.reserved_bytes)}, about {format_seconds(way.step_s)} a step"
    lines = [Text.assemble((f"{title}  ", "dim"), takes)]
    if way.flags:
        lines.append(Text(f"  lowtide trace: {way.flags}", style="dim"))
        lines.append(Text(f"  in your script: {way.code(limits.device_bytes, for_manage(request))}", style="dim"))
    return Text("\n").join(lines)


def plan_headline(request: PlanRequest, found: PlannedStep, most: LargestBatch | None = None) -> Panel:
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
    if most is not None:
        over = most.next_bytes - budgets.device_bytes
        too_much = f", {format_bytes(over)} too much" if over > 0 else ", and too much of the host"
        more = f"  {most.num_samples + 1} would take {format_bytes(most.next_bytes)} at least{too_much}"
        facts.add_row("largest batch", Text.assemble((f"{most.num_samples} samples", "bold"), (more, "dim")))
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
    if found.with_tables_s is not None:
        facts.add_row(
            "faster",
            Text(
                f"allow=tables: about {format_seconds(found.with_tables_s)}, embeddings stay on the host; it adds up their "
                "gradients in 16 bits"
            ),
        )
    title = Text.assemble((f"{request.model} on {found.hardware.name}", "bold"), f"  {found.num_tried} plans simulated")
    return Panel(facts, title=title, title_align="left", expand=False, padding=(1, 2))


def _alternatives(found: PlannedStep) -> list[Option]:
    """One choice for the whole model: the fastest that fit, then the nearest that do not."""
    limits = found.source.limits
    same = [
        option
        for option in options(found.source.search_with_gaps, limits)
        if option.candidate.placement.schedule is limits.schedule
        and option.candidate.placement.groups != found.source.best.placement.groups
    ]
    fitting = sorted((each for each in same if each.over_bytes <= 0), key=lambda each: each.candidate.step_s)
    others = sorted((each for each in same if each.over_bytes > 0), key=lambda each: each.over_bytes)
    return [*fitting[:_NUM_OTHERS], *others[:_NUM_TOO_LARGE]]


def _others(found: PlannedStep) -> Table:
    return make_table(
        "One choice for the whole model instead",
        _alternatives(found),
        words("weights, updates, activations", _placed),
        number("a step", lambda other: format_seconds(other.candidate.step_s)),
        number("slower by", lambda other: "" if other.over_bytes > 0 else _slower(other, found)),
        number("device", lambda other: size(other.candidate.device_bytes), "estimated"),
        number("too much", _too_much, "what is beyond the budget, estimated"),
    )


def _slower(other: Option, found: PlannedStep) -> str:
    return f"{max(0.0, other.candidate.step_s / found.step_s - 1):.0%}"


def _too_much(other: Option) -> Value:
    if other.over_bytes <= 0:
        return Value("fits", tone=Tone.GOOD)
    short_of = other.short_of.removeprefix("the ").removesuffix(" memory")
    return Value(f"{format_bytes(other.over_bytes)} {short_of}", tone=Tone.BAD)


def _placed(other: Option) -> str:
    return f"{other.choice.weights}, {other.choice.update}, {other.choice.activations}"


def for_manage(request: PlanRequest) -> dict[str, object]:
    """What `manage` and `prepare` are told beside the plan."""
    given = {
        "precision": request.precision,
        "moments": None if request.moments == "fp32" else request.moments,
        "max_grad_norm": request.max_grad_norm,
    }
    return {key: value for key, value in given.items() if value is not None}


def _code(request: PlanRequest) -> str:
    """The call that does this in a script."""
    given = {
        "device_memory": request.device_memory,
        "host_memory": request.host_memory,
        **for_manage(request),
        "schedule": None if request.schedule == "deferred" else request.schedule,
        "allow": request.allow.split(",") if request.allow else None,
    }
    words_given = "".join(f", {key}={value!r}" for key, value in given.items() if value is not None)
    return f"in your script: session = lowtide.prepare(model, optimizer, batch{words_given})"
