from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from lowtide.report.palette import COLOURS, DARK_COLOURS, STACK_ORDER
from lowtide.tracing.step_trace import Category

# Machado, Oliveira and Fernandes (2009), severity 1: what each kind of vision makes of linear RGB.
VISION = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}


def lab(colour: str, vision: np.ndarray) -> np.ndarray:
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(vision @ linear, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    ratio = to_xyz @ seen / np.array([0.95047, 1.0, 1.08883])
    f = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def test_every_category_has_a_place_and_colours() -> None:
    assert set(STACK_ORDER) == set(Category) == set(COLOURS) == set(DARK_COLOURS)
    assert len(STACK_ORDER) == len(Category)


@pytest.mark.parametrize("colours", [COLOURS, DARK_COLOURS], ids=["light", "dark"])
@pytest.mark.parametrize("vision", VISION)
def test_colours_can_be_told_apart(colours: dict[Category, str], vision: str) -> None:
    # A difference of 2 is just visible side by side; 12 is plain at a glance.
    for first, second in combinations(STACK_ORDER, 2):
        distance = np.linalg.norm(lab(colours[first], VISION[vision]) - lab(colours[second], VISION[vision]))
        assert distance > 12, (first, second, distance)
