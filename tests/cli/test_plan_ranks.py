"""`lowtide plan --ranks`: 80 columns say what each way takes, the same as JSON, and exit code 2 for what was typed wrongly."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from lowtide.cli.main import app
from lowtide.planning.plan import plan_from_json

RUN = CliRunner()
WORDS = [
    "plan",
    "gpt-tiny",
    "--batch",
    "8x128",
    "--gpu",
    "rtx-4090",
    "--device-memory",
    "200MiB",
    "--host-memory",
    "8GiB",
]


def run(*words: str) -> str:
    result = RUN.invoke(app, [*WORDS, *words])
    assert result.exit_code == 0, result.output
    return result.output


def test_one_screen_says_what_each_way_takes() -> None:
    output = run("--ranks", "4")
    lines = output.splitlines()
    text = " ".join(output.replace("│", " ").split())
    for words in (
        "gpt-tiny on 4 x rtx-4090",
        "8x128 on each rank",
        "4 ranks on a node, pcie4 (25.5 GB/s each way)",
        "Ways to train on 4 ranks",
        "of 2.0 GiB for each rank",
        "tensor and pipeline parallelism are not planned",
        "ranks=torch.distributed.group.WORLD)",
    ):
        assert words in text
    for way in ("data parallel", "sharded, device", "sharded, host", "one to all, device", "one to all, host"):
        assert sum(line.startswith(way) for line in lines) == 1
    assert "hybrid" not in output
    assert len(lines) <= 40
    assert all(len(line) <= 80 for line in lines if not line.startswith("in your script"))


def test_large_figures_stay_inside_80_columns() -> None:
    words = [
        "plan",
        "llama-8b",
        "--batch",
        "2x2048",
        "--gpu",
        "a100-80gb",
        "--host-memory",
        "2TiB",
        "--ranks",
        "16",
        "--full",
    ]
    result = RUN.invoke(app, words)
    assert result.exit_code == 0, result.output
    lines = [line for line in result.output.splitlines() if not line.startswith("in your script")]
    assert all(len(line) <= 80 for line in lines)
    assert "…" not in "".join(lines)
    assert "hybrid, device" in result.output
    assert "2 with 8 ranks on a node" in result.output
    counts = [line.split()[0] for line in lines if line.strip()[:1].isdigit()]
    assert counts == ["1", "2", "4", "8", "16"]


def test_the_same_for_machines() -> None:
    found = json.loads(
        run("--ranks", "4", "--json", "--full", "--set", "ranks.per_node=2", "--set", "ranks.network=infiniband-hdr")
    )
    assert found["schema"] == "lowtide.planned_ranks/1"
    assert found["cluster"]["per_node"] == 2
    assert found["cluster"]["between"]["name"] == "infiniband-hdr"
    ways = {way["name"]: way for way in found["ways"]}
    assert found["fastest"] == min((way for way in ways.values() if way["fits"]), key=lambda way: way["step_s"])["name"]
    assert "hybrid, device" in ways
    sent = ways["sharded, host"]["sent_bytes"]
    assert sent.keys() == {"all-gather", "reduce-scatter", "all-reduce"}
    assert sent["all-reduce"] % 8 == 0, "the norms of gradients, in double"
    assert sent["all-reduce"] < 8 * 1000
    assert ways["data parallel"]["sent_bytes"].keys() == {"all-reduce"}
    plan = plan_from_json(json.dumps(ways["hybrid, device"]["plan"]))
    assert plan.sharding is not None
    assert plan.sharding.shards == 2
    assert [each["ranks"] for each in found["by_count"]] == [1, 2, 4]


def test_where_nothing_fits_the_ways_are_shown_and_the_exit_code_is_2() -> None:
    words = [word if word != "200MiB" else "20MiB" for word in WORDS]
    result = RUN.invoke(app, [*words, "--ranks", "2"])
    assert result.exit_code == 2
    assert "too much" in result.output
    text = " ".join(result.output.split())
    assert "no way to train on 2 ranks fits 20.0 MiB of each device and 4.0 GiB of the host for each rank" in text
    result = RUN.invoke(app, [*words, "--ranks", "2", "--json"])
    assert result.exit_code == 2
    assert json.loads(result.stdout)["fastest"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "0"], "ranks.count is 0; give a whole number"),
        (["--ranks", "12"], "12 ranks do not fill nodes of 8"),
        (["--set", "ranks.link=nvlink4"], "ranks.link was given, and no number of ranks"),
        (["--ranks", "2", "--set", "ranks.link=nvlink"], "there is no link named 'nvlink'"),
        (["--ranks", "2", "--pareto"], "--ranks shows tables only, for one GPU"),
    ],
)
def test_bad_input_is_one_sentence(words: list[str], message: str) -> None:
    result = RUN.invoke(app, [*WORDS, *words])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
