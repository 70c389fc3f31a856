"""What a run told before its end, and how it travels."""

from __future__ import annotations

import datetime as dt
import math
import platform

import psutil
import pytest
import torch

from lowtide.errors import HardwareError
from lowtide.lab.progress import Progress, SoFar, describe, find_surroundings
from lowtide.units import GiB


def losses_after(*steps: tuple[int, float | None]) -> tuple[float, ...]:
    so_far = SoFar()
    for step, loss in steps:
        so_far.add(Progress(words="training", step=step, steps=9, loss=loss))
    return so_far.losses


def test_losses_are_those_of_the_first_steps_without_a_gap() -> None:
    assert losses_after((1, 3.0), (2, 2.0), (2, None), (3, 1.0)) == (3.0, 2.0, 1.0)
    assert losses_after((1, 3.0), (1, 3.0)) == (3.0,)
    assert losses_after((1, 3.0), (3, 1.0), (4, 0.5)) == (3.0,)
    assert losses_after((1, 3.0), (2, math.nan), (3, 1.0)) == (3.0,)
    assert losses_after() == ()


def test_evaluations_are_those_before_one_that_is_no_number() -> None:
    so_far = SoFar()
    assert so_far.evaluations == ()
    for step, loss in ((2, 3.0), (4, 2.0), (6, math.inf), (8, 1.0)):
        so_far.add(Progress(words="training", step=step, steps=9, loss=5.0))
        so_far.add(Progress(words="evaluated", step=step, steps=9, evaluation_loss=loss))
    assert so_far.evaluations == ((2, 3.0), (4, 2.0))
    assert so_far.words == "last heard: evaluated, step 8 of 9, evaluation loss 1.0000"


def test_words() -> None:
    so_far = SoFar()
    assert so_far.words == "nothing was heard of it"
    so_far.add(Progress(words="preparing the corpus"))
    assert so_far.words == "last heard: preparing the corpus"
    whole = Progress(words="training", step=3, steps=100, loss=5.1234, peak_bytes=4 * GiB, samples_per_s=6.125)
    assert describe(whole) == "training, step 3 of 100, loss 5.1234, peak 4.000 GiB, 6.125 samples/s"


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
