"""The sweep: torch's activation memory budget against the peak it gives, point by point, without compiling."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lowtide import compat, config
from lowtide.errors import BadRecordError, ConfigError
from lowtide.lab.budget.points import BudgetPoint, not_monotone, recomputed_share, trace_recipe
from lowtide.lab.progress import OnProgress, Progress
from lowtide.lab.recipe import Recipe
from lowtide.lab.record import read_json, write_json
from lowtide.models import resolve_model
from lowtide.plain_text import Plain
from lowtide.tracing.compiled.partition import Partition, read_partition
from lowtide.tracing.compiled.program import find_peak
from lowtide.tracing.compiled.schedule import fuse, schedule

COUNTED = (
    "bytes are those of live tensors: the allocator's rounding, the libraries' workspaces and the optimizer's update are not "
    "among them"
)
ASSUMED = (
    "peak_bytes: a pointwise result is written only where it is an output, where a product or attention reads it, or where "
    "its readers would have to read more than 4 buffers for it (8 for a single reader); unfused_peak_bytes: all are written"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetSweep:
    """The points of one model and batch."""

    model: str
    batch: str
    dtype: str
    torch: str
    """The version of torch whose partitioner cut the graph."""
    trace_seconds: float
    """How long the graph took to trace, once."""
    points: tuple[BudgetPoint, ...]
    """The points, the smallest budget first."""
    remarks: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The model with the batch, the type and the version of torch."""
        return f"{self.model}, {self.batch}, {self.dtype}, torch {self.torch}"


def run_sweep(recipe: Recipe, budgets: Sequence[float], *, on_progress: OnProgress) -> BudgetSweep:
    """What the recipe's model, compiled as a whole, would save and need at its peak under each budget.

    The graph is traced once, on tensors without values. Torch's own partitioner then cuts it for each budget; nothing is
    compiled, and no GPU is needed. Of the recipe only the model, the batch, the dtype and the device count.

    Args:
        recipe: What is trained.
        budgets: From 0 to 1, in any order; a number given twice is one point.
        on_progress: Told of each point.

    Raises:
        ConfigError: There is no budget, one is not within 0 and 1, or the batch does not fit the model.
        TraceError: The model cannot be traced as one graph.
    """
    ordered = _checked(budgets)
    on_progress(Progress(words=f"tracing {recipe.model}", steps=len(ordered)))
    start = time.perf_counter()
    joint, remarks = trace_recipe(recipe)
    trace_seconds = time.perf_counter() - start
    points = []
    for number, budget in enumerate(ordered):
        on_progress(Progress(words=f"budget {budget:g}", step=number, steps=len(ordered)))
        points.append(make_point(joint, budget, on_host=recipe.device == "cpu"))
    on_progress(Progress(words="done", step=len(ordered), steps=len(ordered)))
    return BudgetSweep(
        model=recipe.model,
        batch=recipe.batch or resolve_model(recipe.model, settings=recipe.model_settings).default_batch,
        dtype=recipe.dtype,
        torch=torch.__version__,
        trace_seconds=trace_seconds,
        points=tuple(points),
        remarks=(*remarks, COUNTED, ASSUMED, *(f"not monotone: {rise.words}" for rise in not_monotone(points))),
    )


def make_point(joint: compat.JointGraph, budget: float, *, on_host: bool) -> BudgetPoint:
    """One point: the graph cut under a budget, and what its forward and backward graphs would need on the host or a GPU."""
    start = time.perf_counter()
    graphs = compat.partition(joint, budget)
    partition = read_partition(graphs)
    return BudgetPoint(
        budget=budget,
        saved_bytes=partition.saved_bytes,
        peak_bytes=peak_bytes(partition, on_host=on_host),
        unfused_peak_bytes=unfused_peak_bytes(partition),
        recomputed_flops_share=recomputed_share(graphs),
        seconds=time.perf_counter() - start,
    )


def peak_bytes(partition: Partition, *, on_host: bool) -> int:
    """The peak over forward and backward as compiled code runs them; for the host with fusion only, its code has other rules."""
    if on_host:
        forward, backward = (fuse(half, on_host=True) for half in (partition.forward, partition.backward))
    else:
        forward = schedule(partition.forward)
        backward = schedule(partition.backward, freeable=partition.saved)
    held = (*partition.kept, *partition.tangents)
    return max(
        find_peak(forward, kept=partition.kept, donated=()).num_bytes,
        find_peak(backward, kept=held, donated=partition.donated).num_bytes,
    )


def unfused_peak_bytes(partition: Partition) -> int:
    """The peak over forward and backward with every result in a buffer of its own."""
    forward = find_peak(partition.forward, kept=partition.kept)
    backward = find_peak(partition.backward, kept=(*partition.kept, *partition.tangents))
    return max(forward.num_bytes, backward.num_bytes)


def _checked(budgets: Sequence[float]) -> list[float]:
    if not budgets:
        raise ConfigError("there is no budget to try; give numbers from 0 to 1, such as 0.2, 0.5 and 1", key="budgets")
    for budget in budgets:
        # Also for what is not a number.
        if not 0.0 <= budget <= 1.0:
            raise ConfigError(
                f"the budget {budget} is not within 0 and 1, which stands for what torch saves by default",
                key="budgets",
            )
    return sorted(set(budgets))


SCHEMA = "lowtide.budget_sweep/1"


def sweep_data(sweep: BudgetSweep) -> dict[str, Plain]:
    """The sweep as plain data, with its schema."""
    return {"schema": SCHEMA, **config.to_plain(sweep)}


def write_sweep(sweep: BudgetSweep, path: Path) -> None:
    """Write a sweep, whole or not at all."""
    write_json(path, sweep_data(sweep))


def read_sweep(path: Path) -> BudgetSweep:
    """The sweep of a file.

    Raises:
        BadRecordError: It cannot be read, is no JSON, is of another kind, or lacks something; the path is in the message.
    """
    plain = read_json(path, SCHEMA)
    try:
        sweep = config.from_plain(BudgetSweep, plain)
    except ConfigError as error:
        raise BadRecordError(f"{path}: {error}") from error
    if not sweep.points:
        raise BadRecordError(f"{path}: the sweep has no points")
    return sweep
