from __future__ import annotations

import pytest

from lowtide.errors import BadRecordError
from lowtide.lab.report.sweep import read_sweep
from lowtide.units import GiB
from tests.lab.report.samples import budget_sweep


def point(budget: float, peak_gib: float, kind: str = "real") -> dict[str, object]:
    peak = int(peak_gib * GiB)
    return {"budget": budget, "saved_bytes": GiB, "peak_bytes": peak, "recomputed_flops_share": 0.5, "kind": kind}


def sweep_of(*points: dict[str, object]) -> dict[str, object]:
    return {"schema": "lowtide.budget_sweep/1", "model": "deep-one", "points": list(points)}


def test_a_smaller_budget_with_a_larger_peak_is_found_and_said() -> None:
    sweep = read_sweep(sweep_of(point(0.6, 15.0), point(0.05, 13.5), point(0.1, 13.25), point(0.3, 13.0)))
    assert [each.budget for each in sweep.points] == [0.05, 0.1, 0.3, 0.6]
    assert [reversal.point.budget for reversal in sweep.reversals] == [0.05, 0.1]
    assert sweep.reversals[0].words == (
        "Budget 0.05 has a larger peak, 13.500 GiB, than budget 0.3 with 13.000 GiB: 512.0 MiB more (real)."
    )


def test_kinds_are_not_compared_with_each_other() -> None:
    sweep = read_sweep(sweep_of(point(0.1, 5.0), point(0.5, 4.0, "static"), point(0.5, 6.0)))
    assert sweep.reversals == ()
    assert {kind: len(points) for kind, points in sweep.curves.items()} == {"real": 2, "static": 1}


def test_equal_peaks_are_monotone() -> None:
    assert read_sweep(sweep_of(point(0.1, 5.0), point(0.5, 5.0))).reversals == ()
    assert read_sweep(budget_sweep(is_monotone=True)).reversals == ()


def test_more_is_said_of_a_point_than_is_drawn() -> None:
    assert len(read_sweep(sweep_of({**point(0.1, 5.0), "note": "later"})).points) == 1


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({}, "the schema of a budget sweep is None, not 'lowtide.budget_sweep/1'"),
        ({"schema": "lowtide.lab_run/1"}, "the schema of a budget sweep is 'lowtide.lab_run/1'"),
        (sweep_of(), "needs 'model', a text, and 'points', a list with at least one"),
        ({**sweep_of(point(0.1, 5.0)), "model": None}, "needs 'model', a text"),
        (sweep_of(point(0.1, 5.0), {"budget": 0.2}), "point 2 of the budget sweep of deep-one: .*saved_bytes"),
        (sweep_of(point(0.1, 5.0, "guessed")), "point 1 of the budget sweep of deep-one: .*kind"),
    ],
)
def test_bad_sweeps(plain: dict[str, object], message: str) -> None:
    with pytest.raises(BadRecordError, match=message):
        read_sweep(plain)
