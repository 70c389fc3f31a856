from __future__ import annotations

import subprocess
import sys
from itertools import combinations
from pathlib import Path

import matplotlib as mpl
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from lowtide.errors import ConfigError
from lowtide.lab.record import Outcome
from lowtide.lab.report.charts import panel_of
from lowtide.lab.report.comparison import make_comparisons
from lowtide.report.figures import save_panels
from tests.lab.report.samples import experiment, record


def save(records: list[object], path: Path) -> Path:
    return save_panels([panel_of(each) for each in make_comparisons(records)], path, title="Lab report")


def draw(records: list[object], path: Path) -> str:
    return save(records, path).read_text()


def test_the_whole_experiment(tmp_path: Path) -> None:
    picture = imread(save(experiment(), tmp_path / "new" / "r.png"))
    assert picture.shape[1] == 1600
    assert picture[..., :3].std() > 0.05


def test_a_front_of_one_point_has_no_line_to_explain(tmp_path: Path) -> None:
    alone = [each for each in experiment() if each.name.endswith("/control")]
    assert ">front: no other" in draw(experiment(), tmp_path / "many.svg")
    svg = draw(alone, tmp_path / "one.svg")
    assert ">measured, on the front" in svg
    assert ">front: no other" not in svg


def test_the_names_are_in_the_picture(tmp_path: Path) -> None:
    svg = draw(experiment(), tmp_path / "r.svg")
    for text in (
        "bf16_stochastic",
        "samples/s after 10 steps of warm-up",
        "peak, GiB",
        "published",
        "forward",
        "backward",
    ):
        assert f">{text}" in svg
    assert "21.173 GiB in forward, predicted 21.154" in svg
    assert "control_batch_64 out of memory" in svg


def test_names_do_not_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Figure] = []
    savefig = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **more: (kept.append(self), savefig(self, *args, **more))[1]
    )
    draw(experiment(), tmp_path / "r.svg")
    scatter = kept[0].axes[0]
    names = {config.label for comparison in make_comparisons(experiment()) for config in comparison.rows}
    boxes = [text.get_window_extent() for text in scatter.texts if text.get_text() in names]
    assert len(boxes) == 14
    assert not [pair for pair in combinations(boxes, 2) if pair[0].overlaps(pair[1])]
    assert all(scatter.get_window_extent().padded(2).contains(*box.min) for box in boxes)


def test_names_are_not_mathematics(tmp_path: Path) -> None:
    [*records] = experiment()[:1]
    odd = record("peak_memory/a$b_{$", speed=records[0].speed, memory=records[0].memory)
    assert draw([odd], tmp_path / "r.svg").count("a$b_{$") == 2


@pytest.mark.parametrize("lone", [record(), record(peak_bytes=None, outcome=Outcome.KILLED)])
def test_little_to_draw(tmp_path: Path, lone: object) -> None:
    assert "No finished row has both a peak and a speed." in draw([lone], tmp_path / "r.svg")


def test_two_devices_are_drawn_below_each_other(tmp_path: Path) -> None:
    one = experiment()[0]
    both = [one, record(device="cpu, emulated", speed=one.speed)]
    svg = draw(both, tmp_path / "r.svg")
    assert "peak_memory on NVIDIA H200" in svg
    assert "peak_memory on cpu, emulated" in svg


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot draw a figure as 'r\.bmp'"):
        draw([record()], tmp_path / "r.bmp")


def test_the_callers_style_is_left_alone(tmp_path: Path) -> None:
    before = dict(mpl.rcParams)
    draw([record()], tmp_path / "r.svg")
    assert dict(mpl.rcParams) == before


def test_matplotlib_is_imported_only_to_draw() -> None:
    script = "import sys, lowtide.lab.report; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
