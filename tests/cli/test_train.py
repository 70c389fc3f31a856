"""`lowtide train` as a user types it: what it says, what it leaves, and with which exit code."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lowtide.cli import train as train_module
from lowtide.cli.main import app
from lowtide.runtime.checkpoints.disk import Disk
from lowtide.train.progress import RunStatus
from tests.train.runs import TEXT, losses

SMALL = (
    "model_settings={num_layers: 1, hidden_size: 32, num_heads: 2}",
    "batch=2x32",
    "steps=4",
    "device=cpu",
    "device_memory=2MiB",
    "checkpoints.every=2",
    "log.every=2",
)


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT * 60, encoding="utf-8")
    return "data.text=text.txt"


def run(*words: str, settings: tuple[str, ...] = ()) -> Any:
    given = [word for setting in settings for word in ("--set", setting)]
    return CliRunner().invoke(app, ["train", *words, *given], catch_exceptions=False)


def flat(text: str) -> str:
    return " ".join(text.split())


def test_a_run_ends_with_where_its_result_is_and_what_to_type_next(text: str) -> None:
    result = run("gpt_tiny", settings=(*SMALL, text))
    assert result.exit_code == 0, result.stderr
    first, *others = result.stdout.splitlines()
    assert first.startswith("trained 4 steps: loss ")
    assert "held out" in first
    assert others == [
        "the model: lowtide-train/gpt_tiny/model",
        "train longer: lowtide train lowtide-train/gpt_tiny --resume --set steps=8",
    ]
    assert Path("lowtide-train/gpt_tiny/model/model.safetensors").is_file()
    lines = result.stderr.splitlines()
    assert "building gpt-tiny" in lines
    assert [line.split(",")[0] for line in lines if line.startswith("step ")] == [
        "step 1 of 4", "step 2 of 4", "step 4 of 4",
    ]  # fmt: skip
    again = run("gpt_tiny", settings=(*SMALL, text))
    assert again.exit_code == 2
    assert "go on with it by `lowtide train lowtide-train/gpt_tiny --resume`" in flat(again.stderr)
    longer = run("lowtide-train/gpt_tiny", "--resume", "--json", settings=("steps=5",))
    assert longer.exit_code == 0, longer.stderr
    row = json.loads(longer.stdout)
    assert (row["schema"], row["step"], row["is_finished"], row["saved_step"]) == ("lowtide.train/1", 5, True, 5)
    assert [step for step, _ in losses(Path("lowtide-train/gpt_tiny"))] == [1, 2, 3, 4, 5]


def test_ctrl_c_saves_and_says_how_to_go_on(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = train_module.LineDisplay.show

    def show(self: train_module.LineDisplay, status: RunStatus) -> None:
        real(self, status)
        if status.step == 3 and status.words == "training":
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.3)  # the thread that watches hears of it

    monkeypatch.setattr(train_module.LineDisplay, "show", show)
    result = run("gpt_tiny", "--out", "a run", settings=(*SMALL, text))
    assert result.exit_code == 130
    assert result.stdout.splitlines() == [
        "stopped after step 3 of 4: step 3 is saved",
        "go on: lowtide train 'a run' --resume",
    ]
    assert "stopping: this step ends, and the run is saved; once more leaves at once" in result.stderr
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("words", "settings", "message"),
    [
        (("gpt_tin",), (), "there is no recipe of a run named 'gpt_tin'; did you mean 'gpt_tiny'?"),
        (
            ("fresh", "--resume"),
            (),
            "fresh is a folder, and no run has begun there: begin one with `lowtide train RECIPE --out fresh`",
        ),
        (("gpt_tiny",), ("data.tex=a",), "unknown key 'data.tex'; did you mean 'data.text'?"),
        (("gpt_tiny",), ("data.text=none.txt",), "there is no file or folder"),
        (("gpt_tiny", "--resume"), ("data.text=text.txt",), "there is no run in lowtide-train/gpt_tiny to resume"),
        (("gpt_tiny",), ("data.text=text.txt", "device_memory=60KiB"), "no plan fits 60.0 KiB of device memory"),
        (("gpt_tiny", "--out", "/proc/none"), ("data.text=text.txt",), "--out '/proc/none' cannot be written"),
        (("finetune",), ("data.text=text.txt",), "missing key 'model', which has no default: give --set model=..."),
        (("finetune",), ("data.text=text.txt", "model=hf:none"), "there is no Hugging Face config"),
        (("gpt_tiny",), ("data.text=text.txt", "steps"), "the setting 'steps' is not of the form a.b=value"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    text: str, words: tuple[str, ...], settings: tuple[str, ...], message: str
) -> None:
    del text
    Path("fresh").mkdir()
    asked = (*SMALL, *settings) if words[0] == "gpt_tiny" else (*settings, "device=cpu", "device_memory=1MiB")
    result = run(*words, settings=asked)
    assert result.exit_code == 2, result.stderr
    assert message in flat(result.stderr)
    assert "Traceback" not in result.stderr
    assert not Path("lowtide-train", "gpt_tiny", "checkpoints").exists()


def test_a_run_that_stops_has_exit_code_1(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("gpt_tiny", settings=(*SMALL, text, "optimizer.settings.lr=1e30", "scheduler.warmup_steps=0"))
    assert result.exit_code == 1, result.stdout
    message = flat(result.stderr)
    assert "RunStoppedError: the run stopped: step " in message
    assert "is not finite" in message
    assert "Lower optimizer.settings.lr" in message


def test_a_save_that_fails_is_told_once(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_up(self: Disk, path: Path, num_bytes: int) -> int:
        if "00000002" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(self, path, num_bytes)

    real = Disk.create
    monkeypatch.setattr(Disk, "create", fill_up)
    result = run("gpt_tiny", settings=(*SMALL, text))
    assert result.exit_code == 0, result.stderr
    (told,) = [line for line in result.stderr.splitlines() if os.strerror(errno.ENOSPC) in line]
    assert told.startswith("a checkpoint could not be saved: cannot make room for ")
    assert told.endswith("the training goes on")


def test_the_folder_of_a_run_is_where_it_goes_on(text: str) -> None:
    assert run("gpt_tiny", settings=(*SMALL, text, "steps=1")).exit_code == 0
    result = run("lowtide-train/gpt_tiny", "--resume", "--out", "elsewhere")
    assert result.exit_code == 2
    assert "is the folder of a run, which goes on there: leave --out out" in flat(result.stderr)


def test_on_a_terminal_the_view_is_live(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(width=80, force_terminal=True, color_system=None, record=True, file=io.StringIO())
    monkeypatch.setattr(train_module, "ERR", console)
    result = run("gpt_tiny", settings=(*SMALL, text))
    assert result.exit_code == 0, result.stderr
    shown = console.export_text()
    for words in ("gpt-tiny → lowtide-train/gpt_tiny", "step 4 of 4", "tokens/s", "2.0 MiB", "checkpoint  step"):
        assert words in shown
