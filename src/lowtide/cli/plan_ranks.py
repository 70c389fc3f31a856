"""`lowtide plan --ranks N`: the ways to train on several devices, what each takes of a rank, and which is the fastest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.panel import Panel
from rich.table import Table as RichTable
from rich.text import Text

from lowtide.cli.console import OUT, progress
from lowtide.cli.plan import ANY, PlanRequest, Shown, for_manage
from lowtide.errors import ConfigError
from lowtide.hardware.links import Cluster, Link
from lowtide.planning.plan import plan_to_json
from lowtide.report.plan_tables import LANE_NAMES, scaling_table, ways_table
from lowtide.runtime.rank_ways import RankedWay, RankPlans, code_of, nothing_fits, plan_ranks, scaling
from lowtide.units import format_bytes, format_count, format_seconds

_OUT_OF_SCOPE = (
    "Bytes are estimated and times simulated; nothing was replayed. Every rank runs the whole model on a batch of its own: tensor "
    "and pipeline parallelism are not planned."
)


def run_plan_ranks(request: PlanRequest, *, as_json: bool, reports: list[Path], shown: Shown) -> None:
    """Plan for several ranks, and show the ways; fewer ranks too where all is shown.

    Args:
        request: What was asked for; `ranks.count` is set.
        as_json: Whether it is for machines.
        reports: None: there is no page of this.
        shown: What is shown besides; nothing but `is_full`.

    Raises:
        ConfigError: Something is asked for that is made for one rank alone.
        PlanError: No way fits; the ways are shown nevertheless.
    """
    if reports or shown.pareto or shown.max_batch or request.gpu == ANY:
        raise ConfigError(
            "--ranks shows tables only, for one GPU; leave out --report, --pareto, --max-batch and --gpu any",
            key="ranks",
        )
    with progress("planning") as on_progress:
        problem, limits = request.pose(on_progress)
        found = plan_ranks(problem, limits, request.ranks)
        by_count = scaling(problem, limits, request.ranks) if shown.is_full else ()
    if as_json:
        print(json.dumps(summarise_ranks(request, found, by_count), indent=2))
    else:
        OUT.print(_headline(request, found))
        OUT.print(ways_table(found))
        if by_count:
            OUT.print(scaling_table(by_count))
        if found.fastest is not None:
            OUT.print(Text(f"in your script: {_code(request, found.fastest)}", style="dim"), soft_wrap=True)
        OUT.print(Text(_OUT_OF_SCOPE, style="dim"))
    if found.fastest is None:
        raise nothing_fits(found)


def _code(request: PlanRequest, way: RankedWay) -> str:
    words = {"host_memory": request.host_memory, "allow": request.allow.split(",") if request.allow else None}
    return code_of(way, for_manage(request), {key: value for key, value in words.items() if value is not None})


def _headline(request: PlanRequest, found: RankPlans) -> Panel:
    facts = RichTable.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    best = found.fastest
    if best is None:
        facts.add_row("fastest", Text("nothing fits", style="bold red"))
    else:
        bound = LANE_NAMES.get(best.simulated.bound_by, best.simulated.bound_by)
        speed = Text.assemble((best.way.name, "bold"), f": about {format_seconds(best.step_s)} a step")
        if best.tokens_per_s is not None:
            speed.append(f", {format_count(round(best.tokens_per_s))} tokens/s of all ranks")
        facts.add_row("fastest", speed.append(f"  bound by {bound}", style="dim"))
        facts.add_row(
            "device", f"{format_bytes(best.candidate.device_bytes)} of {format_bytes(found.limits.device_bytes)}"
        )
        facts.add_row(
            "host",
            f"{format_bytes(best.candidate.host_bytes)} of {format_bytes(found.limits.host_bytes)} for each rank",
        )
    facts.add_row(
        "batch", "that of the model, on each rank" if request.batch is None else f"{request.batch} on each rank"
    )
    facts.add_row("nodes", _nodes(found))
    title = Text.assemble((f"{request.model} on {found.num_ranks} x {request.gpu}", "bold"))
    return Panel(facts, title=title, title_align="left", expand=False, padding=(1, 2))


def _nodes(found: RankPlans) -> str:
    cluster = found.cluster
    group = cluster.all_of(found.num_ranks)
    inside = f"{group.per_node} ranks on a node" + (f", {_rate(cluster.inside)}" if group.per_node > 1 else "")
    if group.num_nodes == 1:
        return inside
    adapters = f"{cluster.adapters} x " if cluster.adapters > 1 else ""
    return f"{group.num_nodes} with {inside}; between them {adapters}{_rate(cluster.between)}"


def _rate(link: Link) -> str:
    return f"{link.name} ({link.rate / 1e9:,.3g} GB/s each way)"


def summarise_ranks(request: PlanRequest, found: RankPlans, by_count: tuple[RankPlans, ...] = ()) -> dict[str, Any]:
    """The ways as figures, with the plan of each."""
    best = found.fastest
    return {
        "schema": "lowtide.planned_ranks/1",
        "hardware": request.gpu,
        "ranks": found.num_ranks,
        "cluster": _cluster(found.cluster),
        "device_bytes": found.limits.device_bytes,
        "host_bytes": found.limits.host_bytes,
        "fastest": None if best is None else best.way.name,
        "code": None if best is None else _code(request, best),
        "ways": [{**_figures(way), "plan": json.loads(plan_to_json(way.plan))} for way in found.ways],
        "by_count": [{"ranks": each.num_ranks, "ways": [_figures(way) for way in each.ways]} for each in by_count],
    }


def _cluster(cluster: Cluster) -> dict[str, Any]:
    links = {
        where: {"name": link.name, "bytes_per_s": link.rate, "latency_s": link.latency_s}
        for where, link in (("inside", cluster.inside), ("between", cluster.between))
    }
    return {"per_node": cluster.per_node, "adapters": cluster.adapters, **links}


def _figures(way: RankedWay) -> dict[str, Any]:
    return {
        "name": way.way.name,
        "fits": way.fits,
        "step_s": way.step_s,
        "tokens_per_s": way.tokens_per_s,
        "bound_by": way.simulated.bound_by,
        "busy_s": {str(lane): seconds for lane, seconds in way.simulated.busy_s.items()},
        "device_bytes": way.candidate.device_bytes,
        "host_bytes": way.candidate.host_bytes,
        "pinned_bytes": way.candidate.pinned_bytes,
        "link_bytes": way.link_bytes,
        "sent_bytes": {str(operation): num_bytes for operation, num_bytes in way.sent_bytes.items() if num_bytes},
    }
