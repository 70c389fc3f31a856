"""The check over ranks: a recipe trained plainly in one process, and managed by several that average their gradients.

The plain run takes each batch in as many parts as there are ranks, one after the other, and their mean. So both runs make the
same gradients, which add up in another order, and differ by that alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowtide.distributed.launch import require_devices, run_on_ranks, tell, threads_of_each
from lowtide.errors import ConfigError, LowtideError, RankFailedError
from lowtide.lab import training
from lowtide.lab.check import (
    CheckReport,
    OnProgress,
    compare_tensors,
    json_number,
    refuse_incomparable,
    run_managed,
    run_plain,
)
from lowtide.lab.recipe import Recipe
from lowtide.lab.recipe_parts import PlanRecipe
from lowtide.models import ModelSource, resolve_model
from lowtide.plain_text import Plain
from lowtide.planning.budget_plans import WarmUp
from lowtide.runtime.statistics.session_stats import SessionStats

_Trained = tuple[tuple[float, ...], dict[str, Tensor]]
"""Losses and last weights."""

SCHEMA = "lowtide.check-ranks/1"
SHARES = {"float32": 1e-5, "bfloat16": 0.01, "float16": 1e-3}
"""By the type of the weights: which share of a loss, or of a tensor's norm, may differ. Some steps in the last place."""
ROUNDINGS = 10
"""How many times as much as other last bits of the gradients change in plain torch. A gradient that is zero but for rounding, such
as that of a key's bias, is another number each time, which Adam makes a step of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """How far the two runs are apart in one loss or one tensor, in its own unit."""

    where: str
    size: float
    """The loss, or the tensor's norm."""
    difference: float
    """The difference of the losses; or the norm of the tensors' difference. A single weight is no measure: where its gradient is
    nearly zero, Adam makes a step of the last bits."""
    by_rounding: float
    """What other last bits of the gradients change in plain torch."""
    allowed: float

    @property
    def excess(self) -> float:
        """1 is as much as is allowed; without bound where a number is none."""
        if self.difference == 0:
            return 0.0
        is_number = math.isfinite(self.difference) and math.isfinite(self.allowed) and self.allowed > 0
        return self.difference / self.allowed if is_number else math.inf

    @property
    def is_allowed(self) -> bool:
        """Whether the runs agree here."""
        return self.excess <= 1

    def to_dict(self) -> dict[str, Plain]:
        """Plain data for JSON."""
        numbers = {
            "size": self.size,
            "difference": self.difference,
            "by_rounding": self.by_rounding,
            "allowed": self.allowed,
        }
        return {"where": self.where, **{key: json_number(value) for key, value in numbers.items()}}


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksReport:
    """What `run_check_on_ranks` found."""

    num_ranks: int
    runs: CheckReport
    """The managed losses are means over the ranks; the weights and the statistics are rank 0's."""
    loss: Gap
    """The loss that is nearest to, or furthest beyond, what is allowed."""
    weight: Gap
    """The same of all parameters and buffers."""
    parted: tuple[int, ...]
    """Ranks whose last weights are not the bits of rank 0's."""

    @property
    def tolerance(self) -> str:
        """What is allowed, in words."""
        recipe = self.runs.recipe
        own = f", or {recipe.tolerance:g} in each loss and weight, as the recipe says" if recipe.tolerance else ""
        return (
            f"{SHARES[recipe.dtype]:g} of each loss and of each tensor's norm, and {ROUNDINGS} times what other last bits of the "
            f"gradients change in plain torch{own}"
        )

    @property
    def passed(self) -> bool:
        """The runs agree, and so do the ranks."""
        return ((self.loss.is_allowed and self.weight.is_allowed) or self.runs.passed) and not self.parted

    def to_dict(self) -> dict[str, Plain]:
        """Plain data for JSON, as `CheckReport.to_dict`."""
        return {
            **self.runs.to_dict(),
            "schema": SCHEMA,
            "passed": self.passed,
            "num_ranks": self.num_ranks,
            "tolerance": self.tolerance,
            "loss": self.loss.to_dict(),
            "weight": self.weight.to_dict(),
            "parted": list(self.parted),
        }


def run_check_on_ranks(recipe: Recipe, num_ranks: int, on_progress: OnProgress | None = None) -> RanksReport:
    """Train the recipe's model plainly in this process, then managed in `num_ranks` others, and compare losses and weights.

    The batch is the recipe's, of which each rank takes its part. On the CPU each rank has an emulated device; on CUDA one of its
    own.

    Args:
        recipe: What to train, and under which plan.
        num_ranks: How many processes train it.
        on_progress: Called with a few words at each step.

    Raises:
        ConfigError: As for `run_check`; or the recipe cannot be trained by so many ranks.
        HardwareError: There are fewer devices than ranks.
        RankFailedError: A rank raised, was killed or stood still.
    """
    say = on_progress or (lambda _: None)
    refuse_incomparable(recipe)
    device = training.find_device(recipe.device)
    _refuse_one_process(recipe, device)
    require_devices(num_ranks, device.type)
    source = resolve_model(recipe.model, settings=recipe.model_settings)
    batch = training.make_batches(recipe, source)
    _refuse_uneven(recipe, batch(0), num_ranks)
    with training.arithmetic(recipe, device), training.deterministic(device), _threads(threads_of_each(num_ranks)):
        plain = other = _run_in_parts(recipe, source, batch, num_ranks, device, say)
        # One gradient is no sum, and a sum of two is the same in either order.
        if num_ranks > 1 and num_ranks * recipe.accumulation > 2:
            other = _run_in_parts(
                recipe,
                source,
                batch,
                num_ranks,
                device,
                lambda words: say(f"rounded otherwise, {words}"),
                _rounded_otherwise,
            )
    if device.type == "cuda":
        torch.cuda.empty_cache()
    found = _run_ranks(recipe, num_ranks, device.type, say)
    say("comparing weights")
    for message in found[0].warnings:
        warnings.warn(message, stacklevel=2)
    return _compared(recipe, device.type, plain, other, found)


def _compared(recipe: Recipe, device: str, plain: _Trained, other: _Trained, found: Sequence[_Found]) -> RanksReport:
    losses = tuple(math.fsum(each) / len(found) for each in zip(*(each.losses for each in found), strict=True))
    runs = CheckReport(
        recipe=recipe,
        device=device,
        plain_losses=plain[0],
        managed_losses=losses,
        differing_weights=compare_tensors(plain[1], found[0].weights),
        stats=found[0].stats,
    )

    def gap(where: str, size: float, difference: float, by_rounding: float) -> Gap:
        allowed = SHARES[recipe.dtype] * size + ROUNDINGS * by_rounding
        return Gap(where=where, size=size, difference=difference, by_rounding=by_rounding, allowed=allowed)

    steps = enumerate(zip(plain[0], losses, other[0], strict=True))
    of_losses = [gap(f"step {step + 1}", abs(a), _finite(abs(a - b)), _finite(abs(a - c))) for step, (a, b, c) in steps]
    of_weights = [
        gap(name, _norm(value), _distance(value, found[0].weights[name]), _distance(value, other[1][name]))
        for name, value in plain[1].items()
    ]
    return RanksReport(
        num_ranks=len(found),
        runs=runs,
        loss=max(of_losses, key=lambda each: each.excess),
        weight=max(of_weights, key=lambda each: each.excess),
        parted=tuple(rank for rank, each in enumerate(found) if each.digest != found[0].digest),
    )


def _distance(first: Tensor, second: Tensor) -> float:
    """0 for the same values, whatever they are."""
    first, second = first.double(), second.double()
    same = (first == second) | (first.isnan() & second.isnan())
    return _finite(_norm((first - second).masked_fill(same, 0.0)))


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))


def _finite(value: float) -> float:
    """What is no number is without bound."""
    return value if math.isfinite(value) else math.inf


def _refuse_one_process(recipe: Recipe, device: torch.device) -> None:
    if isinstance(recipe.plan, WarmUp):
        raise ConfigError(
            "plan is a warm-up, which makes its plan from what one process observes, and all ranks need the same one: give a plan "
            "by hand or a static-partition, or check without --ranks",
            key="plan",
        )
    if ":" in (recipe.device or ""):
        raise ConfigError(
            f"device is {recipe.device!r}, which is one device, and each rank has its own: set device={device.type}, or check "
            "without --ranks",
            key="device",
        )


def _refuse_uneven(recipe: Recipe, batch: training.Batch, num_ranks: int) -> None:
    size = _num_samples(batch)
    if size % num_ranks:
        raise ConfigError(
            f"batch is {recipe.batch or 'the default'} of {recipe.model}, whose {size} samples cannot be divided among {num_ranks} "
            f"ranks; set a batch of {max(1, round(size / num_ranks)) * num_ranks} samples, or give another number of ranks",
            key="batch",
        )


def _num_samples(batch: training.Batch) -> int:
    return max((len(value) for value in batch.values() if value.dim()), default=1)


def _part(batch: training.Batch, number: int, num_parts: int) -> training.Batch:
    """Some of the samples; what is not by sample, such as one row of positions, as it is."""
    size = _num_samples(batch)
    return {
        key: value.chunk(num_parts)[number] if value.dim() and len(value) == size else value
        for key, value in batch.items()
    }


def _run_in_parts(
    recipe: Recipe,
    source: ModelSource,
    batch: Callable[[int], training.Batch],
    num_parts: int,
    device: torch.device,
    say: OnProgress,
    around: Callable[[nn.Module], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> _Trained:
    """The plain run, each batch in parts, which are backward calls to the same update."""
    # The plan, of which a plain run knows nothing, might not allow several.
    in_parts = replace(recipe, accumulation=recipe.accumulation * num_parts, plan=PlanRecipe())

    def part(number: int) -> training.Batch:
        return _part(batch(number // num_parts), number % num_parts, num_parts)

    @contextlib.contextmanager
    def alike(model: nn.Module) -> Iterator[None]:
        with around(model), _alike(model, num_parts):
            yield

    return run_plain(recipe if num_parts == 1 else in_parts, source, part, device, say, alike)


@contextlib.contextmanager
def _alike(model: nn.Module, num_parts: int) -> Iterator[None]:
    """Each part of a batch begins with the random numbers and the buffers that the first began with, and the first's stay.

    So it is on ranks, which have one seed, and rank 0's buffers.
    """
    number = itertools.count()
    begin: _State | None = None
    left: _State | None = None

    def before(*_: object) -> None:
        # Not after the part's own forward: its backward may read the buffers.
        nonlocal begin, left
        part = next(number) % num_parts
        if part == 0:
            if left is not None:
                left.put_back()
            begin = _State(model)
            return
        if part == 1:
            left = _State(model)
        assert begin is not None
        begin.put_back()

    handle = model.register_forward_pre_hook(before)
    yield
    handle.remove()
    if left is not None:
        left.put_back()


@contextlib.contextmanager
def _rounded_otherwise(model: nn.Module) -> Iterator[None]:
    """Each gradient has other last bits after each backward: it is a step of its type larger or smaller."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    generators = {device: torch.Generator(device).manual_seed(0) for device in {each.device for each in parameters}}

    def change(parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None and gradient.layout is torch.strided:
            up = torch.empty_like(gradient).bernoulli_(0.5, generator=generators[gradient.device])
            gradient.mul_(1 + torch.finfo(gradient.dtype).eps * (2 * up - 1))

    handles = [parameter.register_post_accumulate_grad_hook(change) for parameter in parameters]
    yield
    for handle in handles:
        handle.remove()


class _State:
    """Random numbers and buffers, as they are when it is made."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._random = torch.get_rng_state()
        self._on_cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        self._buffers = [buffer.clone() for buffer in model.buffers()]

    def put_back(self) -> None:
        """Have them so again."""
        torch.set_rng_state(self._random)
        if self._on_cuda is not None:
            torch.cuda.set_rng_state(self._on_cuda)
        for buffer, value in zip(self._model.buffers(), self._buffers, strict=True):
            buffer.copy_(value)


@contextlib.contextmanager
def _threads(number: int) -> Iterator[None]:
    """As many as a rank has: some kernels add in another order with more."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What a rank answers."""

    losses: tuple[float, ...]
    weights: dict[str, Tensor]
    """Rank 0's; the others' are empty."""
    digest: str
    """A digest of the parameters. Buffers are left out: the others get rank 0's with the next forward."""
    stats: SessionStats
    warnings: tuple[str, ...]


def _run_ranks(recipe: Recipe, num_ranks: int, device: str, say: OnProgress) -> list[_Found]:
    def on_message(rank: int, words: object) -> None:
        if rank == 0:
            say(f"{num_ranks} ranks, {words}")

    try:
        found: list[_Found] = run_on_ranks(
            _run_rank, num_ranks, recipe, num_ranks, device, device=device, on_message=on_message
        )
    except RankFailedError as error:
        cause = error.__cause__
        if isinstance(cause, LowtideError) and isinstance(cause, ValueError):
            raise cause from None  # the recipe is wrong, and no rank is to blame
        raise
    return found


def _run_rank(rank: int, recipe: Recipe, num_ranks: int, device_type: str) -> _Found:
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device(device_type)
    source = resolve_model(recipe.model, settings=recipe.model_settings)
    batch = training.make_batches(recipe, source)

    def part(number: int) -> training.Batch:
        return _part(batch(number), rank, num_ranks)

    with (
        warnings.catch_warnings(record=True) as caught,
        training.arithmetic(recipe, device),
        training.deterministic(device),
    ):
        losses, weights, stats = run_managed(recipe, source, part, device, tell, dist.group.WORLD)
    parameters = {name for name, _ in source.build(recipe.torch_dtype).named_parameters()}
    digest = hashlib.sha256()
    for name in sorted(parameters & weights.keys()):
        digest.update(weights[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return _Found(
        losses=losses,
        weights={} if rank else weights,
        digest=digest.hexdigest(),
        stats=stats,
        warnings=tuple(str(each.message) for each in caught),
    )
