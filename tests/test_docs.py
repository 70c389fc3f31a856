"""The documentation cannot rot: its examples run, its tables and its chart are what the records say, its links lead somewhere.

Its form is tested too: the width of its text, how a page opens, the size of the README.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import chart, render
from benchmarks.optim.tables import readme
from benchmarks.records import WIDTH
from benchmarks.session.suites import SUITES
from benchmarks.session.tables import streaming
from lowtide.errors import BadRecordError, UnknownNameError
from lowtide.units import GiB

REPO = Path(__file__).resolve().parent.parent
README = REPO / "README.md"
DOCUMENTS = render.documents(REPO)
PAGES = [*DOCUMENTS, REPO / "CONTRIBUTING.md"]


def named(path: Path) -> str:
    """A page as its test is called."""
    return str(path.relative_to(REPO))


by_document = pytest.mark.parametrize("path", DOCUMENTS, ids=named)
by_page = pytest.mark.parametrize("path", PAGES, ids=named)


def blocks(text: str, language: str) -> Iterator[tuple[int, str, str]]:
    """(line, source, the text before it) of each fenced block in a language."""
    lines = text.split("\n")
    start: int | None = None
    fence, before = "", ""
    for number, line in enumerate(lines):
        opening = re.match(r"(`{3,}|~{3,})\s*(\w*)", line)
        if not fence and opening:
            fence, start = opening[1], number + 1 if opening[2] == language else None
            before = next((text for text in reversed(lines[:number]) if text.strip()), "").strip()
        elif fence and line.strip() == fence:
            if start is not None:
                yield start + 1, "\n".join(lines[start:number]), before
            fence = ""


def python_blocks(text: str) -> Iterator[tuple[int, str]]:
    """(line, source) of each ```python block that no `<!-- not run: reason -->` stands right before."""
    for line, source, before in blocks(text, "python"):
        if not re.fullmatch(r"<!-- not run: .*\S.* -->", before):
            yield line, source


def as_script(text: str) -> str:
    """One script of the blocks, in order; lines keep their numbers, so that a traceback points into the document."""
    script: list[str] = []
    for line, source in python_blocks(text):
        script += [""] * (line - 1 - len(script)) + source.split("\n")
    return "\n".join(script)


def commands(text: str) -> str:
    """One script of the ```bash blocks that `<!-- run -->` stands right before."""
    return "\n".join(source for _, source, before in blocks(text, "bash") if before == "<!-- run -->")


def having(script_of: Callable[[str], str]) -> list[Path]:
    return [path for path in DOCUMENTS if script_of(path.read_text(encoding="utf-8")).strip()]


@pytest.mark.parametrize("path", having(as_script), ids=named)
def test_examples_run(path: Path, tmp_path: Path) -> None:
    script = as_script(path.read_text(encoding="utf-8"))
    file = tmp_path / f"{path.stem}.py"
    file.write_text(script, encoding="utf-8")
    # A process of its own, in an empty folder: what a reader who copies the blocks into a file gets.
    done = subprocess.run(
        [sys.executable, file], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"{path.name}: {done.stderr[-3000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("path", having(commands), ids=named)
def test_commands_run(path: Path, tmp_path: Path) -> None:
    script = commands(path.read_text(encoding="utf-8"))
    around = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euc", script], cwd=tmp_path, env=around, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"{path.name}: {done.stdout[-1500:]}{done.stderr[-1500:]}"


BEFORE_THE_DIFF = """
import torch
from lowtide.models.gpt import GPT, GPTConfig

torch.backends.mkldnn.enabled = False  # bf16 products on any processor
config = GPTConfig(vocab_size=64, context_length=16, num_layers=2, hidden_size=32, num_heads=2)
model = GPT(config).to(torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters())
device = "cuda" if torch.cuda.is_available() else "cpu"
ids = torch.randint(64, (2, 16), device=device)
loader = [{"input_ids": ids, "labels": ids}] * 3
before = [parameter.clone() for parameter in model.parameters()]
"""
AFTER_THE_DIFF = """
assert all((new != old.to(new.device)).any() for new, old in zip(model.parameters(), before))
"""


def test_the_loop_with_the_readmes_diff_applied_trains(tmp_path: Path) -> None:
    ((_, diff, _),) = blocks(README.read_text(encoding="utf-8"), "diff")
    applied = [line[1:] for line in diff.split("\n") if not line.startswith("-")]
    file = tmp_path / "loop.py"
    file.write_text(BEFORE_THE_DIFF + "\n".join(applied) + AFTER_THE_DIFF, encoding="utf-8")
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@by_document
def test_tables_are_what_the_records_say(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert render.fill(text, render.RESULTS) == text, "run python -m benchmarks.render"


@by_document
def test_links_to_files_lead_somewhere(path: Path) -> None:
    prose = re.sub(r"^(`{3,}).*?^\1", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose)
    files = [target for target in targets if not re.match(r"[a-z]+:", target)]
    assert [target for target in files if not (path.parent / target).exists()] == []


def test_the_chart_is_what_the_records_say() -> None:
    assert render.CHART in README.read_text(encoding="utf-8")
    drawn = (REPO / render.CHART).read_text(encoding="utf-8")
    assert chart.description(drawn) == chart.describe(render.RESULTS), "run python -m benchmarks.render"


def test_the_chart_is_drawn_from_records_alone() -> None:
    assert chart.draw(render.RESULTS) == chart.draw(render.RESULTS)


# Their form


def prose(text: str) -> str:
    """The text, with nothing left of fenced blocks, rendered tables, comments and rows of tables but their lines."""
    empty = lambda match: "\n" * match[0].count("\n")  # noqa: E731 - so short
    text = re.sub(r"^(`{3,}|~{3,}).*?^\1", empty, text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!-- rendered: .*?<!-- end -->", empty, text, flags=re.DOTALL)
    return re.sub(r"^(?:\||<!--).*$", "", text, flags=re.MULTILINE)


@by_page
def test_text_wraps_at_one_width(path: Path) -> None:
    lines = prose(path.read_text(encoding="utf-8")).split("\n")
    # A link, or code without a place to break, may be longer than a line.
    broken = [re.sub(r"!?\[[^\]]*\]\([^)]*\)|`[^`]*`", "", line) for line in lines]
    long = [n for n, line in enumerate(lines, start=1) if len(line) > WIDTH and " " in broken[n - 1].strip(" -.,;:()")]
    assert long == [], f"lines of {named(path)} with more than {WIDTH} columns"


@by_page
def test_a_page_opens_with_its_purpose_in_one_sentence(path: Path) -> None:
    title, blank, *rest = path.read_text(encoding="utf-8").split("\n")
    assert title.startswith("# ")
    assert blank == ""
    opening = " ".join(rest[: rest.index("")])
    assert re.match(r"[A-Z][a-z]", opening)
    assert opening.endswith(".")
    num_sentences = 2 if path == README else 1
    assert len(re.findall(r"[.!?](?= |$)", opening)) == num_sentences, opening


@by_page
def test_sentences_begin_with_their_subject(path: Path) -> None:
    text = " ".join(prose(path.read_text(encoding="utf-8")).split())
    assert re.findall(r"(?:^|[.!?:|] |\*\* )Of \w+ \w+", text) == []


def test_the_readme_is_one_screen_and_a_little() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.split()) <= 900
    first_screen = text.partition("\n## ")[0]
    assert first_screen.count("\n") < 60
    for part in ("step_time.svg", "pip install", "```diff", "lowtide.trace(", "DeepSpeed", "**Runs on**"):
        assert part in first_screen


def test_every_page_is_on_the_index() -> None:
    index = (REPO / "docs" / "index.md").read_text(encoding="utf-8")
    pages = {path.relative_to(REPO / "docs").as_posix() for path in DOCUMENTS if path != README}
    assert {page for page in pages - {"index.md"} if f"]({page})" not in index} == set()


@by_document
def test_links_to_headings_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", prose(text)):
        page = (path.parent / target) if target else path
        headings = re.findall(r"^#+ (.*)$", prose(page.read_text(encoding="utf-8")), flags=re.MULTILINE)
        assert anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# The functions above, against documents whose answer is known

FENCE = "```"
SAMPLE = f"""# Title

{FENCE}python
a = 1
b = a + 1
{FENCE}

<!-- not run: needs a card -->

{FENCE}python
raise SystemExit
{FENCE}

<!-- not run: -->
{FENCE}python
c = b
{FENCE}

{FENCE}bash
{FENCE}python
rm -rf nothing
{FENCE}
"""


def test_blocks_are_found_with_their_lines() -> None:
    assert list(python_blocks(SAMPLE)) == [(4, "a = 1\nb = a + 1"), (16, "c = b")]


def test_script_keeps_line_numbers() -> None:
    assert as_script(SAMPLE).split("\n")[3:5] == ["a = 1", "b = a + 1"]
    assert as_script(SAMPLE).split("\n")[15] == "c = b"


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
    lines = render.accuracy(tmp_path).split("\n")
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
    lines = render.accuracy_summary(tmp_path).split("\n")
    assert lines[2] == "| peak allocated | c20 | 21 | 10.00% | 19.00% | 20.00% |"
    assert lines[3] == "| peak reserved | c20 | 21 | 10.00% | 19.00% | 20.00% |"


def test_failed_cases_are_shown_and_not_counted(tmp_path: Path) -> None:
    failed = case("oom", allocated=(1, 1), reserved=(1, 1)) | {"measured_allocated_bytes": None}
    write_accuracy(tmp_path, "2026-01-01", [failed, case("ok", allocated=(1, 1), reserved=(1, 1))])
    assert "| oom | gpt | bf16 | none | adamw | backward | - | - | failed | 1.000 |" in render.accuracy(tmp_path)
    summary = render.accuracy_summary(tmp_path)
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
    lines = render.fresh(tmp_path).split("\n")
    assert lines[2] == "| a | 1.000 | +10.00% | -1.00% | 2.000 | +10.00% | -1.00% |"
    assert lines[4] == "| **95th percentile** |  | 10.00% | 1.00% |  | 10.00% | 1.00% |"
    assert records_named(lines) == 3

    write_fresh(tmp_path, "fresh_repredicted", "lowtide.fresh_predicted/1", [{"name": "a", "failed": "no kernel"}])
    with pytest.raises(BadRecordError, match="'a' needs a number in allocated"):
        render.fresh(tmp_path)


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
    lines = render.fresh_summary(tmp_path).split("\n")
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
    text = render.peak_memory(tmp_path)
    assert "| control | loss | 21.165 | 21.200 | +0.17% |" in text
    assert "<sub>Records. none, torch 2.8: `peak_memory/x`.</sub>" in text
    rows[0]["published_gib"] = "much"
    file.write_text(json.dumps(record | {"date": "2026-01-01", "rows": rows}), encoding="utf-8")
    with pytest.raises(BadRecordError, match="'control' needs numbers in published_gib and predicted_bytes"):
        render.peak_memory(tmp_path)


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
        render.accuracy(tmp_path)


def test_missing_and_broken_records(tmp_path: Path) -> None:
    with pytest.raises(BadRecordError, match="there are no records in .*accuracy; run the benchmark"):
        render.accuracy(tmp_path)
    with pytest.raises(BadRecordError, match="there are no records named streaming_.* in .*session; run the benchmark"):
        streaming(tmp_path)
    write_accuracy(tmp_path, "2026-01-01", [])
    (tmp_path / "accuracy" / "cut.json").write_text("{", encoding="utf-8")
    with pytest.raises(BadRecordError, match=r"cut\.json is not JSON"):
        render.accuracy(tmp_path)


def test_fill_replaces_only_what_is_between_markers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(render.RENDERERS, "one", lambda results: f"| {results.name} |")
    opening, end = "<!-- rendered: one -->\n", "<!-- end -->\n"
    text = f"before\n{opening}old\nolder\n{end}between\n{opening}{end}after\n"
    filled = render.fill(text, tmp_path)
    table = f"{opening}| {tmp_path.name} |\n{end}"
    assert filled == f"before\n{table}between\n{table}after\n"
    assert render.fill(filled, tmp_path) == filled


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- rendered: accuracy -->\n", "'accuracy' is never closed"),
        ("<!-- end -->\n", "line 1: <!-- end --> without"),
        ("<!-- rendered: accuracy -->\n<!-- rendered: accuracy -->\n<!-- end -->", "line 2: 'accuracy' is still open"),
    ],
)
def test_unbalanced_markers_are_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        render.fill(text, tmp_path)


def test_unknown_renderer_suggests_a_near_one(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="no renderer named 'acuracy'; did you mean 'accuracy'"):
        render.fill("<!-- rendered: acuracy -->\n<!-- end -->\n", tmp_path)


def test_check_names_stale_files_and_rendering_heals_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_accuracy(tmp_path / "results", "2026-01-01", [case("a", allocated=(1, 1), reserved=(1, 1))])
    readme = tmp_path / "README.md"
    readme.write_text("<!-- rendered: accuracy-summary -->\nold\n<!-- end -->\n", encoding="utf-8")
    monkeypatch.setattr(render, "REPO", tmp_path)
    monkeypatch.setattr(render, "RESULTS", tmp_path / "results")
    assert render.main(["--check"]) == 1
    assert "README.md: out of date" in capsys.readouterr().out
    assert render.main([]) == 0
    assert render.main(["--check"]) == 0
    assert "peak allocated" in readme.read_text(encoding="utf-8")
