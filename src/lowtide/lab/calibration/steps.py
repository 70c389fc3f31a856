"""What whole steps say: how long the host needs to launch an operator, what operators bound by memory reach, and what a session's
Python takes for a window, a finished gradient and a watched operator.

A step of a small model is bound by the host and one of a large model by the device. What each operator reads, writes and
computes is read off a trace of the same step.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lowtide.hardware import Hardware
from lowtide.hardware.rates import DeviceRates, HostRates, KernelRate
from lowtide.lab.calibration.timing import Timer
from lowtide.lab.calibration.updates import updates_elsewhere
from lowtide.models.llama import Llama, LlamaConfig
from lowtide.planning.hand_plan import make_plan
from lowtide.runtime.manage import manage
from lowtide.runtime.prediction.trace import trace
from lowtide.tracing.step_trace import Phase, StepTrace

_IN_BACKWARD = {"schedule": "in_backward", "update": "device"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one operator of a step does."""

    operator: str
    num_bytes: float
    flops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Forward and backward of a model, and what it consists of."""

    config: LlamaConfig
    batch: tuple[int, int]
    dtype: str
    num_ops: int
    num_block_ops: int
    """In the forward of the blocks."""
    works: tuple[Work, ...]
    """Empty for a step on the host, whose operators have no known costs."""

    def build(self, device: torch.device) -> nn.Module:
        """The model, with weights drawn on the device."""
        with device:
            return Llama(self.config).to(getattr(torch, self.dtype))

    def ids(self, device: torch.device) -> dict[str, torch.Tensor]:
        """The batch."""
        ids = torch.randint(self.config.vocab_size, self.batch, device=device)
        return {"input_ids": ids, "labels": ids}


def read_step(config: LlamaConfig, batch: tuple[int, int], dtype: str, hardware: Hardware) -> Step:
    """Trace a step twice: once with times that are bytes, once with times that are FLOP."""
    nothing, one = KernelRate(per_s=float("inf"), start_s=0.0), KernelRate(per_s=1.0, start_s=0.0)
    empty = Step(config=config, batch=batch, dtype=dtype, num_ops=0, num_block_ops=0, works=())

    def traced(memory: KernelRate, product: KernelRate) -> StepTrace:
        assert hardware.rates is not None
        rates = replace(
            hardware.rates, memory=memory, fp32=product, bf16=product, fp16=product, attention_share=1.0,
            attention_backward_share=1.0,
        )  # fmt: skip
        return trace(
            empty.build(torch.device("meta")),
            empty.ids(torch.device("cpu")),
            hardware=replace(hardware, measured=rates),
        )

    if hardware.is_host:
        by_bytes = trace(empty.build(torch.device("meta")), empty.ids(torch.device("cpu")), hardware=hardware)
        works: tuple[Work, ...] = ()
    else:
        by_bytes, by_flops = traced(one, nothing), traced(nothing, one)
        works = tuple(
            Work(operator=op.name, num_bytes=op.seconds, flops=other.seconds)
            for op, other in zip(by_bytes.ops, by_flops.ops, strict=True)
            if op.seconds
        )
    num_block_ops = sum(op.phase is Phase.FORWARD and op.module.startswith("layers.") for op in by_bytes.ops)
    return replace(empty, num_ops=len(by_bytes.ops), num_block_ops=num_block_ops, works=works)


def fit_memory(step: Step, step_s: float, rates: DeviceRates) -> KernelRate:
    """What operators that are bound by memory reach in a whole step: what products leave of its time, for their bytes.

    It is less than what a single large kernel reaches, because most are smaller, and read in other orders; never more.
    """
    products_s = sum(
        rates.seconds(num_bytes=work.num_bytes, flops=work.flops, dtype=step.dtype, operator=work.operator)
        for work in step.works
        if work.flops
    )
    others = [work.num_bytes for work in step.works if not work.flops]
    left_s = step_s - products_s - len(others) * rates.memory.start_s
    fastest_s = sum(others) / rates.memory.per_s
    return replace(rates.memory, per_s=sum(others) / max(left_s, fastest_s))


def measure_step(timer: Timer, step: Step, name: str) -> float:
    """Median seconds of forward and backward."""
    timer.tell(name)
    model, batch = step.build(timer.device), step.ids(timer.device)
    times = _times(lambda: _forward_backward(model, batch), timer.sizes.num_steps)
    return timer.note(name, step.num_ops, "operator", times).median_s


def _forward_backward(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    loss = model(**batch).loss
    loss.backward()
    model.zero_grad()
    loss.item()


def _times(call: Callable[[], None], count: int) -> list[float]:
    for _ in range(3):
        call()
    times = []
    for _ in range(count):
        began_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - began_s)
    return times


def measure_session(timer: Timer, step: Step, host: HostRates) -> HostRates:
    """What a session's Python takes, from steps of a small model under several plans.

    Args:
        timer: What it counts by.
        step: A step that is bound by the host.
        host: Rates to complete; its launches are known.
    """
    plain, plain_beside, _ = _managed(timer, step, "plain", None)
    resident, resident_beside, _ = _managed(timer, step, "resident", {"weights": "resident", **_IN_BACKWARD})
    streamed, streamed_beside, num_groups = _managed(timer, step, "streamed", {"weights": "streamed", **_IN_BACKWARD})
    selective, _, _ = _managed(
        timer, step, "selective", {"weights": "resident", "activations": "selective", **_IN_BACKWARD}
    )
    num_parameters = len(list(step.build(torch.device("meta")).parameters()))
    # A selective policy sees the operators of the forward, and sees them again in the backward, which repeats them.
    watched_s = (selective - resident - step.num_block_ops * host.launch_s) / (2 * step.num_block_ops)
    slower = [plain_beside / plain, resident_beside / resident, streamed_beside / streamed]
    return replace(
        host,
        window_s=max(0.0, streamed - resident) / (2 * num_groups),
        watched_s=max(0.0, watched_s),
        finished_s=max(0.0, resident - plain) / num_parameters,
        slowdown_beside_updates=max(1.0, statistics.median(slower)),
    )


def _managed(timer: Timer, step: Step, name: str, words: dict[str, Any] | None) -> tuple[float, float, int]:
    """Median seconds of a step alone and beside updates on the host, and how many groups it has."""
    sizes = timer.sizes
    timer.tell(f"session, {name}")
    model, batch = step.build(timer.device), step.ids(timer.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    session: AbstractContextManager[Any] = contextlib.nullcontext()
    num_groups = 0
    if words is not None:
        # An emulated device has no size of its own.
        plan = make_plan(model, **words, device_memory=None if timer.is_cuda else "1GiB")
        num_groups = len(plan.groups)
        is_bf16 = step.dtype == "bfloat16"
        session = manage(model, optimizer, plan, device=timer.device, precision="bf16 exact" if is_bf16 else None)

    def train() -> None:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    with session:
        alone = timer.note(f"step, {name}", 1, "step", _times(train, sizes.num_steps))
        with updates_elsewhere(sizes.num_updated // 4):
            beside = timer.note(f"step, {name}, beside updates", 1, "step", _times(train, sizes.num_steps))
    return alone.median_s, beside.median_s, num_groups
