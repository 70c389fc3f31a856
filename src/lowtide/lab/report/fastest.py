"""Which configuration is the fastest within a budget, for every budget at once."""

from __future__ import annotations

from lowtide.lab.report.byte_unit import unit_for
from lowtide.lab.report.comparison import Comparison
from lowtide.lab.report.tables import speed_text


def fastest_words(comparison: Comparison) -> str:
    """The front as a sentence, from the smallest budget that holds any row to the largest that is worth having.

    By peaks, as the front is: what the allocator reserves and the context take is beside that. "" where there is no front.
    """
    if not comparison.front:
        return ""
    unit = unit_for(comparison.rows)
    steps = []
    for row in comparison.front:
        speed = comparison.speed(row)
        assert speed is not None, "a row on the front has a peak and a speed"
        assert row.peak_bytes is not None, "a row on the front has a peak and a speed"
        steps.append(f"from {unit.text(row.peak_bytes)} {unit.name} {row.label} ({speed_text(speed.mean)} samples/s)")
    missing = ""
    if comparison.speedless:
        labels = ", ".join(row.label for row in comparison.speedless)
        missing = f" Not among them, for want of a {comparison.speed_name}: {labels}."
    doubt = (
        " The times are of an emulated device, so that the order may be another on a card."
        if comparison.is_emulated
        else ""
    )
    return f"Fastest within a budget, by peak: {'; '.join(steps)}.{missing}{doubt}"
