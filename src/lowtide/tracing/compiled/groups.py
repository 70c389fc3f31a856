"""Groups under a compile budget in a prediction: the call of one becomes one node of autograd.

Its forward allocates what the compiled forward returns and saves, and plays its temporaries; the node holds what is saved, and
lets go of it in the backward where the compiled code reads it last. Nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lowtide import compat
from lowtide.errors import TraceError
from lowtide.tracing.attention.use import Attention
from lowtide.tracing.compiled.capture import TENSOR, Captured, Captures, GroupCall
from lowtide.tracing.compiled.partition import Returned
from lowtide.tracing.compiled.program import Effect, Program, Step, effects, unread_inputs, with_reuse
from lowtide.tracing.ghost.mode import GhostMode
from lowtide.tracing.ghost.operators import Operator, describe
from lowtide.tracing.ghost.tensor import Ghost


class GhostCompiler:
    """Stands in for `torch.compile` under a budget, on ghosts."""

    def __init__(self, mode: GhostMode, attention: Attention, torch_version: str) -> None:
        self._mode = mode
        self._captures = Captures(attention)
        self._torch_version = torch_version

    def __call__(self, module: nn.Module, path: str, share: float) -> Callable[..., Any]:
        """What takes the calls of a module that is compiled with a share of what it would save."""
        return lambda *args, **kwargs: self._call(GroupCall.of(module, path, args, kwargs), share, args, kwargs)

    def _call(self, call: GroupCall, share: float, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mode = self._mode
        tensors = [*call.weights.values(), *call.inputs]
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
            mode.note("compiled groups that are called without gradients are taken to run uncompiled there")
            return compat.plain_call(call.module)(*args, **kwargs)
        self._refuse(call, tensors)
        captured = self._captures.of(call, share)
        mode.note(self._note())
        mode.recorder.enter_module(call.path)
        try:
            results = _Node.apply(_Run(captured, mode), *tensors)  # type: ignore[no-untyped-call]  # torch's has no types
        finally:
            mode.recorder.leave_module(has_weights=bool(call.weights))
        found = iter(results)
        leaves = [next(found) if other is TENSOR else other for other in captured.others]
        return compat.unflatten(leaves, captured.structure)

    def _refuse(self, call: GroupCall, tensors: list[Tensor]) -> None:
        where = f"{type(call.module).__name__} at {call.path or 'the top'} has a compile budget"
        if torch.is_autocast_enabled("ghost"):
            raise TraceError(
                f"{where}, and under autocast its graph is not known without a GPU; give the model its precision "
                "(settings=StepSettings(precision=...)), use another policy, or lowtide.observe",
                module=call.path,
            )
        if not all(isinstance(tensor, Ghost) and tensor.life.on_device for tensor in tensors):
            raise TraceError(
                f"{where}, and is given tensors of the host; move them to the device before", module=call.path
            )

    def _note(self) -> str:
        installed = torch.__version__.split("+")[0]
        other = "" if installed == self._torch_version else f", not by {self._torch_version}'s"
        return (
            f"groups with a compile budget save what the partitioner of torch {installed} chooses{other}; inside of them "
            "lifetimes follow a simple form of the compiler's fusion"
        )


class _Run:
    """One call of a group, from its forward to its backward. Holds what the node of compiled code would hold."""

    def __init__(self, captured: Captured, mode: GhostMode) -> None:
        self._captured, self.mode = captured, mode
        self._held: dict[str, Ghost] = {}

    def forward(self, tensors: tuple[Ghost, ...]) -> tuple[Ghost, ...]:
        """The tensors that the group returns."""
        captured, partition = self._captured, self._captured.partition
        given = dict(zip(partition.kept, tensors, strict=True))
        made = play(captured.forward, given, partition.forms, mode=self.mode, kept=partition.kept, donated=())
        results = tuple(self._seen(made, result) for result in partition.returned)
        # Weights too: they are read again. Without the graph behind them, which is others' to hold.
        self._held = {buffer: self._alone(made[buffer]) for buffer in partition.saved}
        self._held |= {
            buffer: self._alone(tensor)
            for buffer, tensor in zip(partition.kept, tensors, strict=True)
            if buffer in partition.held
        }
        return results

    def backward(self, gradients: tuple[Tensor, ...]) -> tuple[Ghost | None, ...]:
        """The gradients of weights and inputs."""
        captured, partition = self._captured, self._captured.partition
        if not self._held and partition.saved | partition.held:
            raise TraceError("a backward runs twice through compiled code, which frees what it has saved")
        given, self._held = self._held, {}
        kept = []
        needed: list[Any] = [g for g, needs in zip(gradients, captured.needs_gradient, strict=True) if needs]
        for buffer, gradient in zip(partition.tangents, needed, strict=True):
            if gradient.stride() == partition.forms[buffer].stride():
                given[buffer] = gradient
                kept.append(buffer)  # autograd holds it
            else:
                given[buffer] = gradient.contiguous()
        made = play(captured.backward, given, partition.forms, mode=self.mode, kept=kept, donated=partition.donated)
        return tuple(None if result is None else self._seen(made, result) for result in partition.gradients)

    @property
    def not_differentiable(self) -> list[int]:
        """Which of the results have no gradient."""
        return [index for index, needs in enumerate(self._captured.needs_gradient) if not needs]

    def _seen(self, made: dict[str, Ghost], result: Returned | None) -> Ghost:
        """A result over the storage of its buffer."""
        assert result is not None, "the capture has refused it"
        form, storage = result.form, made[result.buffer].untyped_storage()
        return self.mode.place(
            compat.meta_tensor_over(storage, form.dtype, form.shape, form.stride(), int(form.storage_offset()))
        )

    def _alone(self, ghost: Ghost) -> Ghost:
        return self.mode.place(ghost.inner.detach())


class _Node(torch.autograd.Function):
    """The node of a compiled group."""

    @staticmethod
    def forward(ctx: Any, run: _Run, *tensors: Ghost) -> tuple[Ghost, ...]:
        results = run.forward(tensors)
        ctx.run = run
        ctx.mark_non_differentiable(*(results[index] for index in run.not_differentiable))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Ghost | None, ...]:
        run: _Run = ctx.run
        try:
            return None, *run.backward(gradients)
        except BaseException as error:
            run.mode.fail(error)
            raise


def play(
    program: Program,
    given: dict[str, Ghost],
    forms: Mapping[str, Tensor],
    *,
    mode: GhostMode,
    kept: Collection[str],
    donated: Collection[str],
) -> dict[str, Ghost]:
    """Run a program on record; returns its outputs.

    Args:
        program: After fusion: all its buffers are written.
        given: Its inputs. Those that are not kept are let go after their last read: the caller must hold none of them.
        forms: Of each buffer.
        mode: Of the trace.
        kept: As for `effects`.
        donated: As for `effects`.
    """
    for buffer in unread_inputs(program, kept):
        given.pop(buffer, None)  # of the backward's inputs, only those that it reads are given
    for effect in with_reuse(program, effects(program, kept=kept, donated=donated)):
        _run(effect, given, forms, mode)
    return {buffer: given[buffer] for buffer in program.outputs}


def _run(effect: Effect, alive: dict[str, Ghost], forms: Mapping[str, Tensor], mode: GhostMode) -> None:
    step = effect.step
    number = mode.recorder.begin_op(_name(step))
    for buffer in step.reads:
        mode.recorder.use(alive[buffer].life, number)
    for buffer, old in effect.replaces.items():
        alive[buffer] = alive.pop(old)
    for buffer in effect.begins:
        # A result that is no tensor, or an empty one, takes no memory, but is read by its name like the others.
        form = forms.get(buffer)
        alive[buffer] = mode.place(torch.empty(0, device="meta") if form is None else _new_storage(form))
    for buffer in step.writes:
        mode.recorder.use(alive[buffer].life, number)
    if step.call is not None and hasattr(step.call.operator, "_schema"):
        mode.charge(describe(step.call.operator), step.call.args, step.call.out)
    else:
        tensors = (forms[buffer] for buffer in (*step.reads, *step.writes) if buffer in forms)
        mode.charge(Operator(_name(step)), tuple(tensors), None)
    for buffer in effect.ends:
        del alive[buffer]


def _new_storage(form: Tensor) -> Tensor:
    """A meta tensor like a form, with a storage of just its elements; where the form has gaps, without them."""
    storage = torch.UntypedStorage(form.nbytes, device="meta")
    span = 1 + sum((size - 1) * stride for size, stride in zip(form.shape, form.stride(), strict=True))
    stride = form.stride() if span <= form.numel() else torch.empty(form.shape, device="meta").stride()
    return compat.meta_tensor_over(storage, form.dtype, form.shape, stride)


def _name(step: Step) -> str:
    """A kernel by its operator, so that reports know it; fused code by the operator that ends it."""
    return step.operator if step.call is not None else f"fused {step.operator or step.name}"
