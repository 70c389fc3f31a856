"""Rates: how fast kernels, copies, updates and the host's Python really are, measured or reckoned from a data sheet.

A kernel takes its start and its work: `start_s + work / per_s`. So a small product reaches less of the peak than a large one.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from lowtide.errors import ConfigError

PRODUCT_EFFICIENCY, MEMORY_EFFICIENCY = 0.73, 0.50
"""Shares of the vendor's rates that matrix products reach, and all that is bound by memory. Fitted to seven steps of Llamas on an
H200 (`tests/tracing/test_step_time.py`), and taken for other devices too. A calibration of one finds 0.76 and 0.44."""
ATTENTION_EFFICIENCY, ATTENTION_BACKWARD_EFFICIENCY = 0.607, 0.576
"""The same of fused attention in FLOP/s, from the calibration of an H200 (`benchmarks/results/hardware`)."""
ATTENTION_MEMORY_EFFICIENCY, ATTENTION_BACKWARD_MEMORY_EFFICIENCY = 1.44, 0.464
"""And in bytes a second, beside that. More than memory gives: a part is read from caches."""
KERNEL_S, PRODUCT_S = 1.5e-6, 3.5e-6
"""What a kernel takes besides its work, and what a product does: to be started, and to end."""
LINK_EFFICIENCY = 0.81
"""Share of what a slot promises, each way while both are busy: 51 GB/s of 63 on the H200's host, and 55 in one direction alone."""
UPDATE_EFFICIENCY = {"exact": 0.5, "fp32": 0.5, "eight_bit": 0.27, "torch_fused": 0.57, "torch": 0.25}
"""Share of the device's memory bandwidth that updates reach.

In the steps of `benchmarks/results/session/optimizer_2026-11-16T0849` exact ones
reach 2.4 TB/s of 4.8 and torch's fused ones 2.75; the others stand to these as in the calibration."""


class UpdateKind(enum.StrEnum):
    """Which code updates the weights, on which formats."""

    EXACT = "bf16 exact"
    FP32 = "fp32"
    EIGHT_BIT = "8bit"
    """Exact bf16 weights with moments of 8 bits."""
    TORCH_FUSED = "torch fused"
    TORCH = "torch"
    """torch's own step where it is not fused."""


def _require_positive(rates: object, *names: str) -> None:
    for name in names:
        if (value := getattr(rates, name)) <= 0:
            raise ConfigError(f"{name} is {value}; a rate is above 0", key=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRate:
    """The time of one kind of kernel: `start_s + work / per_s`."""

    per_s: float
    """FLOP/s or bytes a second of a kernel with much work."""
    start_s: float = KERNEL_S

    def __post_init__(self) -> None:
        _require_positive(self, "per_s")

    def seconds(self, work: float) -> float:
        """How long a kernel with so much work takes."""
        return self.start_s + work / self.per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRate:
    """The time of fused attention beside the start of a product: FLOP and bytes one after the other.

    A short sequence has as many bytes as a long one of as many tokens, and few FLOP.
    """

    share: float
    """FLOP/s over those of products in the same type."""
    bytes_per_s: float
    """Bytes of arguments and outputs a second."""

    def __post_init__(self) -> None:
        _require_positive(self, "share", "bytes_per_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRates:
    """Bytes a second that updates read and write: weights, gradients and state."""

    exact: float
    fp32: float
    eight_bit: float
    torch_fused: float
    torch: float

    def __post_init__(self) -> None:
        _require_positive(self, *(kind.name.lower() for kind in UpdateKind))

    def of(self, kind: UpdateKind) -> float:
        """The rate of one kind."""
        return float(getattr(self, kind.name.lower()))

    def times(self, factor: float) -> UpdateRates:
        """All of them faster by a factor."""
        return UpdateRates(**{kind.name.lower(): self.of(kind) * factor for kind in UpdateKind})


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """How fast a device's kernels and the copies to and from it are."""

    fp32: KernelRate
    """Matrix products in float32, and in types that have no rate of their own."""
    bf16: KernelRate | None
    fp16: KernelRate | None
    attention: AttentionRate
    attention_backward: AttentionRate
    memory: KernelRate
    """All operators that are bound by memory, by the bytes of their arguments and outputs."""
    to_device_bytes_per_s: float
    """From locked host memory while copies run the other way too."""
    to_host_bytes_per_s: float
    updates: UpdateRates

    def __post_init__(self) -> None:
        _require_positive(self, "to_device_bytes_per_s", "to_host_bytes_per_s")

    def product(self, dtype: str) -> KernelRate:
        """Matrix products in a dtype (`torch.bfloat16`)."""
        own = {"bfloat16": self.bf16, "float16": self.fp16}.get(dtype.removeprefix("torch."))
        return self.fp32 if own is None else own

    def seconds(self, *, num_bytes: float, flops: float = 0.0, dtype: str = "float32", operator: str = "") -> float:
        """The longer of arithmetic and memory traffic, for attention both; 0 for an operator that has neither."""
        if not num_bytes and not flops:
            return 0.0
        seconds = self.memory.seconds(num_bytes)
        if not flops:
            return seconds
        product = self.product(dtype)
        if "attention" in operator:
            attention = self.attention_backward if operator.endswith("backward") else self.attention
            return product.seconds(flops / attention.share) + num_bytes / attention.bytes_per_s
        return max(seconds, product.seconds(flops))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRates:
    """How fast a device's host launches, manages a session and updates. The defaults are those of the H200's host."""

    launch_s: float = 18e-6
    """What the host needs to launch an operator of an ordinary model: its Python, torch's own work, the driver's. Measured on
    the host of the H200, in steps of a small Llama: 36 to 46 ms for 2,179 operators, views among them."""
    window_s: float = 1.0e-3
    """What it needs besides to open and close a window. The launch-bound Llama of `benchmarks/results/session/launch_versus`
    has 16 windows in a step and takes 16 ms longer."""
    watched_s: float = 44e-6
    """What it needs besides for an operator that a selective policy looks at. 24 small layers take 223 ms longer under a
    selective policy, for 210 operators each (`benchmarks/results/launches`)."""
    finished_s: float = 0.24e-3
    """What it needs for one parameter whose gradient it sends to the host, or has updated on the device in backward. The same
    layers of nine parameters take 48 ms longer where their gradients go to the host, 57 where the device updates them."""
    slowdown_beside_updates: float = 1.2
    """How many times longer launches take while a worker updates. The same layers, while the kernel works on other memory:
    1.13 to 1.37."""
    updates: UpdateRates = UpdateRates(exact=127e9, fp32=113e9, eight_bit=87e9, torch_fused=96e9, torch=21e9)
    """4.9 billion parameters a second in the exact update, which moves 26 bytes for each. The others stand to it as in the
    calibration of another such host (`benchmarks/results/hardware`), which was a fifth faster."""
    updates_beside_copies: UpdateRates = UpdateRates(
        exact=86e9, fp32=83e9, eight_bit=74e9, torch_fused=72e9, torch=17e9
    )
    """The same while copies take their part of the host's memory bandwidth: 3.3 billion in the exact update."""
    memory_bytes_per_s: float | None = None
    """What a copy by all cores reads and writes; None where it was not measured."""
    pin_bytes_per_s: float | None = None
    """How fast memory that is in use is locked for copies; None where it was not measured."""

    def __post_init__(self) -> None:
        _require_positive(self, "launch_s")

    def launching(self, launch_s: float) -> HostRates:
        """A host that launches at another rate, and whose other Python is faster or slower with it."""
        factor = launch_s / self.launch_s
        slower = {name: getattr(self, name) * factor for name in ("window_s", "watched_s", "finished_s")}
        return replace(self, launch_s=launch_s, **slower)


def reckon_rates(
    *,
    fp32_flops: float,
    bf16_flops: float | None,
    fp16_flops: float | None,
    memory_bytes_per_s: float,
    host_link_bytes_per_s: float,
) -> DeviceRates:
    """The rates of a device from its data sheet: times what the H200 reaches of its own."""

    def product(flops: float) -> KernelRate:
        return KernelRate(per_s=flops * PRODUCT_EFFICIENCY, start_s=PRODUCT_S)

    def attention(efficiency: float, memory_efficiency: float) -> AttentionRate:
        return AttentionRate(share=efficiency / PRODUCT_EFFICIENCY, bytes_per_s=memory_bytes_per_s * memory_efficiency)

    return DeviceRates(
        fp32=product(fp32_flops),
        bf16=None if bf16_flops is None else product(bf16_flops),
        fp16=None if fp16_flops is None else product(fp16_flops),
        attention=attention(ATTENTION_EFFICIENCY, ATTENTION_MEMORY_EFFICIENCY),
        attention_backward=attention(ATTENTION_BACKWARD_EFFICIENCY, ATTENTION_BACKWARD_MEMORY_EFFICIENCY),
        memory=KernelRate(per_s=memory_bytes_per_s * MEMORY_EFFICIENCY),
        to_device_bytes_per_s=host_link_bytes_per_s * LINK_EFFICIENCY,
        to_host_bytes_per_s=host_link_bytes_per_s * LINK_EFFICIENCY,
        updates=UpdateRates(**{name: share * memory_bytes_per_s for name, share in UPDATE_EFFICIENCY.items()}),
    )
