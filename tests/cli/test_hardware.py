"""`lowtide hardware`, and what `--gpu this` does with a machine that was, or was not, measured."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from lowtide.cli.hardware import calibration_panel
from lowtide.cli.main import app
from lowtide.config import from_plain
from lowtide.hardware import find_hardware, known
from lowtide.hardware.calibration import (
    Calibration,
    calibration_path,
    current_setting,
    find_calibration,
    save_calibration,
)
from lowtide.lab.calibration import calibrate
from lowtide.optim.host import kernel as host_kernel
from tests.hardware.samples import calibration
from tests.lab.calibration.sizes import TINY

RUN = CliRunner()
PLAN = ["plan", "gpt-tiny", "--batch", "8x128", "--gpu", "this", "--device-memory", "200MiB"]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the calibration of this machine goes, which has no GPU and is measured in a second."""
    host_kernel.is_available()  # finds the library before its folder is another
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(known, "find_calibration", find_calibration)
    monkeypatch.setattr(calibrate, "sizes_for", lambda device: TINY)
    return calibration_path(None)


def test_it_measures_once_and_then_shows_what_it_found(kept: Path) -> None:
    first = RUN.invoke(app, ["hardware", "--json"])
    assert first.exit_code == 0, first.output
    found = from_plain(Calibration, json.loads(first.stdout))
    assert found.setting == current_setting(torch.device("cpu"))
    assert kept.exists()
    again = RUN.invoke(app, ["hardware", "--json"])
    assert again.stdout == first.stdout
    shown = RUN.invoke(app, ["hardware"])
    assert shown.exit_code == 0, shown.output
    for words in ("no GPU", "updates on the host", "an operator", "only the host was measured", found.measured_at):
        assert words in " ".join(shown.output.replace("│", " ").split())
    assert len(shown.output.splitlines()) <= 40
    assert from_plain(Calibration, json.loads(RUN.invoke(app, ["hardware", "--json", "--again"]).stdout)) != found


def test_a_gpus_rates_stand_beside_its_data_sheet() -> None:
    found = calibration()
    shown = calibration_panel(found, known.calibrated(find_hardware("l4"), found))
    text = " ".join(_text(shown).split())
    # 60 of 121 TFLOP/s; 2e11 of 3e11 bytes a second.
    for words in ("bf16 products 60.0 TFLOP/s, 50% of the data sheet", "186.3 GiB/s in a step, 67% of the data sheet"):
        assert words in text


def _text(shown: object) -> str:
    console = Console(width=160, file=io.StringIO())
    console.print(shown)
    return console.file.getvalue()  # type: ignore[attr-defined]  # it is the StringIO


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("missing", "this machine was not measured yet"),
        ("stale", "the processor was other and is"),
        ("corrupt", "the calibration is corrupt"),
    ],
)
def test_what_does_not_count_ends_with_exit_code_2(kept: Path, what: str, words: str) -> None:
    if what != "missing":
        setting = replace(current_setting(torch.device("cpu")), processor="other")
        save_calibration(calibration(setting, has_gpu=False), kept)
    if what == "corrupt":
        kept.write_text(kept.read_text()[:200])
    for command in (PLAN, ["trace", "gpt-tiny", "--gpu", "this"]):
        result = RUN.invoke(app, command)
        assert result.exit_code == 2
        text = " ".join(result.output.split())
        assert words in text
        assert "lowtide hardware" in text


def test_a_plan_says_whose_rates_it_has(kept: Path) -> None:
    mine = calibration(current_setting(torch.device("cpu")), has_gpu=False)
    save_calibration(mine, kept)
    found = json.loads(RUN.invoke(app, [*PLAN, "--json"]).stdout)
    assert found["rates"] == "measured on this machine"
    words = [word if word != "this" else "rtx-4090" for word in PLAN]
    assert "data sheet, times what an H200 and its host reach" in " ".join(RUN.invoke(app, words).output.split())
    # A host that launches ten times slower: the step is bound by that.
    slow = replace(mine, host=mine.host.launching(10 * mine.host.launch_s))
    save_calibration(slow, kept)
    slower = json.loads(RUN.invoke(app, [*PLAN, "--json"]).stdout)
    assert slower["step_s"] > 3 * found["step_s"]
