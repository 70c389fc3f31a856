"""The training step itself, in plain torch: what is traced and what is observed, and listeners that follow it."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import module as module_hooks

from lowtide import compat
from lowtide.activations.apply import apply
from lowtide.activations.losses.huggingface import chunked_head
from lowtide.activations.policy import Keep
from lowtide.activations.policy_call import CompileGroup
from lowtide.errors import BatchMismatchError, ConfigError, TraceError
from lowtide.hardware.machine import software
from lowtide.memory.mover import Mover
from lowtide.tracing.settings import Implementation, StepSettings, UpdateSchedule
from lowtide.tracing.step_trace import Phase

Loss = Callable[[nn.Module, Any], Tensor]
OptimizerFactory = Callable[[Any], torch.optim.Optimizer]

_FULL = "float32"
"""What torch's autocast does not compute in: it switches itself off for it."""

PhaseListener = Callable[[Phase], None]
"""Is told of each phase before it begins."""


class ModuleListener(Protocol):
    """Is told which module's forward runs, in the thread that runs it."""

    def enter_module(self, path: str) -> None:
        """The forward of a module begins."""

    def leave_module(self, *, has_weights: bool) -> None:
        """The forward of the innermost running module ends."""


@contextlib.contextmanager
def watch_gradients(model: nn.Module, on_gradient: Callable[[Tensor], None]) -> Iterator[None]:
    """While active, `on_gradient` is told of each parameter's gradient as soon as it is complete.

    Before the user's own hooks, which may free it.
    """

    def tell(parameter: Tensor) -> None:
        if parameter.grad is not None:
            on_gradient(parameter.grad)

    with contextlib.ExitStack() as hooks:
        for parameter in model.parameters():
            if parameter.requires_grad:
                hooks.enter_context(compat.register_first_gradient_hook(parameter, tell))
        yield


@contextlib.contextmanager
def watch_modules(model: nn.Module, listener: ModuleListener) -> Iterator[None]:
    """While active, a listener is told of every module's forward, recomputations included."""
    paths = {id(module): path for path, module in model.named_modules()}
    weighty = {id(module) for module in model.modules() if next(module.parameters(), None) is not None}

    def enter(module: nn.Module, args: Any) -> None:
        listener.enter_module(paths.get(id(module), type(module).__name__))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        listener.leave_module(has_weights=id(module) in weighty)

    after = module_hooks.register_module_forward_hook(leave, always_call=True)
    with module_hooks.register_module_forward_pre_hook(enter), after:
        yield


@dataclass(slots=True)
class TrainingStep:
    """A model, its batch, its optimizer and how they are run: calling it makes one step."""

    model: nn.Module
    batch: Any
    optimizer: torch.optim.Optimizer | None
    loss: Loss | None
    settings: StepSettings
    around_first: contextlib.AbstractContextManager[object] | None = None
    """Entered for the first step's forwards and backwards only."""

    def __call__(self, device_type: str, on_phase: PhaseListener) -> None:
        """One step; `on_phase` hears of each phase before it begins."""
        around, self.around_first = self.around_first or contextlib.nullcontext(), None
        with self._attention(), around:
            for _ in range(self.settings.accumulate):
                loss = self._forward(device_type, on_phase)
                on_phase(Phase.BACKWARD)
                loss.backward()
        on_phase(Phase.UPDATE)
        if self.optimizer is not None and self.settings.update is UpdateSchedule.DEFERRED:
            if self.settings.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm)
            self.optimizer.step()
        owner = self.model if self.optimizer is None else self.optimizer
        owner.zero_grad(set_to_none=not self.settings.keep_gradients)

    def _forward(self, device_type: str, on_phase: PhaseListener) -> Tensor:
        on_phase(Phase.FORWARD)
        autocast = self.settings.autocast
        is_on = autocast is not None and autocast != _FULL
        cast = torch.autocast(device_type, dtype=getattr(torch, str(autocast))) if is_on else contextlib.nullcontext()
        # The loss phase begins at the latest when the outermost module returns (see StorageRecorder.begin_phase).
        with cast, self.model.register_forward_hook(lambda *_: on_phase(Phase.LOSS)):
            loss: Any = (self.loss or own_loss)(self.model, self.batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            kind = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise TraceError(
                f"the loss must be a scalar tensor, got {kind}; pass loss=lambda model, batch: ... that returns "
                "one; on the command line a factory returns (model, batch, loss)"
            )
        return loss

    def _attention(self) -> contextlib.AbstractContextManager[None]:
        word = self.settings.attention
        if word is None:
            return contextlib.nullcontext()
        fused = [] if word == "math" else [getattr(SDPBackend, f"{word.upper()}_ATTENTION")]
        return sdpa_kernel([*fused, SDPBackend.MATH])


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss that the model itself returns, called with the batch as it asks for it."""
    kwargs = {str(key): value for key, value in batch.items()} if isinstance(batch, Mapping) else {}
    args: tuple[Any, ...] = () if isinstance(batch, Mapping) else (batch,)
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        args = tuple(batch)
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise BatchMismatchError(
            f"{type(model).__name__}.forward cannot be called with the batch ({error}); give a batch with the names it "
            "takes, or pass loss=lambda model, batch: ...",
            module=type(model).__name__,
        ) from error
    output = model(*args, **kwargs)
    if isinstance(output, Tensor):
        return output
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None:
        raise TraceError(
            f"{type(model).__name__} returned a {type(output).__name__} without a loss; add labels to the batch, or pass "
            "loss=lambda model, batch: ..."
        )
    assert isinstance(loss, Tensor)
    return loss


def about_step(step: TrainingStep) -> dict[str, str]:
    """The batch, the optimizer and the types of a step in words, for `StepTrace.about`."""
    sizes: Counter[str] = Counter()
    for parameter in step.model.parameters():
        sizes[_type_name(parameter)] += parameter.numel()
    return {
        "batch": _batch_words(step.batch),
        "optimizer": _optimizer_words(step.optimizer),
        "dtype": " and ".join(name for name, _ in sizes.most_common()),
        **software(),
    }


def _batch_words(batch: Any) -> str:
    """The tensors of a batch: `input_ids, labels 8x2048 int64`."""
    names: dict[str, list[str]] = {}
    for name, tensor in named_tensors(batch, ""):
        shape = "x".join(map(str, tensor.shape)) or "one number"
        names.setdefault(f"{shape} {_type_name(tensor)}", []).append(name)
    return "; ".join(f"{', '.join(filter(None, called))} {words}".strip() for words, called in names.items())


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in a nest of mappings, sequences and dataclasses, such as a batch."""
    return (tensor for _, tensor in named_tensors(value, ""))


def named_tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a nest with where they are in it: `labels`, `inputs.mask`."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from named_tensors(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for part in value:
            yield from named_tensors(part, name)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from named_tensors(getattr(value, field.name), f"{name}.{field.name}" if name else field.name)


def _optimizer_words(optimizer: torch.optim.Optimizer | None) -> str:
    """The class, with those of its settings that are not its defaults: `SGD(momentum=0.9)`."""
    if optimizer is None:
        return "none"
    kind = type(optimizer)
    usual = inspect.signature(kind).parameters
    changed = [
        f"{key}={value}"
        for key, value in optimizer.param_groups[0].items()
        if isinstance(value, bool | int | float | str | tuple) and key in usual and value != usual[key].default
    ]
    return f"{kind.__name__}({', '.join(changed)})" if changed else kind.__name__


def _type_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def autocast_note(step: TrainingStep, *, has_cast: bool) -> str | None:
    """The note on an autocast that has no effect; None where it casts weights, or is not asked for.

    Args:
        step: After it ran.
        has_cast: Whether autocast cast any tensor, where that is known; else True.
    """
    word = step.settings.autocast
    if word is None:
        return None
    if word == _FULL:
        return f"autocast={word} changes nothing: torch's autocast computes in bfloat16 or float16 alone; leave it out"
    weights = {parameter.dtype for parameter in step.model.parameters() if parameter.is_floating_point()}
    types = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in weights))
    advice = "leave it out" + ("" if types == _FULL else ", or keep the weights in float32")
    if not has_cast:
        return f"autocast={word} changes nothing: the step has nothing to cast, its weights are in {types}; {advice}"
    if types == word:
        return (
            f"autocast={word} casts no weight: they are in {word} already, and only norms, softmax and losses are computed "
            f"otherwise, in float32; {advice}"
        )
    return None


def choose_implementation(optimizer: torch.optim.Optimizer, implementation: Implementation) -> None:
    """Make the optimizer use one of torch's implementations."""
    flags = {"foreach": implementation is Implementation.FOREACH, "fused": implementation is Implementation.FUSED}
    for group in optimizer.param_groups:
        if implementation is Implementation.FUSED and "fused" not in group:
            raise ConfigError(
                f"{type(optimizer).__name__} has no fused implementation; leave `implementation` out",
                key="implementation",
            )
        group.update({key: value for key, value in flags.items() if key in group})


def choose_as_on_host(optimizer: torch.optim.Optimizer) -> None:
    """Switch `foreach` off where the user has not set it, as torch does on the host."""
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = False


def update_in_backward(optimizer: torch.optim.Optimizer) -> None:
    """Update each parameter in the backward, by an optimizer of its own with the same settings, and free its gradient."""
    kind = type(optimizer)
    accepted = inspect.signature(kind).parameters
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key != "params" and key in optimizer.defaults}
        for parameter in group["params"]:
            if not parameter.requires_grad:
                continue
            # Defaults may hold more than the constructor takes: AdamW's `decoupled_weight_decay` is Adam's.
            single = kind([parameter], **{key: value for key, value in settings.items() if key in accepted})
            single.param_groups[0].update(settings)
            if parameter in optimizer.state:
                single.state[parameter] = optimizer.state[parameter]

            def update(param: Tensor, single: torch.optim.Optimizer = single) -> None:
                single.step()
                single.zero_grad()

            parameter.register_post_accumulate_grad_hook(update)
            optimizer.state[parameter] = single.state[parameter]


@contextlib.contextmanager
def activations_applied(
    model: nn.Module, settings: StepSettings, *, mover: Mover | None = None, compile_group: CompileGroup | None = None
) -> Iterator[None]:
    """Put the settings' activation policy and chunked loss on a model; afterwards it is as it came.

    Args:
        model: Real, or of ghosts.
        settings: Of the step.
        mover: Carries offloaded tensors; None takes the one of the model's device.
        compile_group: Compiles a group under a budget; None takes torch's compiler.

    Raises:
        ConfigError: The model has no repeated blocks for a policy, or no head that can be chunked.
    """
    with contextlib.ExitStack() as stack:
        if settings.chunked_loss:
            stack.callback(chunked_head(model).remove)
        policy = settings.policy
        if policy is not None and policy != Keep():
            stack.callback(apply(model, policy, mover=mover, compile_group=compile_group).remove)
        yield
