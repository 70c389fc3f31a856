"""The records in benchmarks/results: their form, and that a table finds each of them where it looks."""

from __future__ import annotations

import json

from benchmarks.records import RESULTS
from lowtide.lab.record import json_text

RECORDS = sorted(RESULTS.rglob("*.json"))


def test_records_have_a_line_for_each_field_and_row() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in RECORDS}
    assert texts
    assert [path.name for path, text in texts.items() if json_text(json.loads(text)) != text] == []
