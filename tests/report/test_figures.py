from __future__ import annotations

import re
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.image import imread

import lowtide.report
from lowtide.errors import ConfigError
from lowtide.report.figures import save_png
from lowtide.report.palette import COLOURS, PEAK_COLOUR
from lowtide.tracing.step_trace import Category, Phase
from lowtide.units import MiB
from tests.tracing.samples import TraceBuilder, observed_like, tiny_trace, transformer_trace


def share_of(picture: np.ndarray, colour: str) -> float:
    wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return float((np.abs(picture[..., :3] - wanted).max(axis=-1) < 0.01).mean())


def test_areas_are_in_proportion_to_bytes(tmp_path: Path) -> None:
    path = save_png(tiny_trace(), tmp_path / "new" / "figure.png", dots_per_inch=150)
    picture = imread(path)
    assert picture.shape[1] == round(6.75 * 150)
    weights, optimizer = share_of(picture, COLOURS[Category.WEIGHTS]), share_of(picture, COLOURS[Category.OPTIMIZER])
    assert weights > 0.05
    # 8 MiB of state over 4 MiB of weights for the whole step; the legend's squares and the axis take a little of each.
    assert optimizer / weights == pytest.approx(2.0, rel=0.05)
    assert share_of(picture, PEAK_COLOUR) > 0.0005


def test_the_observation_is_drawn_over_it(tmp_path: Path) -> None:
    trace = transformer_trace(layers=2)
    alone = imread(save_png(trace, tmp_path / "alone.png", dots_per_inch=100))
    both = imread(save_png(trace, tmp_path / "both.png", observed_like(trace), dots_per_inch=100))
    assert share_of(both, "#1b2028") > share_of(alone, "#1b2028") + 0.0005


def test_vector_figures_name_the_peak_as_text(tmp_path: Path) -> None:
    svg = save_png(tiny_trace(), tmp_path / "figure.svg").read_text()
    for text in ("peak 19.0 MiB in loss", "aten._log_softmax", "forward", "backward", "allocated (MiB)", "weights"):
        assert text in svg
    assert save_png(tiny_trace(), tmp_path / "figure.pdf").read_bytes().startswith(b"%PDF")


def test_names_are_not_mathematics(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.enter(Phase.FORWARD)
    builder.op("aten.mm", module="a$b_{$" + "long_name " * 40)
    builder.allocate(MiB, Category.ACTIVATIONS)
    svg = save_png(builder.build(), tmp_path / "figure.svg").read_text()
    assert "a$b_{$long_name" in svg
    assert "…" in svg


def test_a_step_without_events_is_drawn(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.allocate(MiB, Category.WEIGHTS)
    assert "before the step" in save_png(builder.build(), tmp_path / "figure.svg").read_text()


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"cannot draw a figure as 'figure\.bmp'; name it with one of \.png, \.pdf, \.svg"
    ):
        save_png(tiny_trace(), tmp_path / "figure.bmp")


def test_the_callers_style_is_left_alone(tmp_path: Path) -> None:
    before = dict(mpl.rcParams)
    save_png(tiny_trace(), tmp_path / "figure.png", dots_per_inch=50)
    assert dict(mpl.rcParams) == before


def test_matplotlib_is_imported_only_to_draw() -> None:
    package = Path(lowtide.report.__file__).parents[1]
    text_of = {path.relative_to(package).as_posix(): path.read_text() for path in package.rglob("*.py")}
    users = [name for name, text in text_of.items() if re.search(r"^\s*(import|from) matplotlib", text, re.M)]
    assert sorted(users) == ["report/figures.py"]
    # It costs half a second, so that the modules that draw are imported where it is drawn, within a function.
    importers = [
        name for name, text in text_of.items() if re.search(r"^(import|from) lowtide\.report\.figures", text, re.M)
    ]
    assert importers == []
