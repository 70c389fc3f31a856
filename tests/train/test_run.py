"""A run from a recipe: it learns, it is what plain torch would do, and it goes on with the same bits wherever it was stopped."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
import torch

from lowtide.config import override
from lowtide.errors import ConfigError, MissingExtraError, PlanError
from lowtide.lab import training
from lowtide.models import resolve_model
from lowtide.runtime.checkpoints.format import CheckpointReader
from lowtide.train.data import Prefetch, mixed_seed
from lowtide.train.folder import OutputFolder
from lowtide.train.inputs import find_tokenizer, read_inputs
from lowtide.train.model import find_subject
from lowtide.train.stopping import StopRequests
from tests.train.runs import Heard, ask_to_stop, losses, refuse_to_leave, rows, small_recipe, train


def weights(out: Path, step: int) -> dict[str, torch.Tensor]:
    reader = CheckpointReader(out / "checkpoints" / f"step-{step:08d}")
    return {f"{file}.{name}": reader.read(file, name) for file in ("model", "optimizer") for name in reader.names(file)}


def assert_same_weights(one: Path, other: Path, step: int) -> None:
    left, right = weights(one, step), weights(other, step)
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    result = train(small_recipe(folder), folder / "out")
    assert result.is_finished
    return folder / "out"


def test_a_run_has_the_losses_of_a_plain_loop(undisturbed: Path, tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path)
    subject = find_subject(recipe)
    inputs = read_inputs(subject, find_tokenizer(None, recipe.model), lambda _: None)
    source = resolve_model(recipe.model, settings=recipe.model_settings)
    model = training.make_model(subject.recipe, source)
    optimizer = torch.optim.AdamW(model.parameters())
    found = []
    for step in range(8):
        torch.manual_seed(mixed_seed(recipe.seed, step))
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * recipe.scheduler.share(step, 8)
        loss = model(**inputs.batches(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append((step + 1, float(loss.detach())))
    assert losses(undisturbed) == found
    assert found[-1][1] < found[0][1]


def test_the_folder_has_all_that_a_run_leaves(undisturbed: Path) -> None:
    assert OutputFolder(undisturbed).recipe().steps == 8
    assert (undisturbed / "model" / "model.safetensors").is_file()
    (evaluation,) = rows(undisturbed, "evaluation")
    assert evaluation["step"] == 8
    assert 0 < evaluation["loss"] < 6
    step = rows(undisturbed, "step")[-1]
    assert step.keys() >= {"loss", "lr", "grad_norm", "tokens_per_s", "step_s", "device_peak_bytes", "host_peak_bytes"}
    assert 0 < step["device_peak_bytes"] <= 450 * 1024
    assert [row["is_finished"] for row in rows(undisturbed, "end")] == [True]


@pytest.mark.parametrize("budget", ["450KiB", pytest.param("2MiB", marks=pytest.mark.slow)])
def test_a_run_that_was_stopped_goes_on_with_the_same_bits(undisturbed: Path, tmp_path: Path, budget: str) -> None:
    chosen = random.Random(budget).randrange(1, 7)
    recipe = small_recipe(undisturbed.parent)
    stop = StopRequests(30, refuse_to_leave)
    heard = ask_to_stop(stop, chosen)
    first = train(recipe, tmp_path / "out", heard=heard, stop=stop)
    last = heard.statuses[-1]
    assert (last.words, last.saved_step, last.is_saving) == ("ended", chosen, False)
    assert (first.is_finished, first.model, stop.exit_code) == (False, None, 130)
    assert first.step == first.saved_step == chosen
    heard = Heard()
    again = train(override(recipe, [f"device_memory={budget}"]), tmp_path / "out", resume=True, heard=heard)
    assert again.is_finished
    assert f"going on after step {first.step}" in heard.notes
    assert losses(tmp_path / "out") == losses(undisturbed)
    assert [row["loss"] for row in rows(tmp_path / "out", "evaluation")] == [
        row["loss"] for row in rows(undisturbed, "evaluation")
    ]
    assert_same_weights(tmp_path / "out", undisturbed, 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("accumulation=3", "max_grad_norm=0.5"),
        ("schedule=in_backward",),
        ("dtype=bfloat16", "precision=bf16 exact", "schedule=in_backward"),
        ("dtype=bfloat16", "precision=bf16 stochastic", "moments=8bit", "max_grad_norm=1.0"),
        ("dtype=float16", "precision=fp16 exact", "moments=bf16"),
        ("precision=fp32", "moments=bf16", "accumulation=2"),
    ],
    ids=lambda settings: " ".join(settings),
)
def test_every_kind_of_run_goes_on_with_the_same_bits(tmp_path: Path, settings: tuple[str, ...]) -> None:
    recipe = small_recipe(tmp_path, "steps=6", "evaluation.every=2", *settings)
    train(recipe, tmp_path / "whole")
    for step in (2, 3, 5):
        stop = StopRequests(30, refuse_to_leave)
        heard = ask_to_stop(stop, step, signal.SIGTERM)
        train(recipe, tmp_path / "parts", heard=heard, stop=stop, resume=step > 2)
        assert stop.exit_code == 143
    assert train(recipe, tmp_path / "parts", resume=True).is_finished
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert_same_weights(tmp_path / "parts", tmp_path / "whole", 6)


@pytest.mark.gpu
def test_on_a_gpu_a_run_that_was_stopped_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    recipe = small_recipe(
        tmp_path, "device=cuda", "device_memory=1GiB", "deterministic=true", "max_grad_norm=1.0", "checkpoints.every=3"
    )
    train(recipe, tmp_path / "whole")
    stop = StopRequests(30, refuse_to_leave)
    train(recipe, tmp_path / "parts", heard=ask_to_stop(stop, 4), stop=stop)
    assert train(recipe, tmp_path / "parts", resume=True).is_finished
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert_same_weights(tmp_path / "parts", tmp_path / "whole", 8)


@pytest.mark.slow
def test_a_finished_run_is_not_trained_again_but_longer(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, "steps=3", "scheduler.decay=none")
    train(recipe, tmp_path / "out")
    heard = Heard()
    assert train(recipe, tmp_path / "out", resume=True, heard=heard).is_finished
    assert not heard.statuses
    assert train(override(recipe, ["steps=5"]), tmp_path / "out", resume=True).step == 5
    whole = small_recipe(tmp_path, "steps=5", "scheduler.decay=none")
    train(whole, tmp_path / "whole")
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")
    with pytest.raises(ConfigError, match="is saved at step 5, beyond the 4 that are asked for: set steps to 5"):
        train(override(recipe, ["steps=4"]), tmp_path / "out", resume=True)


def test_checkpoints_come_when_they_are_due_and_old_ones_go(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, "checkpoints.every=2", "checkpoints.keep=1", "checkpoints.keep_every=4")
    train(recipe, tmp_path / "out")
    kept = sorted(path.name for path in (tmp_path / "out" / "checkpoints").glob("step-*"))
    assert kept == ["step-00000004", "step-00000008"]
    assert [row["saved_step"] for row in rows(tmp_path / "out", "checkpoint")] == [2, 4, 6, 8]
    by_time = small_recipe(tmp_path, "checkpoints.minutes=0.000001", "steps=3")
    train(by_time, tmp_path / "by_time")
    assert [row["saved_step"] for row in rows(tmp_path / "by_time", "checkpoint")] == [1, 2, 3]


class TestRefused:
    """What is found before anything is written, or before anything is changed."""

    def test_a_second_start_into_the_same_folder(self, undisturbed: Path) -> None:
        recipe = small_recipe(undisturbed.parent)
        before = (undisturbed / "metrics.jsonl").read_bytes()
        command = f"lowtide train {undisturbed} --resume"
        with pytest.raises(ConfigError, match=f"has a run of this recipe already: go on with it by `{command}`"):
            train(recipe, undisturbed)
        with pytest.raises(ConfigError, match=r"has a run of another recipe \(seed is 4 and was 3\) already"):
            train(override(recipe, ["seed=4"]), undisturbed)
        with pytest.raises(ConfigError, match="cannot go on with another recipe: optimizer.name is .*and was"):
            train(override(recipe, ["optimizer.name=sgd", "steps=20"]), undisturbed, resume=True)
        assert (undisturbed / "metrics.jsonl").read_bytes() == before

    def test_nothing_to_resume(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="there is no run in .*none to resume: leave --resume out"):
            train(small_recipe(tmp_path), tmp_path / "none", resume=True)
        with pytest.raises(ConfigError, match="is not empty, and has no run: give another folder with --out"):
            train(small_recipe(tmp_path), tmp_path)

    def test_another_text_than_the_run_began_with(self, tmp_path: Path) -> None:
        recipe = small_recipe(tmp_path, "steps=1")
        train(recipe, tmp_path / "out")
        with (tmp_path / "text.txt").open("a") as file:
            file.write("more\n")
        with pytest.raises(ConfigError, match=r"the data of the run in .* is not what it began with"):
            train(override(recipe, ["steps=2"]), tmp_path / "out", resume=True)

    def test_a_budget_that_nothing_fits(self, tmp_path: Path) -> None:
        recipe = small_recipe(tmp_path, "device_memory=100KiB")
        with pytest.raises(PlanError, match="no plan fits 100.0 KiB"):
            train(recipe, tmp_path / "out")
        # Nothing was saved: the next start needs no --resume, and another recipe is as good.
        assert train(small_recipe(tmp_path, "steps=1"), tmp_path / "out").is_finished

    @pytest.mark.parametrize(
        ("setting", "message"),
        [
            ("data.text=none.txt", "there is no file or folder none.txt"),
            ("batch=2x5000", "'batch'.*32 positions"),
            ("device_memory=null", "an emulated device has no size of its own"),
            ("model=resnet-50", "unknown key 'num_layers'"),
            ("data.tokenizer=hf:/nowhere", "/nowhere has no tokenizer"),
            ("precision=bf16 exact", "precision is 'bf16 exact', which is for weights in bfloat16"),
        ],
    )
    def test_bad_settings(self, tmp_path: Path, setting: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            train(small_recipe(tmp_path, setting), tmp_path / "out")
        assert not (tmp_path / "out").exists() or not (tmp_path / "out" / "recipe.yaml").exists()

    def test_a_text_shorter_than_a_sequence(self, tmp_path: Path) -> None:
        (tmp_path / "short.txt").write_text("twenty characters...", encoding="utf-8")
        with pytest.raises(ConfigError, match="gives 20 tokens, fewer than one sequence of 32.*batch=2x10"):
            train(small_recipe(tmp_path, f"data.text={tmp_path / 'short.txt'}"), tmp_path / "out")

    def test_curves_without_tensorboard(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(MissingExtraError, match=r'pip install "lowtide\[tensorboard\]"'):
            train(small_recipe(tmp_path, "log.tensorboard=true"), tmp_path / "out")


def test_tokens_are_checked_against_the_vocabulary_and_not_against_positions(tmp_path: Path) -> None:
    settings = "model_settings={num_layers: 1, hidden_size: 32, num_heads: 2, context_length: 1024}"
    assert find_subject(small_recipe(tmp_path, settings)).vocab_size == 256


def test_curves_are_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    train(small_recipe(tmp_path, "steps=2", "log.tensorboard=true"), tmp_path / "out")
    (file,) = (tmp_path / "out" / "tensorboard").glob("events.*")
    assert b"evaluation_loss" in file.read_bytes()


def test_a_step_reads_its_own_batches_wherever_the_run_begins(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path)
    inputs = read_inputs(find_subject(recipe), find_tokenizer(None, recipe.model), lambda _: None)
    batches = Prefetch(inputs.batches, 3)
    try:
        assert torch.equal(batches.take()["input_ids"], inputs.batches(3)["input_ids"])
        assert torch.equal(batches.take()["input_ids"], inputs.batches(4)["input_ids"])
    finally:
        batches.close()
