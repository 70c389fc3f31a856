"""The cards Lowtide knows by name.

Rates are dense figures of the vendors' sheets (half of those quoted "with sparsity"); for GeForce cards those with fp32
accumulation, which is what torch uses. Links are PCIe rates of the card's own slot, one direction.
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
_PCIE3_X16 = 15.75 * _GIGA
_PCIE4_X8 = 15.75 * _GIGA
_PCIE4_X16 = 31.5 * _GIGA
_PCIE5_X16 = 63.0 * _GIGA
_NO_UNIT = None


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
