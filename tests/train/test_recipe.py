"""Recipes of runs: read strictly, completed on the command line, and documented key by key."""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from lowtide import config
from lowtide.errors import ConfigError, UnknownNameError
from lowtide.lab.recipe_file import known_recipes
from lowtide.lab.recipe_parts import OptimizerRecipe
from lowtide.train.recipe import (
    HARMLESS,
    CheckpointRecipe,
    DataRecipe,
    EvaluationRecipe,
    FaultRecipe,
    LogRecipe,
    SchedulerRecipe,
    TrainRecipe,
    differing_keys,
    harmful_keys,
    known_train_recipes,
    read_train_recipe,
)

PARTS = {
    "data": DataRecipe,
    "optimizer": OptimizerRecipe,
    "scheduler": SchedulerRecipe,
    "evaluation": EvaluationRecipe,
    "checkpoints": CheckpointRecipe,
    "log": LogRecipe,
    "faults": FaultRecipe,
}
SMALL = TrainRecipe(model="gpt-tiny", data=DataRecipe(text=Path("text.txt")))


def test_the_shipped_recipes_need_what_only_the_user_knows() -> None:
    assert sorted(known_train_recipes()) == ["finetune", "gpt_tiny"]
    with pytest.raises(ConfigError, match="missing key 'model', which has no default: give --set model=..."):
        read_train_recipe("finetune")
    with pytest.raises(
        ConfigError, match=r"data has neither text nor tokens: give one of them, such as data.text=FILE"
    ):
        read_train_recipe("gpt_tiny")
    recipe = read_train_recipe("finetune", ["model=hf:gone", "data.text=notes.txt", "device_memory=24GiB"])
    assert (recipe.model, recipe.data.text, recipe.device_memory) == ("hf:gone", Path.cwd() / "notes.txt", "24GiB")
    assert (recipe.precision, recipe.dtype, recipe.optimizer.settings["lr"]) == ("bf16 exact", "bfloat16", 2e-5)
    assert not set(known_train_recipes()) & set(known_recipes()), "the lab lists its own only"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["data.txt=a"], "unknown key 'data.txt'; did you mean 'data.text'?"),
        (["text=a"], "unknown key 'text'; did you mean 'data.text'?"),
        (["lr=1"], "unknown key 'lr'"),
        (["steps=0"], "steps is 0; give 1 or more"),
        (["epochs=0"], "epochs is 0.0; give a number above 0"),
        (["data.tokens=x.npy"], "data has both text and tokens"),
        (["data.held_out_share=1.0"], "held_out_share is 1.0"),
        (["data.held_out=x.txt", "data.held_out_share=0.1"], "held_out is x.txt and held_out_share is 0.1: give one"),
        (["data.tokenizer=words"], "tokenizer is 'words'; give bytes, or hf:FOLDER"),
        (["scheduler.floor=2"], "floor is 2.0; give a number from 0 to 1"),
        (["scheduler.decay=slow"], "must be one of 'cosine', 'linear', 'none'"),
        (["checkpoints.minutes=0"], "minutes is 0.0; give a number above 0, or null for none"),
        (["checkpoints.keep=0"], "keep is 0; give 1 or more"),
        (["faults.retries=-1"], "retries is -1; give 0 or more"),
        (["max_grad_norm=0"], "max_grad_norm is 0.0"),
        (["device_memory=24 apples"], "device_memory"),
        (
            ["schedule=in_backward", "accumulation=2"],
            "accumulation is 2, and the schedule in_backward allows one backward",
        ),
        (["schedule=in_backward", "max_grad_norm=1"], "max_grad_norm is 1.0, which needs all gradients"),
        (["schedule=in_backward", "dtype=fp16", "precision=fp16 exact"], "whose loss is scaled, and the schedule"),
        (["moments=8bit"], "moments is '8bit', which is for updates through Lowtide's own kernels"),
        (["dtype=float32", "precision=bf16 exact"], "which is for weights in bfloat16, and dtype is float32"),
        (["dtype=decimal"], "dtype"),
    ],
)
def test_what_does_not_fit_is_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        config.override(SMALL, settings)


def test_a_name_that_there_is_not() -> None:
    with pytest.raises(UnknownNameError, match="there is no recipe of a run named 'finetun'; did you mean 'finetune'?"):
        read_train_recipe("finetun")
    with pytest.raises(ConfigError, match="cannot read the recipe file none.yaml"):
        read_train_recipe("none.yaml")


def test_a_file_extends_a_shipped_one_and_names_paths_from_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "text.txt").touch()
    (tmp_path / "mine.yaml").write_text("extends: gpt_tiny\ndata: {text: text.txt}\nsteps: 7\n")
    recipe = read_train_recipe(str(tmp_path / "mine.yaml"), ["seed=2"])
    assert (recipe.data.text, recipe.data.held_out_share) == (tmp_path / "text.txt", 0.05)
    assert (recipe.steps, recipe.seed, recipe.batch) == (7, 2, "8x128")


def test_paths_of_models_are_whole_so_that_a_run_goes_on_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    recipe = read_train_recipe("finetune", ["model=hf:model", "data.text=a.txt", "data.tokenizer=hf:model"])
    assert (recipe.model, recipe.data.tokenizer) == (f"hf:{tmp_path}/model", f"hf:{tmp_path}/model")


def test_a_recipe_is_written_whole_and_read_back(tmp_path: Path) -> None:
    config.write_config(SMALL, tmp_path / "recipe.yaml")
    assert config.read_config(TrainRecipe, tmp_path / "recipe.yaml") == SMALL


class TestScheduler:
    def test_a_cosine_falls_to_its_floor(self) -> None:
        scheduler = SchedulerRecipe(decay="cosine", warmup_steps=4, floor=0.1)
        shares = [scheduler.share(step, 104) for step in range(104)]
        assert shares[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
        assert shares[54] == pytest.approx(0.55)
        assert shares[29] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
        assert shares[-1] == pytest.approx(0.1, abs=1e-3)
        assert all(one >= next_one for one, next_one in pairwise(shares[3:]))

    def test_a_line_and_none(self) -> None:
        line = SchedulerRecipe(decay="linear")
        assert [line.share(step, 4) for step in range(4)] == [1.0, 0.75, 0.5, 0.25]
        assert [SchedulerRecipe(decay="none", warmup_steps=2).share(step, 4) for step in range(4)] == [
            0.5,
            1.0,
            1.0,
            1.0,
        ]
        assert SchedulerRecipe(warmup_steps=9).share(3, 4) == 4 / 9, "a rise that is longer than the run"


def test_some_keys_may_change_when_a_run_goes_on() -> None:
    other = config.override(
        SMALL, ["steps=9", "checkpoints.keep=5", "device_memory=3GiB", "seed=4", "data.shuffle=false"]
    )
    differing = differing_keys(SMALL, other)
    assert differing == {
        "data.shuffle": (True, False),
        "steps": (None, 9),
        "device_memory": (None, "3GiB"),
        "seed": (0, 4),
        "checkpoints.keep": (2, 5),
    }
    assert harmful_keys(list(differing)) == ["data.shuffle", "seed"]
    assert {field.name for field in fields(TrainRecipe)} >= HARMLESS


def test_a_change_within_a_mapping_is_a_change() -> None:
    small = config.override(SMALL, ["optimizer.settings.lr=1"])
    other = config.override(SMALL, ["optimizer.settings.lr=2"])
    assert differing_keys(small, other) == {"optimizer.settings.lr": (1, 2)}
    assert harmful_keys(list(differing_keys(SMALL, other))) == ["optimizer.settings.lr"]


# The page of reference


def documented(repo_root: Path) -> dict[str, str]:
    """The default of each key on the page, as it stands there."""
    text = (repo_root / "docs" / "train.md").read_text(encoding="utf-8")
    return {
        key: default.strip() for key, default in re.findall(r"^\| `([\w.]+)` \|.*\| ([^|]*) \|$", text, re.MULTILINE)
    }


def defaults() -> dict[str, Any]:
    plain = config.to_plain(SMALL)
    found: dict[str, Any] = {}
    for key, value in plain.items():
        if key in PARTS:
            assert isinstance(value, dict)
            found |= {f"{key}.{inner}": value[inner] for inner in value}
        else:
            found[key] = value
    return found


def test_the_page_has_every_key_with_its_default(repo_root: Path) -> None:
    page = documented(repo_root)
    assert list(page) == list(defaults())
    for key, default in defaults().items():
        if key in ("model", "data.text"):
            continue  # which SMALL had to give
        written = page[key].strip("`")
        value = None if written == "none" else "" if written == "empty" else yaml.safe_load(written)
        assert value == default, key


def test_every_key_has_an_explanation() -> None:
    for kind in (TrainRecipe, *PARTS.values()):
        lines = Path(inspect.getsourcefile(kind) or "").read_text(encoding="utf-8")
        body = lines[lines.index(f"class {kind.__name__}:") :]
        for field in fields(kind):
            declared = re.search(rf"^    {field.name}: .*(?:\n        .*|\n    \))*\n    (\S.*)", body, re.MULTILINE)
            assert declared, (kind, field.name)
            if kind is not OptimizerRecipe:
                assert declared[1].startswith('"""'), (kind, field.name)
