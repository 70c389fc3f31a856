"""Hardware: one kind of device as data, so that a machine without it can predict and plan for it; and those known by name.

Rates are the dense figures of the vendors' sheets (half of those quoted "with sparsity"); for GeForce boards those with fp32
accumulation, which is what torch uses. Host links are one direction of the device's own PCIe slot.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Any

from lowtide.errors import ConfigError, UnknownNameError
from lowtide.units import GiB, MiB

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


class Source(enum.StrEnum):
    """Where a figure comes from."""

    VENDOR = "vendor's data sheet"
    MEASURED = "measured with torch on such a device"
    REPORTED = "printed by torch on somebody's device of that kind; differs by some 0.1 GiB from driver to driver"
    RULE = "rule in torch's source"
    UNKNOWN = "not known; 0 or None stands for it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One kind of device. Rates are what the vendor promises at best; real kernels reach 60 to 80% of them."""

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
    launch_s: float = 18e-6
    """What the host needs to launch an operator of an ordinary model: its Python, torch's own work, the driver's. Measured on
    the host of the H200, in steps of a small Llama: 36 to 46 ms for 2,179 operators, views among them."""
    context_bytes: int = 0
    """Used outside the allocator by a process that trains: CUDA context and loaded kernels. 0 where unknown."""
    cublas_workspace_bytes: int = 0
    """Kept per handle and stream by the newest supported torch (others: `cublas_workspace_for`); 0 on the host."""
    cublaslt_workspace_bytes: int = 0
    """The same for products with a fused bias (others: `cublaslt_workspace_for`); 0 where both share one."""
    configured_workspace_bytes: int | None = None
    """What `CUBLAS_WORKSPACE_CONFIG` asks for where it is set, see `parse_cublas_workspace_config`; None where it is not."""
    memory_source: Source
    rate_source: Source = Source.VENDOR
    host_link_source: Source = Source.VENDOR
    context_source: Source = Source.UNKNOWN
    workspace_source: Source = Source.RULE
    is_nvidia: bool = True
    """Whether torch's CUDA rules apply to it."""
    is_tested: bool = False
    """Whether predictions for it were compared with the device itself."""

    def __post_init__(self) -> None:
        sizes = ("memory_bytes", "num_sms", "context_bytes", "cublas_workspace_bytes", "cublaslt_workspace_bytes")
        rates = ("bf16_flops", "fp16_flops", "tf32_flops", "fp32_flops", "memory_bytes_per_s", "host_link_bytes_per_s")
        for field in (*sizes, *rates):
            value = getattr(self, field)
            if value is not None and value < 0:
                raise ConfigError(f"{field} of the hardware {self.name!r} cannot be negative, got {value}", key=field)

    @property
    def is_host(self) -> bool:
        """Whether this is the CPU, which has no allocator to replay and no workspaces."""
        return self.compute_capability == (0, 0)

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


_TERA = 1e12
_GIGA = 1e9
_PCIE3_X16 = _PCIE4_X8 = 15.75 * _GIGA
_PCIE4_X16 = 31.5 * _GIGA
_PCIE5_X16 = 63.0 * _GIGA


def _device(
    name: str,
    label: str,
    *,
    gib: float,
    capability: tuple[int, int],
    sms: int,
    tflops: tuple[float | None, float, float | None, float],
    gb_per_s: float,
    link: float,
    **others: Any,
) -> Hardware:
    """Hardware from the columns of its data sheet; `tflops` are bf16, fp16, tf32 and fp32, `others` further fields."""
    bf16, fp16, tf32, fp32 = (None if rate is None else rate * _TERA for rate in tflops)
    fields: dict[str, Any] = dict(
        memory_bytes=round(gib * GiB), compute_capability=capability, num_sms=sms, bf16_flops=bf16, fp16_flops=fp16,
        tf32_flops=tf32, fp32_flops=fp32, memory_bytes_per_s=gb_per_s * _GIGA, host_link_bytes_per_s=link,
        cublas_workspace_bytes=cublas_workspace_bytes(capability), memory_source=Source.REPORTED,
    )  # fmt: skip
    return Hardware(name=name, label=label, **{**fields, **others})


_HOPPER_SXM = (989.4, 989.4, 494.7, 66.9)
_AMPERE_A100 = (312.0, 312.0, 156.0, 19.5)
_CPU = Hardware(
    name="cpu",
    label="this machine's processor and memory",
    memory_bytes=0,
    compute_capability=(0, 0),
    num_sms=0,
    memory_source=Source.UNKNOWN,
    rate_source=Source.UNKNOWN,
    host_link_source=Source.UNKNOWN,
    is_nvidia=False,
    is_tested=True,
)

# fmt: off
_KNOWN = (
    # The context is that after matrix products, attention and convolutions, forward and backward; 552,402,944 bytes before
    # the first kernel.
    _device("h200", "NVIDIA H200 (SXM)", gib=150_109_880_320 / GiB, capability=(9, 0), sms=132, tflops=_HOPPER_SXM,
            gb_per_s=4800, link=55.4 * _GIGA, context_bytes=877_461_504, memory_source=Source.MEASURED,
            host_link_source=Source.MEASURED, context_source=Source.MEASURED, workspace_source=Source.MEASURED,
            is_tested=True),
    _device("h100", "NVIDIA H100 80GB (SXM)", gib=79.18, capability=(9, 0), sms=132, tflops=_HOPPER_SXM,
            gb_per_s=3350, link=_PCIE5_X16),
    _device("h100-pcie", "NVIDIA H100 80GB (PCIe)", gib=79.11, capability=(9, 0), sms=114,
            tflops=(756.0, 756.0, 378.0, 51.2), gb_per_s=2039, link=_PCIE5_X16),
    _device("b200", "NVIDIA B200 (HGX)", gib=178.35, capability=(10, 0), sms=148,
            tflops=(2250.0, 2250.0, 1125.0, 75.0), gb_per_s=8000, link=_PCIE5_X16),
    _device("a100-80gb", "NVIDIA A100 80GB (SXM)", gib=79.15, capability=(8, 0), sms=108, tflops=_AMPERE_A100,
            gb_per_s=2039, link=_PCIE4_X16),
    _device("a100-40gb", "NVIDIA A100 40GB (SXM)", gib=39.39, capability=(8, 0), sms=108, tflops=_AMPERE_A100,
            gb_per_s=1555, link=_PCIE4_X16),
    _device("l4", "NVIDIA L4", gib=22.03, capability=(8, 9), sms=58, tflops=(121.0, 121.0, 60.0, 30.3),
            gb_per_s=300, link=_PCIE4_X16),
    _device("l40s", "NVIDIA L40S", gib=44.40, capability=(8, 9), sms=142, tflops=(362.1, 362.1, 183.2, 91.6),
            gb_per_s=864, link=_PCIE4_X16),
    _device("a10g", "NVIDIA A10G", gib=22.06, capability=(8, 6), sms=80, tflops=(70.0, 70.0, 35.0, 35.0),
            gb_per_s=600, link=_PCIE4_X16),
    _device("t4", "NVIDIA T4", gib=14.74, capability=(7, 5), sms=40, tflops=(None, 65.0, None, 8.1),
            gb_per_s=320, link=_PCIE3_X16),
    _device("v100-32gb", "NVIDIA V100 32GB (SXM2)", gib=31.74, capability=(7, 0), sms=80,
            tflops=(None, 125.0, None, 15.7), gb_per_s=900, link=_PCIE3_X16),
    _device("rtx-3060", "NVIDIA GeForce RTX 3060 12GB", gib=11.76, capability=(8, 6), sms=28,
            tflops=(25.5, 25.5, 12.7, 12.7), gb_per_s=360, link=_PCIE4_X16),
    _device("rtx-3090", "NVIDIA GeForce RTX 3090", gib=23.69, capability=(8, 6), sms=82,
            tflops=(71.0, 71.0, 35.6, 35.6), gb_per_s=936, link=_PCIE4_X16),
    _device("rtx-4060-ti-16gb", "NVIDIA GeForce RTX 4060 Ti 16GB", gib=15.60, capability=(8, 9), sms=34,
            tflops=(44.1, 44.1, 22.1, 22.1), gb_per_s=288, link=_PCIE4_X8),
    _device("rtx-4090", "NVIDIA GeForce RTX 4090", gib=23.64, capability=(8, 9), sms=128,
            tflops=(165.2, 165.2, 82.6, 82.6), gb_per_s=1008, link=_PCIE4_X16),
    _device("rtx-5090", "NVIDIA GeForce RTX 5090", gib=31.36, capability=(12, 0), sms=170,
            tflops=(209.5, 209.5, 104.8, 104.8), gb_per_s=1792, link=_PCIE5_X16),
    _device("mi300x", "AMD Instinct MI300X", gib=191.98, capability=(9, 4), sms=304,
            tflops=(1307.4, 1307.4, 653.7, 163.4), gb_per_s=5300, link=_PCIE5_X16, is_nvidia=False,
            cublas_workspace_bytes=ROCM_WORKSPACE_BYTES, cublaslt_workspace_bytes=ROCM_LT_WORKSPACE_BYTES),
    _CPU,
)
# fmt: on

_BY_NAME = {hardware.name: hardware for hardware in _KNOWN}


def known_hardware() -> tuple[Hardware, ...]:
    """Every device in the table; `cpu`, which stands for the host, comes last."""
    return _KNOWN


def find_hardware(name: str) -> Hardware:
    """The device of that name. Case, spaces and underscores do not matter: `RTX 4090` finds `rtx-4090`.

    Example:
        >>> find_hardware("RTX 4090").num_sms
        128

    Raises:
        UnknownNameError: There is no such device; the message names the nearest.
    """
    typed = "-".join(name.strip().lower().replace("_", " ").replace("-", " ").split())
    if typed not in _BY_NAME:
        raise UnknownNameError("hardware", name, _BY_NAME)
    return _BY_NAME[typed]
