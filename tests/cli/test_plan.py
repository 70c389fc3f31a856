"""`lowtide plan`: one screen, the same as JSON, and exit code 2 for what was typed wrongly."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lowtide.cli.main import app
from lowtide.planning.plan import plan_from_json

RUN = CliRunner()
WORDS = ["plan", "gpt-tiny", "--batch", "8x128", "--gpu", "rtx-4090", "--device-memory", "200MiB"]


def test_one_screen_says_what_the_plan_takes() -> None:
    result = RUN.invoke(app, WORDS)
    assert result.exit_code == 0, result.output
    for words in (
        "time of the step",
        "tokens/s",
        "of 200.0 MiB reserved",
        "for the whole model instead",
        "lowtide.prepare(",
    ):
        assert words in result.output
    assert len(result.output.splitlines()) <= 40


def test_the_same_for_machines(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    words = [*WORDS, "--json", "--report", str(page), "--set", "schedule=in_backward", "--set", "precision=bf16 exact"]
    result = RUN.invoke(app, words)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["peak_reserved_bytes"] <= 200 << 20
    plan = plan_from_json(json.dumps(found["plan"]))
    assert plan.schedule.value == "in_backward"
    assert found["step_s"] > 0
    assert page.exists()


def test_the_largest_batch_and_the_fewest_changes() -> None:
    result = RUN.invoke(app, [*WORDS[:-1], "80MiB", "--max-batch", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["peak_reserved_bytes"] <= 80 << 20 < found["largest_batch"]["next_bytes"]
    result = RUN.invoke(app, [*WORDS[:-1], "60MiB"])
    assert result.exit_code == 0, result.output
    assert len(result.output.splitlines()) <= 40
    text = " ".join(result.output.split())
    for words in (
        "fewest changes",
        "--set plan.",
        "plan = lowtide.make_plan(model, weights=",
        "too much",
        "MiB device",
    ):
        assert words in text
    assert "…" not in text
    # Lines to copy are whole, however narrow the terminal is.
    assert any(
        line.lstrip().startswith("in your script: plan = ") and line.endswith("optimizer, plan)")
        for line in result.output.splitlines()
    )


def test_the_code_says_what_the_command_was_told() -> None:
    words = ["--set", "precision=bf16 exact", "--set", "moments=8bit", "--set", "max_grad_norm=1.0"]
    result = RUN.invoke(app, [*WORDS[:-1], "60MiB", *words])
    assert result.exit_code == 0, result.output
    fewest, fastest = [line for line in result.output.splitlines() if "in your script: " in line]
    given = "precision='bf16 exact', moments='8bit', max_grad_norm=1.0)"
    assert fewest.endswith(f"session = lowtide.manage(model, optimizer, plan, {given}")
    assert (
        fastest == f"in your script: session = lowtide.prepare(model, optimizer, batch, device_memory='60MiB', {given}"
    )


def test_the_flags_of_the_fewest_changes_trace_what_was_told() -> None:
    result = RUN.invoke(app, [*WORDS[:-1], "60MiB", "--json"])
    told = json.loads(result.stdout)["fewest_changes"]
    traced = RUN.invoke(app, ["trace", *WORDS[1:-2], "--json", *told["flags"].split()])
    assert traced.exit_code == 0, traced.output
    peak = json.loads(traced.stdout)["peak_reserved_bytes"]
    # Without the budget the allocator gives nothing back.
    assert told["peak_reserved_bytes"] <= peak <= 1.2 * told["peak_reserved_bytes"]


def test_all_hardware_on_one_screen() -> None:
    result = RUN.invoke(app, ["plan", "gpt-tiny", "--batch", "8x128", "--gpu", "any"])
    assert result.exit_code == 0, result.output
    assert len(result.output.splitlines()) <= 40
    for words in ("h200", "tokens/s", "bound by", "fits too, slower: "):
        assert words in result.output
    refused = RUN.invoke(app, ["plan", "gpt-tiny", "--batch", "8x128", "--gpu", "any", "--pareto"])
    assert refused.exit_code == 2
    assert "name one GPU" in " ".join(refused.output.split())


def test_where_nothing_fits_the_floor_is_true() -> None:
    words = [*WORDS[:2], "--batch", "64x128", *WORDS[4:-1]]
    result = RUN.invoke(app, [*words, "60MiB"])
    assert result.exit_code == 2
    text = " ".join(result.output.split())
    assert "would fit" in text
    assert "micro-batches of" in text
    floor = re.search(r"the step reserves ([0-9.]+) MiB; give that much, or a smaller batch", text)
    assert floor is not None, text
    assert RUN.invoke(app, [*words, f"{float(floor[1]) + 0.1:.1f}MiB"]).exit_code == 0
    assert RUN.invoke(app, [*words, f"{float(floor[1]) * 0.8:.1f}MiB"]).exit_code == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device-memory", "30MiB"], "no plan fits 30.0 MiB of device memory: with weights"),
        (["--device-memory", "1KiB"], "no plan fits 1.0 KiB of device memory: with weights"),
        (["--device-memory", "lots"], "device_memory"),
        (["--device-memory", "24"], "device_memory is '24', which has no unit; write '24GiB', or MiB"),
        (["--device-memory", "0GiB"], "device_memory is '0GiB'; give a size such as '24GiB'"),
        (["--device-memory", "-3GiB"], "device_memory"),
        (["--device-memory", "24 bananas"], "device_memory"),
        (
            ["--device-memory", "90GiB"],
            "device_memory is 90.0 GiB, and NVIDIA GeForce RTX 4090 has 23.6 GiB; give at most",
        ),
        (["--host-memory", "0MiB"], "host_memory is '0MiB'; give a size"),
        (["--batch", "0x128"], "--batch: '0x128' is not a batch"),
        (["--gpu", "rtx-9999"], "rtx-9999"),
        (["--gpu", "24"], "'24' is neither the name of a device nor a capacity; write a name such as rtx-4090"),
        (["--set", "schedule=never"], "schedule"),
        (["--set", "optimizer=none"], "a plan places what an optimizer needs"),
    ],
)
def test_what_is_wrong_is_told_with_exit_code_2(words: list[str], message: str) -> None:
    result = RUN.invoke(app, ["plan", "gpt-tiny", "--batch", "8x128", "--gpu", "rtx-4090", *words])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_memory_against_speed_is_a_table_and_json() -> None:
    words = ["plan", "gpt-tiny", "--batch", "8x128", "--gpu", "rtx-4090", "--pareto"]
    result = RUN.invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "Memory against speed" in result.output
    assert "replayed" in result.output
    points = json.loads(RUN.invoke(app, [*words, "--json"]).stdout)["by_budget"]
    assert len(points) >= 3
    assert all(
        later["device_bytes"] > earlier["device_bytes"] and later["step_s"] < earlier["step_s"]
        for earlier, later in itertools.pairwise(points)
    )
    assert json.loads(RUN.invoke(app, [*words[:-1], "--json"]).stdout)["by_budget"] == []
