"""A run of blocks that are alike: which of their calls are real, and what stands in for the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowtide import compat
from lowtide.tracing import block_signature
from lowtide.tracing.ghost.arguments import META
from lowtide.tracing.ghost.mode import GhostMode
from lowtide.tracing.ghost.tensor import Ghost
from lowtide.tracing.number_watch import NumberWatch
from lowtide.tracing.repeat_calls import (
    Call,
    CannotRepeatError,
    Emission,
    Position,
    Template,
    TensorCopy,
    Turn,
    circumstances,
    flatten,
    owners,
)
from lowtide.tracing.segment_words import RunRecord, Window


class Run:
    """A run of blocks that are alike, and their calls."""

    def __init__(
        self, blocks: Sequence[tuple[str, nn.Module]], mode: GhostMode, windows: list[Window], watch: NumberWatch
    ) -> None:
        self.paths = [path for path, _ in blocks]
        self.blocks = [block for _, block in blocks]
        self.failure = ""
        self.mode = mode
        self._windows = windows
        self._turns: list[Turn] = []
        self.has_repeated = False
        self._parameters = [list(block.parameters()) for block in self.blocks]
        self._signature = block_signature.describe(self.blocks[1])
        self._numbers = watch

    def record(self) -> RunRecord:
        """What `unroll` needs to know."""
        weights = []
        for block in self.blocks:
            tensors = [t for m in block.modules() for t in (*m._parameters.values(), *m._buffers.values())]
            weights.append([tensor.life.number for tensor in tensors if isinstance(tensor, Ghost)])
        return RunRecord(paths=self.paths, weights=weights, turns=[turn.calls for turn in self._turns])

    # -- forward -----------------------------------------------------------------------------------------------------

    def call(self, rank: int, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A block is called: run it for real, or stand in for it."""
        if rank == 0:
            self._turns.append(
                Turn(is_open=not any(block_signature.has_hooks(m) for b in self.blocks for m in b.modules()))
            )
        turn = self._turns[-1] if self._turns else None
        if turn is None or not turn.is_open:
            return self._refused("its calls are not alike", original, args, kwargs)
        about, tensors = circumstances(args, kwargs)
        node = compat.next_node_number()
        if rank != len(turn.calls) or (rank and node != turn.last_node) or compat.has_saved_tensor_hooks():
            turn.is_open = False
            return self._refused("its blocks do not follow each other directly", original, args, kwargs)
        if not 2 <= rank < len(self.blocks) - 3:
            return self._run(turn, rank, original, args, kwargs, about, tensors)
        if turn.template is None or turn.template.circumstances != about:
            turn.is_open = False
            return self._refused("its calls differ", original, args, kwargs)
        return self._repeat(turn, rank, tensors)

    def _refused(self, reason: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.has_repeated:
            # A replaced block left no optimizer state and no values behind that this call could go on from.
            raise CannotRepeatError(f"{self.paths[0]}: {reason}")
        return original(*args, **kwargs)

    def _run(
        self,
        turn: Turn,
        rank: int,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        about: tuple[Any, ...],
        tensors: list[Ghost],
    ) -> Any:
        recorder = self.mode.recorder
        before = [owners(tensor) for tensor in tensors] if rank == 1 else []
        enter = Position.of(recorder)
        self._numbers.is_on = True
        output = original(*args, **kwargs)
        self._numbers.is_on = False
        call = Call(
            rank=rank,
            inputs=tuple(tensor.life.number for tensor in tensors),
            enter=enter,
            leave=Position.of(recorder),
            is_repeated=False,
        )
        turn.calls.append(call)
        turn.last_node = compat.next_node_number()
        is_alone = not self._numbers.strangers and not self._numbers.is_blind
        if rank == 1 and is_alone and block_signature.describe(self.blocks[1]) == self._signature:
            after = [owners(tensor) for tensor in tensors]
            keeps = tuple(
                any(a > b for a, b in zip(now, then, strict=True)) for now, then in zip(after, before, strict=True)
            )
            turn.template = Template.of(output, call, about, tensors, keeps)
        self._watch(turn, call, output)
        return output

    def _watch(self, turn: Turn, call: Call, output: Any) -> None:
        """See the backward of a real call begin."""
        outputs: list[Ghost] = []
        flatten(output, outputs)
        if len(outputs) != 1 or outputs[0].grad_fn is None:
            return
        number = outputs[0].output_nr

        def begin(gradients: tuple[Tensor | None, ...]) -> None:
            gradient = gradients[number]
            if isinstance(gradient, Ghost):
                self.begin(turn, call, gradient)

        outputs[0].grad_fn.register_prehook(begin)

    def _repeat(self, turn: Turn, rank: int, tensors: list[Ghost]) -> Any:
        """Stand in for a call."""
        template = turn.template
        assert template is not None
        enter = Position.of(self.mode.recorder)
        lives = tuple(tensor.life.number for tensor in tensors)
        call = Call(rank=rank, inputs=lives, enter=enter, leave=enter, is_repeated=True)
        kept: list[Tensor] = [tensor for tensor, is_kept in zip(tensors, template.keeps, strict=True) if is_kept]
        output: Tensor = self._make(template.output, call, "forward", {})
        if template.keeps_output:
            kept.append(self.mode.place(output.inner.detach()))  # type: ignore[attr-defined]
        if template.source is not None:
            source = tensors[template.source]
            # In a list, because a node that returns a tensor it was given makes a view of it.
            output = _Stand.apply(source, [output], _Backward(self, turn, call, kept, source))  # type: ignore[no-untyped-call]
        call.leave = Position.of(self.mode.recorder)
        turn.calls.append(call)
        turn.last_node = compat.next_node_number()
        self.has_repeated = True
        self._windows.append(Window(run=self.paths[0], turn=len(self._turns) - 1, call=call, segment="forward"))
        return (output, *template.rest) if template.is_tuple else output

    def _make(self, copy: TensorCopy, call: Call, segment: str, storages: dict[int, torch.UntypedStorage]) -> Ghost:
        storage = storages.get(copy.index)
        if storage is None:
            storage = torch.UntypedStorage(copy.storage_bytes, device="meta")
            storages[copy.index] = storage
        ghost = self.mode.place(copy.make(storage), is_logged=False)
        ghost.life.is_logged = True  # its birth is written down by `unroll`; its death is real
        call.stand_ins[segment, copy.index] = ghost.life.number
        return ghost

    # -- backward ----------------------------------------------------------------------------------------------------

    def begin(self, turn: Turn, call: Call, gradient: Ghost) -> None:
        """The backward of a call begins, and the one of the next block is over."""
        here = Position.of(self.mode.recorder)
        call.begin, call.gradient = here, gradient.life.number
        if call.rank + 1 < len(turn.calls):
            following = turn.calls[call.rank + 1]
            following.end = here
            if following.rank in self._references:
                emission = self._observe(following, gradient)
                if emission is None or (turn.emission is not None and turn.emission != emission):
                    self.fail("gradients leave its blocks in different ways")
                turn.emission = turn.emission or emission
        if call.rank in self._references:
            call.grads_before = tuple(_gradient_life(parameter) for parameter in self._parameters[call.rank])

    def _observe(self, call: Call, gradient: Ghost) -> Emission | None:
        """What a real call's backward has left, at the moment it is over; None for what cannot be imitated."""
        assert call.begin is not None
        first = call.begin.lives
        passed_on = gradient.life.number == call.gradient
        if gradient.life.number < first and not passed_on:
            return None
        changes: list[TensorCopy | bool] = []
        for parameter, before in zip(self._parameters[call.rank], call.grads_before, strict=True):
            after = parameter.grad
            if isinstance(after, Ghost) and before is None and after.life.number >= first:
                changes.append(TensorCopy.of(after, first))
            elif before == _gradient_life(parameter):
                changes.append(before is not None)
            else:
                return None
        return Emission(None if passed_on else TensorCopy.of(gradient, first), tuple(changes))

    def backward(self, turn: Turn, call: Call, gradient: Ghost) -> Tensor | None:
        """Stand in for the backward of a call; returns the gradient of its input, None after a failure."""
        self.begin(turn, call, gradient)
        self._windows.append(Window(run=self.paths[0], turn=self._turns.index(turn), call=call, segment="backward"))
        emission = turn.emission
        if emission is None or self.failure:
            self.fail("a backward began before its template's had ended")
            return None
        storages: dict[int, torch.UntypedStorage] = {}
        for parameter, change in zip(self._parameters[call.rank], emission.weights, strict=True):
            if (parameter.grad is not None) is not (change is True):
                self.fail("gradients exist in some of its blocks only")
            elif isinstance(change, TensorCopy):
                parameter.grad = self._make(change, call, "backward", storages)
        if emission.gradient is None:
            return gradient
        return self._make(emission.gradient, call, "backward", storages)

    def fail(self, reason: str) -> None:
        """Remember why the run is no repetition."""
        self.failure = self.failure or f"{self.paths[0]}: {reason}"

    @property
    def _references(self) -> tuple[int, ...]:
        """The real blocks that must have done the same: the first that can and the last two that can."""
        return 1, len(self.blocks) - 3, len(self.blocks) - 2


class _Backward:
    """What the node of a replaced call knows. It holds what the block would hold, until its backward."""

    __slots__ = ("_call", "_dtype", "_kept", "_run", "_shape", "_turn")

    def __init__(self, run: Run, turn: Turn, call: Call, kept: list[Tensor], source: Tensor) -> None:
        self._run, self._turn, self._call, self._kept = run, turn, call, kept
        self._shape, self._dtype = source.shape, source.dtype

    def __call__(self, gradient: Ghost) -> Tensor:
        result = self._run.backward(self._turn, self._call, gradient)
        self._kept.clear()
        if result is None:
            # An error raised in autograd's thread would end the process: the step goes on to its end, for nothing.
            return self._run.mode.place(torch.empty(self._shape, dtype=self._dtype, device=META))
        return result


class _Stand(torch.autograd.Function):
    """The node that stands for a block."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, output: list[Tensor], backward: _Backward) -> Tensor:
        ctx.backward_of_block = backward
        return output.pop()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.backward_of_block(gradient), None, None


def _gradient_life(parameter: Tensor) -> int | None:
    return parameter.grad.life.number if isinstance(parameter.grad, Ghost) else None
