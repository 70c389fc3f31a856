"""Recipes that extend others, and recipes by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowtide.errors import ConfigError, UnknownNameError
from lowtide.lab.recipe_file import FOLDER, find_recipe, known_recipes, read_recipe, resolve_recipe
from lowtide.lab.recipe_parts import Constant, HubDataset, LinearWarmup, TextFiles
from lowtide.planning.budget_plans import StaticPartition


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_settings_replace_those_below_one_by_one(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "model: gpt-tiny\nsteps: 5\nplan: {weights: resident, prefetch_depth: 3}\n")
    path = write(tmp_path, "other.yaml", "extends: base.yaml\nsteps: 7\nplan: {weights: streamed}\n")
    recipe = read_recipe(path)
    assert (recipe.model, recipe.steps) == ("gpt-tiny", 7)
    assert recipe.plan is not None
    assert (recipe.plan.weights, recipe.plan.prefetch_depth) == ("streamed", 3)


@pytest.mark.parametrize("suffix", [".yaml", ".yml", ".json"])
def test_a_file_beside_is_extended_without_its_suffix(tmp_path: Path, suffix: str) -> None:
    write(tmp_path, f"shared/base.v1{suffix}", '{"model": "gpt-tiny", "steps": 5}')
    path = write(tmp_path, "mine.yaml", "extends: shared/base.v1\nseed: 7\n")
    assert (read_recipe(path).steps, read_recipe(path).seed) == (5, 7)


def test_a_file_of_the_name_of_a_recipe_extends_the_package_s(tmp_path: Path) -> None:
    path = write(tmp_path, "gpt_streamed.yaml", "extends: gpt_streamed\nseed: 7\n")
    assert read_recipe(path).model == read_recipe(find_recipe("gpt_streamed")).model
    beside = write(tmp_path, "other.yaml", "extends: gpt_streamed\n")
    assert read_recipe(beside).seed == 7, "a file beside comes before a recipe of the package"


def test_another_kind_begins_anew(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "model: gpt-tiny\nscheduler: {kind: linear-warmup, warmup_steps: 2}\n")
    path = write(tmp_path, "other.yaml", "extends: base.yaml\nscheduler: {kind: constant}\n")
    assert isinstance(read_recipe(tmp_path / "base.yaml").scheduler, LinearWarmup)
    assert isinstance(read_recipe(path).scheduler, Constant)


def test_settings_of_a_built_in_model_go_with_it(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "model: deep-one-tiny\nmodel_settings: {vocab_size: 512, norm: fused}\n")
    other = write(tmp_path, "other.yaml", "extends: base.yaml\nmodel: gpt-tiny\nmodel_settings: {norm: separate}\n")
    own = write(tmp_path, "own.yaml", "extends: base.yaml\nmodel: mymodel:make\n")
    assert read_recipe(other).model_settings == {"vocab_size": 512, "norm": "separate"}
    assert read_recipe(own).model_settings == {}
    # What stands beside it is a mistake, and is not dropped.
    own = write(tmp_path, "own.yaml", "extends: base.yaml\nmodel: mymodel:make\nmodel_settings: {vocab_size: 64}\n")
    assert read_recipe(own).model_settings == {"vocab_size": 64}


def test_another_optimizer_begins_anew(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "model: gpt-tiny\noptimizer: {name: adamw, settings: {lr: 0.1, betas: [0.9, 0.95]}}\n")
    path = write(tmp_path, "other.yaml", "extends: base.yaml\noptimizer: {name: sgd, settings: {momentum: 0.9}}\n")
    assert read_recipe(path).optimizer.settings == {"momentum": 0.9}


def test_a_data_set_of_another_name_keeps_its_other_settings(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "model: gpt-tiny\ndata: {kind: hub-dataset, name: a, column: story}\n")
    data = read_recipe(write(tmp_path, "other.yaml", "extends: base.yaml\ndata: {name: b}\n")).data
    assert data == HubDataset(name="b", column="story")


def test_of_several_the_later_wins(tmp_path: Path) -> None:
    write(tmp_path, "one.yaml", "model: gpt-tiny\nsteps: 5\nseed: 1\n")
    write(tmp_path, "two.yaml", "steps: 6\n")
    recipe = read_recipe(write(tmp_path, "three.yaml", "extends: [one.yaml, two.yaml]\n"))
    assert (recipe.model, recipe.steps, recipe.seed) == ("gpt-tiny", 6, 1)


def test_paths_are_from_the_file_that_extends(tmp_path: Path) -> None:
    write(tmp_path, "a/base.yaml", "extends: ../root.yaml\nsteps: 5\n")
    write(tmp_path, "root.yaml", "model: gpt-tiny\n")
    assert read_recipe(write(tmp_path, "b/other.yaml", "extends: ../a/base.yaml\n")).steps == 5


def test_recipes_of_the_package_are_extended_by_name(tmp_path: Path) -> None:
    for name in ("peak_memory_tiny/control", "peak_memory_tiny/control.yaml"):
        recipe = read_recipe(write(tmp_path, "mine.yaml", f"extends: {name}\nsteps: 5\n"))
        assert (recipe.model, recipe.steps) == ("deep-one-tiny", 5)


def test_null_takes_away(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "model: gpt-tiny\nplan: {weights: resident}\n")
    assert read_recipe(write(tmp_path, "plain.yaml", "extends: base.yaml\nplan: null\n")).plan is None


def test_paths_of_data_are_from_the_folder_of_the_file_that_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = "data: {kind: text-files, path: texts}\n"
    base = write(tmp_path, "shared/base.yaml", f"model: gpt-tiny\n{data}")
    heir = write(tmp_path, "mine/heir.yaml", "extends: ../shared/base.yaml\ndata: {vocab_size: 300}\n")
    other = write(tmp_path, "mine/other.yaml", "extends: ../shared/base.yaml\ndata: {path: ../more}\n")
    whole = write(tmp_path, "mine/whole.yaml", f"extends: ../shared/base.yaml\ndata: {{path: {tmp_path}/a.txt}}\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert read_recipe(base).data == TextFiles(path=tmp_path / "shared/texts")
    assert read_recipe("../shared/base.yaml").data == TextFiles(path=tmp_path / "shared/texts")
    assert read_recipe(heir).data == TextFiles(path=tmp_path / "shared/texts", vocab_size=300)
    assert read_recipe(other).data == TextFiles(path=tmp_path / "more")
    assert read_recipe(whole).data == TextFiles(path=tmp_path / "a.txt")
    assert read_recipe(base, ["data.path=texts"]).data == TextFiles(path=elsewhere / "texts")
    assert read_recipe(base, ["data.path=texts", "data.vocab_size=300"]).data.path == elsewhere / "texts"


class TestSources:
    def test_each_setting_has_the_file_that_set_it_last(self, tmp_path: Path) -> None:
        base = write(tmp_path, "base.yaml", "model: gpt-tiny\nsteps: 5\noptimizer: {settings: {lr: 0.1, eps: 1e-7}}\n")
        path = write(tmp_path, "other.yaml", "extends: base.yaml\nsteps: 6\noptimizer: {settings: {lr: 0.2}}\n")
        resolved = resolve_recipe(path, ["seed=3"])
        assert resolved.recipe == read_recipe(path, ["seed=3"])
        assert resolved.sources == {
            "model": str(base),
            "steps": str(path),
            "optimizer.settings.lr": str(path),
            "optimizer.settings.eps": str(base),
            "seed": "--set",
        }

    def test_what_begins_anew_has_no_older_source(self, tmp_path: Path) -> None:
        write(tmp_path, "base.yaml", "model: gpt-tiny\ndata: {kind: stories, vocab_size: 300, seed: 2}\n")
        path = write(tmp_path, "other.yaml", "extends: base.yaml\ndata: {kind: hub-dataset, name: a}\n")
        assert resolve_recipe(path).sources.keys() == {"model", "data.kind", "data.name"}
        assert "data.vocab_size" in resolve_recipe(tmp_path / "base.yaml", ["data.kind=stories"]).sources
        sources = resolve_recipe(tmp_path / "base.yaml", ["data.kind=random-inputs"]).sources
        assert sources.keys() == {"model", "data.kind"}
        assert sources["data.kind"] == "--set"
        own = write(tmp_path, "own.yaml", "model: gpt-tiny\nplan: {weights: resident, device_memory: 1MiB}\n")
        words = ["plan.kind=static-partition", "plan.share=0.5"]
        assert resolve_recipe(own, words).sources.keys() == {"model", "plan.kind", "plan.share"}
        assert resolve_recipe(own, words).recipe.plan == StaticPartition(share=0.5)
        sources = resolve_recipe(tmp_path / "base.yaml", ["data={kind: stories, seed: 4}"]).sources
        assert sources == {"model": str(tmp_path / "base.yaml"), "data.kind": "--set", "data.seed": "--set"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: other.yaml\n", "extends itself"),
        ("extends: missing.yaml\n", "neither the file"),
        ("extends: 3\n", "must be the path of another recipe"),
        ("- a\n", "must be a mapping"),
        ("model: gpt-tiny\nstep: 3\n", "unknown key 'step'; did you mean 'steps'"),
    ],
)
def test_what_is_wrong_is_said_with_the_file(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, "other.yaml", text)
    with pytest.raises(ConfigError) as caught:
        read_recipe(path)
    assert message in str(caught.value)
    assert "other.yaml" in str(caught.value) or "missing.yaml" in str(caught.value)


def test_names_leave_out_what_is_only_extended(tmp_path: Path) -> None:
    for name in ("a/one.yaml", "a/_base.yaml", "b/two.json", "three.yml", "notes.txt"):
        write(tmp_path, name, "")
    assert [name for name, path in known_recipes([tmp_path]).items() if path.is_relative_to(tmp_path)] == [
        *("a/one", "b/two", "three")
    ]


def test_of_two_files_with_one_name_the_yaml_counts(tmp_path: Path) -> None:
    for name in ("one.json", "one.yaml", "one.yml"):
        write(tmp_path, name, "")
    assert known_recipes([tmp_path])["one"] == tmp_path / "one.yaml"


def test_a_name_may_be_its_last_part_where_that_is_unique(tmp_path: Path) -> None:
    for name in ("a/one.yaml", "a/both.yaml", "b/both.yaml"):
        write(tmp_path, name, "")
    known = known_recipes([tmp_path])
    assert find_recipe("one", known) == tmp_path / "a/one.yaml"
    assert find_recipe("b/both", known) == tmp_path / "b/both.yaml"
    assert find_recipe(str(tmp_path / "a/both.yaml"), known) == tmp_path / "a/both.yaml"
    with pytest.raises(ConfigError, match="end of several recipes: a/both, b/both"):
        find_recipe("both", known)


def test_an_unknown_name_gets_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'control'"):
        find_recipe("contrl", {"a/control": tmp_path / "a/control.yaml"})


PUBLISHED = {
    "control": 21.165,
    "bfloat16": 12.418,
    "checkpoint": 12.529,
    "compile": 19.712,
    "fused": 21.164,
    "fused_checkpoint": 7.425,
    "bf16_fused_checkpoint": 3.975,
    "memory_budget_05": 13.561,
    "memory_budget_60": 15.636,
    "fused_memory_budget_05": 13.562,
    "bf16_budget_60": 6.709,
}


@pytest.mark.parametrize("name", known_recipes())
def test_every_recipe_that_comes_with_the_package_is_right(name: str) -> None:
    recipe = read_recipe(find_recipe(name))
    if name.startswith("peak_memory"):
        assert recipe.about
        tiny = name.startswith("peak_memory_tiny/")
        assert (recipe.model, recipe.device) == (("deep-one-tiny", "cpu") if tiny else ("deep-one-1.6b", "cuda"))
        assert (recipe.published is not None) == (not tiny and name.rpartition("/")[2] in PUBLISHED)


def test_the_published_table_is_all_there() -> None:
    found = {name: read_recipe(FOLDER / f"peak_memory/{name}.yaml").published for name in PUBLISHED}
    assert {name: row.peak_gib for name, row in found.items() if row is not None} == PUBLISHED


def test_every_recipe_has_a_small_one() -> None:
    names = known_recipes()
    large = {name.rpartition("/")[2] for name in names if name.startswith("peak_memory/")}
    small = {name.rpartition("/")[2] for name in names if name.startswith("peak_memory_tiny/")}
    assert large == small
