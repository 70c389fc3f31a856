"""Titles of reports over one folder, over none, and over several."""

from __future__ import annotations

import pytest

from lowtide.lab.report.comparison import make_comparisons
from lowtide.lab.report.rows import make_rows
from lowtide.lab.report.titles import report_title
from tests.lab.report.samples import record


@pytest.mark.parametrize(
    ("names", "title"),
    [
        (("peak_memory/a", "peak_memory/b"), "peak_memory"),
        (("mine",), "mine"),
        (("mine", "own", "third"), "mine, own, third"),
        (("mine", "own", "third", "fourth"), "mine, own and 2 other recipes"),
        (("peak_memory/a", "mine", "peak_memory/b"), "peak_memory, mine"),
        (("x/a", "mine", "y/a", "own", "x/b", "z/a"), "x, mine and 3 other groups"),
    ],
)
def test_reports(names: tuple[str, ...], title: str) -> None:
    assert report_title(make_rows([record(name) for name in names])) == f"Lab report: {title}"


def test_recipes_without_a_folder_are_named() -> None:
    records = [record("x/control"), record("mine"), record("own", recipe={"model": "gpt-tiny"}), record("more")]
    titles = [comparison.title for comparison in make_comparisons(records)]
    assert titles == ["x on NVIDIA H200", "mine, more (deep-one) on NVIDIA H200", "own (gpt-tiny) on NVIDIA H200"]
