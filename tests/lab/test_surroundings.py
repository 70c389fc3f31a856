"""Where and with what a run was made."""

from __future__ import annotations

import datetime as dt
import platform

import psutil
import pytest
import torch

from lowtide.errors import HardwareError
from lowtide.lab.surroundings import find_surroundings


def test_the_device_the_machine_and_the_versions() -> None:
    found = find_surroundings("cpu")
    assert found.device == "cpu, emulated"
    assert found.torch == torch.__version__
    assert found.python == platform.python_version()
    assert found.memory_bytes == psutil.virtual_memory().total
    assert " x " in found.processor
    date = dt.datetime.fromisoformat(found.date)
    assert date.tzinfo is not None
    assert abs((dt.datetime.now(dt.UTC) - date).total_seconds()) < 60
    with pytest.raises(HardwareError):
        find_surroundings("cuda:99")


@pytest.mark.gpu
def test_a_card_is_named_with_its_driver() -> None:
    found = find_surroundings("cuda")
    assert found.device == torch.cuda.get_device_name(0)
    assert found.driver is not None
