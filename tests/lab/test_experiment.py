"""One run of a recipe: the same numbers as a plain loop, and memory that is what its parts say."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import nn

from lowtide import config
from lowtide.errors import ConfigError
from lowtide.lab import experiment, training
from lowtide.lab.experiment import run_experiment, thinned
from lowtide.lab.progress import Progress
from lowtide.lab.recipe import CompileRecipe, Recipe
from lowtide.lab.recipe_parts import EvaluationRecipe, OptimizerRecipe, PlanRecipe, RiseFromZero, Stories, TextFiles
from lowtide.lab.record import Outcome, RunRecord
from lowtide.lab.training import make_model
from lowtide.models import ModelSource, resolve_model
from lowtide.planning.budget_plans import StaticPartition, WarmUp
from lowtide.planning.plan import Schedule, Site, Weights
from lowtide.units import parse_bytes

RESIDENT = PlanRecipe(weights=Weights.RESIDENT, update=Site.DEVICE)
SMALL = Recipe(
    model="deep-one-tiny",
    batch="2x32",
    steps=3,
    device="cpu",
    optimizer=OptimizerRecipe(name="deep-one-adafactor", settings={"lr": 0.01}),
    plan=RESIDENT,
)


def run(recipe: Recipe, seen: list[Progress] | None = None) -> RunRecord:
    collected = [] if seen is None else seen
    return run_experiment(recipe, name="a/small", on_progress=collected.append)


def test_a_plain_run_is_the_plain_loop() -> None:
    recipe = replace(SMALL, plan=None, scheduler=RiseFromZero(rise_steps=10))
    record = run(recipe)
    source = resolve_model(recipe.model)
    model = make_model(recipe, source)
    ids = source.make_batch("2x32")["input_ids"]
    from lowtide.optim import Adafactor

    optimizer = Adafactor(model.parameters(), lr=0.01)
    losses = []
    for step in range(3):
        optimizer.param_groups[0]["lr"] = 0.01 * step / 10
        batch = ids.roll(step, dims=-1)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert record.losses == tuple(losses)
    assert record.outcome is Outcome.FINISHED
    assert record.parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("plan", "smaller"),
    [
        (RESIDENT, None),
        (replace(RESIDENT, schedule=Schedule.IN_BACKWARD, chunk_memory="128KiB"), "update"),
        (replace(RESIDENT, activations="recompute"), "forward"),
        (PlanRecipe(device_memory="16MiB"), "update"),
    ],
    ids=["resident", "in backward", "recompute", "streamed"],
)
def test_a_plan_changes_memory_and_no_loss(plan: PlanRecipe, smaller: str | None) -> None:
    plain, managed = run(replace(SMALL, plan=None)), run(replace(SMALL, plan=plan))
    assert plain.losses == managed.losses
    assert plain.memory is not None
    assert managed.memory is not None
    assert managed.session is not None
    if smaller is None:
        # Chunks are padded to 512 bytes for each parameter; nothing else may differ.
        assert managed.memory.peak_bytes == pytest.approx(plain.memory.peak_bytes, rel=0.002)
        assert managed.memory.by_phase.keys() == plain.memory.by_phase.keys() == {"forward", "backward", "update"}
    else:
        assert managed.memory.by_phase[smaller] < 0.8 * plain.memory.by_phase[smaller]


@pytest.mark.parametrize(
    "plan", [StaticPartition(share=0.5, device_memory="9MiB"), WarmUp(device_memory="9MiB")], ids=["static", "warm-up"]
)
def test_a_plan_that_makes_itself_changes_no_loss(plan: StaticPartition | WarmUp) -> None:
    plain, managed = run(replace(SMALL, plan=None)), run(replace(SMALL, plan=plan))
    assert plain.losses == managed.losses
    assert plain.memory is not None
    assert managed.memory is not None
    assert 0 < managed.memory.peak_bytes < plain.memory.peak_bytes
    assert managed.memory.peak_bytes <= parse_bytes(str(plan.device_memory))
    assert managed.predicted is None
    assert len(managed.memory.timeline) > 10
    said = [
        remark for remark in managed.remarks if remark.startswith("peaks are without the first step, which the warm")
    ]
    assert len(said) == isinstance(plan, WarmUp)
    # It goes through a record's file as any other.
    assert config.from_plain(Recipe, managed.recipe).plan == plan


def test_the_cache_and_defragmentation_are_the_recipe_s() -> None:
    """Staging of gradients for the host goes through the cache; a defragmentation empties it."""
    plan = PlanRecipe(device_memory="16MiB", schedule=Schedule.IN_BACKWARD)
    found = {}
    for name, settings in {"default": {}, "none": {"cached_buffers": 0}, "tidy": {"defragment_every": 1}}.items():
        record = run(replace(SMALL, plan=replace(plan, **settings)))
        assert record.session is not None
        found[name] = record.losses, record.session["cache"]
    assert len({losses for losses, _ in found.values()}) == 1
    assert found["none"][1]["hits"] == 0 < found["tidy"][1]["hits"] < found["default"][1]["hits"]


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_the_timeline_has_the_runs_peak(activations: str) -> None:
    stories = Stories(num_stories=60, num_validation=5, vocab_size=300)
    evaluation = EvaluationRecipe(samples=5, batch=1)
    recipe = replace(SMALL, data=stories, model_settings={"vocab_size": 300}, evaluation=evaluation)
    record = run(replace(recipe, batch="8x64", plan=replace(RESIDENT, activations=activations)))
    assert record.memory is not None
    assert max(num_bytes for _, num_bytes in record.memory.timeline) == record.memory.peak_bytes
    phases = [phase for phase, _ in record.memory.timeline]
    assert phases == sorted(phases, key=["forward", "backward", "update"].index)


def test_a_streamed_run_has_a_timeline_of_all_its_groups() -> None:
    plain, streamed = run(replace(SMALL, plan=None)), run(replace(SMALL, plan=PlanRecipe(device_memory="16MiB")))
    assert plain.memory is not None
    assert streamed.memory is not None
    assert len(streamed.memory.timeline) == len(plain.memory.timeline) > 10


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler reads it
@pytest.mark.parametrize("scope", ["model", "blocks"])
def test_a_compiled_run_has_a_timeline_of_its_phases(scope: Literal["model", "blocks"]) -> None:
    record = run(replace(SMALL, compile=CompileRecipe(scope=scope, backend="aot_eager_decomp_partition")))
    assert record.memory is not None
    assert dict(record.memory.timeline) == record.memory.by_phase


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, TypeError])
def test_what_goes_wrong_after_the_last_step_costs_the_timeline_alone(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def runs_out(modules: object, watch: object) -> None:
        raise kind("no room to look")

    whole = run(SMALL)
    monkeypatch.setattr(experiment, "watched", runs_out)
    record = run(SMALL)
    assert record.outcome is Outcome.FINISHED
    assert whole.memory is not None
    assert record.memory is not None
    assert record.memory.by_phase == whole.memory.by_phase
    assert record.memory.timeline == ()
    assert record.remarks == (
        f"no timeline: one more step, to be watched, ended with {kind.__name__}: no room to look",
    )


def test_statistics_are_of_the_run_and_not_of_the_step_that_was_watched() -> None:
    record = run(replace(SMALL, plan=PlanRecipe(device_memory="16MiB")))
    assert record.session is not None
    assert record.session["num_steps"] == SMALL.steps


def test_offloading_nothing_is_remarked() -> None:
    assert "nothing was offloaded" in run(replace(SMALL, plan=replace(RESIDENT, activations="offload"))).remarks[0]


def test_all_types_begin_at_the_same_weights() -> None:
    source = resolve_model("deep-one-tiny")
    single = make_model(SMALL, source)
    half = make_model(replace(SMALL, dtype="bfloat16"), source)
    for one, other in zip(single.parameters(), half.parameters(), strict=True):
        assert torch.equal(one.bfloat16(), other)


def test_evaluation_and_progress() -> None:
    stories = Stories(num_stories=60, num_validation=5, vocab_size=300)
    recipe = replace(
        SMALL,
        data=stories,
        model_settings={"vocab_size": 300},
        evaluation=EvaluationRecipe(samples=5, batch=2),
        plan=None,
    )
    seen: list[Progress] = []
    record = run(recipe, seen)
    assert record.evaluation_loss is not None
    assert 0.5 * math.log(300) < record.evaluation_loss < 2 * math.log(300)
    steps = [progress for progress in seen if progress.words == "training"]
    assert [progress.step for progress in steps] == [1, 2, 3]
    assert all(progress.peak_bytes and progress.samples_per_s and progress.loss for progress in steps)
    assert sum(progress.words.startswith("evaluating") for progress in seen) == 3
    assert record.memory is not None
    assert "evaluation" in record.memory.by_phase
    assert record.speed is not None
    assert record.speed.samples_per_step == 2
    assert record.speed.evaluation_s is not None
    assert record.speed.evaluation_s > 0
    assert record.remarks == ()
    without = run(replace(recipe, evaluation=None))
    assert without.speed is not None
    assert without.speed.evaluation_s is None


EVALUATED = replace(
    SMALL,
    data=Stories(num_stories=60, num_validation=5, vocab_size=300),
    model_settings={"vocab_size": 300},
    evaluation=EvaluationRecipe(samples=5, batch=2),
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler reads it
@pytest.mark.parametrize(
    "changes",
    [
        {"plan": None},
        {"plan": PlanRecipe(device_memory="16MiB")},
        {"plan": replace(RESIDENT, schedule=Schedule.IN_BACKWARD), "dtype": "bfloat16", "precision": "bf16 stochastic"},
        {"plan": None, "compile": CompileRecipe(backend="aot_eager_decomp_partition")},
    ],
    ids=["plain", "streamed", "stochastic in backward", "compiled"],
)
def test_evaluations_within_a_run_are_those_of_shorter_runs_and_change_nothing(changes: dict[str, Any]) -> None:
    recipe = replace(EVALUATED, steps=4, **changes)
    seen: list[Progress] = []
    record = run(replace(recipe, evaluation=EvaluationRecipe(samples=5, batch=2, after=(1, 3))), seen)
    shorter = {steps: run(replace(recipe, steps=steps)) for steps in (1, 3, 4)}
    assert record.evaluations == tuple((step, shorter[step].evaluation_loss) for step in (1, 3))
    assert len({loss for _, loss in record.evaluations}) == 2
    told = [(each.step, each.evaluation_loss) for each in seen if each.evaluation_loss is not None]
    assert tuple(told) == record.evaluations
    whole = shorter[4]
    assert (record.losses, record.evaluation_loss) == (whole.losses, whole.evaluation_loss)
    assert whole.evaluations == ()
    assert record.memory is not None
    assert whole.memory is not None
    assert record.memory.by_phase.keys() == whole.memory.by_phase.keys()
    if changes["plan"] is None:  # a session's forward depends on when the host's updates are over, in any run
        assert record.memory.by_phase == whole.memory.by_phase
    assert [
        (progress.words, progress.step) for progress in seen if progress.words.startswith(("training", "evaluating"))
    ] == [
        ("training", 1),
        *((f"evaluating after step 1, batch {number} of 3", 1) for number in (1, 2, 3)),
        ("training", 2),
        ("training", 3),
        *((f"evaluating after step 3, batch {number} of 3", 3) for number in (1, 2, 3)),
        ("training", 4),
        *((f"evaluating, batch {number} of 3", 4) for number in (1, 2, 3)),
    ]


def test_a_model_that_draws_while_it_is_evaluated_is_trained_on_the_same_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_dropout_that_is_never_off(recipe: Recipe, source: ModelSource) -> nn.Module:
        model = make_model(recipe, source)
        embedding = next(module for module in model.modules() if isinstance(module, nn.Embedding))
        embedding.register_forward_hook(lambda _, inputs, output: nn.functional.dropout(output, 0.5))
        return model

    monkeypatch.setattr(training, "make_model", with_dropout_that_is_never_off)
    recipe = replace(EVALUATED, plan=None)
    within = run(replace(recipe, evaluation=EvaluationRecipe(samples=5, batch=2, after=(1,))))
    assert within.losses == run(recipe).losses


def test_evaluations_within_a_run_are_in_no_time_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0

    def tick() -> float:
        nonlocal now_s
        now_s += 1.0
        return now_s

    def told(progress: Progress) -> None:
        nonlocal now_s
        now_s += 1000.0 if progress.words.startswith("evaluating after") else 10.0

    monkeypatch.setattr(experiment, "time", SimpleNamespace(perf_counter=tick))
    evaluation = EvaluationRecipe(samples=5, batch=2, after=(1, 2))
    record = run_experiment(replace(EVALUATED, evaluation=evaluation), name="a/small", on_progress=told)
    assert record.speed is not None
    assert record.speed.step_s == (1.0, 1.0, 1.0)
    assert record.speed.evaluation_s == 31.0  # three batches are told


def test_an_evaluation_on_fewer_samples_than_asked_for_is_remarked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = "\n\n".join(f"sample number {number} of ten" for number in range(10))
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    data = TextFiles(path=tmp_path / "text.txt", vocab_size=270, validation_share=0.3)
    recipe = replace(SMALL, steps=1, data=data, model_settings={"vocab_size": 300}, plan=None)
    fewer = run(replace(recipe, evaluation=EvaluationRecipe(samples=4)))
    said = "evaluated on 3 samples, all that the data has for it: evaluation.samples asks for 4"
    assert fewer.remarks == (said,)
    all_of_them = run(replace(recipe, evaluation=EvaluationRecipe(samples=3)))
    assert all_of_them.remarks == ()
    assert all_of_them.evaluation_loss == fewer.evaluation_loss


def test_the_same_recipe_gives_the_same_losses() -> None:
    recipe = replace(SMALL, data=Stories(num_stories=60, num_validation=0, vocab_size=300))
    recipe = replace(recipe, model_settings={"vocab_size": 300})
    assert run(recipe).losses == run(recipe).losses
    assert run(recipe).losses != run(replace(recipe, seed=1)).losses


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler reads it
def test_compiled_blocks_are_close_to_plain_ones() -> None:
    compiled = replace(SMALL, compile=CompileRecipe(scope="blocks", backend="aot_eager_decomp_partition"))
    assert run(compiled).losses == pytest.approx(run(SMALL).losses, rel=1e-5)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (replace(SMALL, evaluation=EvaluationRecipe()), "random inputs have nothing to evaluate on"),
        (
            Recipe(model="resnet-50", device="cpu", data=Stories(num_stories=60, vocab_size=300), batch="2x3x64x64"),
            "pixel_values",
        ),
        (replace(SMALL, model_settings={"nrom": "fused"}), "did you mean 'norm'"),
        (replace(SMALL, data=Stories(num_stories=60, vocab_size=600)), "vocab"),
    ],
)
def test_what_does_not_fit_is_said(recipe: Recipe, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run(recipe)
    assert message in str(caught.value)


def test_thinned_timelines_keep_their_largest() -> None:
    points = [("forward", value) for value in range(100)] + [("backward", value) for value in range(100, 0, -1)]
    kept = thinned(points, 10)
    assert len(kept) <= 12
    assert max(value for _, value in kept) == 100
    assert [phase for phase, _ in kept] == sorted((phase for phase, _ in kept), reverse=True)


def test_a_run_that_diverges_is_seen() -> None:
    recipe = replace(
        SMALL, optimizer=OptimizerRecipe(name="sgd", settings={"lr": 1e30}), model_settings={"loss": "chunked"}
    )
    assert not math.isfinite(run(recipe).losses[-1])


def test_buffers_keep_the_type_that_the_model_gives_them() -> None:
    source = resolve_model("llama-tiny")
    made = make_model(replace(SMALL, model="llama-tiny", dtype="bfloat16"), source)
    expected = source.build(torch.bfloat16)
    assert [tensor.dtype for tensor in made.buffers()] == [tensor.dtype for tensor in expected.buffers()]
    assert {tensor.dtype for tensor in made.parameters()} == {torch.bfloat16}
