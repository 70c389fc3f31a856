"""The check: one recipe trained plainly and under management, from the same weights, on the same batches.

On the CPU the managed run has an emulated device, so that a check needs no GPU. Where the recipe has a `precision`, the
managed run updates through Lowtide's own kernels, and the plain one through torch's optimizer on fp32 masters: they agree
within rounding, and the recipe's tolerance says how far.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lowtide.config import to_plain
from lowtide.errors import ConfigError
from lowtide.lab import training
from lowtide.lab.recipe import Recipe
from lowtide.lab.recipe_parts import RandomInputs, session_plan
from lowtide.models import ModelSource, resolve_model
from lowtide.plain_text import Plain
from lowtide.runtime.manage import manage
from lowtide.runtime.session import Session
from lowtide.runtime.statistics.session_stats import SessionStats

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SCHEMA = "lowtide.check/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """One parameter or buffer that ended the two runs with different bits."""

    name: str
    max_difference: float
    """Largest absolute difference of two elements; infinite where one of them is NaN and the other is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """What `run_check` found."""

    recipe: Recipe
    device: str
    """Where both runs computed."""
    plain_losses: tuple[float, ...]
    """One for each update."""
    managed_losses: tuple[float, ...]
    differing_weights: tuple[TensorDifference, ...]
    """The weights that differ, in the order of the model's state dict; empty when every bit is the same."""
    stats: SessionStats
    """What the managed run's session measured."""

    @property
    def tolerance(self) -> float:
        """The difference that the recipe accepts."""
        return self.recipe.tolerance

    @property
    def max_loss_difference(self) -> float:
        """The largest difference of two losses, over all updates."""
        return _max_difference(*(torch.tensor(losses).double() for losses in (self.plain_losses, self.managed_losses)))

    @property
    def max_weight_difference(self) -> float:
        """The largest difference over all parameters and buffers after the last update."""
        return max((tensor.max_difference for tensor in self.differing_weights), default=0.0)

    @property
    def first_differing_step(self) -> int | None:
        """Number of the first update, from 0, whose losses are not the same; None when all are."""
        pairs = zip(self.plain_losses, self.managed_losses, strict=True)
        return next((step for step, (plain, managed) in enumerate(pairs) if plain != managed), None)

    @property
    def first_difference(self) -> str | None:
        """The earliest difference that was seen, in words, with steps counted from 1; None when there is none."""
        step = self.first_differing_step
        if step is not None:
            return f"the loss of step {step + 1}: {self.plain_losses[step]!r} against {self.managed_losses[step]!r}"
        if self.differing_weights:
            first = self.differing_weights[0]
            return f"{first.name!r} after the last step, by {first.max_difference:.3g}"
        return None

    @property
    def is_identical(self) -> bool:
        """Whether every loss and every bit of the weights is the same."""
        return self.first_differing_step is None and not self.differing_weights

    @property
    def passed(self) -> bool:
        """Identical, or within the tolerance where the recipe gives one."""
        return self.is_identical or (
            self.tolerance > 0.0 and max(self.max_loss_difference, self.max_weight_difference) <= self.tolerance
        )

    def to_dict(self) -> dict[str, Plain]:
        """Plain data for JSON. A number that is not finite becomes text, since JSON has none."""
        return {
            "schema": SCHEMA,
            "passed": self.passed,
            "identical": self.is_identical,
            "tolerance": self.tolerance,
            "first_difference": self.first_difference,
            "max_loss_difference": json_number(self.max_loss_difference),
            "max_weight_difference": json_number(self.max_weight_difference),
            "differing_weights": [
                {"name": tensor.name, "max_difference": json_number(tensor.max_difference)}
                for tensor in self.differing_weights
            ],
            "plain_losses": [json_number(loss) for loss in self.plain_losses],
            "managed_losses": [json_number(loss) for loss in self.managed_losses],
            "device": self.device,
            "recipe": to_plain(self.recipe),
            "stats": self.stats.to_dict(),
        }


def compare_tensors(plain: Mapping[str, Tensor], managed: Mapping[str, Tensor]) -> tuple[TensorDifference, ...]:
    """The tensors of two state dicts that differ in any bit.

    A name that only one of them has, or another dtype or shape, is a difference without bound.
    """
    found = []
    for name in dict.fromkeys([*plain, *managed]):
        first, second = plain.get(name), managed.get(name)
        if first is None or second is None or (first.dtype, first.shape) != (second.dtype, second.shape):
            found.append(TensorDifference(name=name, max_difference=math.inf))
        elif not torch.equal(_bits(first), _bits(second)):
            found.append(TensorDifference(name=name, max_difference=_max_difference(first, second)))
    return tuple(found)


def _bits(tensor: Tensor) -> Tensor:
    # Equal values are not the same bits: -0.0 equals 0.0, and NaN does not equal itself.
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _max_difference(first: Tensor, second: Tensor) -> float:
    # In double: the difference of two bf16 numbers need not be one.
    wide = (first.detach().cpu().double(), second.detach().cpu().double())
    same = (wide[0] == wide[1]) | (wide[0].isnan() & wide[1].isnan())
    return float((wide[0] - wide[1]).abs().masked_fill(same, 0.0).nan_to_num(nan=math.inf, posinf=math.inf).max())


def json_number(value: float) -> float | str:
    """The number, or text where JSON has none."""
    return value if math.isfinite(value) else str(value)


OnProgress = Callable[[str], None]


def run_check(recipe: Recipe, on_progress: OnProgress | None = None) -> CheckReport:
    """Train the recipe's model plainly, then managed, and compare losses and weights.

    The plain run comes first and is gone, but for its weights on the host, before the managed one starts: the device
    must be able to hold it.

    Args:
        recipe: What to train, and under which plan.
        on_progress: Called with a few words at each step.

    Raises:
        ConfigError: The recipe does not fit the model, or the plain run does not stay finite.
        HardwareError: The recipe's device is not there.
    """
    say = on_progress or (lambda _: None)
    refuse_incomparable(recipe)
    device = training.find_device(recipe.device)
    source = resolve_model(recipe.model, settings=recipe.model_settings)
    batch = training.make_batches(recipe, source)
    with training.arithmetic(recipe, device), training.deterministic(device):
        plain_losses, plain_weights = run_plain(recipe, source, batch, device, say)
        managed_losses, managed_weights, stats = run_managed(recipe, source, batch, device, say)
    say("comparing weights")
    return CheckReport(
        recipe=recipe,
        device=str(device),
        plain_losses=plain_losses,
        managed_losses=managed_losses,
        differing_weights=compare_tensors(plain_weights, managed_weights),
        stats=stats,
    )


def refuse_incomparable(recipe: Recipe) -> None:
    """What a check would leave out, and so check another run than the recipe's."""
    if recipe.plan is None:
        raise ConfigError("a check compares a managed run with a plain one, and plan is null: give a plan", key="plan")
    if recipe.precision is not None and not recipe.tolerance:
        raise ConfigError(
            f"precision is {recipe.precision!r}: a check compares Lowtide's own kernels with torch's optimizer on fp32 masters "
            "then, and the two agree within rounding, not in every bit. Set tolerance to the largest difference that is "
            "right in a loss or weight, such as 1e-4 in fp32 and 0.05 in bfloat16",
            key="tolerance",
        )
    for key, is_asked in (("compile", recipe.compile is not None), ("data", not isinstance(recipe.data, RandomInputs))):
        if is_asked:
            raise ConfigError(
                f"a check compares with plain torch on random inputs, and the recipe sets {key}: leave it out, or run the "
                "recipe in the lab (lowtide lab run)",
                key=key,
            )


def run_plain(
    recipe: Recipe,
    source: ModelSource,
    batch: Callable[[int], training.Batch],
    device: torch.device,
    say: OnProgress,
    around: Callable[[nn.Module], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> tuple[tuple[float, ...], dict[str, Tensor]]:
    """The losses and final weights of plain torch.

    Args:
        recipe: What to train.
        source: Its model.
        batch: By number, on the host.
        device: Where it is trained.
        say: Called with a few words at each step.
        around: Entered with the model around the training.

    Raises:
        ConfigError: A loss is not finite.
    """
    model = training.make_model(recipe, source).to(device)
    make = training.make_optimizer if recipe.precision is None else training.optimizer_over_masters
    optimizer = make(recipe.optimizer, model)
    on_step = _steps("plain", recipe, say)
    with around(model):
        losses = training.train(recipe, model, optimizer, batch, device=device, on_step=on_step)
    broken = next((step for step, loss in enumerate(losses) if not math.isfinite(loss)), None)
    if broken is not None:
        raise ConfigError(
            f"the loss of the plain run is {losses[broken]} at step {broken + 1}, so that there is nothing to "
            "compare with; lower optimizer.settings.lr, set max_grad_norm, or use another dtype",
            key="optimizer.settings.lr",
        )
    return losses, _on_host(model)


def run_managed(
    recipe: Recipe,
    source: ModelSource,
    batch: Callable[[int], training.Batch],
    device: torch.device,
    say: OnProgress,
    ranks: ProcessGroup | None = None,
) -> tuple[tuple[float, ...], dict[str, Tensor], SessionStats]:
    """The losses, final weights and statistics of a session.

    Args:
        recipe: What to train, and under which plan.
        source: Its model.
        batch: By number, on the host; of several ranks the part of this one.
        device: The session's.
        say: Called with a few words at each step.
        ranks: Those that gradients are averaged over; None where this process is alone.
    """
    model = training.make_model(recipe, source)
    optimizer = training.make_optimizer(recipe.optimizer, model)
    assert recipe.plan is not None, "refuse_incomparable asks for one"
    plan = session_plan(recipe.plan, model)
    on_step = _steps("managed", recipe, say)
    with manage(
        model,
        optimizer,
        plan,
        device=device,
        precision=recipe.precision,
        moments=recipe.moments,
        seed=recipe.seed,
        ranks=ranks,
    ) as session:
        phase = _phases(recipe, session)
        losses = training.train(recipe, model, optimizer, batch, device=device, on_step=on_step, phase=phase)
        session.settle()
        stats = session.stats()
    # After the session: what `close` gives back is what a user keeps.
    return losses, _on_host(model), stats


def _phases(recipe: Recipe, session: Session) -> Callable[[str], contextlib.AbstractContextManager[object]]:
    """The last of several backward calls to an update averages, as a loop over ranks is written."""
    if recipe.accumulation == 1:
        return contextlib.nullcontext
    num_forwards = 0

    def phase(name: str) -> contextlib.AbstractContextManager[object]:
        nonlocal num_forwards
        num_forwards += name == "forward"
        is_last = num_forwards % recipe.accumulation == 0
        return contextlib.nullcontext() if is_last or name == "update" else session.no_sync()

    return phase


def _steps(kind: str, recipe: Recipe, say: OnProgress) -> Callable[[int, float], None]:
    return lambda step, loss: say(f"{kind} run, step {step + 1} of {recipe.steps}, loss {loss:.4f}")


def _on_host(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
