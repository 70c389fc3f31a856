"""Calibration: what was measured on a machine, which machine that was, and the file it is kept in.

It counts for the device, driver, processor and torch that it was measured with, and for nothing else. One that is asked for by
name and does not fit is refused with what differs; one that nobody asked for is then as good as not there.
"""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from lowtide import config, plain_text
from lowtide.errors import BadRecordError, ConfigError
from lowtide.hardware.machine import cache_folder, this_machine
from lowtide.hardware.rates import DeviceRates, HostRates
from lowtide.units import format_bytes

SCHEMA_VERSION = 1
AGAIN = "measure it again with `lowtide hardware --again`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a calibration depends on, and counts for."""

    device: str | None
    """As torch names it; None for a machine without a GPU."""
    device_memory_bytes: int
    """0 without a GPU."""
    driver: str | None
    torch: str
    processor: str

    def differences(self, other: Setting) -> tuple[str, ...]:
        """What is different in another, a clause for each."""
        found = []
        for field in fields(Setting):
            there, here = getattr(self, field.name), getattr(other, field.name)
            if there != here:
                name = field.name.removesuffix("_bytes").replace("_", " ")
                words = (format_bytes(value) if field.name.endswith("_bytes") else value for value in (there, here))
                found.append("the {} was {} and is {}".format(name, *words))
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One thing that was timed."""

    name: str
    work: float
    """What one call does, in units."""
    unit: str
    """`FLOP`, `byte`, `operator` and so on."""
    times_s: tuple[float, ...]
    """Seconds of a call, of each repeat."""

    @property
    def median_s(self) -> float:
        """Median seconds of the repeats."""
        return statistics.median(self.times_s)

    @property
    def per_s(self) -> float:
        """Units of work a second."""
        return self.work / self.median_s


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDevice:
    """What was measured of a GPU."""

    rates: DeviceRates
    context_bytes: int | None
    """What the driver says is used, less what the allocator reserves; None where other processes use the device too."""
    cublas_workspace_bytes: int
    """What the allocator keeps after a matrix product, beside the product."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """How fast one machine is, as measured by `lowtide.calibrate`."""

    schema_version: int = SCHEMA_VERSION
    setting: Setting
    measured_at: str
    """ISO date and time, UTC."""
    lowtide: str
    """Version and commit of what measured."""
    took_s: float
    device: MeasuredDevice | None
    """None on a machine without a GPU: then only the host is measured."""
    host: HostRates
    measurements: tuple[Measurement, ...]
    """All that was timed; the rates come from these."""
    notes: tuple[str, ...] = ()
    """What a reader must know: what was not measured, and what stands for it."""


def current_setting(device: torch.device) -> Setting:
    """What a calibration made now would count for. A CUDA device is initialised."""
    machine = this_machine()
    is_cuda = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if is_cuda else None
    return Setting(
        device=None if properties is None else str(properties.name),
        device_memory_bytes=0 if properties is None else int(properties.total_memory),
        driver=machine.driver if is_cuda else None,
        torch=str(torch.__version__),
        processor=machine.processor,
    )


def calibration_path(device: str | None) -> Path:
    """Where the calibration of a kind of device is kept, or that of a machine without one."""
    slug = re.sub(r"[^a-z0-9]+", "-", (device or "host").lower()).strip("-")
    return cache_folder() / "hardware" / f"{slug}.json"


def save_calibration(calibration: Calibration, path: Path) -> None:
    """Write it in one piece, so that a run killed here leaves no half of it.

    Raises:
        OSError: The file cannot be written.
    """
    with plain_text.written_whole(path) as file:
        file.write(plain_text.render(config.to_plain(calibration), "json").encode())


def load_calibration(path: Path, setting: Setting) -> Calibration:
    """The calibration in a file, which must count for a setting.

    Raises:
        ConfigError: There is none, or it was made with something else than the setting has; the message says what.
        BadRecordError: The file is corrupt, or of another version of Lowtide.
    """
    if not path.exists():
        raise ConfigError(
            f"this machine was not measured yet: there is no {path}; run `lowtide hardware`, or name the device",
            key="hardware",
        )
    try:
        plain = plain_text.read(path, "calibration")
        version = plain.get("schema_version") if isinstance(plain, dict) else None
        if version != SCHEMA_VERSION:
            raise BadRecordError(
                f"the calibration {path} has schema version {version!r}, and this Lowtide reads {SCHEMA_VERSION}; {AGAIN}"
            )
        calibration = config.from_plain(Calibration, plain)
    except ConfigError as error:
        raise BadRecordError(f"the calibration is corrupt: {error}; {AGAIN}") from error
    if different := calibration.setting.differences(setting):
        raise ConfigError(
            f"the calibration {path} does not count here: {'; '.join(different)}; {AGAIN}", key="hardware"
        )
    return calibration


def find_calibration(device: torch.device) -> Calibration | None:
    """The calibration of this machine's device where a valid one is kept; else None."""
    setting = current_setting(device)
    try:
        return load_calibration(calibration_path(setting.device), setting)
    except (ConfigError, BadRecordError):
        return None
