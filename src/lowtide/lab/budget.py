"""What torch's activation memory budget does to the peak, without compiling, in seconds a point.

The joint forward and backward graph of a recipe's model is traced once and cut for each budget. The points together say
where the peak is not monotone, and which budgets are worth having.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from lowtide import compat, config
from lowtide.errors import BadRecordError, ConfigError, TraceError
from lowtide.lab.progress import OnProgress, Progress
from lowtide.lab.recipe import Recipe
from lowtide.lab.record import read_json, write_json
from lowtide.lab.training import Batch, make_batches
from lowtide.models import resolve_model
from lowtide.plain_text import Plain
from lowtide.report.table import byte_unit
from lowtide.tracing.attention.use import Attention, AttentionChoices, TargetAttention
from lowtide.tracing.compiled.partition import Partition, read_partition
from lowtide.tracing.compiled.program import find_peak
from lowtide.tracing.compiled.schedule import fuse, schedule
from lowtide.units import format_bytes

SCHEMA = "lowtide.budget_sweep/1"
COUNTED = (
    "bytes are those of live tensors: the allocator's rounding, the libraries' workspaces and the optimizer's update are not "
    "among them"
)
ASSUMED = (
    "peak_bytes: a pointwise result is written only where it is an output, where a product or attention reads it, or where "
    "its readers would have to read more than 4 buffers for it (8 for a single reader); unfused_peak_bytes: all are written"
)
HOPPER = (9, 0)
"""The compute capability to take where there is no GPU to ask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPoint:
    """One budget, and what the compiled step would need under it."""

    budget: float
    """torch's activation memory budget, 0 to 1."""
    saved_bytes: int
    """What the forward makes and keeps for the backward."""
    peak_bytes: int
    """Largest sum of live bytes over forward and backward, as compiled code runs them, see `peak_bytes`."""
    unfused_peak_bytes: int
    """The peak if every result were written; not quite a bound, because another order of steps may hold more."""
    recomputed_flops_share: float
    """The share of the forward's operations that the backward does again."""
    seconds: float
    """How long the point took to find."""
    kind: Literal["static"] = "static"
    """The point is read off the graph, not measured."""


@dataclass(frozen=True, slots=True)
class Reversal:
    """A budget that a larger one beats."""

    point: BudgetPoint
    better: BudgetPoint
    """The larger budget with the smallest peak."""

    @property
    def words(self) -> str:
        """The reversal as a sentence, with the numbers."""
        unit = byte_unit(self.point.peak_bytes)
        peak, less = unit.text(self.point.peak_bytes), unit.text(self.better.peak_bytes)
        more = format_bytes(self.point.peak_bytes - self.better.peak_bytes)
        return (
            f"Budget {self.point.budget:g} has a larger peak, {peak} {unit.name}, than budget {self.better.budget:g} with "
            f"{less} {unit.name}: {more} more ({self.point.kind})."
        )


def reversals(points: Iterable[BudgetPoint]) -> tuple[Reversal, ...]:
    """Each budget that has a larger peak than a larger budget, the smallest first."""
    ordered = sorted(points, key=lambda point: point.budget)
    found = []
    for index, point in enumerate(ordered):
        larger = [other for other in ordered[index + 1 :] if other.budget > point.budget]
        better = min(larger, key=lambda other: other.peak_bytes, default=point)
        if better.peak_bytes < point.peak_bytes:
            found.append(Reversal(point, better))
    return tuple(found)


def pareto(points: Sequence[BudgetPoint]) -> list[BudgetPoint]:
    """The points that no other beats in both peak and recomputation, by peak; of equal ones the first."""
    kept: list[BudgetPoint] = []
    for point in sorted(points, key=lambda point: (point.peak_bytes, point.recomputed_flops_share)):
        if not kept or point.recomputed_flops_share < kept[-1].recomputed_flops_share:
            kept.append(point)
    return kept


def recomputed_share(graphs: compat.ForwardBackward) -> float:
    """Operations that the backward repeats, over all of the forward: 0 where nothing of weight is repeated, 1 for all.

    Those of products, convolutions and attention are counted, by torch's own formulas; others are bound by memory.
    """
    forward = {node.name: num_flops(node) for node in graphs.forward.nodes}
    total = sum(forward.values())
    if not total:
        return 0.0
    # What is computed again has the name that it had in the forward.
    again = sum(forward.get(node.name, 0) for node in graphs.backward.nodes if node.op == "call_function")
    return again / total


def num_flops(node: fx.Node) -> int:
    """Operations of one node; 0 for those that have no formula."""
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if node.op != "call_function" or formula is None:
        return 0
    # Tensors without values, numbers, or tuples of them.
    args, kwargs = map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


def trace_recipe(recipe: Recipe) -> tuple[compat.JointGraph, tuple[str, ...]]:
    """The joint graph of the recipe's model with its loss, as `torch.compile` of the whole model cuts it, and remarks on it.

    Raises:
        ConfigError: The batch does not fit the model, or the recipe compiles its blocks one by one.
        TraceError: The model cannot be traced as one graph.
    """
    if recipe.compile is not None and recipe.compile.scope == "blocks":
        raise ConfigError(
            "a sweep cuts the graph of the whole model, and compile.scope is 'blocks': set it to 'model'",
            key="compile.scope",
        )
    source = resolve_model(recipe.model, settings=recipe.model_settings)
    batch = make_batches(recipe, source)(0)
    model = source.build(recipe.torch_dtype)
    if recipe.device == "cpu":
        return trace_model(model, batch, name=recipe.model), ("attention as on the host",)
    major, minor = torch.__version__.split(".")[:2]
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else HOPPER
    choices = AttentionChoices(capability, (int(major), int(minor)))
    with TargetAttention(Attention(choices, lambda: "")):
        joint = trace_model(model, batch, name=recipe.model)
    return joint, tuple(choices.notes())


def trace_model(model: nn.Module, batch: Batch, *, name: str) -> compat.JointGraph:
    """The joint graph of `model(**batch)` and the backward of all that it returns.

    Args:
        model: On any device, the meta device too: only forms of tensors are looked at.
        batch: On any device.
        name: What the user calls the model, for the error.

    Raises:
        TraceError: It cannot be traced as one graph, or nothing in it is trained.
    """
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def forward(*tensors: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip((*weights, *batch), tensors, strict=True))
        inputs = {key: named[key] for key in batch}
        result = torch.func.functional_call(model, {key: named[key] for key in weights}, kwargs=inputs)
        return tuple(compat.tensors_in(result))

    try:
        return compat.trace_joint_graph(forward, list(weights.values()), list(batch.values()))
    except (RuntimeError, ValueError, NotImplementedError, TypeError) as error:
        raise TraceError(
            f"{name} cannot be traced as one graph of forward and backward ({type(error).__name__}: {error}); a sweep needs "
            "a model that torch.compile takes whole (fullgraph=True)"
        ) from error


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
    compiled, and no GPU is needed. Only the recipe's model, batch, dtype and device count.

    Args:
        recipe: What is trained.
        budgets: From 0 to 1, in any order; a number given twice is one point.
        on_progress: Told of each point.

    Raises:
        ConfigError: There is no budget, one is not within 0 and 1, or the batch does not fit the model.
        TraceError: The model cannot be traced as one graph.
    """
    if not budgets:
        raise ConfigError("there is no budget to try; give numbers from 0 to 1, such as 0.2, 0.5 and 1", key="budgets")
    # Also for what is not a number.
    wrong = [budget for budget in budgets if not 0.0 <= budget <= 1.0]
    if wrong:
        raise ConfigError(
            f"the budget {wrong[0]} is not within 0 and 1, which stands for what torch saves by default", key="budgets"
        )
    ordered = sorted(set(budgets))
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
        remarks=(*remarks, COUNTED, ASSUMED, *(f"not monotone: {reversal.words}" for reversal in reversals(points))),
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
