"""The commands as a user types them: output, files, errors and exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lowtide.cli import demo
from lowtide.cli.main import app
from lowtide.cli.request import TraceRequest
from lowtide.tracing.trace_json import load_trace

RUNNER = CliRunner()


def run(*words: str) -> Any:
    return RUNNER.invoke(app, list(words), catch_exceptions=False)


def figures(*words: str) -> dict[str, Any]:
    result = run(*words, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)  # nothing but JSON on the standard output


class TestTrace:
    def test_the_tables_name_the_peak(self) -> None:
        result = run("trace", "gpt-tiny", "--batch", "2x64")
        assert result.exit_code == 0
        for words in ("gpt-tiny", "peak allocated", "At the peak, by category", "Highest in each phase", "sum"):
            assert words in result.stdout

    def test_json_sums_to_the_peak(self) -> None:
        found = figures("trace", "gpt-tiny", "--batch", "2x64")
        assert found["schema"] == "lowtide.summary/1"
        assert sum(found["at_peak"].values()) == found["peak_bytes"] == max(found["phase_peaks"].values())
        assert found["card"] == "h200"
        assert found["attention"] == [{"backend": "cudnn", "num_calls": 4, "reason": ""}]

    def test_settings_reach_the_step(self) -> None:
        plain = figures("trace", "gpt-tiny", "--batch", "8x128", "--set", "dtype=float32")
        lean = figures(
            "trace", "gpt-tiny", "--batch", "8x128", "--set", "dtype=float32", "--set", "step.activations=recompute"
        )
        assert lean["settings"]["activations"] == "recompute"
        assert lean["at_peak"]["activations"] < plain["at_peak"]["activations"]
        assert lean["at_peak"]["weights"] == plain["at_peak"]["weights"]

    def test_reports_are_written_by_suffix(self, tmp_path: Path) -> None:
        files = [tmp_path / name for name in ("page.html", "figure.png", "trace.json.gz")]
        words = [word for file in files for word in ("--report", str(file))]
        result = run("trace", "gpt-tiny", "--batch", "2x64", "--json", *words)
        assert result.exit_code == 0, result.stderr
        assert load_trace(files[2]).peak_bytes == json.loads(result.stdout)["peak_bytes"]
        assert files[0].read_text(encoding="utf-8").startswith("<!doctype html>")
        assert files[1].read_bytes().startswith(b"\x89PNG")


class TestExplain:
    def test_sentences_and_techniques(self, tmp_path: Path) -> None:
        page = tmp_path / "page.html"
        found = figures("explain", "deep-one-tiny", "--batch", "2x64", "--report", str(page))
        assert found["explanation"][0].startswith("The peak of")
        techniques = {row["technique"]: row for row in found["what_if"]}
        assert {"selective recompute", "recompute", "offload", "optimizer in backward"} <= set(techniques)
        for row in techniques.values():
            assert row["saved_bytes"] == found["peak_bytes"] - row["after_bytes"]
            assert row["reason"].endswith(".")
        assert "What would lower the peak" in page.read_text(encoding="utf-8")


class TestErrors:
    @pytest.mark.parametrize(
        ("words", "expected"),
        [
            (("trace", "lama-8b"), "did you mean 'llama-8b'"),
            (("trace", "gpt-tiny", "--batch", "2by64"), "2by64"),
            (("trace", "gpt-tiny", "--gpu", "h20"), "h200"),
            (("trace", "gpt-tiny", "--set", "step.activation=recompute"), "activations"),
            (("trace", "gpt-tiny", "--set", "optimizer=adamv"), "adamw"),
            (("trace", "gpt-tiny", "--batch", "2x64", "--report", "page.docx"), ".html"),
            (("trace", "hf:/no/such/folder"), "/no/such/folder"),
            (("trace", "no.such.module:factory"), "no.such.module"),
        ],
    )
    def test_bad_input_is_one_message_that_says_what_to_do(self, words: tuple[str, ...], expected: str) -> None:
        result = run(*words)
        assert result.exit_code in (1, 2)
        message = " ".join(result.stderr.split())
        assert expected in message
        assert "Traceback" not in message
        assert result.stdout == "" or "page.docx" in words


def test_demo_predicts_trains_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "LARGE", TraceRequest(model="llama-tiny", batch="1x64", gpu="rtx-4090"))
    report = tmp_path / "demo.html"
    result = run("demo", "--report", str(report))
    assert result.exit_code == 0, result.stderr
    assert "llama-tiny" in result.stdout
    text = " ".join(result.stdout.split())
    assert "All 12 losses are the same, bit for bit; the budget held" in text
    assert float(text.split(" times the budget")[0].split()[-1]) > 3
    page = report.read_text(encoding="utf-8")
    assert "llama-tiny" in page
    assert "A small GPT, managed" in page
    assert "emulated device" in page


def test_the_version_is_shown() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert re.fullmatch(r"lowtide \d+\.\d+\.\d+\S*, torch 2\.\S+\n", result.stdout)


def test_the_package_can_be_run_as_a_module() -> None:
    words = [sys.executable, "-m", "lowtide"]
    done = subprocess.run([*words, "lab", "--help"], capture_output=True, text=True, check=True)
    assert "Usage: lowtide lab " in done.stdout


def test_an_unknown_recipe_is_told_in_a_line_or_two() -> None:
    result = run("check", "zzz")
    assert result.exit_code == 2
    words = " ".join(result.stderr.split())
    assert "there is no recipe named 'zzz'; the nearest are " in words
    assert words.endswith("; see lowtide lab ls")
    assert words.count("'") == 2 * 4
    near = " ".join(run("check", "gpt_streamd").stderr.split())
    assert "did you mean 'gpt_streamed'" in near
    assert near.endswith("see lowtide lab ls")
