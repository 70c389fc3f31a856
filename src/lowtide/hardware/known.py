"""The kinds of hardware known by name, and this machine's device, measured where a calibration of it is there.

Their table is `known.csv`. Rates are the dense figures of the vendors' sheets (half of those quoted "with sparsity"); for
GeForce boards those with fp32 accumulation, which is what torch uses. Host links are one direction of the device's own PCIe
slot. Memory is what torch sees under Linux; under Windows the driver hides less of it.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
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
_PCIE_BYTES_PER_S = {
    "3.0 x16": 15.75 * _GIGA,
    "4.0 x8": 15.75 * _GIGA,
    "4.0 x16": 31.5 * _GIGA,
    "5.0 x8": 31.5 * _GIGA,
    "5.0 x16": 63.0 * _GIGA,
}
_BEYOND_THE_TABLE: dict[str, dict[str, Any]] = {
    # The context is that after matrix products, attention and convolutions, forward and backward; 552,402,944 bytes before
    # the first kernel.
    "h200": {
        "memory_bytes": 150_109_880_320,
        "memory_source": Source.MEASURED,
        "context_bytes": 877_461_504,
        "context_source": Source.MEASURED,
        "workspace_source": Source.MEASURED,
        "is_tested": True,
    },
    "mi300x": {
        "is_nvidia": False,
        "cublas_workspace_bytes": ROCM_WORKSPACE_BYTES,
        "cublaslt_workspace_bytes": ROCM_LT_WORKSPACE_BYTES,
    },
}
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


def _read_table() -> Iterator[Hardware]:
    """The devices of `known.csv`, which has a column for each figure of a data sheet."""
    text = files("lowtide.hardware").joinpath("known.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(line for line in text.splitlines() if not line.startswith("#")):
        major, minor = map(int, row["compute_capability"].split("."))
        rates = ("bf16", "fp16", "tf32", "fp32")
        fields: dict[str, Any] = {
            "memory_bytes": round(float(row["memory_gib"]) * GiB),
            "memory_source": Source[row["memory_source"].upper()],
            "compute_capability": (major, minor),
            "num_sms": int(row["multiprocessors"]),
            **{
                f"{kind}_flops": float(row[f"{kind}_tflops"]) * _TERA if row[f"{kind}_tflops"] else None
                for kind in rates
            },
            "memory_bytes_per_s": float(row["memory_gb_per_s"]) * _GIGA,
            "host_link_bytes_per_s": _PCIE_BYTES_PER_S[row["pcie"]],
            "cublas_workspace_bytes": cublas_workspace_bytes((major, minor)),
        }
        yield Hardware(name=row["name"], label=row["label"], **fields | _BEYOND_THE_TABLE.get(row["name"], {}))


_KNOWN = (*_read_table(), _CPU)
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
