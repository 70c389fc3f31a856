"""The lab's table in the documentation, over records of several dates, seeds and kinds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.lab_tables import memory
from lowtide.errors import BadRecordError
from lowtide.lab.record import MemoryFigures, Outcome, PredictedFigures, RunRecord, write_record
from lowtide.units import GiB
from tests.lab.report.samples import SURROUNDINGS, record


def write(folder: Path, *records: RunRecord) -> Path:
    for number, each in enumerate(records):
        write_record(each, folder / "lab" / f"{number}.json")
    return folder


def made(date: str, **changes: object) -> RunRecord:
    around = {key: changes.pop(key) for key in ("torch", "commit") if key in changes}
    return replace(record(**changes), surroundings=replace(SURROUNDINGS, date=date, **around))  # type: ignore[arg-type]  # texts


def test_the_newest_counts_whatever_the_zone(tmp_path: Path) -> None:
    later = made("2026-03-01T23:30:00-05:00", peak_bytes=2 * GiB)  # the 2nd at 04:30 elsewhere
    results = write(tmp_path, later, made("2026-03-02T01:00:00+00:00", peak_bytes=3 * GiB))
    assert "| control | - | 2.000 | forward |" in memory(results)


def test_predictions_are_compared_with_the_peak_of_training(tmp_path: Path) -> None:
    figures = MemoryFigures(peak_bytes=4 * GiB, by_phase={"backward": 2 * GiB, "evaluation": 4 * GiB})
    predicted = PredictedFigures(peak_bytes=2 * GiB, peak_phase="backward", at_peak={})
    results = write(tmp_path, record(memory=figures, predicted=predicted))
    assert "| control | - | 4.000 | evaluation | 2.000 | +0.00% |" in memory(results)


def test_all_that_the_rows_were_made_with_is_said(tmp_path: Path) -> None:
    first = made("2026-03-01T10:00:00+00:00", torch="2.11.0", commit="aaa")
    second = made("2026-04-01T10:00:00+00:00", name="peak_memory/fused", torch="2.13.0", commit="bbb")
    provenance = memory(write(tmp_path, first, second)).splitlines()[-1]
    assert provenance.endswith("NVIDIA H200, torch 2.11.0, 2.13.0, commit aaa, bbb, 2026-03-01 to 2026-04-01.")


def test_a_run_that_did_not_finish_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadRecordError, match=r"0\.json: the run of peak_memory/control has no peak \(killed\)"):
        memory(write(tmp_path, record(peak_bytes=None, outcome=Outcome.KILLED)))
