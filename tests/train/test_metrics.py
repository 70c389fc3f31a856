"""The rows that a run leaves: whole lines, one for each step, whatever kills the writer."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from lowtide.train.metrics import Curves, MetricsLog


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "run" / "metrics.jsonl"
    log = MetricsLog(path)
    for step in range(1, 6):
        log.add("step", step, loss=1.0 / step)
        if step == 3:
            log.add("evaluation", step, loss=2.0)
    log.sync()
    log.close()
    return path


def test_a_run_that_goes_on_cuts_the_steps_after_it(written: Path) -> None:
    log = MetricsLog(written, step=3)
    log.add("step", 4, loss=9.0)
    log.close()
    assert steps(written) == [1, 2, 3, 3, 4]
    assert json.loads(written.read_text().splitlines()[-1])["loss"] == 9.0


def test_a_run_that_begins_anew_has_no_old_rows(written: Path) -> None:
    MetricsLog(written).close()
    assert written.read_bytes() == b""


@pytest.mark.parametrize("torn", range(1, 60, 7))
def test_a_torn_last_line_goes(written: Path, torn: int) -> None:
    whole = written.read_bytes()
    written.write_bytes(whole[:-torn])
    log = MetricsLog(written, step=5)
    log.add("step", 5, loss=7.0)
    log.close()
    assert steps(written) == [1, 2, 3, 3, 4, 5]


@pytest.mark.parametrize("line", [b"no JSON\n", b"[1]\n", b'{"step": "5"}\n', b"\xff\xfe\n", b"\x00" * 40])
def test_what_is_no_row_ends_them(written: Path, line: bytes) -> None:
    with written.open("ab") as file:
        file.write(line)
    MetricsLog(written, step=9).close()
    assert steps(written) == [1, 2, 3, 3, 4, 5]


def test_numbers_that_json_has_not_are_null(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.add("step", 1, loss=math.nan, lr=math.inf, words="kept")
    log.close()
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (row["loss"], row["lr"], row["words"]) == (None, None, "kept")


def test_curves_after_the_step_are_taken_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for begin, values in ((0, [5.0, 4.0, 3.0, 2.0]), (2, [2.5, 1.5])):
        curves = Curves(tmp_path, step=begin)
        for number, value in enumerate(values, start=begin + 1):
            curves.add(number, {"loss": value, "unknown": 1.0, "grad_norm": None})
        curves.add_evaluation(begin + 1, 9.0)
        curves.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 5.0), (2, 4.0), (3, 2.5), (4, 1.5)]
    assert set(events.Tags()["scalars"]) == {"loss", "evaluation_loss"}
