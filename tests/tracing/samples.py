"""Synthetic StepTraces for tests: a builder, a hand-countable step, and one shaped like a transformer's.

Use `TraceBuilder` to write a step event by event:

    builder = TraceBuilder(model="toy")
    builder.allocate(4 * MiB, Category.WEIGHTS, module="linear")    # before the first phase: alive at the start
    builder.enter(Phase.FORWARD)
    builder.op("aten.mm", module="linear", source="toy.py:3")
    out = builder.allocate(MiB, Category.ACTIVATIONS)                         # takes module, op and source from the op
    builder.free(out)
    trace = builder.build()
"""

from __future__ import annotations

import math
from dataclasses import replace

from lowtide.tracing.step_trace import Allocation, Category, Event, Op, Phase, StepTrace, Target
from lowtide.units import MiB

ROUND = 512
SEGMENT = 2 * MiB
TARGET = Target(card="h200", torch_version="2.13.0", context_bytes=520 * MiB, capacity_bytes=143_771 * MiB)


class TraceBuilder:
    """Writes a consistent StepTrace event by event: blocks are rounded to 512 bytes, reserved memory only grows."""

    def __init__(self, *, model: str = "toy", origin: str = "predicted", target: Target = TARGET) -> None:
        self._model, self._origin, self._target = model, origin, target
        self._phase: Phase | None = None
        self._ops: list[Op] = []
        self._allocations: list[Allocation] = []
        self._events: list[Event] = []
        self._allocated = self._reserved = self._start = 0

    def enter(self, phase: Phase) -> None:
        """Begin a phase; the first call ends what was alive before the step."""
        if self._phase is None:
            self._start = self._allocated
        self._phase = phase

    def op(self, name: str, *, module: str = "", source: str = "", seconds: float = 0.0) -> int:
        """Run an operator; what follows is allocated and freed by it."""
        assert self._phase is not None, "enter a phase first"
        self._ops.append(Op(name=name, module=module, source=source, phase=self._phase, seconds=seconds))
        return len(self._ops) - 1

    def allocate(
        self,
        num_bytes: int,
        category: Category,
        *,
        module: str | None = None,
        shape: tuple[int, ...] | None = None,
        dtype: str = "float32",
    ) -> int:
        """Allocate and return the allocation's index."""
        op = self._ops[-1] if self._ops else None
        block = math.ceil(num_bytes / ROUND) * ROUND
        self._allocations.append(
            Allocation(
                requested_bytes=num_bytes,
                bytes=block,
                category=category,
                module=module if module is not None else op.module if op else "",
                op=op.name if op else "",
                source=op.source if op else "",
                shape=shape if shape is not None else (num_bytes // 4,),
                dtype=dtype,
                phase=self._phase,
                born=None if self._phase is None else len(self._events),
                died=None,
                uses=(len(self._ops) - 1,) if self._ops else (),
            )
        )
        self._record(len(self._allocations) - 1, block)
        return len(self._allocations) - 1

    def use(self, allocation: int) -> None:
        """Say that the current op touches an allocation."""
        old = self._allocations[allocation]
        self._allocations[allocation] = replace(old, uses=(*old.uses, len(self._ops) - 1))

    def free(self, allocation: int) -> None:
        """Free an allocation."""
        assert self._phase is not None, "what is alive before the step cannot die before it"
        old = self._allocations[allocation]
        assert old.died is None, f"allocation {allocation} was freed already"
        self._allocations[allocation] = replace(old, died=len(self._events))
        self._record(allocation, -old.bytes)

    def build(self, *, notes: tuple[str, ...] = (), num_parameters: int = 0) -> StepTrace:
        """The trace so far."""
        start_reserved = math.ceil(self._start / SEGMENT) * SEGMENT
        return StepTrace(
            model=self._model,
            origin=self._origin,
            target=self._target,
            settings={"batch": "8x128", "precision": None, "optimizer": {"name": "AdamW", "fused": False}},
            num_parameters=num_parameters,
            start_allocated_bytes=self._start if self._phase is not None else self._allocated,
            start_reserved_bytes=start_reserved,
            ops=tuple(self._ops),
            allocations=tuple(self._allocations),
            events=tuple(self._events),
            notes=notes,
        )

    def _record(self, allocation: int, change: int) -> None:
        self._allocated += change
        self._reserved = max(self._reserved, math.ceil(self._allocated / SEGMENT) * SEGMENT)
        if self._phase is not None:
            self._events.append(
                Event(
                    allocation=allocation,
                    is_free=change < 0,
                    op=len(self._ops) - 1,
                    phase=self._phase,
                    allocated_bytes=self._allocated,
                    reserved_bytes=self._reserved,
                )
            )


def tiny_trace(*, origin: str = "predicted") -> StepTrace:
    """A step small enough to count by hand: 4 MiB weights, 8 MiB optimizer state, and a peak of 19 MiB in the loss.

    Allocated MiB: 12 before the step, then 15 (forward), 19 and 15 (loss), 18 and 15 (backward), 12 (update).
    """
    builder = TraceBuilder(model="tiny", origin=origin)
    builder.allocate(4 * MiB, Category.WEIGHTS, module="head", shape=(1024, 1024))
    builder.allocate(8 * MiB, Category.OPTIMIZER, module="head", shape=(2, 1024, 1024))
    builder.enter(Phase.FORWARD)
    builder.op("aten.mm", module="head", source="tiny.py:10", seconds=1e-5)
    hidden = builder.allocate(3 * MiB, Category.ACTIVATIONS, shape=(768, 1024))
    builder.enter(Phase.LOSS)
    builder.op("aten._log_softmax", module="", source="tiny.py:20", seconds=2e-5)
    scratch = builder.allocate(4 * MiB, Category.TEMPORARIES, shape=(1024, 1024))
    builder.free(scratch)
    builder.enter(Phase.BACKWARD)
    builder.op("aten.mm", module="head", source="tiny.py:10", seconds=2e-5)
    builder.use(hidden)
    gradient = builder.allocate(3 * MiB, Category.GRADIENTS, shape=(768, 1024))
    builder.free(hidden)
    builder.enter(Phase.UPDATE)
    builder.op("aten._foreach_mul_", module="", source="train.py:5", seconds=3e-5)
    builder.free(gradient)
    return builder.build(notes=("the head is not tied",), num_parameters=1024 * 1024)


def transformer_trace(
    *, layers: int = 12, width: int = 768, tokens: int = 8192, vocab: int = 50257, origin: str = "predicted"
) -> StepTrace:
    """A bf16 step with the rise, the loss spike, the fall and the update of a transformer trained by foreach AdamW."""
    builder = TraceBuilder(model="gpt2", origin=origin)
    source = "gpt.py:{}".format
    matrix, hidden = 12 * width * width * 2, tokens * width * 2
    for layer in range(layers):
        builder.allocate(matrix, Category.WEIGHTS, module=f"layers.{layer}", shape=(12, width, width), dtype="bfloat16")
    builder.allocate(vocab * width * 2, Category.WEIGHTS, module="embed", shape=(vocab, width), dtype="bfloat16")
    for layer in range(layers):
        builder.allocate(2 * matrix, Category.OPTIMIZER, module=f"layers.{layer}", shape=(2, 12, width, width))
    builder.allocate(2 * vocab * width * 2, Category.OPTIMIZER, module="embed", shape=(2, vocab, width))
    builder.allocate(32 * MiB, Category.WORKSPACE, module="", dtype="uint8")

    kept: list[list[int]] = []
    builder.enter(Phase.FORWARD)
    builder.op("aten.embedding", module="embed", source=source(40), seconds=1e-4)
    kept.append([builder.allocate(hidden, Category.ACTIVATIONS, shape=(tokens, width), dtype="bfloat16")])
    for layer in range(layers):
        saved = []
        for name, op, factor, line in LAYER_OPS:
            builder.op(op, module=f"layers.{layer}.{name}", source=source(line), seconds=3e-4)
            scratch = builder.allocate(hidden, Category.TEMPORARIES, shape=(tokens, width), dtype="bfloat16")
            shape = (tokens, int(factor * width))
            size = int(factor * hidden)
            saved.append(builder.allocate(size, Category.ACTIVATIONS, shape=shape, dtype="bfloat16"))
            builder.free(scratch)
        kept.append(saved)
    builder.enter(Phase.LOSS)
    builder.op("aten.mm", module="lm_head", source=source(71), seconds=2e-3)
    logits = builder.allocate(tokens * vocab * 2, Category.ACTIVATIONS, shape=(tokens, vocab), dtype="bfloat16")
    builder.op("aten._to_copy", module="", source="loss.py:12", seconds=1e-3)
    upcast = builder.allocate(tokens * vocab * 4, Category.TEMPORARIES, shape=(tokens, vocab))
    builder.op("aten._log_softmax", module="", source="loss.py:13", seconds=1e-3)
    probabilities = builder.allocate(tokens * vocab * 4, Category.ACTIVATIONS, shape=(tokens, vocab))
    builder.free(upcast)
    builder.enter(Phase.BACKWARD)
    builder.op("aten._log_softmax_backward_data", module="", source="loss.py:13", seconds=1e-3)
    spike = builder.allocate(tokens * vocab * 4, Category.TEMPORARIES, shape=(tokens, vocab))
    builder.free(probabilities)
    builder.free(logits)
    builder.op("aten.mm", module="lm_head", source=source(71), seconds=2e-3)
    gradients = [builder.allocate(vocab * width * 2, Category.GRADIENTS, shape=(vocab, width), dtype="bfloat16")]
    builder.free(spike)
    for layer in reversed(range(layers)):
        for (name, op, factor, line), saved in zip(reversed(LAYER_OPS), reversed(kept.pop()), strict=True):
            builder.op(op, module=f"layers.{layer}.{name}", source=source(line), seconds=6e-4)
            builder.use(saved)
            size = int(factor * hidden)
            scratch = builder.allocate(
                size, Category.TEMPORARIES, shape=(tokens, int(factor * width)), dtype="bfloat16"
            )
            builder.free(saved)
            builder.free(scratch)
        builder.op("aten.mm", module=f"layers.{layer}", source=source(60), seconds=6e-4)
        gradients.append(builder.allocate(matrix, Category.GRADIENTS, shape=(12, width, width), dtype="bfloat16"))
    builder.op("aten.embedding_dense_backward", module="embed", source=source(40), seconds=1e-3)
    builder.free(kept.pop().pop())
    builder.enter(Phase.UPDATE)
    builder.op("aten._foreach_sqrt", module="", source="train.py:31", seconds=1e-3)
    copies = [builder.allocate(matrix, Category.TEMPORARIES, dtype="bfloat16") for _ in range(layers)]
    for copy in copies:
        builder.free(copy)
    builder.op("optimizer.zero_grad", module="", source="train.py:32")
    for gradient in gradients:
        builder.free(gradient)
    notes = ("workspaces as measured on this card", "the batch was filled with random token ids")
    return builder.build(notes=notes, num_parameters=layers * 12 * width * width + vocab * width)


LAYER_OPS = (
    ("norm1", "aten.native_layer_norm", 1.0, 51),
    ("attention.qkv", "aten.addmm", 3.0, 52),
    ("attention", "aten._scaled_dot_product_flash_attention", 1.0, 53),
    ("attention.out", "aten.addmm", 1.0, 54),
    ("norm2", "aten.native_layer_norm", 1.0, 56),
    ("mlp.up", "aten.addmm", 4.0, 57),
    ("mlp", "aten.gelu", 4.0, 58),
    ("mlp.down", "aten.addmm", 1.0, 59),
)
"""Name, operator, size as a multiple of the hidden state, line: what one layer keeps for its backward."""


def observed_like(trace: StepTrace, *, scale: float = 1.02) -> StepTrace:
    """What an observation of the step might look like: slightly larger, every other small scratch unseen."""
    dropped = {
        index
        for index, allocation in enumerate(trace.allocations)
        if allocation.category is Category.TEMPORARIES and allocation.bytes < trace.peak_bytes // 100 and index % 2
    }
    builder = TraceBuilder(model=trace.model, origin="observed", target=trace.target)
    handles: dict[int, int] = {}
    for index, allocation in enumerate(trace.allocations):
        if allocation.born is None:
            handles[index] = builder.allocate(
                int(allocation.bytes * scale), allocation.category, module=allocation.module, shape=allocation.shape
            )
    phase: Phase | None = None
    last_op = -1
    for event in trace.events:
        if event.phase is not phase:
            builder.enter(event.phase)
            phase = event.phase
        if event.op != last_op:
            op = trace.ops[event.op]
            builder.op(op.name, module=op.module, source=op.source)
            last_op = event.op
        if event.allocation in dropped:
            continue
        if event.is_free:
            builder.free(handles[event.allocation])
        else:
            allocation = trace.allocations[event.allocation]
            handles[event.allocation] = builder.allocate(
                int(allocation.bytes * scale), allocation.category, shape=allocation.shape, dtype=allocation.dtype
            )
    return builder.build(num_parameters=trace.num_parameters)
