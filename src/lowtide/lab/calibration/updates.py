"""What updates reach, on the host and on the device: Lowtide's kernels and torch's AdamW, alone and beside copies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import torch

from lowtide.hardware.rates import UpdateKind, UpdateRates
from lowtide.lab.calibration.kernels import Copies
from lowtide.lab.calibration.timing import Timer
from lowtide.optim import reference
from lowtide.optim.device import kernel as device_kernel
from lowtide.optim.host import kernel as host_kernel
from lowtide.optim.rules import Adam
from lowtide.optim.state import new_state
from lowtide.optim.update_types import Moments, Numerics, Piece, Rounding

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
