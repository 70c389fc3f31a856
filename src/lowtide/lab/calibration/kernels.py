"""What a device's kernels reach: matrix products, attention, memory, copies to and from the host, and what its libraries keep.

A `Timer` makes so many calls that a clock can tell, and leaves out the host's launches between them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide import compat
from lowtide.hardware.calibration import Measurement
from lowtide.hardware.rates import AttentionRate, KernelRate
from lowtide.models.llama import LlamaConfig
from lowtide.tracing.ghost.costs import BACKWARD_ATTENTION

_MOST_CALLS = 400
"""In a repeat: what a stream takes before the host has to wait for it, with room."""
_MOST_HIDDEN_S = 0.2
"""Seconds of launches that are hidden behind a busy device."""
LARGE = LlamaConfig(
    vocab_size=32000, context_length=2048, num_layers=4, hidden_size=2048, intermediate_size=8192, num_heads=16, num_kv_heads=16,
)  # fmt: skip
SMALL = LlamaConfig(
    vocab_size=512, context_length=64, num_layers=12, hidden_size=64, intermediate_size=256, num_heads=4, num_kv_heads=4,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large what is measured is, and how long it is measured."""

    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    squares: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    num_tokens: int = 8192
    """Rows of the tall products, and tokens of each attention."""
    hidden_size: int = 4096
    inner_size: int = 11008
    lengths: tuple[int, ...] = (512, 2048, 8192)
    """Lengths of attention; each divides the number of tokens."""
    head_size: int = 128
    memory_bytes: int = 512 << 20
    """Bytes of the arrays that memory is measured with: far more than caches hold."""
    copy_bytes: int = 256 << 20
    num_updated: int = 1 << 26
    """Parameters of an update."""
    large: LlamaConfig = LARGE
    """Its step is bound by the device."""
    large_batch: tuple[int, int] = (4, 2048)
    small: LlamaConfig = SMALL
    """Its step is bound by the host."""
    small_batch: tuple[int, int] = (1, 16)
    model_dtype: str = "bfloat16"
    num_steps: int = 15
    least_s: float = 0.15
    """Seconds of each measurement, all repeats together."""
    num_repeats: int = 5


@dataclass(slots=True)
class Timer:
    """Times calls on one device, and keeps what it found."""

    device: torch.device
    sizes: Sizes
    tell: Callable[[str], None] = lambda text: None
    found: list[Measurement] = field(default_factory=list)

    @property
    def is_cuda(self) -> bool:
        """Whether the device works beside the host."""
        return self.device.type == "cuda"

    def wait(self) -> None:
        """Until the device has done all that it was told."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def on_device(self, name: str, work: float, unit: str, call: Callable[[], object]) -> Measurement:
        """Time work of the device, without the host's launches where they are shorter than the work of many calls."""
        self.tell(name)
        call()
        self.wait()
        began_s = time.perf_counter()
        call()
        launched_s = time.perf_counter() - began_s
        self.wait()
        once_s = time.perf_counter() - began_s
        count = max(1, min(_MOST_CALLS, round(self.sizes.least_s / self.sizes.num_repeats / once_s)))
        repeat = self._timed_by_events if self.is_cuda else self._timed_by_clock
        return self.note(name, work, unit, [repeat(call, count, launched_s) for _ in range(self.sizes.num_repeats)])

    def on_host(self, name: str, work: float, unit: str, call: Callable[[], object], *, count: int = 1) -> Measurement:
        """Time work of the host, after one call that does not count."""
        self.tell(name)
        call()
        return self.note(
            name, work, unit, [self._timed_by_clock(call, count, 0.0) for _ in range(self.sizes.num_repeats)]
        )

    def note(self, name: str, work: float, unit: str, times_s: list[float]) -> Measurement:
        """Keep what was timed."""
        self.found.append(Measurement(name=name, work=float(work), unit=unit, times_s=tuple(times_s)))
        return self.found[-1]

    def _timed_by_clock(self, call: Callable[[], object], count: int, launched_s: float) -> float:
        del launched_s
        self.wait()
        began_s = time.perf_counter()
        for _ in range(count):
            call()
        self.wait()
        return (time.perf_counter() - began_s) / count

    def _timed_by_events(self, call: Callable[[], object], count: int, launched_s: float) -> float:
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.wait()
        # The calls are launched while the device is busy, so that it goes from one to the next.
        compat.keep_device_busy(min(_MOST_HIDDEN_S, 1.5 * launched_s * count + 1e-4))
        began.record()
        for _ in range(count):
            call()
        ended.record()
        self.wait()
        return float(began.elapsed_time(ended)) * 1e-3 / count


_NO_LIMIT = 1e18
"""Bytes a second, where they take no time that could be told."""
_OTHERS_BYTES = 4 << 30
"""A context above this is not one process's own."""


def fit_rate(measurements: Sequence[Measurement]) -> KernelRate:
    """The start and the rate with the least relative error, squared, over kernels of all sizes."""
    inverse, start_s = _least_squares([(each.work / each.median_s, 1 / each.median_s) for each in measurements])
    return KernelRate(per_s=1 / inverse, start_s=start_s)


def fit_attention(measurements: Sequence[Measurement], num_bytes: float, product: KernelRate) -> AttentionRate:
    """The same for attention over so many bytes at several lengths, which starts as a product does."""
    left_s = [max(each.median_s - product.start_s, 0.01 * each.median_s) for each in measurements]
    inverse, inverse_bytes = _least_squares(
        [(each.work / seconds, num_bytes / seconds) for each, seconds in zip(measurements, left_s, strict=True)]
    )
    return AttentionRate(share=1 / inverse / product.per_s, bytes_per_s=1 / max(inverse_bytes, 1 / _NO_LIMIT))


def _least_squares(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The `a` above 0 and `b` of at least 0 for which `a * x + b * y` comes nearest to 1 for all points."""
    xx, xy, yy = (sum(p[i] * p[j] for p in points) for i, j in ((0, 0), (0, 1), (1, 1)))
    x, y = (sum(p[i] for p in points) for i in (0, 1))
    determinant = xx * yy - xy * xy
    if determinant > 1e-12 * xx * yy:
        a, b = (yy * x - xy * y) / determinant, (xx * y - xy * x) / determinant
        if a > 0 and b >= 0:
            return a, b
    # Timed so badly, or so much alike, that there is no telling them apart.
    return x / xx, 0.0


def measure_products(timer: Timer, dtype_name: str) -> KernelRate:
    """Squares, and the tall products of a transformer block: forward, gradient of the input, gradient of the weight."""
    sizes, dtype = timer.sizes, getattr(torch, dtype_name)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    found = []
    try:
        for size in sizes.squares:
            square = _random(timer, size, size, dtype=dtype)
            found.append(_product(timer, f"{dtype_name} {size} x {size} x {size}", square, square.t()))
        x = _random(timer, sizes.num_tokens, sizes.hidden_size, dtype=dtype)
        for width in (sizes.hidden_size, sizes.inner_size):
            weight, gradient = (_random(timer, rows, width, dtype=dtype) for rows in (sizes.hidden_size, len(x)))
            shape = f"{len(x)} x {sizes.hidden_size} x {width}"
            found.append(_product(timer, f"{dtype_name} {shape} forward", x, weight))
            found.append(_product(timer, f"{dtype_name} {shape} input gradient", gradient, weight.t()))
            found.append(_product(timer, f"{dtype_name} {shape} weight gradient", x.t(), gradient))
    finally:
        torch.set_float32_matmul_precision(before)
    return fit_rate(found)


def _product(timer: Timer, name: str, left: Tensor, right: Tensor) -> Measurement:
    out = torch.empty(left.shape[0], right.shape[1], dtype=left.dtype, device=left.device)
    flops = 2.0 * left.shape[0] * left.shape[1] * right.shape[1]
    return timer.on_device(f"product {name}", flops, "FLOP", lambda: torch.mm(left, right, out=out))


def measure_attention(timer: Timer, dtype_name: str, product: KernelRate) -> tuple[AttentionRate, AttentionRate]:
    """Causal attention through SDPA, forward and backward."""
    sizes, dtype = timer.sizes, getattr(torch, dtype_name)
    heads = max(1, sizes.hidden_size // sizes.head_size)
    forward, backward = [], []
    for length in sizes.lengths:
        shape = (sizes.num_tokens // length, heads, length, sizes.head_size)
        query, key, value = (_random(timer, *shape, dtype=dtype).requires_grad_() for _ in range(3))
        gradient = _random(timer, *shape, dtype=dtype)
        flops = 2.0 * shape[0] * heads * length * length * sizes.head_size
        name = f"attention {dtype_name} length {length}"

        def attend(query: Tensor = query, key: Tensor = key, value: Tensor = value) -> Tensor:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

        with torch.no_grad():
            forward.append(timer.on_device(name, flops, "FLOP", attend))
        out, inputs = attend(), (query, key, value)

        def backpropagate(out: Tensor = out, inputs: tuple[Tensor, ...] = inputs, gradient: Tensor = gradient) -> None:
            torch.autograd.grad(out, inputs, gradient, retain_graph=True)

        backward.append(timer.on_device(f"{name} backward", BACKWARD_ATTENTION * flops, "FLOP", backpropagate))
    # The backward reads what the forward does, its output and its gradient, and writes three gradients.
    num_bytes = sizes.num_tokens * heads * sizes.head_size * dtype.itemsize
    return fit_attention(forward, 4 * num_bytes, product), fit_attention(backward, 8 * num_bytes, product)


def measure_memory(timer: Timer) -> KernelRate:
    """Pointwise operators, large and tiny: bytes read and written a second, and what each kernel takes besides."""
    num_elements = timer.sizes.memory_bytes // 4
    found = []
    for count, size in ((num_elements, "large"), (1024, "tiny")):
        left, right = (torch.ones(count, device=timer.device) for _ in range(2))
        out = torch.empty_like(left)

        def add(left: Tensor = left, right: Tensor = right, out: Tensor = out) -> None:
            torch.add(left, right, out=out)

        found.append(timer.on_device(f"memory {size} sum", 12.0 * count, "byte", add))
    half = torch.ones(num_elements, dtype=torch.bfloat16, device=timer.device)
    wide = torch.empty(num_elements, device=timer.device)
    timer.on_device("memory cast to fp32", 6.0 * num_elements, "byte", lambda: wide.copy_(half))
    timer.on_device("memory total", 4.0 * num_elements, "byte", wide.sum)
    return fit_rate(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """Bytes a second of copies in each direction, while the other is busy too."""

    to_device: float
    to_host: float


class Copies:
    """Copies both ways between locked host memory and the device, each on a stream of its own."""

    def __init__(self, timer: Timer) -> None:
        num_bytes = timer.sizes.copy_bytes
        self.num_bytes, self._timer = num_bytes, timer
        timer.tell("locking memory for copies")
        host = [torch.ones(num_bytes, dtype=torch.uint8, pin_memory=timer.is_cuda) for _ in range(2)]
        device = [torch.ones(num_bytes, dtype=torch.uint8, device=timer.device) for _ in range(2)]
        self._pairs = {"to device": (device[0], host[0]), "to host": (host[1], device[1])}
        self._streams = {way: torch.cuda.Stream(timer.device) for way in self._pairs} if timer.is_cuda else {}

    def start(self, way: str, count: int) -> None:
        """Give one direction some copies to do; the host does not wait for them where there is a device."""
        out, source = self._pairs[way]
        if not self._streams:
            for _ in range(count):
                out.copy_(source)
            return
        with torch.cuda.stream(self._streams[way]):
            for _ in range(count):
                out.copy_(source, non_blocking=True)

    def are_busy(self) -> bool:
        """Whether both directions still copy."""
        return all(not stream.query() for stream in self._streams.values())

    def wait(self) -> None:
        """Until all copies are done."""
        self._timer.wait()

    def measure(self) -> LinkRates:
        """Each direction alone, for the record, and both at once."""
        timer, rates = self._timer, {}
        for way in self._pairs:
            timer.tell(f"copies {way}")
            other = next(name for name in self._pairs if name != way)
            # The other direction has more to do, so that it is busy to the end.
            for name, counts in (("alone", {way: 8}), ("beside the other", {way: 8, other: 12})):
                times = [self._run(counts, way) / 8 for _ in range(timer.sizes.num_repeats)]
                rates[way] = timer.note(f"copy {way} {name}", self.num_bytes, "byte", times).per_s
        return LinkRates(to_device=rates["to device"], to_host=rates["to host"])

    def _run(self, counts: dict[str, int], timed: str) -> float:
        """Seconds in which the copies of one direction are done."""
        self._timer.wait()
        began_s = time.perf_counter()
        for way in sorted(counts, key=lambda way: way == timed):
            self.start(way, counts[way])
        if self._streams:
            self._streams[timed].synchronize()
        took_s = time.perf_counter() - began_s
        self._timer.wait()
        return took_s


def measure_pinning(timer: Timer) -> float:
    """Bytes a second of host memory that is locked for copies."""
    timer.tell("locking host memory")
    memory = torch.ones(timer.sizes.copy_bytes, dtype=torch.uint8)
    times = []
    for _ in range(timer.sizes.num_repeats):
        began_s = time.perf_counter()
        compat.lock_host_memory(memory)
        times.append(time.perf_counter() - began_s)
        compat.unlock_host_memory(memory.data_ptr())
    return timer.note("locking host memory", memory.nbytes, "byte", times).per_s


def workspace_bytes(device: torch.device) -> int:
    """What the allocator keeps for cuBLAS after a product."""
    left = torch.ones(64, 64, device=device)
    out = torch.empty_like(left)
    compat.free_cublas_workspaces()
    before = torch.cuda.memory_allocated(device)
    torch.mm(left, left, out=out)
    return torch.cuda.memory_allocated(device) - before


def context_bytes(device: torch.device) -> int | None:
    """What the driver says is used less what the allocator has reserved; None where others seem to use the device too."""
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    used = total - free - torch.cuda.memory_reserved(device)
    return used if 0 < used < _OTHERS_BYTES else None


def _random(timer: Timer, *shape: int, dtype: torch.dtype) -> Tensor:
    """What a network has: zeros and small whole numbers take less power, and so are faster."""
    return torch.randn(*shape, device=timer.device, dtype=dtype)
