"""The kinds of hardware known by name, and this machine's device, measured where a calibration of it is there.

Rates are the dense figures of the vendors' sheets (half of those quoted "with sparsity"); for GeForce boards those with fp32
accumulation, which is what torch uses. Host links are one direction of the device's own PCIe slot. Memory is what torch sees
under Linux; under Windows the driver hides less of it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch

from lowtide.errors import ConfigError, UnknownNameError
from lowtide.hardware.calibration import (
    Calibration,
    calibration_path,
    current_setting,
    find_calibration,
    load_calibration,
)
from lowtide.hardware.profile import (
    ROCM_LT_WORKSPACE_BYTES,
    ROCM_WORKSPACE_BYTES,
    Hardware,
    Source,
    cublas_workspace_bytes,
)
from lowtide.units import GiB, parse_bytes

THIS = "this"
"""Names the machine's own device, as it was measured."""
_TERA = 1e12
_GIGA = 1e9
_PCIE3_X16 = _PCIE4_X8 = 15.75 * _GIGA
_PCIE4_X16 = _PCIE5_X8 = 31.5 * _GIGA
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


def _geforce(name: str, sold_as: str, *, fp32: float, **columns: Any) -> Hardware:
    """A GeForce board of the 30, 40 or 50 series: its tensor cores reach twice the rate of fp32, and in TF32 the same rate."""
    return _device(name, f"NVIDIA GeForce {sold_as}", tflops=(2 * fp32, 2 * fp32, fp32, fp32), **columns)


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
            gb_per_s=4800, link=_PCIE5_X16, context_bytes=877_461_504, memory_source=Source.MEASURED,
            context_source=Source.MEASURED, workspace_source=Source.MEASURED,
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
    _device("v100-16gb", "NVIDIA V100 16GB (SXM2)", gib=15.78, capability=(7, 0), sms=80,
            tflops=(None, 125.0, None, 15.7), gb_per_s=900, link=_PCIE3_X16),
    _device("v100-32gb", "NVIDIA V100 32GB (SXM2)", gib=31.74, capability=(7, 0), sms=80,
            tflops=(None, 125.0, None, 15.7), gb_per_s=900, link=_PCIE3_X16),
    # The A40 checks memory for errors unless told not to, which takes 6% of it; the other two only when told to.
    _device("a40", "NVIDIA A40", gib=44.30, capability=(8, 6), sms=84, tflops=(149.7, 149.7, 74.8, 37.4),
            gb_per_s=696, link=_PCIE4_X16),
    _device("rtx-a6000", "NVIDIA RTX A6000", gib=47.53, capability=(8, 6), sms=84, tflops=(154.8, 154.8, 77.4, 38.7),
            gb_per_s=768, link=_PCIE4_X16),
    _device("rtx-6000-ada", "NVIDIA RTX 6000 Ada Generation", gib=47.38, capability=(8, 9), sms=142,
            tflops=(364.2, 364.2, 182.1, 91.1), gb_per_s=960, link=_PCIE4_X16),
    _geforce("rtx-3050", "RTX 3050 8GB", gib=7.65, capability=(8, 6), sms=20, fp32=9.1,
             gb_per_s=224, link=_PCIE4_X8, memory_source=Source.ESTIMATED),
    _device("rtx-3060", "NVIDIA GeForce RTX 3060 12GB", gib=11.76, capability=(8, 6), sms=28,
            tflops=(25.5, 25.5, 12.7, 12.7), gb_per_s=360, link=_PCIE4_X16),
    _geforce("rtx-3060-ti", "RTX 3060 Ti", gib=7.65, capability=(8, 6), sms=38, fp32=16.2,
             gb_per_s=448, link=_PCIE4_X16),
    _geforce("rtx-3070", "RTX 3070", gib=7.78, capability=(8, 6), sms=46, fp32=20.3,
             gb_per_s=448, link=_PCIE4_X16),
    _geforce("rtx-3070-ti", "RTX 3070 Ti", gib=7.66, capability=(8, 6), sms=48, fp32=21.7,
             gb_per_s=608, link=_PCIE4_X16),
    _geforce("rtx-3080-10gb", "RTX 3080 10GB", gib=9.78, capability=(8, 6), sms=68, fp32=29.8,
             gb_per_s=760, link=_PCIE4_X16),
    _geforce("rtx-3080-12gb", "RTX 3080 12GB", gib=11.72, capability=(8, 6), sms=70, fp32=30.6,
             gb_per_s=912, link=_PCIE4_X16, memory_source=Source.ESTIMATED),
    _geforce("rtx-3080-ti", "RTX 3080 Ti", gib=11.77, capability=(8, 6), sms=80, fp32=34.1,
             gb_per_s=912, link=_PCIE4_X16),
    _device("rtx-3090", "NVIDIA GeForce RTX 3090", gib=23.69, capability=(8, 6), sms=82,
            tflops=(71.0, 71.0, 35.6, 35.6), gb_per_s=936, link=_PCIE4_X16),
    _geforce("rtx-3090-ti", "RTX 3090 Ti", gib=23.58, capability=(8, 6), sms=84, fp32=40.0,
             gb_per_s=1008, link=_PCIE4_X16),
    _geforce("rtx-4060", "RTX 4060", gib=7.62, capability=(8, 9), sms=24, fp32=15.1,
             gb_per_s=272, link=_PCIE4_X8),
    _geforce("rtx-4060-ti-8gb", "RTX 4060 Ti 8GB", gib=7.62, capability=(8, 9), sms=34, fp32=22.1,
             gb_per_s=288, link=_PCIE4_X8),
    _device("rtx-4060-ti-16gb", "NVIDIA GeForce RTX 4060 Ti 16GB", gib=15.60, capability=(8, 9), sms=34,
            tflops=(44.1, 44.1, 22.1, 22.1), gb_per_s=288, link=_PCIE4_X8),
    _geforce("rtx-4070", "RTX 4070", gib=11.72, capability=(8, 9), sms=46, fp32=29.1,
             gb_per_s=504, link=_PCIE4_X16),
    _geforce("rtx-4070-super", "RTX 4070 SUPER", gib=11.72, capability=(8, 9), sms=56, fp32=35.5,
             gb_per_s=504, link=_PCIE4_X16, memory_source=Source.ESTIMATED),
    _geforce("rtx-4070-ti", "RTX 4070 Ti", gib=11.70, capability=(8, 9), sms=60, fp32=40.1,
             gb_per_s=504, link=_PCIE4_X16),
    _geforce("rtx-4070-ti-super", "RTX 4070 Ti SUPER", gib=15.69, capability=(8, 9), sms=66, fp32=44.1,
             gb_per_s=672, link=_PCIE4_X16),
    _geforce("rtx-4080", "RTX 4080", gib=15.57, capability=(8, 9), sms=76, fp32=48.7,
             gb_per_s=716.8, link=_PCIE4_X16),
    _geforce("rtx-4080-super", "RTX 4080 SUPER", gib=15.57, capability=(8, 9), sms=80, fp32=52.2,
             gb_per_s=736, link=_PCIE4_X16),
    _device("rtx-4090", "NVIDIA GeForce RTX 4090", gib=23.64, capability=(8, 9), sms=128,
            tflops=(165.2, 165.2, 82.6, 82.6), gb_per_s=1008, link=_PCIE4_X16),
    _geforce("rtx-5060", "RTX 5060", gib=7.65, capability=(12, 0), sms=30, fp32=19.2,
             gb_per_s=448, link=_PCIE5_X8, memory_source=Source.ESTIMATED),
    _geforce("rtx-5060-ti-16gb", "RTX 5060 Ti 16GB", gib=15.48, capability=(12, 0), sms=36, fp32=23.7,
             gb_per_s=448, link=_PCIE5_X8),
    _geforce("rtx-5070", "RTX 5070", gib=11.48, capability=(12, 0), sms=48, fp32=30.9,
             gb_per_s=672, link=_PCIE5_X16),
    _geforce("rtx-5070-ti", "RTX 5070 Ti", gib=15.46, capability=(12, 0), sms=70, fp32=43.9,
             gb_per_s=896, link=_PCIE5_X16),
    _geforce("rtx-5080", "RTX 5080", gib=15.47, capability=(12, 0), sms=84, fp32=56.3,
             gb_per_s=960, link=_PCIE5_X16),
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
    """The device of that name, or one of that capacity.

    Case, spaces and underscores do not matter: `RTX 4090` finds `rtx-4090`. A bare capacity such as `24GiB` stands for any
    NVIDIA GPU of compute capability 8.9 whose `total_memory` that is; its rates are not known, so neither are step times.
    `this` is the machine's own device, or the host where it has none, with the rates that `lowtide hardware` measured.

    Example:
        >>> find_hardware("RTX 4090").num_sms
        128
        >>> find_hardware("24GiB").memory_bytes == 24 * 2**30
        True

    Raises:
        UnknownNameError: There is no such device; the message names the nearest.
        ConfigError: It begins as a number does, but is no positive size with a unit. Or it is `this`, and the machine was
            measured with another device, driver, processor or torch, or not at all.
        BadRecordError: It is `this`, and the calibration is corrupt or of another version of Lowtide.
    """
    typed = "-".join(name.strip().lower().replace("_", " ").replace("-", " ").split())
    if typed in _BY_NAME:
        return _BY_NAME[typed]
    if typed == THIS:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        setting = current_setting(device)
        return calibrated(kind_of(device), load_calibration(calibration_path(setting.device), setting))
    if re.match(r"\s*[-+.]?\s*[0-9]", name):
        return _of_capacity(name)
    # A board that is sold with several memories: `rtx-3080` means `rtx-3080-12gb` rather than `rtx-4080`.
    kinds = [known for known in _BY_NAME if known.startswith(f"{typed}-")]
    raise UnknownNameError("hardware", name, kinds or _BY_NAME)


def hardware_of(device: torch.device) -> Hardware:
    """This machine's device: as it was measured where a valid calibration is kept, else as its data sheet has it."""
    calibration = find_calibration(device)
    kind = kind_of(device)
    return kind if calibration is None else calibrated(kind, calibration)


def calibrated(hardware: Hardware, calibration: Calibration) -> Hardware:
    """A kind of hardware with the rates, the context and the workspace that were measured of it."""
    note = f"rates are those that this machine reached when it was measured: {calibration.measured_at}"
    hardware = replace(hardware, host=calibration.host, host_source=Source.CALIBRATED, note=note)
    found = calibration.device
    if found is None:
        return hardware
    if found.context_bytes is not None:
        hardware = replace(hardware, context_bytes=found.context_bytes, context_source=Source.CALIBRATED)
    return replace(
        hardware,
        measured=found.rates,
        rate_source=Source.CALIBRATED,
        host_link_source=Source.CALIBRATED,
        configured_workspace_bytes=found.cublas_workspace_bytes,
        workspace_source=Source.CALIBRATED,
    )


def kind_of(device: torch.device) -> Hardware:
    """The known hardware of a device's name and size, or what torch tells about it."""
    if device.type != "cuda":
        return _CPU
    properties = torch.cuda.get_device_properties(device)
    same = [
        known
        for known in _KNOWN
        if known.label.split(" (")[0].startswith(properties.name)
        or properties.name.startswith(known.label.split(" (")[0])
    ]
    if same:
        nearest = min(same, key=lambda known: abs(known.memory_bytes - properties.total_memory))
        return replace(nearest, memory_bytes=properties.total_memory)
    return replace(
        find_hardware(f"{properties.total_memory >> 20}MiB"),
        label=properties.name,
        memory_bytes=properties.total_memory,
        compute_capability=(properties.major, properties.minor),
        num_sms=properties.multi_processor_count,
    )


def _of_capacity(text: str) -> Hardware:
    try:
        num_bytes = parse_bytes(text) if text.rstrip()[-1:].isalpha() else 0  # a bare number would be bytes
    except ConfigError:
        num_bytes = 0
    if num_bytes == 0:
        raise ConfigError(
            f"{text!r} is neither the name of a device nor a capacity; write a name such as rtx-4090, or a positive size with "
            "its unit such as 24GiB",
            key="hardware",
        )
    name = "".join(text.split())
    return Hardware(
        name=name,
        label=f"any NVIDIA GPU of compute capability 8.9 with {name}",
        memory_bytes=num_bytes,
        compute_capability=(8, 9),
        num_sms=_BY_NAME["rtx-4090"].num_sms,
        cublas_workspace_bytes=cublas_workspace_bytes((8, 9)),
        memory_source=Source.GIVEN,
        rate_source=Source.UNKNOWN,
        host_link_source=Source.UNKNOWN,
        note=f"{name} names a capacity and no device: kernels and workspaces are taken to be those of an NVIDIA GPU of compute "
        "capability 8.9 with 128 multiprocessors, as the RTX 4090 has, and step times are not known",
    )
