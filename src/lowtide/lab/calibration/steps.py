"""What updates and whole steps reach.

Updates are timed on the host and on the device: Lowtide's kernels and torch's AdamW, alone and beside copies. Whole steps say
how long the host needs to launch an operator, what operators bound by memory reach, and what a session's Python takes for a
window, a finished gradient and a watched operator. A step of a small model is bound by the host and one of a large model by the
device. What each operator reads, writes and computes is read off a trace of the same step.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import psutil
import torch
from torch import nn

from lowtide.hardware import Hardware
from lowtide.hardware.rates import DeviceRates, HostRates, KernelRate, UpdateKind, UpdateRates
from lowtide.lab.calibration.kernels import Copies, Timer
from lowtide.models.llama import Llama, LlamaConfig
from lowtide.optim import reference
from lowtide.optim.device import kernel as device_kernel
from lowtide.optim.host import kernel as host_kernel
from lowtide.optim.rules import Adam
from lowtide.optim.state import new_state
from lowtide.optim.update_types import Moments, Numerics, Piece, Rounding
from lowtide.planning.hand_plan import make_plan
from lowtide.runtime.manage import manage
from lowtide.runtime.prediction.trace import trace
from lowtide.tracing.step_trace import Op, Phase, seconds_of

_BYTES_A_PARAMETER = 48
"""Host memory in which an update is measured, with room."""
_CHUNK = 1 << 24
"""Parameters of a chunk, about what sessions update by one call."""
_FASTEST_LINK = 60e9
_MOST_COPIES = 10_000
_STEPS = {
    UpdateKind.EXACT: (torch.bfloat16, Rounding.EXACT, Moments.FP32),
    UpdateKind.FP32: (torch.float32, Rounding.NEAREST, Moments.FP32),
    UpdateKind.EIGHT_BIT: (torch.bfloat16, Rounding.EXACT, Moments.INT8),
}


def make_update(kind: UpdateKind, num_elements: int, device: torch.device) -> tuple[Callable[[], object], int]:
    """An update of one parameter, and the bytes that it reads and writes: the weight twice, the gradient, the state twice."""
    dtype, rounding, moments = _STEPS.get(kind, (torch.float32, Rounding.NEAREST, Moments.FP32))
    weight = torch.full((num_elements,), 0.5, dtype=dtype, device=device, requires_grad=True)
    gradient = torch.full_like(weight, 1e-3, requires_grad=False)
    if kind not in _STEPS:
        weight.grad = gradient
        optimizer = torch.optim.AdamW([weight], lr=1e-4, fused=kind is UpdateKind.TORCH_FUSED)
        return optimizer.step, weight.nbytes * 7
    rule = Adam(lr=1e-4, weight_decay=0.1)
    state = new_state(weight.detach(), rule, Numerics(rounding=rounding, moments=moments))
    piece = Piece(
        weight=weight.detach(), gradient=gradient, state=state.tensors, rule=rule, step=10, remainder=state.remainder
    )
    on_host = host_kernel.update if host_kernel.is_available() else reference.update
    update = on_host if device.type == "cpu" else device_kernel.update
    return lambda: update([piece], rounding=rounding, moments=moments), 3 * weight.nbytes + 2 * state.nbytes


def measure_device_updates(timer: Timer) -> UpdateRates:
    """Updates on the device, each by one launch or a few."""
    rates = {}
    for kind in UpdateKind:
        call, num_bytes = make_update(kind, timer.sizes.num_updated, timer.device)
        rates[kind.name.lower()] = timer.on_device(f"update on the device, {kind}", num_bytes, "byte", call).per_s
    return UpdateRates(**rates)


def measure_host_updates(timer: Timer, copies: Copies | None) -> tuple[UpdateRates, UpdateRates | None]:
    """Updates on the host, alone and while copies run both ways; torch's own with its own threads.

    A session updates chunk by chunk, so what a call takes besides is in the rate.

    Args:
        timer: What it counts by.
        copies: None where there is no device to copy to and from: then nothing is measured beside them.
    """
    num_elements = min(timer.sizes.num_updated, psutil.virtual_memory().available // _BYTES_A_PARAMETER)
    alone, beside = {}, {}
    for kind in UpdateKind:
        # The slow one would take half of all the time.
        count = num_elements // 8 if kind is UpdateKind.TORCH else num_elements
        call, num_bytes = _in_chunks(kind, count)
        name = f"update on the host, {kind}"
        found = timer.on_host(name, num_bytes, "byte", call)
        alone[kind.name.lower()] = found.per_s
        if copies is not None:
            times = [_beside(copies, call, found.median_s) for _ in range(timer.sizes.num_repeats)]
            beside[kind.name.lower()] = timer.note(f"{name}, beside copies", num_bytes, "byte", times).per_s
    return UpdateRates(**alone), UpdateRates(**beside) if beside else None


def _in_chunks(kind: UpdateKind, num_elements: int) -> tuple[Callable[[], None], int]:
    """Updates of so many parameters on the host, one chunk after the other, and the bytes of all of them."""
    sizes = [min(_CHUNK, num_elements - begin) for begin in range(0, num_elements, _CHUNK)]
    updates = [make_update(kind, size, torch.device("cpu")) for size in sizes]

    def update_all() -> None:
        for update, _ in updates:
            update()

    return update_all, sum(num_bytes for _, num_bytes in updates)


def _beside(copies: Copies, call: Callable[[], object], alone_s: float) -> float:
    """Seconds of a call during which both directions copy from its beginning to its end."""
    count = 2 + int(3 * alone_s * _FASTEST_LINK / copies.num_bytes)
    while True:
        for way in ("to device", "to host"):
            copies.start(way, count)
        began_s = time.perf_counter()
        call()
        took_s = time.perf_counter() - began_s
        are_busy = copies.are_busy()
        copies.wait()
        if are_busy or count > _MOST_COPIES:
            return took_s
        count *= 2


@contextmanager
def running(call: Callable[[], object]) -> Iterator[None]:
    """Another thread makes the call again and again, as a session's worker updates."""
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            call()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def measure_host_memory(timer: Timer) -> float:
    """Bytes a second that a copy by all of torch's threads reads and writes."""
    source = torch.ones(timer.sizes.memory_bytes // 4)
    out = torch.ones_like(source)
    return timer.on_host("host memory copy", 2.0 * source.nbytes, "byte", lambda: out.copy_(source)).per_s


_IN_BACKWARD = {"schedule": "in_backward", "update": "device"}
_DEFERRED = {"weights": "resident", "update": "device"}
_PRECISIONS = {
    "bfloat16": ("bf16 exact", UpdateKind.EXACT, 26),
    "float16": ("fp16 exact", UpdateKind.FP32, 30),
    "float32": ("fp32", UpdateKind.FP32, 28),
}
"""By the type of a model: how a session updates it exactly, the nearest kind of update, and the bytes for each parameter."""
_NUM_BLOCKS = 3
"""In which steps alone and steps beside updates take turns, because a host is faster at one time than at another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Forward and backward of a model, and the operators that they consist of."""

    config: LlamaConfig
    batch: tuple[int, int]
    dtype: str
    ops: tuple[Op, ...] = ()

    @property
    def num_block_ops(self) -> int:
        """Operators in the forward of the blocks."""
        return sum(op.phase is Phase.FORWARD and op.module.startswith("layers.") for op in self.ops)

    def build(self, device: torch.device) -> nn.Module:
        """The model, with weights drawn on the device."""
        with device:
            return Llama(self.config).to(getattr(torch, self.dtype))

    def ids(self, device: torch.device) -> dict[str, torch.Tensor]:
        """The batch."""
        ids = torch.randint(self.config.vocab_size, self.batch, device=device)
        return {"input_ids": ids, "labels": ids}


def read_step(config: LlamaConfig, batch: tuple[int, int], dtype: str, hardware: Hardware) -> Step:
    """Trace a step, with the kernels that some hardware would choose."""
    step = Step(config=config, batch=batch, dtype=dtype)
    traced = trace(step.build(torch.device("meta")), step.ids(torch.device("cpu")), hardware=hardware)
    return replace(step, ops=traced.ops)


def fit_memory(step: Step, step_s: float, rates: DeviceRates) -> KernelRate:
    """What operators that are bound by memory reach in a whole step: what products leave of its time, for their bytes.

    It is less than what a single large kernel reaches, because most are smaller, and read in other orders; never more.
    """
    works = [(op.name, op.work) for op in step.ops if op.work is not None]
    products_s = sum(seconds_of(name, work, rates) for name, work in works if work.flops)
    others = [work.num_bytes for _, work in works if not work.flops]
    left_s = step_s - products_s - len(others) * rates.memory.start_s
    fastest_s = sum(others) / rates.memory.per_s
    return replace(rates.memory, per_s=sum(others) / max(left_s, fastest_s))


def measure_step(timer: Timer, step: Step, name: str) -> float:
    """Median seconds of forward and backward."""
    timer.tell(name)
    model, batch = step.build(timer.device), step.ids(timer.device)
    times = _times(lambda: _forward_backward(model, batch), 2 * timer.sizes.num_steps)
    return timer.note(name, len(step.ops), "operator", times).median_s


def _forward_backward(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    loss = model(**batch).loss
    loss.backward()
    model.zero_grad()
    loss.item()


def _times(call: Callable[[], object], count: int) -> list[float]:
    for _ in range(2):
        call()
    times = []
    for _ in range(count):
        began_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - began_s)
    return times


def measure_updates_in_session(timer: Timer, step: Step, step_s: float, alone: UpdateRates) -> UpdateRates:
    """What Lowtide's kernels reach in the steps of a session, where they also look for gradients that are not finite.

    Args:
        timer: What it counts by.
        step: One that is bound by the device.
        step_s: What its forward and backward take.
        alone: What the kernels reach by themselves; never less than in a session.
    """
    precision, kind, bytes_each = _PRECISIONS[step.dtype]
    managed_s, _, _ = _managed(timer, step, "updates on the device", _DEFERRED, precision=precision)
    num_elements = sum(parameter.numel() for parameter in step.build(torch.device("meta")).parameters())
    least_s = bytes_each * num_elements / alone.of(kind)
    share = least_s / max(managed_s - step_s, least_s)
    return replace(alone, exact=alone.exact * share, fp32=alone.fp32 * share, eight_bit=alone.eight_bit * share)


def measure_session(timer: Timer, step: Step, host: HostRates) -> HostRates:
    """What a session's Python takes, from steps of a small model under several plans.

    Args:
        timer: What it counts by.
        step: A step that is bound by the host.
        host: Rates to complete; its launches are known.
    """
    precision = _PRECISIONS[step.dtype][0]
    measured = partial(_managed, timer, step, precision=precision, is_beside=True)
    plain, plain_beside, _ = measured("plain", None)
    resident, resident_beside, _ = measured("resident", {"weights": "resident", **_IN_BACKWARD})
    streamed, streamed_beside, num_groups = measured("streamed", {"weights": "streamed", **_IN_BACKWARD})
    words = {"weights": "resident", "activations": "selective", **_IN_BACKWARD}
    selective, _, _ = measured("selective", words)
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


def _managed(
    timer: Timer,
    step: Step,
    name: str,
    words: dict[str, Any] | None,
    *,
    precision: str,
    is_beside: bool = False,
) -> tuple[float, float, int]:
    """Median seconds of a step alone and beside updates on the host, 0 where that is not asked for, and the number of groups."""
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
        session = manage(model, optimizer, plan, device=timer.device, precision=precision)

    def train() -> None:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    alone: list[float] = []
    beside: list[float] = []
    update, _ = make_update(UpdateKind.EXACT, sizes.num_updated // 2 if is_beside else 1, torch.device("cpu"))
    with session:
        for _ in range(_NUM_BLOCKS):
            count = -(-sizes.num_steps // _NUM_BLOCKS)
            alone += _times(train, count)
            if is_beside:
                with running(update):
                    beside += _times(train, count)
    alone_s = timer.note(f"step, {name}", 1, "step", alone).median_s
    beside_s = timer.note(f"step, {name}, beside updates", 1, "step", beside).median_s if beside else 0.0
    return alone_s, beside_s, num_groups
