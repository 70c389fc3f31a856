"""The check: one recipe trained plainly and under management, from the same weights, on the same batches.

On the CPU the managed run has an emulated device, so that a check needs no GPU. Where the recipe has a `precision`, the
managed run updates through Lowtide's own kernels, and the plain one through torch's optimizer on fp32 masters: they agree
within rounding, and the recipe's tolerance says how far.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lowtide.errors import ConfigError, HardwareError
from lowtide.lab.arithmetic import arithmetic
from lowtide.lab.check_report import CheckReport, compare_tensors
from lowtide.lab.data_recipe import RandomInputs
from lowtide.lab.masters import optimizer_over_masters
from lowtide.lab.plan_recipe import session_plan
from lowtide.lab.recipe import Recipe
from lowtide.lab.training import Batch, make_batches, make_model, make_optimizer, train
from lowtide.models import ModelSource, resolve_model
from lowtide.runtime.manage import manage
from lowtide.runtime.session_stats import SessionStats

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
    if recipe.plan is None:
        raise ConfigError("a check compares a managed run with a plain one, and plan is null: give a plan", key="plan")
    _refuse_incomparable(recipe)
    device = find_device(recipe.device)
    source = resolve_model(recipe.model, settings=recipe.model_settings)
    batch = make_batches(recipe, source)
    with _comparable(recipe, device):
        plain_losses, plain_weights = _run_plain(recipe, source, batch, device, say)
        _check_finite(plain_losses)
        managed_losses, managed_weights, stats = _run_managed(recipe, source, batch, device, say)
    say("comparing weights")
    return CheckReport(
        recipe=recipe,
        device=str(device),
        plain_losses=plain_losses,
        managed_losses=managed_losses,
        differing_weights=compare_tensors(plain_weights, managed_weights),
        stats=stats,
    )


def _refuse_incomparable(recipe: Recipe) -> None:
    """What a check would leave out, and so check another run than the recipe's."""
    if recipe.precision is not None and not recipe.tolerance:
        raise ConfigError(
            f"precision is {recipe.precision!r}: a check compares Lowtide's own kernels with torch's optimizer on fp32 masters "
            "then, and the two agree within rounding, not in every bit. Set tolerance to the largest difference that is "
            "right in a loss or weight, such as 1e-4 in fp32 and 0.05 in bfloat16",
            key="tolerance",
        )
    asked = {
        "compile": recipe.compile is not None,
        "data": not isinstance(recipe.data, RandomInputs),
    }
    for key, is_asked in asked.items():
        if is_asked:
            raise ConfigError(
                f"a check compares with plain torch on random inputs, and the recipe sets {key}: leave it out, or run the "
                "recipe in the lab (lowtide lab run)",
                key=key,
            )


def find_device(name: str | None) -> torch.device:
    """The device of that name; without a name, the GPU where there is one.

    Raises:
        ConfigError: The name is none of torch's, or not one that a session runs on.
        HardwareError: There is no such device here.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"{name!r} is no device; use cpu, cuda or cuda:0", key="device") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"a session runs on cpu or cuda, not on {name!r}", key="device")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise HardwareError(
            f"there is no device {name!r}: torch sees {torch.cuda.device_count()} CUDA devices; set device=cpu to check "
            "on an emulated one"
        )
    return device


def _run_plain(
    recipe: Recipe, source: ModelSource, batch: Callable[[int], Batch], device: torch.device, say: OnProgress
) -> tuple[tuple[float, ...], dict[str, Tensor]]:
    model = make_model(recipe, source).to(device)
    make = make_optimizer if recipe.precision is None else optimizer_over_masters
    optimizer = make(recipe.optimizer, model)
    on_step = _steps("plain", recipe, say)
    losses = train(recipe, model, optimizer, batch, device=device, on_step=on_step)
    return losses, _on_host(model)


def _run_managed(
    recipe: Recipe, source: ModelSource, batch: Callable[[int], Batch], device: torch.device, say: OnProgress
) -> tuple[tuple[float, ...], dict[str, Tensor], SessionStats]:
    model = make_model(recipe, source)
    optimizer = make_optimizer(recipe.optimizer, model)
    assert recipe.plan is not None, "run_check asks for one"
    plan = session_plan(recipe.plan, model)
    on_step = _steps("managed", recipe, say)
    with manage(
        model, optimizer, plan, device=device, precision=recipe.precision, moments=recipe.moments, seed=recipe.seed
    ) as session:
        losses = train(recipe, model, optimizer, batch, device=device, on_step=on_step)
        session.settle()
        stats = session.stats()
    # After the session: what `close` gives back is what a user keeps.
    return losses, _on_host(model), stats


def _steps(kind: str, recipe: Recipe, say: OnProgress) -> Callable[[int, float], None]:
    return lambda step, loss: say(f"{kind} run, step {step + 1} of {recipe.steps}, loss {loss:.4f}")


def _on_host(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}


def _check_finite(losses: tuple[float, ...]) -> None:
    for step, loss in enumerate(losses):
        if not math.isfinite(loss):
            raise ConfigError(
                f"the loss of the plain run is {loss} at step {step + 1}, so that there is nothing to compare with; lower "
                "optimizer.settings.lr, set max_grad_norm, or use another dtype",
                key="optimizer.settings.lr",
            )


@contextlib.contextmanager
def _comparable(recipe: Recipe, device: torch.device) -> Iterator[None]:
    """Settings under which two plain runs give the same bits, taken back afterwards."""
    with arithmetic(recipe, device), _deterministic() if device.type == "cuda" else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    # cuBLAS reads this when its handle is made, and torch refuses deterministic matmuls without it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
