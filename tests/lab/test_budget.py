"""The sweep: its points, its refusals, its file, and compiled code as the truth."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.compiled.check import measure
from lowtide import compat
from lowtide.errors import BadRecordError, ConfigError, TraceError
from lowtide.lab.budget import (
    BudgetPoint,
    BudgetSweep,
    make_point,
    pareto,
    peak_bytes,
    read_sweep,
    reversals,
    run_sweep,
    trace_model,
    trace_recipe,
    write_sweep,
)
from lowtide.lab.progress import Progress
from lowtide.lab.recipe import CompileRecipe, Recipe
from lowtide.models import resolve_model
from lowtide.models.layers import ModelOutput
from lowtide.tracing.compiled.partition import read_partition
from lowtide.tracing.compiled.program import Program
from lowtide.tracing.compiled.schedule import schedule
from lowtide.units import GiB

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

SMALL = Recipe(model="deep-one-tiny", model_settings={"num_layers": 2}, batch="2x32", plan=None)


def silent(progress: Progress) -> None:
    pass


@pytest.fixture(scope="module")
def sweep() -> BudgetSweep:
    return run_sweep(SMALL, [1.0, 0.5, 0.0, 0.5], on_progress=silent)


def test_points_come_by_budget_each_once(sweep: BudgetSweep) -> None:
    assert [point.budget for point in sweep.points] == [0.0, 0.5, 1.0]
    assert all(point.seconds > 0 and point.kind == "static" for point in sweep.points)
    assert (sweep.model, sweep.batch, sweep.dtype, sweep.torch) == (
        "deep-one-tiny",
        "2x32",
        "float32",
        torch.__version__,
    )


def test_less_is_saved_and_more_computed_again_under_a_smaller_budget(sweep: BudgetSweep) -> None:
    none, half, whole = sweep.points
    assert none.saved_bytes == 0 < half.saved_bytes < whole.saved_bytes
    assert none.recomputed_flops_share == pytest.approx(1.0)
    assert whole.recomputed_flops_share < half.recomputed_flops_share < none.recomputed_flops_share


def test_what_the_caller_has_got_too_ends_with_its_last_reader_where_the_order_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Inductor holds weights, the batch and the gradients that come in for lasting, not the logits.
    freed: list[frozenset[str]] = []

    def noted(program: Program, freeable: frozenset[str] = frozenset()) -> Program:
        freed.append(freeable)
        return schedule(program, freeable=freeable)

    monkeypatch.setattr("lowtide.lab.budget.schedule", noted)
    joint, _ = trace_recipe(SMALL)
    partition = read_partition(compat.partition(joint, 1.0))
    assert partition.donated < partition.saved
    peak_bytes(partition, on_host=False)
    assert freed == [frozenset(), partition.saved]


def test_the_peak_lies_between_what_must_live_and_the_unfused_bound(sweep: BudgetSweep) -> None:
    model = resolve_model("deep-one-tiny", settings=SMALL.model_settings).build(None)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    for point in sweep.points:
        # At the end of the backward: the weights and a gradient for each.
        assert 2 * weights <= point.peak_bytes <= point.unfused_peak_bytes
        assert point.peak_bytes >= weights + point.saved_bytes


def test_remarks_say_what_was_assumed(sweep: BudgetSweep) -> None:
    assert "attention runs on the efficient backend" in sweep.remarks
    assert any(remark.startswith("peak_bytes: ") for remark in sweep.remarks)
    rises = [remark for remark in sweep.remarks if remark.startswith("not monotone: ")]
    none, half, whole = (point.peak_bytes for point in sweep.points)
    assert bool(rises) == (none > half or half > whole)


def test_on_the_host_attention_is_the_hosts() -> None:
    recipe = Recipe(model="gpt-tiny", batch="1x16", plan=None, device="cpu")
    assert run_sweep(recipe, [1.0], on_progress=silent).remarks[0] == "attention as on the host"


def test_progress_is_told_before_each_point() -> None:
    told: list[Progress] = []
    run_sweep(SMALL, [1.0], on_progress=told.append)
    assert [(progress.words, progress.step, progress.steps) for progress in told] == [
        ("tracing deep-one-tiny", 0, 1),
        ("budget 1", 0, 1),
        ("done", 1, 1),
    ]


def test_half_precision_halves_what_is_not_upcast(sweep: BudgetSweep) -> None:
    whole = sweep.points[-1]
    (half,) = run_sweep(replace(SMALL, dtype="bfloat16"), [1.0], on_progress=silent).points
    assert whole.saved_bytes / 2 <= half.saved_bytes < whole.saved_bytes


@pytest.mark.parametrize(
    ("name", "settings", "batch"),
    [
        ("gpt-tiny", {"num_layers": 1}, "1x16"),
        ("llama-tiny", {"num_layers": 1}, "1x16"),
        ("resnet-50", {"blocks": [1, 1, 1, 1]}, "1x3x64x64"),
    ],
)
def test_other_models(name: str, settings: dict[str, Any], batch: str) -> None:
    recipe = Recipe(model=name, model_settings=settings, batch=batch, plan=None)
    (point,) = run_sweep(recipe, [1.0], on_progress=silent).points
    assert point.saved_bytes > 0


@pytest.mark.parametrize("budgets", [[], [1.5], [0.5, -0.1], [float("nan")]])
def test_budgets_that_are_none(budgets: list[float]) -> None:
    with pytest.raises(ConfigError, match="there is no budget|is not within 0 and 1") as caught:
        run_sweep(SMALL, budgets, on_progress=silent)
    assert caught.value.key == "budgets"


def test_blocks_are_refused() -> None:
    recipe = Recipe(model="deep-one-tiny", plan=None, compile=CompileRecipe(scope="blocks"))
    with pytest.raises(ConfigError, match="a sweep cuts the graph of the whole model"):
        run_sweep(recipe, [1.0], on_progress=silent)


class Reader(nn.Module):
    """Reads a value, which a graph cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> ModelOutput:
        out = self.linear(x)
        return ModelOutput(loss=out.sum() if out.sum() > 0 else out.mean(), logits=None)


def test_a_model_that_reads_values_is_refused() -> None:
    with pytest.raises(TraceError, match="my-model cannot be traced as one graph of forward and backward"):
        trace_model(Reader(), {"x": torch.zeros(2, 4)}, name="my-model")


def test_a_model_without_anything_to_train_is_refused() -> None:
    model = nn.Linear(4, 4).requires_grad_(False)
    with pytest.raises(TraceError, match="nothing that the function returns needs a gradient"):
        trace_model(model, {"input": torch.zeros(2, 4)}, name="frozen")


class TestFile:
    def test_a_sweep_survives(self, sweep: BudgetSweep, tmp_path: Path) -> None:
        path = tmp_path / "folder" / "sweep.json"
        write_sweep(sweep, path)
        assert read_sweep(path) == sweep
        assert [file.name for file in path.parent.iterdir()] == ["sweep.json"]

    def test_the_keys_are_those_of_the_schema(self, sweep: BudgetSweep, tmp_path: Path) -> None:
        write_sweep(sweep, tmp_path / "sweep.json")
        plain = json.loads((tmp_path / "sweep.json").read_text())
        assert plain["schema"] == "lowtide.budget_sweep/1"
        assert {"model", "batch", "torch", "points", "remarks"} <= set(plain)
        assert set(plain["points"][0]) == {
            "budget",
            "saved_bytes",
            "peak_bytes",
            "unfused_peak_bytes",
            "recomputed_flops_share",
            "seconds",
            "kind",
        }

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", "cannot be read as JSON"),
            ("[]", "the schema is 'list'"),
            ('{"schema": "lowtide.trace/1"}', "the schema is 'lowtide.trace/1'"),
            ('{"schema": "lowtide.budget_sweep/1", "model": "x"}', "batch"),
        ],
    )
    def test_a_bad_file_is_named(self, text: str, message: str, tmp_path: Path) -> None:
        path = tmp_path / "bad.json"
        path.write_text(text)
        with pytest.raises(BadRecordError, match=message) as caught:
            read_sweep(path)
        assert str(path) in str(caught.value)


class TestCompiled:
    """The same model compiled by inductor on the host: what it saves and needs is what was read off the graph."""

    @pytest.fixture(autouse=True)
    def fresh(self) -> Iterator[None]:
        torch.compiler.reset()
        yield
        torch.compiler.reset()

    @pytest.mark.slow
    @pytest.mark.parametrize("budget", [1.0, 0.6, 0.05])
    def test_saved_bytes_and_peak(self, budget: float) -> None:
        recipe = Recipe(model="deep-one-tiny", batch="16x96", plan=None, device="cpu")
        point = make_point(trace_recipe(recipe)[0], budget, on_host=True)
        saved_bytes, peak_bytes = measure(recipe, budget)
        assert point.saved_bytes == saved_bytes
        assert peak_bytes <= point.unfused_peak_bytes
        # Beyond the loss, which lives on, only choices of inductor that the model of fusion leaves out. Code of torch 2.11
        # holds about one tensor of the logits' size more under a budget.
        is_older = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
        assert point.peak_bytes == pytest.approx(peak_bytes, rel=0.04 if is_older else 0.002)


def point(budget: float, peak: float, recomputed: float = 0.0) -> BudgetPoint:
    return BudgetPoint(
        budget=budget,
        saved_bytes=0,
        peak_bytes=round(peak * GiB),
        unfused_peak_bytes=0,
        recomputed_flops_share=recomputed,
        seconds=1.0,
    )


def test_a_peak_that_falls_with_the_budget_is_monotone() -> None:
    assert reversals([point(0, 1), point(0.5, 2), point(1, 2)]) == ()
    assert reversals([point(0.5, 2)]) == ()
    assert reversals([]) == ()


def test_pareto_keeps_what_nothing_else_beats() -> None:
    points = [point(0, 6, 1.0), point(0.1, 3, 0.9), point(0.5, 4, 0.4), point(0.6, 5, 0.4), point(1, 8, 0.0)]
    assert [kept.budget for kept in pareto(points)] == [0.1, 0.5, 1]


def test_pareto_against_the_definition() -> None:
    points = [point(i / 20, (i * 7) % 5, ((i * 11) % 6) / 6) for i in range(20)]

    figures = [(one.peak_bytes, one.recomputed_flops_share) for one in points]

    def is_beaten(one: tuple[int, float]) -> bool:
        return any(other != one and other[0] <= one[0] and other[1] <= one[1] for other in figures)

    assert {(kept.peak_bytes, kept.recomputed_flops_share) for kept in pareto(points)} == {
        one for one in figures if not is_beaten(one)
    }


def test_a_smaller_budget_with_a_larger_peak_is_found_and_said() -> None:
    found = reversals([point(0.6, 15.0), point(0.05, 13.5), point(0.1, 13.25), point(0.3, 13.0)])
    assert [reversal.point.budget for reversal in found] == [0.05, 0.1]
    assert found[0].words == (
        "Budget 0.05 has a larger peak, 13.500 GiB, than budget 0.3 with 13.000 GiB: 512.0 MiB more (static)."
    )


def test_equal_peaks_are_no_reversal() -> None:
    assert reversals([point(0.1, 5.0), point(0.5, 5.0)]) == ()
