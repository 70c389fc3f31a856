"""Where and with what a run is made: the commit of the sources, the device, the machine, the versions and the date."""

from __future__ import annotations

import datetime as dt
import platform

import torch

from lowtide.hardware.machine import find_commit, lowtide_version, this_machine
from lowtide.lab.check import find_device
from lowtide.lab.record import Surroundings


def find_surroundings(device: str | None) -> Surroundings:
    """Those of a run that begins now on a recipe's device. On CUDA its name is asked, which begins to use it.

    Raises:
        ConfigError: It is no device that a run can have.
        HardwareError: It is not here.
    """
    found = find_device(device)
    return named_surroundings(torch.cuda.get_device_name(found) if found.type == "cuda" else "cpu, emulated")


def named_surroundings(device: str) -> Surroundings:
    """Those of a run that begins now on a device of that name; no device is touched."""
    machine = this_machine()
    return Surroundings(
        date=dt.datetime.now(dt.UTC).astimezone().isoformat(timespec="seconds"),
        commit=find_commit(),
        device=device,
        torch=torch.__version__,
        lowtide=lowtide_version(),
        python=platform.python_version(),
        platform=platform.platform(),
        processor=machine.processor,
        memory_bytes=machine.memory_bytes,
        driver=machine.driver,
    )
