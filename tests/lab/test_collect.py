"""Records of folders: all that can be read, and the names of those that cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowtide.errors import ConfigError
from lowtide.lab.budget import BudgetPoint, BudgetSweep, write_sweep
from lowtide.lab.collect import collect
from lowtide.lab.record import Outcome, RunRecord, write_record
from lowtide.lab.surroundings import named_surroundings


def write(path: Path, name: str) -> None:
    surroundings = named_surroundings("none")
    write_record(RunRecord(name=name, outcome=Outcome.FAILED, surroundings=surroundings, recipe={"seed": 0}), path)


def test_good_ones_are_read_and_bad_ones_named(tmp_path: Path) -> None:
    write(tmp_path / "records" / "b" / "seed-0.json", "b")
    write(tmp_path / "records" / "a" / "c" / "seed-0.json", "a/c")
    bad = {
        "cut.json": (tmp_path / "records" / "b" / "seed-0.json").read_bytes()[:-20],
        "empty.json": b"",
        "bytes.json": b"\xff\xfe\x00",
        "list.json": b"[1, 2]",
        "other.json": b'{"schema": "lowtide.check/1"}',
        "lacking.json": b'{"schema": "lowtide.lab_run/1", "recipe": {}, "session": null}',
    }
    for name, content in bad.items():
        (tmp_path / "records" / name).write_bytes(content)
    (tmp_path / "records" / "half.part").write_bytes(b"{")
    (tmp_path / "unrelated.json").write_bytes(b"{}")
    said: list[str] = []
    found = collect([tmp_path], said.append)
    assert [record.name for record in found.records] == ["a/c", "b"]
    assert len(found.skipped) == len(bad)
    for name in bad:
        assert any(line.startswith(f"{tmp_path.resolve()}/records/{name}: ") for line in found.skipped)
    assert said[-1] == "record 8 of 8"


def test_places_may_be_files_and_plain_folders_and_count_once(tmp_path: Path) -> None:
    write(tmp_path / "one.json", "one")
    write(tmp_path / "two.json", "two")
    found = collect([tmp_path / "two.json", tmp_path, tmp_path / ".." / tmp_path.name])
    assert [record.name for record in found.records] == ["two", "one"]


def test_nothing_to_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder .*none.*lowtide lab run"):
        collect([tmp_path / "none"])
    with pytest.raises(
        ConfigError, match="there are no records and no sweeps in .*; `lowtide lab run NAME` makes some"
    ):
        collect([tmp_path])
    (tmp_path / "bad.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="no record could be read .*bad.json: cannot be read as JSON"):
        collect([tmp_path])


def test_a_sweep_alone_is_enough(tmp_path: Path) -> None:
    point = BudgetPoint(
        budget=1.0, saved_bytes=1, peak_bytes=2, unfused_peak_bytes=3, recomputed_flops_share=0.0, seconds=0.1
    )
    sweep = BudgetSweep(model="m", batch="2x3", dtype="float32", torch="2.13.0", trace_seconds=0.1, points=(point,))
    file = tmp_path / "lab" / "sweeps" / "m.json"
    write_sweep(sweep, file)
    for place in (tmp_path / "lab", file, file.parent):
        found = collect([place])
        assert (found.records, found.sweeps, found.skipped) == ((), (sweep,), ())
    assert collect([tmp_path / "lab", file]).sweeps == (sweep,), "each file once"
    write_sweep(sweep, tmp_path / "copied.json")
    assert collect([tmp_path / "copied.json"]).sweeps == (sweep,)
    write(tmp_path / "lab" / "records" / "sweeps" / "seed-0.json", "sweeps")
    assert [record.name for record in collect([tmp_path / "lab"]).records] == ["sweeps"]
