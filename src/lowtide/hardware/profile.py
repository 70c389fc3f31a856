"""Hardware: one kind of device as data, so that a machine without it can predict and plan for it."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field

from lowtide.errors import ConfigError
from lowtide.hardware.rates import DeviceRates, HostRates, reckon_rates
from lowtide.units import MiB

WORKSPACE_BYTES = 2 * 4 * MiB + 8 * 16 * 1024
"""cuBLAS workspace that torch keeps per handle and stream: `:4096:2:16:8`, two of 4 MiB and eight of 16 KiB."""
LARGE_WORKSPACE_BYTES = 32 * MiB
"""The same on Hopper, and from torch 2.12 on also on Blackwell."""
LT_WORKSPACE_BYTES = 1 * MiB
"""What torch before 2.12 keeps beside it for cuBLASLt; from then on the two share one."""
ROCM_WORKSPACE_BYTES = 128 * MiB
"""The same for hipBLAS on the MI300 family."""
ROCM_LT_WORKSPACE_BYTES = 76 * MiB
"""What hipBLASLt keeps beside that."""
ASSUMED_CONTEXT_BYTES = 840 * MiB
"""Context that is counted where a device's own is not known: that of a training process on an H200, 837 MiB, rounded up."""


class Source(enum.StrEnum):
    """Where a figure comes from."""

    VENDOR = "vendor's data sheet"
    MEASURED = "measured with torch on such a device"
    CALIBRATED = "measured on this machine"
    REPORTED = "printed by torch, or as CUDA's total, on somebody's device of that kind; drivers differ by some 0.1 GiB"
    ESTIMATED = "median of what is reported for GeForce boards that are sold with as much"
    RULE = "rule in torch's source"
    ASSUMED = "assumed to be what was measured on an H200"
    GIVEN = "given by the user"
    UNKNOWN = "not known; 0 or None stands for it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One kind of device. Its rates are what the vendor promises at best; `rates` has what kernels reach of them."""

    name: str
    """Short name to type: `h200`, `rtx-4090`."""
    label: str
    """Full name, as the vendor writes it."""
    memory_bytes: int
    """All memory that torch sees (`total_memory`), before the CUDA context takes its part. 0 where unknown."""
    compute_capability: tuple[int, int]
    """As `torch.cuda.get_device_capability()` gives it; (0, 0) for the host."""
    num_sms: int
    """Multiprocessors (compute units on AMD)."""
    bf16_flops: float | None = None
    """Dense matrix products in bfloat16 with fp32 accumulation, FLOP/s; None where the device has none."""
    fp16_flops: float | None = None
    """The same in float16."""
    tf32_flops: float | None = None
    """The same in float32 operands rounded to TF32, which torch uses only when allowed to."""
    fp32_flops: float | None = None
    """Everything else in float32, matrix products without TF32 included."""
    memory_bytes_per_s: float | None = None
    """Between the chip and its own memory."""
    host_link_bytes_per_s: float | None = None
    """Between the device and pinned host memory, one direction."""
    host: HostRates = field(default_factory=HostRates)
    """Rates of the computer that the device is in: those of the H200's where it was not measured."""
    measured: DeviceRates | None = None
    """What the device itself reached in a calibration; None where it is reckoned from the data sheet."""
    context_bytes: int = 0
    """Used outside the allocator by a process that trains: CUDA context and loaded kernels. `ASSUMED_CONTEXT_BYTES` for a
    device whose context is left out, 0 for the host."""
    cublas_workspace_bytes: int = 0
    """Kept per handle and stream by the newest supported torch (others: `cublas_workspace_for`); 0 on the host."""
    cublaslt_workspace_bytes: int = 0
    """The same for products with a fused bias (others: `cublaslt_workspace_for`); 0 where both share one."""
    configured_workspace_bytes: int | None = None
    """What `CUBLAS_WORKSPACE_CONFIG` asks for where it is set, see `parse_cublas_workspace_config`; None where it is not."""
    memory_source: Source
    rate_source: Source = Source.VENDOR
    host_link_source: Source = Source.VENDOR
    host_source: Source = Source.ASSUMED
    context_source: Source = Source.UNKNOWN
    workspace_source: Source = Source.RULE
    is_nvidia: bool = True
    """Whether torch's CUDA rules apply to it."""
    is_tested: bool = False
    """Whether predictions for it were compared with the device itself."""
    note: str | None = None
    """What a prediction for it must tell its reader."""

    def __post_init__(self) -> None:
        sizes = ("memory_bytes", "num_sms", "context_bytes", "cublas_workspace_bytes", "cublaslt_workspace_bytes")
        rates = ("bf16_flops", "fp16_flops", "tf32_flops", "fp32_flops", "memory_bytes_per_s", "host_link_bytes_per_s")
        for name in (*sizes, *rates):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{name} of the hardware {self.name!r} cannot be negative, got {value}", key=name)
        if self.context_bytes == 0 and self.context_source is Source.UNKNOWN and not self.is_host:
            # Every CUDA process has one, so that 0 would be the worst guess. Frozen, so set past the guard.
            object.__setattr__(self, "context_bytes", ASSUMED_CONTEXT_BYTES)
            object.__setattr__(self, "context_source", Source.ASSUMED)

    @property
    def is_host(self) -> bool:
        """Whether this is the CPU, which has no allocator to replay and no workspaces."""
        return self.compute_capability == (0, 0)

    @property
    def launch_s(self) -> float:
        """What the host needs to launch an operator."""
        return self.host.launch_s

    @property
    def rates(self) -> DeviceRates | None:
        """How fast its kernels and copies are: measured, or the data sheet times what an H200 reaches of its own."""
        if self.measured is not None:
            return self.measured
        fp32_flops, memory, link = self.fp32_flops, self.memory_bytes_per_s, self.host_link_bytes_per_s
        if fp32_flops is None or memory is None or link is None:
            return None
        return reckon_rates(
            fp32_flops=fp32_flops,
            bf16_flops=self.bf16_flops,
            fp16_flops=self.fp16_flops,
            memory_bytes_per_s=memory,
            host_link_bytes_per_s=link,
        )

    @property
    def rates_from(self) -> str:
        """Where a predicted time comes from, for its reader."""
        if Source.CALIBRATED in (self.rate_source, self.host_source):
            return str(Source.CALIBRATED)
        return "not known" if self.rates is None else "data sheet, times what an H200 and its host reach of theirs"

    def flops(self, dtype: str, *, allow_tf32: bool = False) -> float | None:
        """FLOP/s of dense matrix products in a dtype (`bfloat16`); those of fp32 where it has none of its own.

        Example:
            >>> from lowtide.hardware import find_hardware
            >>> find_hardware("a100-80gb").flops("bfloat16")
            312000000000000.0
        """
        own = {
            "bfloat16": self.bf16_flops,
            "float16": self.fp16_flops,
            "float32": self.tf32_flops if allow_tf32 else None,
        }.get(dtype.removeprefix("torch."))
        return own if own is not None else self.fp32_flops

    def cublas_workspace_for(self, torch_version: str) -> int:
        """Bytes of one cuBLAS workspace under that torch.

        Each thread that multiplies keeps one for each of its streams, from its first product on: one for the forward
        and one for autograd's thread in an ordinary training step.

        Example:
            >>> from lowtide.hardware import find_hardware
            >>> [find_hardware("b200").cublas_workspace_for(version) for version in ("2.11.0", "2.13.0")]
            [8519680, 33554432]
        """
        if self.configured_workspace_bytes is not None:
            return self.configured_workspace_bytes
        if not self.is_nvidia:
            return self.cublas_workspace_bytes
        return cublas_workspace_bytes(self.compute_capability, torch_version)

    def cublaslt_workspace_for(self, torch_version: str) -> int:
        """Bytes that a thread keeps beside it from its first product with a fused bias (`addmm`) on; 0 if none."""
        if not self.is_nvidia:
            return self.cublaslt_workspace_bytes
        return LT_WORKSPACE_BYTES if release_of(torch_version) < (2, 12) else 0


def cublas_workspace_bytes(compute_capability: tuple[int, int], torch_version: str = "2.13") -> int:
    """The workspace torch gives cuBLAS by default on an NVIDIA GPU, when `CUBLAS_WORKSPACE_CONFIG` is not set.

    Example:
        >>> cublas_workspace_bytes((9, 0)), cublas_workspace_bytes((8, 9))
        (33554432, 8519680)
    """
    major = compute_capability[0]
    is_large = compute_capability == (9, 0) if release_of(torch_version) < (2, 12) else major in (9, 10, 12)
    return LARGE_WORKSPACE_BYTES if is_large else WORKSPACE_BYTES


def parse_cublas_workspace_config(config: str) -> int:
    """Bytes that a `CUBLAS_WORKSPACE_CONFIG` text stands for: pairs of `:SIZE_IN_KIB:COUNT`.

    Example:
        >>> parse_cublas_workspace_config(":4096:2:16:8")
        8519680

    Raises:
        ConfigError: There is no such pair in the text.
    """
    pairs = re.findall(r":([0-9]+):([0-9]+)", config)
    if not pairs:
        raise ConfigError(f"{config!r} is not a cuBLAS workspace configuration; write :KIB:COUNT, such as :4096:8")
    return sum(int(kib) * 1024 * int(count) for kib, count in pairs)


def release_of(text: str) -> tuple[int, int]:
    """The first two numbers of a version of torch."""
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        raise ConfigError(f"{text!r} is not a torch version; write it as 2.13.0")
    return int(match[1]), int(match[2])
