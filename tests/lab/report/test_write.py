from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lowtide.errors import ConfigError
from lowtide.lab.record import read_record, write_record
from lowtide.lab.report.write import write_report
from lowtide.units import GiB
from tests.lab.report.samples import SURROUNDINGS, budget_sweep, experiment, record

NOWHERE = {"html": None, "markdown": None, "png": None}


def test_all_forms_are_written(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    write_report(
        experiment(), html=folder / "r.html", markdown=folder / "r.md", png=folder / "r.png", sweeps=[budget_sweep()]
    )
    assert (folder / "r.html").read_text().startswith("<!doctype html>")
    assert (folder / "r.md").read_text().startswith("# Lab report: peak_memory\n")
    assert (folder / "r.png").read_bytes().startswith(b"\x89PNG")


def test_records_that_went_through_files_say_the_same(tmp_path: Path) -> None:
    again = []
    for number, each in enumerate(experiment()):
        write_record(each, tmp_path / f"{number}.json")
        again.append(read_record(tmp_path / f"{number}.json"))
    for name, records in (("direct", experiment()), ("read", again)):
        write_report(records, html=tmp_path / f"{name}.html", markdown=tmp_path / f"{name}.md", png=None)
    assert (tmp_path / "direct.md").read_text() == (tmp_path / "read.md").read_text()
    assert (tmp_path / "direct.html").read_text() == (tmp_path / "read.html").read_text()


def test_the_title_names_the_experiments(tmp_path: Path) -> None:
    write_report([record("x/a"), record("y/b"), record("x/c")], **{**NOWHERE, "markdown": tmp_path / "r.md"})
    assert (tmp_path / "r.md").read_text().startswith("# Lab report: x, y\n")
    write_report([record("alone")], **{**NOWHERE, "markdown": tmp_path / "r.md"})
    assert (tmp_path / "r.md").read_text().startswith("# Lab report: alone\n")


def test_older_runs_are_left_out_and_counted_or_shown(tmp_path: Path) -> None:
    old = replace(
        record("x/a", peak_bytes=7 * GiB),
        surroundings=replace(SURROUNDINGS, date="2025-12-24T18:00:00+00:00", commit="0ldc0de"),
    )
    records = [old, record("x/a", peak_bytes=GiB), record("x/b", peak_bytes=2 * GiB)]
    paths = {"html": tmp_path / "r.html", "markdown": tmp_path / "r.md", "png": None}
    write_report(records, **paths)
    for path in (tmp_path / "r.html", tmp_path / "r.md"):
        text = path.read_text()
        assert "2; one older one of the same configuration and seed left out" in text
        # Not even where the figures come from: none of them comes from there.
        assert not any(word in text for word in ("7.000", "0ldc0de", "2025-12-24"))
    write_report(records, **paths, with_older=True)
    for path in (tmp_path / "r.html", tmp_path / "r.md"):
        text = path.read_text()
        assert "left out" not in text
        assert all(word in text for word in ("7.000", "0ldc0de", "older 1, 2025-12-24 18:00"))


def test_no_records() -> None:
    with pytest.raises(ConfigError, match=r"^a report needs at least one record of a run, or a sweep, got none$"):
        write_report([], **{**NOWHERE, "html": Path("never.html")})
    with pytest.raises(ConfigError, match=r"got none; 1 files were skipped: a\.json: no JSON$"):
        write_report([], **{**NOWHERE, "html": Path("never.html")}, skipped=["a.json: no JSON"])
    assert not Path("never.html").exists()


def test_a_sweep_alone_is_a_report(tmp_path: Path) -> None:
    paths = {"html": tmp_path / "r.html", "markdown": tmp_path / "r.md"}
    assert write_report([], **paths, png=None, sweeps=[budget_sweep()], skipped=["a.json: no JSON"]).comparisons == ()
    text = (tmp_path / "r.md").read_text()
    assert text.startswith("# Lab report: memory budget of deep-one\n\n## Memory budget sweep\n")
    assert "- records: none, sweeps are read off the graph that torch would compile\n" in text
    assert "a.json: no JSON" in text
    assert "Memory budget sweep</h2>" in (tmp_path / "r.html").read_text()
    with pytest.raises(ConfigError, match="a picture shows runs, and there is no record of one; leave png out"):
        write_report([], html=tmp_path / "other.html", markdown=None, png=tmp_path / "r.png", sweeps=[budget_sweep()])
    assert {path.name for path in tmp_path.iterdir()} == {"r.html", "r.md"}


def test_nowhere_to_write() -> None:
    with pytest.raises(ConfigError, match="there is nothing to write: give a path for html, markdown or png"):
        write_report([record()], **NOWHERE)


def test_a_picture_of_no_kind_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot draw a figure as 'r\.docx'; name it with one of "):
        write_report([record()], html=tmp_path / "r.html", markdown=None, png=tmp_path / "r.docx")
    assert list(tmp_path.iterdir()) == []


def test_hosts_and_drivers_are_said_where_records_have_them(tmp_path: Path) -> None:
    around = replace(SURROUNDINGS, processor="16 x A Processor", memory_bytes=128 * GiB, driver="570.86.10")
    records = [replace(record("x/a"), surroundings=around), record("x/b")]
    paths = {"html": tmp_path / "r.html", "markdown": tmp_path / "r.md", "png": None}
    write_report(records, **paths)
    for path in (tmp_path / "r.html", tmp_path / "r.md"):
        for words in ("16 x A Processor", "128.0 GiB", "570.86.10"):
            assert words in path.read_text()
        assert "unknown" not in path.read_text()
    write_report(records[1:], **paths)
    assert "processor" not in (tmp_path / "r.md").read_text()
