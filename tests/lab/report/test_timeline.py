from __future__ import annotations

from lowtide.lab.record import MemoryFigures, PredictedFigures
from lowtide.lab.report.rows import make_rows
from lowtide.lab.report.timeline import thinned, timeline_of
from tests.lab.report.samples import record


def test_spans_and_peak() -> None:
    points = (("forward", 4), ("forward", 8), ("backward", 9), ("backward", 3), ("backward", 2), ("update", 5))
    memory = MemoryFigures(peak_bytes=10, by_phase={"backward": 10}, timeline=points)
    predicted = PredictedFigures(peak_bytes=12, peak_phase="backward", at_peak={})
    [row] = make_rows([record(memory=memory, predicted=predicted)])
    timeline = timeline_of(row)
    assert timeline is not None
    assert timeline.points == (4, 8, 9, 3, 2, 5)
    assert [(span.phase, span.start, span.end, span.peak_bytes) for span in timeline.spans] == [
        ("forward", 0.0, 2 / 6, 8),
        ("backward", 2 / 6, 5 / 6, 9),
        ("update", 5 / 6, 1.0, 5),
    ]
    assert (timeline.peak_index, timeline.predicted_bytes, timeline.top_bytes) == (2, 12, 12)


def test_a_step_that_was_not_watched() -> None:
    [row] = make_rows([record()])
    assert timeline_of(row) is None


def test_thinning_keeps_the_peaks() -> None:
    values = [index % 7 for index in range(1000)]
    values[613] = 99
    kept = thinned(values, 50)
    assert len(kept) == 50
    assert max(kept) == 99
    assert kept.index(99) == 613 * 50 // 1000
    assert thinned([3, 1], 50) == (3, 1)
