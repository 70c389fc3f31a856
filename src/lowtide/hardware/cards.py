"""The devices Lowtide knows by name.

Rates are the dense figures of the vendors' sheets (half of those quoted "with sparsity"); for GeForce cards those with
fp32 accumulation, which is what torch uses. Host links are one direction of the card's own PCIe slot.
"""

from __future__ import annotations

from lowtide.errors import UnknownNameError
from lowtide.hardware.profile import (
    ROCM_LT_WORKSPACE_BYTES,
    ROCM_WORKSPACE_BYTES,
    Hardware,
    Source,
    cublas_workspace_bytes,
)
from lowtide.units import GiB

_TERA = 1e12
_GIGA = 1e9
_PCIE3_X16 = _PCIE4_X8 = 15.75 * _GIGA
_PCIE4_X16 = 31.5 * _GIGA
_PCIE5_X16 = 63.0 * _GIGA


def _nvidia(
    name: str,
    label: str,
    *,
    gib: float,
    capability: tuple[int, int],
    sms: int,
    tflops: tuple[float | None, float, float | None, float],
    gb_per_s: float,
    link: float,
) -> Hardware:
    """A card from the columns of its sheet; `tflops` are bf16, fp16, tf32 and fp32."""
    bf16, fp16, tf32, fp32 = (None if rate is None else rate * _TERA for rate in tflops)
    return Hardware(
        name=name,
        label=label,
        memory_bytes=round(gib * GiB),
        compute_capability=capability,
        num_sms=sms,
        bf16_flops=bf16,
        fp16_flops=fp16,
        tf32_flops=tf32,
        fp32_flops=fp32,
        memory_bytes_per_s=gb_per_s * _GIGA,
        host_link_bytes_per_s=link,
        context_bytes=0,
        cublas_workspace_bytes=cublas_workspace_bytes(capability),
        memory_source=Source.REPORTED,
    )


_HOPPER_SXM = (989.4, 989.4, 494.7, 66.9)
_AMPERE_A100 = (312.0, 312.0, 156.0, 19.5)

_H200 = Hardware(
    name="h200",
    label="NVIDIA H200 (SXM)",
    memory_bytes=150_109_880_320,
    compute_capability=(9, 0),
    num_sms=132,
    bf16_flops=_HOPPER_SXM[0] * _TERA,
    fp16_flops=_HOPPER_SXM[1] * _TERA,
    tf32_flops=_HOPPER_SXM[2] * _TERA,
    fp32_flops=_HOPPER_SXM[3] * _TERA,
    memory_bytes_per_s=4800 * _GIGA,
    host_link_bytes_per_s=55.4 * _GIGA,
    # After matrix products, attention and convolutions, forward and backward; 552,402,944 before the first kernel.
    context_bytes=877_461_504,
    cublas_workspace_bytes=cublas_workspace_bytes((9, 0)),
    memory_source=Source.MEASURED,
    host_link_source=Source.MEASURED,
    context_source=Source.MEASURED,
    workspace_source=Source.MEASURED,
    is_tested=True,
)

_MI300X = Hardware(
    name="mi300x",
    label="AMD Instinct MI300X",
    memory_bytes=round(191.98 * GiB),
    compute_capability=(9, 4),
    num_sms=304,
    bf16_flops=1307.4 * _TERA,
    fp16_flops=1307.4 * _TERA,
    tf32_flops=653.7 * _TERA,
    fp32_flops=163.4 * _TERA,
    memory_bytes_per_s=5300 * _GIGA,
    host_link_bytes_per_s=_PCIE5_X16,
    context_bytes=0,
    cublas_workspace_bytes=ROCM_WORKSPACE_BYTES,
    cublaslt_workspace_bytes=ROCM_LT_WORKSPACE_BYTES,
    memory_source=Source.REPORTED,
    is_nvidia=False,
)

_CPU = Hardware(
    name="cpu",
    label="this machine's processor and memory",
    memory_bytes=0,
    compute_capability=(0, 0),
    num_sms=0,
    bf16_flops=None,
    fp16_flops=None,
    tf32_flops=None,
    fp32_flops=None,
    memory_bytes_per_s=None,
    host_link_bytes_per_s=None,
    context_bytes=0,
    cublas_workspace_bytes=0,
    memory_source=Source.UNKNOWN,
    rate_source=Source.UNKNOWN,
    host_link_source=Source.UNKNOWN,
    is_nvidia=False,
    is_tested=True,
)

# fmt: off
_CARDS = (
    _H200,
    _nvidia("h100", "NVIDIA H100 80GB (SXM)", gib=79.18, capability=(9, 0), sms=132, tflops=_HOPPER_SXM,
            gb_per_s=3350, link=_PCIE5_X16),
    _nvidia("h100-pcie", "NVIDIA H100 80GB (PCIe)", gib=79.11, capability=(9, 0), sms=114,
            tflops=(756.0, 756.0, 378.0, 51.2), gb_per_s=2039, link=_PCIE5_X16),
    _nvidia("b200", "NVIDIA B200 (HGX)", gib=178.35, capability=(10, 0), sms=148,
            tflops=(2250.0, 2250.0, 1125.0, 75.0), gb_per_s=8000, link=_PCIE5_X16),
    _nvidia("a100-80gb", "NVIDIA A100 80GB (SXM)", gib=79.15, capability=(8, 0), sms=108, tflops=_AMPERE_A100,
            gb_per_s=2039, link=_PCIE4_X16),
    _nvidia("a100-40gb", "NVIDIA A100 40GB (SXM)", gib=39.39, capability=(8, 0), sms=108, tflops=_AMPERE_A100,
            gb_per_s=1555, link=_PCIE4_X16),
    _nvidia("l4", "NVIDIA L4", gib=22.03, capability=(8, 9), sms=58, tflops=(121.0, 121.0, 60.0, 30.3),
            gb_per_s=300, link=_PCIE4_X16),
    _nvidia("l40s", "NVIDIA L40S", gib=44.40, capability=(8, 9), sms=142, tflops=(362.1, 362.1, 183.2, 91.6),
            gb_per_s=864, link=_PCIE4_X16),
    _nvidia("a10g", "NVIDIA A10G", gib=22.06, capability=(8, 6), sms=80, tflops=(70.0, 70.0, 35.0, 35.0),
            gb_per_s=600, link=_PCIE4_X16),
    _nvidia("t4", "NVIDIA T4", gib=14.74, capability=(7, 5), sms=40, tflops=(None, 65.0, None, 8.1),
            gb_per_s=320, link=_PCIE3_X16),
    _nvidia("v100-32gb", "NVIDIA V100 32GB (SXM2)", gib=31.74, capability=(7, 0), sms=80,
            tflops=(None, 125.0, None, 15.7), gb_per_s=900, link=_PCIE3_X16),
    _nvidia("rtx-3060", "NVIDIA GeForce RTX 3060 12GB", gib=11.76, capability=(8, 6), sms=28,
            tflops=(25.5, 25.5, 12.7, 12.7), gb_per_s=360, link=_PCIE4_X16),
    _nvidia("rtx-3090", "NVIDIA GeForce RTX 3090", gib=23.69, capability=(8, 6), sms=82,
            tflops=(71.0, 71.0, 35.6, 35.6), gb_per_s=936, link=_PCIE4_X16),
    _nvidia("rtx-4060-ti-16gb", "NVIDIA GeForce RTX 4060 Ti 16GB", gib=15.60, capability=(8, 9), sms=34,
            tflops=(44.1, 44.1, 22.1, 22.1), gb_per_s=288, link=_PCIE4_X8),
    _nvidia("rtx-4090", "NVIDIA GeForce RTX 4090", gib=23.64, capability=(8, 9), sms=128,
            tflops=(165.2, 165.2, 82.6, 82.6), gb_per_s=1008, link=_PCIE4_X16),
    _nvidia("rtx-5090", "NVIDIA GeForce RTX 5090", gib=31.36, capability=(12, 0), sms=170,
            tflops=(209.5, 209.5, 104.8, 104.8), gb_per_s=1792, link=_PCIE5_X16),
    _MI300X,
    _CPU,
)
# fmt: on

_BY_NAME = {card.name: card for card in _CARDS}


def known_hardware() -> tuple[Hardware, ...]:
    """Every device in the table; `cpu`, which stands for the host, comes last."""
    return _CARDS


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
        raise UnknownNameError("card", name, _BY_NAME)
    return _BY_NAME[typed]
