"""The commands as a user types them: output, files, errors and exit codes."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lowtide.cli import demo
from lowtide.cli.main import app
from lowtide.cli.trace import TraceRequest
from lowtide.hardware.machine import find_commit
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

    def test_what_was_traced_and_with_what_is_said_everywhere(self, tmp_path: Path) -> None:
        page, saved = tmp_path / "page.html", tmp_path / "trace.json"
        words = ("trace", "gpt-tiny", "--batch", "2x64", "--set", "optimizer=sgd-momentum", "--set", "dtype=fp32")
        result = run(*words, "--report", str(page), "--report", str(saved))
        for text in (result.stdout, page.read_text(encoding="utf-8")):
            text = " ".join(re.sub("[│<>]", " ", text).split())
            for said in ("input_ids, labels 2x64 int64", "SGD(momentum=0.9)", "float32", "h200, 139.8 GiB"):
                assert said in text
            versions = f"torch {torch.__version__.split('+')[0]}, lowtide {metadata.version('lowtide')}"
            assert f"{versions}, Python {platform.python_version()}" in text
            if (commit := find_commit()) != "unknown":
                assert f"commit {commit[:12]}" in text
        found = figures(*words)
        assert (found["batch"], found["optimizer"]) == ("input_ids, labels 2x64 int64", "SGD(momentum=0.9)")
        assert (found["dtype"], found["made_with"]["torch"]) == ("float32", torch.__version__)
        assert load_trace(saved).about["optimizer"] == "SGD(momentum=0.9)"

    def test_a_capacity_is_predicted_for_and_said_to_be_one(self, tmp_path: Path) -> None:
        page = tmp_path / "page.html"
        result = run("trace", "gpt-tiny", "--batch", "2x64", "--gpu", "1GiB", "--report", str(page))
        for text in (result.stdout, page.read_text(encoding="utf-8")):
            text = " ".join(re.sub("[│<>]", " ", text).split())
            assert "840.0 MiB" in text
            assert "assumed, as measured on an H200" in text
            assert "MiB to spare (with 840.0 MiB assumed for the CUDA context)" in text
            assert "1GiB names a capacity and no device" in text
        given = figures("trace", "gpt-tiny", "--batch", "2x64", "--gpu", "1GiB")
        known = figures("trace", "gpt-tiny", "--batch", "2x64", "--gpu", "rtx-4090")
        assert (given["card"], given["capacity_bytes"]) == ("1GiB", 2**30)
        assert given["context_bytes"] == known["context_bytes"] == 840 * 2**20
        assert given["is_context_assumed"] is known["is_context_assumed"] is True
        assert given["step_s"] is None, "a capacity has no rates"
        assert known["step_s"] > 0
        assert known["bound_by"] in ("device", "launches")
        # By the rules of the same compute capability.
        assert given["peak_bytes"] == known["peak_bytes"]

    def test_the_assumed_context_decides_what_fits(self) -> None:
        for capacity, said in (("840MiB", "does not fit"), ("1GiB", "fits, ")):
            assert said in run("trace", "gpt-tiny", "--batch", "2x64", "--gpu", capacity).stdout

    @pytest.mark.filterwarnings("default")
    def test_a_setting_without_effect_is_warned_of_in_a_line(self) -> None:
        result = run("trace", "gpt-tiny", "--batch", "2x64", "--json", "--set", "step.autocast=bf16")
        message = " ".join(result.stderr.split())
        assert message.startswith("warning: autocast=bfloat16 casts no weight: they are in bfloat16 already")
        assert message.endswith("leave it out, or keep the weights in float32")
        assert json.loads(result.stdout)["notes"][-1].startswith("autocast=bfloat16 casts no weight")

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
            (("trace", "gpt-tiny", "--set", "step.activation=recompute"), "did you mean 'step.activations'"),
            (("trace", "gpt-tiny", "--set", "activations=recompute"), "did you mean 'step.activations'"),
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
        assert result.stdout == ""

    @pytest.mark.parametrize("command", ["trace", "explain"])
    @pytest.mark.parametrize(
        ("model", "batch", "said"),
        [
            ("gpt-tiny", "2by64", "--batch: '2by64' is not a batch: write BATCHxLENGTH"),
            ("gpt-tiny", "0x64", "--batch: '0x64' is not a batch: write BATCHxLENGTH"),
            ("gpt-tiny", "2x99999", "--batch: '2x99999' asks for sequences of 99999 tokens, and this model has"),
            ("gpt-tiny", "2x3x4x5", "--batch: '2x3x4x5' has 4 sizes, and this model takes token ids"),
            ("resnet-50", "2x64", "--batch: '2x64' has 2 sizes, and this model takes images"),
            ("llama-tiny", "99999999x999999", "--batch: one input of 99999999x999999 takes"),
        ],
    )
    def test_a_bad_batch_is_the_users_mistake(self, command: str, model: str, batch: str, said: str) -> None:
        result = run(command, model, "--batch", batch)
        message = " ".join(result.stderr.split())
        assert (result.exit_code, result.stdout) == (2, "")
        assert message.startswith(f"ConfigError: {said}")
        assert "Traceback" not in message

    @pytest.mark.parametrize("text", ["24", "-1GiB", "24 bananas"])
    def test_what_is_no_capacity_is_one_sentence(self, text: str) -> None:
        result = run("trace", "gpt-tiny", "--gpu", text)
        message = " ".join(result.stderr.split())
        assert (result.exit_code, result.stdout) == (2, "")
        assert message.startswith(f"ConfigError: '{text}' is neither the name of a device nor a capacity; write ")
        assert "Traceback" not in message

    @pytest.mark.parametrize(
        ("words", "option"),
        [
            (("trace", "gpt-tiny", "--report"), "--report"),
            (("explain", "gpt-tiny", "--report"), "--report"),
            (("demo", "--report"), "--report"),
            (("lab", "report", "--out"), "--out"),
            (("lab", "report", "--markdown"), "--markdown"),
            (("lab", "report", "--png"), "--png"),
            (("lab", "run", "peak_memory_tiny/control", "--out"), "--out"),
            (("lab", "sweep", "peak_memory_tiny/compile", "--out"), "--out"),
        ],
        ids=lambda words: " ".join(words) if isinstance(words, tuple) else words,
    )
    def test_what_cannot_be_written_is_found_before_the_work(
        self, words: tuple[str, ...], option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def work(*args: object, **kwargs: object) -> None:
            raise AssertionError("the work began")

        for begun in (
            *(
                "cli.trace.TraceRequest.run",
                "cli.trace.TraceRequest.problem",
                "cli.demo.run_demo",
                "cli.lab.collect",
                "cli.lab.run_all",
                "cli.lab_results.run_sweep",
            ),
        ):
            monkeypatch.setattr(f"lowtide.{begun}", work)
        monkeypatch.setattr("lowtide.cli.main.run_demo", work)
        (tmp_path / "file").touch()
        suffix = "png" if option == "--png" else "html"
        result = run(*words, str(tmp_path / "file" / f"below.{suffix}"))
        message = " ".join(result.stderr.split())
        assert (result.exit_code, result.stdout) == (2, "")
        assert re.match(rf"ConfigError: {option} '.*' cannot be written: Not a directory; give ", message)


def test_folders_that_reports_need_are_made_when_they_are_written(tmp_path: Path) -> None:
    page = tmp_path / "a" / "b" / "page.html"
    assert run("trace", "no-such-model", "--report", str(page)).exit_code == 2
    assert not (tmp_path / "a").exists(), "a command that did nothing leaves nothing"
    assert run("trace", "gpt-tiny", "--batch", "2x64", "--report", str(page)).exit_code == 0
    assert page.is_file()


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
