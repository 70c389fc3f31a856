"""A recipe as torch objects, with its first weights, and the plain PyTorch loop over them.

The loop knows nothing of plans: the plain and the managed run of a check go through it unchanged.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from lowtide import compat
from lowtide.errors import ConfigError, HardwareError, TraceError
from lowtide.lab.recipe import CompileRecipe, Recipe
from lowtide.lab.recipe_parts import OPTIMIZERS, Constant, LinearWarmup, OptimizerRecipe, RiseFromZero
from lowtide.memory.groups import find_groups
from lowtide.models import ModelSource

Batch = dict[str, Tensor]


class Numbers(Protocol):
    """What of a recipe the first weights and the arithmetic depend on."""

    @property
    def seed(self) -> int:
        """Of the first weights."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of the weights."""

    @property
    def matmul_precision(self) -> str:
        """Of fp32 matrix products."""


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


def make_model(recipe: Numbers, source: ModelSource) -> nn.Module:
    """The model on the host: drawn in fp32 from the seed, then converted, so that all types begin at the same weights.

    Raises:
        ConfigError: As for `materialise`.
    """
    torch.manual_seed(recipe.seed)
    # A factory may draw its weights otherwise than its modules would by themselves, or load them: only itself knows.
    model = materialise((source.build_on_host or source.build)(torch.float32), name=source.name).cpu()
    # Not `model.to`: buffers such as rotary frequencies are of the type that the model itself gives them.
    types = {name: tensor.dtype for name, tensor in _tensors(source.build(recipe.torch_dtype))}
    for name, tensor in _tensors(model):
        tensor.data = tensor.data.to(types[name])
    return model


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def make_optimizer(recipe: OptimizerRecipe, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer over the parameters that are trained."""
    return optimizer_over(recipe, [parameter for parameter in model.parameters() if parameter.requires_grad])


def optimizer_over(recipe: OptimizerRecipe, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The optimizer over some parameters."""
    trained = list(parameters)
    settings: dict[str, Any] = dict(recipe.settings)
    if not recipe.decay_matrices_only:
        return OPTIMIZERS[recipe.name](trained, **settings)
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    vectors = [parameter for parameter in trained if parameter.dim() <= 1]
    # torch refuses a param group without parameters.
    groups: list[dict[str, Any]] = [{"params": matrices}] if matrices else []
    groups += [{"params": vectors, "weight_decay": 0.0}] if vectors else []
    return OPTIMIZERS[recipe.name](groups, **settings)


def make_scheduler(recipe: Recipe, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler | None:
    """The schedule of the learning rate; None where it stays as it is."""
    match recipe.scheduler:
        case Constant():
            return None
        case RiseFromZero(rise_steps=rise_steps):
            return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / rise_steps))
        case LinearWarmup(warmup_steps=warmup_steps):
            return torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: linear_warmup(step, warmup_steps=warmup_steps, steps=recipe.steps)
            )


def linear_warmup(step: int, *, warmup_steps: int, steps: int) -> float:
    """The part of the full learning rate that the step numbered from 0 has; never 0 within the run.

    Example:
        >>> [linear_warmup(step, warmup_steps=2, steps=4) for step in range(4)]
        [0.5, 1.0, 1.0, 0.5]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    # A schedule is asked once more after the last step, where a rise over the whole run leaves nothing to divide by.
    return max(0, steps - step) / max(1, steps - warmup_steps)


def make_batches(recipe: Recipe, source: ModelSource) -> Callable[[int], Batch]:
    """Numbered batches on the host, floating point inputs in the model's type.

    Batch `n` is the model's one batch, turned `n` places along the last dimension of each tensor: valid for any model,
    and different, so that an accumulated gradient is a sum of different ones.

    Raises:
        ConfigError: The recipe's batch does not fit the model.
    """
    if source.loss is not None:
        raise ConfigError(
            f"{source.name} brings a loss of its own, and a recipe trains a model whose output has one; have its forward "
            "return the loss",
            key="model",
        )
    try:
        made = source.make_batch(recipe.batch or source.default_batch)
    except TraceError as error:
        # It was written for tracing, where a batch that does not fit is an error of the run; here the recipe is wrong.
        raise ConfigError(f"'batch': {error}", key="batch") from error
    first = {key: value.to(recipe.torch_dtype) if value.is_floating_point() else value for key, value in made.items()}

    def batch(number: int) -> Batch:
        return {key: value.roll(number, dims=-1) if value.dim() else value for key, value in first.items()}

    return batch


def train(
    recipe: Recipe,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Callable[[int], Batch],
    *,
    device: torch.device,
    on_step: Callable[[int, float], None],
    phase: Callable[[str], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> tuple[float, ...]:
    """The loss of each update: the mean over its backward calls, as exact floats of what the model computed.

    Args:
        recipe: Says how many steps, and of what.
        model: Trained in place.
        optimizer: Over its parameters.
        batch: By number, on the host.
        device: Where batches go.
        on_step: Called with each update's number, from 0, and its loss.
        phase: As for `take_step`.
    """
    scheduler = make_scheduler(recipe, optimizer)
    torch.manual_seed(recipe.seed)
    losses = []
    for step in range(recipe.steps):
        numbers = range(step * recipe.accumulation, (step + 1) * recipe.accumulation)
        batches = ({key: value.to(device) for key, value in batch(number).items()} for number in numbers)
        losses.append(
            take_step(recipe, model, optimizer, scheduler, batches, max_grad_norm=recipe.max_grad_norm, phase=phase)
        )
        on_step(step, losses[-1])
    return tuple(losses)


def take_step(
    recipe: Recipe,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None,
    batches: Iterable[Batch],
    *,
    max_grad_norm: float | None,
    phase: Callable[[str], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> float:
    """Take one update, and give the mean of the losses of its backward calls.

    Args:
        recipe: Says how many backward calls there are.
        model: On its device, or managed.
        optimizer: Over its parameters.
        scheduler: Of the learning rate.
        batches: One for each backward call.
        max_grad_norm: What gradients are clipped to here; None where a session does it, or nobody.
        phase: Entered around forward, backward and update.
    """
    parts = []
    for batch in batches:
        with phase("forward"):
            loss = model(**batch).loss
        with phase("backward"):
            (loss / recipe.accumulation if recipe.accumulation > 1 else loss).backward()
        parts.append(loss.detach())
        del loss
    with phase("update"):
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
    return math.fsum(float(part.double().item()) for part in parts) / len(parts)


def materialise(model: nn.Module, *, name: str) -> nn.Module:
    """The model on the host, its weights drawn from torch's generator: the same seed gives the same weights.

    A model with a `reset_parameters` of its own is asked to draw all its weights and buffers; a Hugging Face model is
    built again from its config; of any other model each module that holds parameters or buffers is asked.

    Args:
        model: On the meta device, or not: then it is as it should be. The one to use afterwards is returned.
        name: What the user calls it, for the error.

    Raises:
        ConfigError: A module holds tensors and has no `reset_parameters`, so that its first values are not known.
    """
    if all(tensor.device.type != "meta" for _, tensor in _tensors(model)):
        return model
    if any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__):
        # Not `to_empty`: rotary frequencies and their like are buffers that only a constructor fills.
        with torch.device("cpu"):
            again: nn.Module = type(model)(model.config)
        return again.train(model.training)
    first_names: dict[nn.Parameter, str] = {}
    ties = {
        other: first_names.setdefault(parameter, other)
        for other, parameter in model.named_parameters(remove_duplicate=False)
    }
    model.to_empty(device="cpu")
    for other, first in ties.items():
        if other != first:
            # `to_empty` makes two tensors of a tied one.
            path, _, key = other.rpartition(".")
            setattr(model.get_submodule(path), key, model.get_parameter(first))
    for path, module in _owners(model):
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            raise ConfigError(
                f"{name} cannot be given first weights: {type(module).__name__} at {path or 'its root'} holds tensors and "
                "has no reset_parameters(); add one there or to the whole model",
                key="model",
            )
        with torch.no_grad():
            reset()
    return model


def _owners(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that must draw values: the model alone if it can, else each that holds tensors directly."""
    if hasattr(model, "reset_parameters"):
        yield "", model
        return
    for path, module in model.named_modules():
        tensors = itertools.chain(module.parameters(recurse=False), module.buffers(recurse=False))
        if next(tensors, None) is not None:
            yield path, module


def optimizer_over_masters(recipe: OptimizerRecipe, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer, for the same loop as a plain one: its step takes the model's gradients, and writes the model's weights."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    masters = [parameter.detach().float().requires_grad_() for parameter in trained]
    optimizer = optimizer_over(recipe, masters)

    def take_gradients(*_: Any) -> None:
        for parameter, master in zip(trained, masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            # The loop clears the gradients of the optimizer's own tensors, which these are not.
            parameter.grad = None

    def write_weights(*_: Any) -> None:
        with torch.no_grad():
            for parameter, master in zip(trained, masters, strict=True):
                parameter.copy_(master)

    optimizer.register_step_pre_hook(take_gradients)
    optimizer.register_step_post_hook(write_weights)
    return optimizer


def compile_model(model: nn.Module, recipe: CompileRecipe) -> None:
    """Have the model's calls compiled, at the first of them.

    Raises:
        ConfigError: The model has no repeated blocks, and only those were to be compiled.
    """
    backend: str | compat.BudgetedCompiler = recipe.backend
    if recipe.activation_budget is not None:
        backend = compat.BudgetedCompiler(recipe.activation_budget, recipe.backend)
    for module in compiled_modules(model, recipe.scope):
        module.compile(backend=backend, dynamic=False)


def compiled_modules(model: nn.Module, scope: Literal["model", "blocks"]) -> list[nn.Module]:
    """What is compiled by itself.

    Raises:
        ConfigError: The model has no repeated blocks, and only those are asked for.
    """
    if scope == "model":
        return [model]
    blocks = [model.get_submodule(group.name) for group in find_groups(model) if group.is_block]
    if not blocks:
        raise ConfigError(
            "compile.scope is 'blocks', and the model has no repeated blocks; compile the whole of it: scope: model",
            key="compile.scope",
        )
    return blocks


@contextlib.contextmanager
def arithmetic(recipe: Numbers, device: torch.device) -> Iterator[None]:
    """The recipe's precision of fp32 products, and kernels that any processor has; taken back afterwards."""
    precision = torch.get_float32_matmul_precision()
    # None leaves the other flags as they are; setting them too, as `mkldnn.flags` does, warns where there is no Intel card.
    was_enabled = bool(torch.backends.mkldnn.set_flags(None, None, None, None)[0])
    torch.set_float32_matmul_precision(recipe.matmul_precision)
    if device.type == "cpu" and recipe.torch_dtype != torch.float32:
        # oneDNN's half precision kernels use instructions that some processors lack, and the process dies on those.
        torch.backends.mkldnn.set_flags(False, None, None, None)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(was_enabled, None, None, None)
        torch.set_float32_matmul_precision(precision)


@contextlib.contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Settings under which two plain runs give the same bits, taken back afterwards; on the host they do without."""
    if device.type != "cuda":
        yield
        return
    # cuBLAS reads this when its handle is made, and torch refuses deterministic matmuls without it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
