"""Tables of records whose answer is known, and records that no table can be made of."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.accuracy.tables import accuracy, accuracy_summary, fresh, fresh_summary
from benchmarks.lab.tables import peak_memory
from benchmarks.optim.tables import readme
from benchmarks.session.suites import SUITES
from benchmarks.session.tables import streaming
from lowtide.errors import BadRecordError
from lowtide.units import GiB


def write_accuracy(folder: Path, date: str, cases: list[dict[str, Any]], changes: dict[str, Any] | None = None) -> None:
    record = {"schema": "lowtide.accuracy/1", "commit": "0123456789abcdef", "hardware": "H200", "torch": "2.13.0"}
    (folder / "accuracy").mkdir(parents=True, exist_ok=True)
    file = folder / "accuracy" / f"{date}_h200.json"
    file.write_text(json.dumps(record | {"date": date, "cases": cases} | (changes or {})), encoding="utf-8")


def case(name: str, *, allocated: tuple[float, float], reserved: tuple[float, float]) -> dict[str, Any]:
    """A case from (measured, predicted) GiB."""
    return {
        "name": name,
        "family": "gpt",
        "precision": "bf16",
        "technique": "none",
        "optimizer": "adamw",
        "measured_allocated_bytes": round(allocated[0] * GiB),
        "predicted_allocated_bytes": round(allocated[1] * GiB),
        "measured_reserved_bytes": round(reserved[0] * GiB),
        "predicted_reserved_bytes": round(reserved[1] * GiB),
        "predicted_peak_phase": "backward",
        "measured_peak_phase": "backward",
    }


def test_accuracy_table(tmp_path: Path) -> None:
    write_accuracy(tmp_path, "2026-01-01", [case("old", allocated=(1, 1), reserved=(1, 1))])
    differs = case("b", allocated=(4, 3.9), reserved=(8, 8)) | {"measured_peak_phase": "update"}
    write_accuracy(tmp_path, "2026-01-02", [case("a", allocated=(2, 2.02), reserved=(4, 4.2)), differs])
    lines = accuracy(tmp_path).split("\n")
    assert lines[2] == "| a | gpt | bf16 | none | adamw | backward | 2.000 | 2.020 | +1.00% | 4.000 | 4.200 | +5.00% |"
    phase = "backward (measured: update)"
    assert lines[3] == f"| b | gpt | bf16 | none | adamw | {phase} | 4.000 | 3.900 | -2.50% | 8.000 | 8.000 | +0.00% |"
    provenance = "<sub>Records. H200, torch 2.13.0: `accuracy/2026-01-02_h200`.</sub>"
    assert lines[4] == ""
    assert lines[5] == provenance
    assert len(lines) == 6


def test_accuracy_summary_is_arithmetic(tmp_path: Path) -> None:
    # Errors of 0, 1, ..., 20 percent: the median is 10, the 95th percentile 19, the worst 20.
    cases = [case(f"c{i}", allocated=(100, 100 + i), reserved=(100, 100 - i)) for i in range(21)]
    write_accuracy(tmp_path, "2026-01-01", cases)
    lines = accuracy_summary(tmp_path).split("\n")
    assert lines[2] == "| peak allocated | c20 | 21 | 10.00% | 19.00% | 20.00% |"
    assert lines[3] == "| peak reserved | c20 | 21 | 10.00% | 19.00% | 20.00% |"


def test_failed_cases_are_shown_and_not_counted(tmp_path: Path) -> None:
    failed = case("oom", allocated=(1, 1), reserved=(1, 1)) | {"measured_allocated_bytes": None}
    write_accuracy(tmp_path, "2026-01-01", [failed, case("ok", allocated=(1, 1), reserved=(1, 1))])
    assert "| oom | gpt | bf16 | none | adamw | backward | - | - | failed | 1.000 |" in accuracy(tmp_path)
    summary = accuracy_summary(tmp_path)
    assert "| peak allocated | ok | 1 |" in summary
    assert " ".join(summary.split()).endswith("1 of 2 cases did not run to their end and are not counted.</sub>")


def write_fresh(results: Path, kind: str, schema: str, rows: list[dict[str, object]]) -> None:
    head = {"schema": schema, "commit": kind, "hardware": "H200", "torch": "2.11", "date": "2026-01-01"}
    (results / "fresh").mkdir(exist_ok=True)
    (results / "fresh" / f"{kind}_a.json").write_text(json.dumps({**head, "rows": rows}), encoding="utf-8")


def records_named(lines: list[str]) -> int:
    """How many records the footnote below a table names."""
    return len(re.findall(r"`\w+/\w+`", " ".join(lines[lines.index("") :])))


def test_fresh_table_sets_both_predictions_beside_the_measurement(tmp_path: Path) -> None:
    truth = [{"name": "a", "allocated_life": GiB, "reserved_life": 2 * GiB}, {"name": "oom", "failed": "out of memory"}]
    write_fresh(tmp_path, "fresh_measured", "lowtide.fresh/1", truth)  # type: ignore[arg-type]
    for kind, share in (("fresh_predicted", 1.10), ("fresh_repredicted", 0.99)):
        row = {"name": "a", "allocated": round(share * GiB), "reserved": round(2 * share * GiB)}
        write_fresh(tmp_path, kind, "lowtide.fresh_predicted/1", [row])
    lines = fresh(tmp_path).split("\n")
    assert lines[2] == "| a | 1.000 | +10.00% | -1.00% | 2.000 | +10.00% | -1.00% |"
    assert lines[4] == "| **95th percentile** |  | 10.00% | 1.00% |  | 10.00% | 1.00% |"
    assert records_named(lines) == 3

    write_fresh(tmp_path, "fresh_repredicted", "lowtide.fresh_predicted/1", [{"name": "a", "failed": "no kernel"}])
    with pytest.raises(BadRecordError, match="'a' needs a number in allocated"):
        fresh(tmp_path)


def test_fresh_summary_tells_the_lists_and_attention_models_apart(tmp_path: Path) -> None:
    for name, family, blind in (("fresh", "GPT-2", 1.01), ("fresh2", "LSTM", 0.80)):
        truth = {"name": "a", "family": family, "allocated_life": GiB, "reserved_life": 2 * GiB}
        write_fresh(tmp_path, f"{name}_measured", "lowtide.fresh/1", [truth])
        for kind, share in (("predicted", blind), ("repredicted", 1.0)):
            row: dict[str, object] = {
                "name": "a",
                "allocated": round(share * GiB),
                "reserved": round(2 * share * GiB),
            }
            write_fresh(tmp_path, f"{name}_{kind}", "lowtide.fresh_predicted/1", [row])
    lines = fresh_summary(tmp_path).split("\n")
    assert [line.split(" | ")[-1] for line in lines[2:10]] == [
        *("1.00% |", "0.00% |"),
        *("20.00% |", "0.00% |"),
        *("20.00% |", "0.00% |"),
        *("1.00% |", "0.00% |"),
    ]
    assert lines[6].startswith("| both lists | blind | 2 |")
    assert lines[8].startswith("| attention models of both | blind | 1 |")
    assert records_named(lines) == 6


def test_peak_memory_table(tmp_path: Path) -> None:
    rows = [{"name": "control", "published_gib": 21.165, "predicted_bytes": round(21.2 * GiB), "peak_phase": "loss"}]
    record = {"schema": "lowtide.peak_memory/1", "commit": "abc", "hardware": {"name": "none"}, "torch": "2.8"}
    (tmp_path / "peak_memory").mkdir()
    file = tmp_path / "peak_memory" / "x.json"
    file.write_text(json.dumps(record | {"date": "2026-01-01", "rows": rows}), encoding="utf-8")
    text = peak_memory(tmp_path)
    assert "| control | loss | 21.165 | 21.200 | +0.17% |" in text
    assert "<sub>Records. none, torch 2.8: `peak_memory/x`.</sub>" in text
    rows[0]["published_gib"] = "much"
    file.write_text(json.dumps(record | {"date": "2026-01-01", "rows": rows}), encoding="utf-8")
    with pytest.raises(BadRecordError, match="'control' needs numbers in published_gib and predicted_bytes"):
        peak_memory(tmp_path)


def optimizer_row(name: str, *, step_s: float, gib: float, host_gib: float, **more: object) -> dict[str, object]:
    figures = {"median_s": step_s, "max_allocated_bytes": GiB, "max_reserved_bytes": round(gib * GiB)}
    return {"name": name, "host_rss_bytes": round(host_gib * GiB), **figures, **more}


def test_own_rows_and_peers_are_each_beside_the_plain_row_of_their_own_run(tmp_path: Path) -> None:
    plain, own = "plain torch, forward and backward", "streamed, on the host in backward, exact"
    peer = "torchao CPUOffloadOptimizer, all bf16"
    head = {"hardware": "H200", "torch": "2.11", "date": "2026-01-01"}
    runs = {
        "session/optimizer_2026": [
            optimizer_row(plain, step_s=1.0, gib=2, host_gib=1, parameters=GiB),
            optimizer_row(own, step_s=1.5, gib=3, host_gib=13, parameters=GiB),
        ],
        "optim/peers_2026": [
            optimizer_row(plain, step_s=2.0, gib=2, host_gib=2, peer="none"),
            optimizer_row(peer, step_s=5.0, gib=4, host_gib=12, peer="torchao"),
        ],
    }
    for (name, rows), schema in zip(runs.items(), ("session", "optimizer"), strict=True):
        record = {"schema": f"lowtide.{schema}_benchmark/1", **head, "commit": schema, "rows": rows}
        file = tmp_path / f"{name}.json"
        file.parent.mkdir()
        file.write_text(json.dumps(record), encoding="utf-8")
    header, _, first, second, blank, *said = readme(tmp_path).split("\n")
    assert header.startswith("| AdamW on one H200 | ms a step |")
    assert first == "| **Lowtide**, in backward, fp32 masters | 1500 | 1.50 | 3.0 | 12.0 |"
    assert second == "| torchao, `CPUOffloadOptimizer`, all bf16 | 5000 | 2.50 | 4.0 | 10.0 |"
    runs_named = "2 runs at 2 commits, each with its own baseline: `optimizer_2026`: Lowtide; `peers_2026`: torchao."
    assert (blank, " ".join(said)) == ("", f"<sub>{runs_named}</sub>")


def write_streaming(folder: Path, date: str, names: Iterable[str], *, plain_s: float, other_s: float) -> None:
    """A run of some of the suite's rows: plain steps took so long, the others so."""
    rows = [
        row | {"median_s": plain_s if row["kind"] == "plain" else other_s, "max_reserved_bytes": GiB, "parameters": 1}
        for row in SUITES["streaming"]
        if row["name"] in names
    ]
    record = {"schema": "lowtide.session_benchmark/1", "commit": "abc", "hardware": "none", "torch": "2.8"}
    (folder / "session").mkdir(exist_ok=True)
    file = folder / "session" / f"streaming_{date}.json"
    file.write_text(json.dumps(record | {"date": date, "rows": rows}), encoding="utf-8")


def test_rows_of_several_runs_are_each_compared_with_the_plain_steps_of_their_own(tmp_path: Path) -> None:
    names = [str(row["name"]) for row in SUITES["streaming"]]
    resident, last = "managed, all resident, SGD", names[-2]
    write_streaming(tmp_path, "2026-01-01", [name for name in names if name != last], plain_s=1.0, other_s=1.1)
    with pytest.raises(BadRecordError, match=rf"session: no record has the rows {last}; run the suite again"):
        streaming(tmp_path)
    write_streaming(tmp_path, "2026-01-02", names, plain_s=1.0, other_s=1.1)
    write_streaming(tmp_path, "2026-01-03", ["plain torch, SGD", resident], plain_s=2.0, other_s=2.1)
    text = streaming(tmp_path)
    assert f"| {resident} | 2100 | +5.00% |" in text
    assert f"| {last} | 1100 | +10.00% |" in text
    write_streaming(tmp_path, "2026-01-04", [resident], plain_s=2.0, other_s=2.1)
    with pytest.raises(BadRecordError, match=r"2026-01-04\.json: no plain row to compare with; run the suite again"):
        streaming(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": "lowtide.accuracy/9"}, "has the schema 'lowtide.accuracy/9', this renderer reads"),
        ({"cases": []}, "'cases' must be a list of mappings with at least one"),
        ({"cases": [{"name": "a"}]}, "'a' has no 'family'"),
    ],
)
def test_bad_record_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_accuracy(tmp_path, "2026-01-01", [case("a", allocated=(1, 1), reserved=(1, 1))], changes)
    with pytest.raises(BadRecordError, match=rf"2026-01-01_h200\.json.*{message}"):
        accuracy(tmp_path)


def test_missing_and_broken_records(tmp_path: Path) -> None:
    with pytest.raises(BadRecordError, match="there are no records in .*accuracy; run the benchmark"):
        accuracy(tmp_path)
    with pytest.raises(BadRecordError, match="there are no records named streaming_.* in .*session; run the benchmark"):
        streaming(tmp_path)
    write_accuracy(tmp_path, "2026-01-01", [])
    (tmp_path / "accuracy" / "cut.json").write_text("{", encoding="utf-8")
    with pytest.raises(BadRecordError, match=r"cut\.json is not JSON"):
        accuracy(tmp_path)
