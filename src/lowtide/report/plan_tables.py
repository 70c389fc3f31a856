"""What a report says about a plan, as tables: what is where, what bounds its step, and what more memory would gain."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from lowtide.activations.policy import word_of_policy
from lowtide.memory.groups import REST
from lowtide.planning.budget_curve import BudgetPoint
from lowtide.planning.comparison import TimelineComparison
from lowtide.planning.placement import is_trained
from lowtide.planning.plan import GroupPlan, Schedule, Site, Weights
from lowtide.planning.simulator import SimulatedStep
from lowtide.planning.timeline import Lane, lanes_that_work
from lowtide.report.table import Fill, Table, Tone, Value, bar, make_table, number, size, words
from lowtide.runtime.plan_problem import PlannedStep
from lowtide.runtime.rank_ways import RankedWay, RankPlans
from lowtide.units import format_count, format_seconds

_LAST_NUMBER = re.compile(r"(?P<before>.*?)(?P<number>\d+)(?P<after>\D*)")
LANE_NAMES: dict[str, str] = {
    Lane.COMPUTE: "computation",
    Lane.TO_DEVICE: "copies to the device",
    Lane.TO_HOST: "copies to the host",
    Lane.HOST_UPDATE: "updates on the host",
    Lane.BETWEEN_RANKS: "collectives between ranks",
}


_BOUND_BY: dict[str, str] = {
    Lane.TO_DEVICE: "copies",
    Lane.TO_HOST: "copies",
    Lane.HOST_UPDATE: "updates",
    Lane.BETWEEN_RANKS: "links",
}
"""Where there is little room; the others have short names."""


def bound_words(simulated: SimulatedStep) -> str:
    """What would have to be faster."""
    return LANE_NAMES.get(simulated.bound_by, simulated.bound_by)


def milliseconds(seconds: float) -> str:
    """A step's time with three digits or more, so that steps that differ by a percent can be told apart."""
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.2f} ms"


def _seconds(seconds: float) -> str:
    """The same in the width of a column among others."""
    return milliseconds(seconds) if seconds < 10 else format_seconds(seconds)


def budget_table(points: Sequence[BudgetPoint], num_tokens: int = 0) -> Table:
    """What each larger device budget gains."""
    speed: Fill[BudgetPoint] = number("tokens/s", lambda point: format_count(round(num_tokens / point.step_s)))
    return make_table(
        "Memory against speed",
        points,
        number("device", lambda point: size(point.budget_bytes)),
        number("a step", lambda point: milliseconds(point.step_s)),
        *(speed,) * bool(num_tokens),
        words("bytes are", lambda point: "replayed" if point.is_replayed else Value("estimated", tone=Tone.QUIET)),
        number("resident", lambda point: f"{point.num_resident}", "groups whose weights stay on the device"),
        number("updated", lambda point: f"{point.num_updated_there}", "groups that the device updates"),
        words("activations", lambda point: point.activations, wraps=True),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRun:
    """Neighbouring groups that are of one kind and treated alike."""

    names: tuple[str, ...]
    weights: Weights
    site: str
    policy: str
    device_bytes: int
    """Weights, gradients and optimizer state that stay on the device."""
    host_bytes: int

    @property
    def name(self) -> str:
        """`blocks.0`, `blocks.0–15`, or the first and the last name."""
        first, last = (name or "(rest of the model)" for name in (self.names[0], self.names[-1]))
        parts = [_LAST_NUMBER.fullmatch(name) for name in (first, last)]
        if len(self.names) == 1:
            return first
        if (
            parts[0]
            and parts[1]
            and parts[0]["before"] == parts[1]["before"]
            and parts[0]["after"] == parts[1]["after"]
        ):
            return f"{parts[0]['before']}{parts[0]['number']}–{parts[1]['number']}{parts[0]['after']}"
        return f"{first} to {last}"


def group_runs(found: PlannedStep) -> tuple[GroupRun, ...]:
    """The groups of a plan in their order, those that are alike together."""
    costs, deferred = found.costs.groups, found.plan.schedule is Schedule.DEFERRED
    layout = found.source.search.layout

    def treated(group: GroupPlan) -> tuple[object, ...]:
        return costs[group.name].kind, group.weights, frozenset(Counter(group.sites).items()), group.activation

    runs = []
    for _, alike in groupby(found.plan.groups, key=treated):
        groups = list(alike)
        device_bytes = host_bytes = 0
        for group in groups:
            cost = costs[group.name]
            trained = [
                (chunk.nbytes, site)
                for chunk, site in zip(layout.chunks_of(group.name), group.sites, strict=True)
                if is_trained(chunk)
            ]
            here = sum(num_bytes for num_bytes, site in trained if site is not Site.HOST)
            state = round(cost.state_bytes * here / cost.trained_bytes) if cost.trained_bytes else 0
            gradients = cost.trained_bytes if deferred else 0
            on_host = cost.trained_bytes - here
            device_bytes += cost.weight_bytes * (group.weights is Weights.RESIDENT) + state + min(here, gradients)
            host_bytes += cost.state_bytes - state + min(on_host, gradients)
            host_bytes += cost.weight_bytes * (group.weights is not Weights.RESIDENT or on_host > 0)
            host_bytes += cost.stashed_bytes.get(word_of_policy(group.activation), 0)
        runs.append(
            GroupRun(
                names=tuple(group.name for group in groups),
                weights=groups[0].weights,
                site=_sites(groups[0]) if any(costs[group.name].trained_bytes for group in groups) else "not trained",
                policy=word_of_policy(groups[0].activation),
                device_bytes=device_bytes,
                host_bytes=host_bytes,
            )
        )
    return tuple(runs)


def _sites(group: GroupPlan) -> str:
    counted = Counter(group.sites)
    if len(counted) == 1:
        return group.sites[0].value
    return ", ".join(f"{count} of {len(group.sites)} chunks {site.value}" for site, count in counted.items())


def placement_table(found: PlannedStep) -> Table:
    """What is where: for each run of equal groups its weights, update, activations and bytes."""
    runs = group_runs(found)
    table = make_table(
        "What is where, equal groups together",
        runs,
        words("groups", lambda run: Value(run.name, is_code=run.names != (REST,)), wraps=True),
        number("count", lambda run: f"{len(run.names):,}"),
        words("weights", lambda run: run.weights.value),
        words("updated on", lambda run: run.site),
        words("activations", lambda run: run.policy),
        number("on the device", lambda run: size(run.device_bytes)),
        number("on the host", lambda run: size(run.host_bytes)),
    )
    sums = [sum(getattr(run, key) for run in runs) for key in ("device_bytes", "host_bytes")]
    return table.with_row(
        Value("sum", tone=Tone.STRONG),
        f"{len(found.plan.groups):,}",
        "",
        "",
        "",
        *(size(each, Tone.STRONG) for each in sums),
    )


def lane_table(simulated: SimulatedStep) -> Table:
    """How long each lane works in a step, and how long the computation waits."""
    waits_s, step_s = simulated.timeline.exposed_copy_s(), simulated.step_s
    working = {lane for lane in Lane if simulated.busy_s[lane]}
    rows = [
        *((LANE_NAMES[lane], "kind-forward", simulated.busy_s[lane]) for lane in lanes_that_work(working)),
        ("launches by the host", "plain", simulated.times.launch_s),
        ("the computation waits", "kind-waiting", waits_s),
    ]
    return make_table(
        "What the step's time goes to",
        rows,
        words("lane", lambda row: row[0], wraps=True),
        number("a step", lambda row: format_seconds(row[2])),
        number("share", lambda row: f"{row[2] / step_s:.0%}" if step_s else ""),
        number("", lambda row: bar(row[1], min(1.0, row[2] / step_s) if step_s else 0.0)),
    )


def ways_table(found: RankPlans) -> Table:
    """The ways to train on several ranks, and what each takes of one of them."""
    fastest, too_much = found.fastest, Value("too much", tone=Tone.BAD)
    return make_table(
        f"Ways to train on {found.num_ranks:,} ranks, each rank's share",
        found.ways,
        words("", lambda way: Value(way.way.name, tone=Tone.STRONG if way is fastest else Tone.PLAIN)),
        number("device", lambda way: size(way.candidate.device_bytes, _tone(way.over_bytes)), "estimated"),
        number("host", lambda way: size(way.candidate.host_bytes, _tone(way.host_over_bytes)), "estimated"),
        number("sends", lambda way: size(way.link_bytes), "over links to other ranks, in a step"),
        number("a step", lambda way: _seconds(way.step_s)),
        *_tokens_of_all(found.ways),
        words(
            "bound by",
            lambda way: _BOUND_BY.get(way.simulated.bound_by, way.simulated.bound_by) if way.fits else too_much,
        ),
    )


def scaling_table(plans: Sequence[RankPlans]) -> Table:
    """The fastest way that fits on fewer and on more ranks."""
    rows = [(each.num_ranks, each.fastest) for each in plans]
    alone = next((way.step_s for _, way in rows if way is not None), None)
    return make_table(
        "The fastest that fits, by the number of ranks",
        rows,
        number("ranks", lambda row: f"{row[0]:,}"),
        words("", lambda row: Value("nothing fits", tone=Tone.BAD) if row[1] is None else row[1].way.name),
        number("device", lambda row: "" if row[1] is None else size(row[1].candidate.device_bytes)),
        number("host", lambda row: "" if row[1] is None else size(row[1].candidate.host_bytes)),
        number("a step", lambda row: "" if row[1] is None else _seconds(row[1].step_s)),
        *_tokens_of_all([way for _, way in rows], second=True),
        number(
            "each",
            lambda row: "" if row[1] is None or alone is None else f"{alone / row[1].step_s:.0%}",
            "speed of each rank, as a share of its speed on the fewest",
        ),
    )


def _tokens_of_all(ways: Sequence[RankedWay | None], *, second: bool = False) -> tuple[Fill[Any], ...]:
    """A column of tokens a second of all ranks together, where the batch has any."""

    def cell(row: Any) -> str:
        way = row[1] if second else row
        return "" if way is None else format_count(round(way.tokens_per_s))

    has_any = any(way is not None and way.tokens_per_s is not None for way in ways)
    return (number("tokens/s", cell, "of all ranks"),) if has_any else ()


def _tone(over_bytes: int) -> Tone:
    return Tone.BAD if over_bytes else Tone.PLAIN


def comparison_table(comparison: TimelineComparison) -> Table:
    """The simulated step against the observed one."""
    num_steps, on = comparison.num_steps, " on an emulated device" if comparison.is_emulated else ""
    return make_table(
        f"Simulated against {num_steps} observed step{'' if num_steps == 1 else 's'}{on}",
        comparison.rows,
        words("", lambda row: row.what, wraps=True),
        number("simulated", lambda row: format_seconds(row.simulated_s)),
        number("observed", lambda row: format_seconds(row.observed_s)),
        number("error", lambda row: "" if row.error is None else f"{row.error:+.0%}"),
        kind="narrow",
    )
