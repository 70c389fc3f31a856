"""Recipes by name, pattern and path, and what each does differently."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowtide import config, plain_text
from lowtide.errors import ConfigError, UnknownNameError
from lowtide.lab.catalogue import (
    annotated_yaml,
    choose_recipes,
    matching_recipes,
    recipe_differences,
    source_name,
)
from lowtide.lab.recipe_file import FOLDER, find_recipe, known_recipes, read_recipe, resolve_recipe

FILES = {
    "_base.yaml": "model: gpt-tiny\nsteps: 4\noptimizer: {name: sgd, settings: {lr: 0.1, momentum: 0.9}}\n",
    "study/control.yaml": "extends: ../_base.yaml\nabout: nothing changed\n",
    "study/half.yaml": "extends: control.yaml\ndtype: bfloat16\n",
    "study/half_fused.yaml": "extends: half.yaml\nplan: {schedule: in_backward, weights: {'*': streamed, head: resident}}\n",
    "study/many.yaml": (
        "extends: control.yaml\ndata: {kind: stories, num_stories: 50}\nscheduler: {kind: rise-from-zero, rise_steps: 3}\n"
        "compile: {}\nplan: null\noptimizer: {settings: {momentum: null, lr: 0.2}}\n"
    ),
    "_small.yaml": "model: llama-tiny\nsteps: 2\n",
    "study_small/half_fused.json": '{"extends": ["../study/half_fused.yaml", "../_small.yaml"], "batch": "1x8"}',
    "other/control.yml": "model: gpt-tiny\nsteps: 3\n",
    "_settings.yaml": "steps: 7\n",
    "on_settings.yaml": "extends: _settings.yaml\nmodel: gpt-tiny\nseed: 1\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "recipes" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path / "recipes"


@pytest.fixture
def known(folder: Path) -> dict[str, Path]:
    return {name: path for name, path in known_recipes([folder]).items() if path.is_relative_to(folder)}


def test_all_folders_are_known_and_shared_files_are_not(folder: Path, known: dict[str, Path]) -> None:
    assert list(known) == [
        "on_settings",
        "other/control",
        "study/control",
        "study/half",
        "study/half_fused",
        "study/many",
        "study_small/half_fused",
    ]
    assert known["other/control"] == folder / "other" / "control.yml"
    everything = known_recipes([folder])
    assert set(known_recipes()) | set(known) == set(everything)
    assert everything["peak_memory/control"].is_relative_to(FOLDER)


def test_a_later_folder_wins(tmp_path: Path) -> None:
    own = tmp_path / "peak_memory" / "control.yaml"
    own.parent.mkdir()
    own.write_text("model: gpt-tiny\n", encoding="utf-8")
    assert known_recipes([tmp_path])["peak_memory/control"] == own


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder of recipes .*none"):
        known_recipes([tmp_path / "none"])


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["study/half"], ["study/half"]),
        (["half"], ["study/half"]),
        (["study/*"], ["study/control", "study/half", "study/half_fused", "study/many"]),
        (["*_fused"], ["study/half_fused", "study_small/half_fused"]),
        (["half*"], ["study/half", "study/half_fused", "study_small/half_fused"]),
        (["man?", "study/[h]alf", "many"], ["study/many", "study/half"]),
    ],
)
def test_words_choose_in_their_order_and_each_once(known: dict[str, Path], words: list[str], names: list[str]) -> None:
    chosen = choose_recipes(words, known)
    assert list(chosen) == names
    assert all(known[name] == path for name, path in chosen.items())


def test_a_path_has_the_name_that_it_is_known_by(folder: Path, known: dict[str, Path], tmp_path: Path) -> None:
    elsewhere = tmp_path / "my.own.yaml"
    elsewhere.write_text("model: gpt-tiny\n", encoding="utf-8")
    chosen = choose_recipes([str(folder / "study" / ".." / "study" / "half.yaml"), str(elsewhere), "half"], known)
    assert list(chosen) == ["study/half", "my.own"]


def test_a_file_that_is_not_there_is_said(known: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="there is no recipe file half.yaml in"):
        choose_recipes(["half.yaml"], known)


@pytest.mark.parametrize("word", ["stdy/half", "study/haIf", "halv"])
def test_unknown_names_have_a_nearest_one(known: dict[str, Path], word: str) -> None:
    with pytest.raises(UnknownNameError, match=f"there is no recipe named '{word}'"):
        choose_recipes(["study/control", word], known)
    if word == "stdy/half":
        with pytest.raises(UnknownNameError, match="did you mean 'study/half'"):
            choose_recipes([word], known)


def test_an_end_of_several_and_two_files_of_one_name(known: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'control' is the end of several recipes: other/control, study/control"):
        choose_recipes(["control"], known)
    paths = [tmp_path / "a" / "x.yaml", tmp_path / "b" / "x.yaml"]
    for path in paths:
        path.parent.mkdir()
        path.write_text("model: gpt-tiny\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="would both be recorded as 'x'"):
        choose_recipes([str(path) for path in paths], known)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("study/control", []),
        ("study/half", ["dtype=bfloat16"]),
        (
            "study/half_fused",
            ["dtype=bfloat16", 'plan.weights={"*": "streamed", "head": "resident"}', "plan.schedule=in_backward"],
        ),
        (
            "study/many",
            [
                "data=stories",
                "data.num_stories=50",
                "optimizer.settings.lr=0.2",
                "optimizer.settings.momentum=null",
                "scheduler=rise-from-zero",
                "scheduler.rise_steps=3",
                "compile.scope=model",
                "plan=null",
            ],
        ),
        # Against both ends of what it extends together: what makes it small is no difference.
        (
            "study_small/half_fused",
            [
                "batch=1x8",
                "dtype=bfloat16",
                'plan.weights={"*": "streamed", "head": "resident"}',
                "plan.schedule=in_backward",
            ],
        ),
        ("other/control", ["steps=3"]),
        ("on_settings", ["steps=7", "seed=1"]),
    ],
)
def test_differences(known: dict[str, Path], name: str, expected: list[str]) -> None:
    assert list(recipe_differences(known[name], read_recipe(known[name]))) == expected


def test_a_plan_where_there_was_none_says_where_the_weights_are(tmp_path: Path) -> None:
    (tmp_path / "plain.yaml").write_text("model: gpt-tiny\nplan: null\n", encoding="utf-8")
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: plain.yaml\nplan: {weights: streamed, device_memory: 1MiB}\n", encoding="utf-8")
    assert recipe_differences(mine, read_recipe(mine)) == ("plan.weights=streamed", "plan.device_memory=1MiB")


def test_a_plan_of_another_kind_says_which_and_what_is_not_its_default(tmp_path: Path) -> None:
    (tmp_path / "plain.yaml").write_text("model: gpt-tiny\nplan: {weights: resident}\n", encoding="utf-8")
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "extends: plain\nplan: {kind: static-partition, share: 0.5, device_memory: 1MiB}\n", encoding="utf-8"
    )
    found = recipe_differences(mine, read_recipe(mine))
    assert found == ("plan=static-partition", "plan.share=0.5", "plan.device_memory=1MiB")


def test_every_recipe_of_the_package_can_be_described() -> None:
    names = known_recipes()
    assert {"peak_memory/control", "peak_memory/streamed", "check/gpt_streamed"} <= set(names)
    for path in names.values():
        recipe_differences(path, read_recipe(path))
    control = names["peak_memory/control"]
    assert recipe_differences(control, read_recipe(control)) == ()


def test_differences_from_a_recipe_of_the_package_and_from_one_with_texts(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: peak_memory_tiny/control\nsteps: 7\n", encoding="utf-8")
    assert recipe_differences(mine, read_recipe(mine)) == ("steps=7",)
    (tmp_path / "texts.yaml").write_text("model: gpt-tiny\ndata: {kind: text-files, path: a.txt}\n", encoding="utf-8")
    mine.write_text("extends: texts.yaml\nsteps: 7\n", encoding="utf-8")
    assert recipe_differences(mine, read_recipe(mine)) == ("steps=7",)


def test_a_pattern_without_a_match_has_no_nearest_name(known: dict[str, Path]) -> None:
    for choose in (choose_recipes, matching_recipes):
        with pytest.raises(ConfigError, match=r"^no recipe matches the pattern 'nothing\*'; see lowtide lab ls$"):
            choose(["nothing*"], known)


@pytest.mark.parametrize("word", ["study", "study/"])
def test_a_folder_is_run_by_a_pattern(known: dict[str, Path], word: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{word}' is a folder of recipes: write 'study/\*' for all of them"):
        choose_recipes([word], known)
    assert list(matching_recipes([word], known)) == list(choose_recipes(["study/*"], known))


def test_a_file_without_its_suffix_is_offered(
    known: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    Path("mine/plain.yml").write_text("model: gpt-tiny\n", encoding="utf-8")
    for choose in (choose_recipes, matching_recipes):
        with pytest.raises(
            ConfigError, match=r"there is no recipe named 'mine/plain', but a file: write mine/plain\.yml"
        ):
            choose(["mine/plain"], known)
        assert choose(["mine/plain.yml"], known) == {"plain": Path("mine/plain.yml")}


def test_files_are_listed_behind_names(folder: Path, known: dict[str, Path], tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("model: gpt-tiny\n", encoding="utf-8")
    listed = matching_recipes([str(mine), str(folder / "study" / "half.yaml"), "other"], known)
    assert list(listed) == ["other/control", "mine", "study/half"]
    with pytest.raises(ConfigError, match="there is no recipe file nowhere.yaml"):
        matching_recipes(["nowhere.yaml"], known)


def test_no_near_name_is_given_twice(known: dict[str, Path]) -> None:
    with pytest.raises(UnknownNameError) as caught:
        choose_recipes(["zzz"], known)
    nearest = str(caught.value).split("the nearest are ")[1].split(";")[0].split(", ")
    assert len(set(nearest)) == len(nearest) == 3


@pytest.mark.parametrize("name", known_recipes())
def test_every_recipe_of_the_package_can_be_read_again(name: str, tmp_path: Path) -> None:
    resolved = resolve_recipe(find_recipe(name), ["seed=3"])
    again = tmp_path / "again.yaml"
    again.write_text(annotated_yaml(config.to_plain(resolved.recipe), resolved.sources), encoding="utf-8")
    assert resolve_recipe(again).recipe == resolved.recipe


def test_words_that_yaml_reads_otherwise_stay_what_they_are() -> None:
    words = [
        "# no comment",
        "null",
        "1e-4",
        ":4096:8",
        "two\nlines",
        "word " * 40,
        "✓ 🙂",
        'it\'s "so"',
        "",
        "- a",
        "a: b",
    ]
    plain = {word or "empty": word for word in words}
    nested = {
        "plan": {"weights": {"*": "streamed", "layers.0": "resident"}},
        "betas": [0.9, 0.95],
        "one": ["a"],
        "settings": {},
    }
    whole = {**plain, **nested}
    text = annotated_yaml(whole, dict.fromkeys([*plain, "betas", "settings", "plan.weights.*"], "a file.yaml"))
    assert plain_text.parse(text, "yaml") == whole
    assert text.count("# a file.yaml") == len(plain) + 3


def test_only_what_was_set_has_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text("model: gpt-tiny\nplan: {weights: resident}\n", encoding="utf-8")
    Path("mine.yaml").write_text("extends: base.yaml\nsteps: 20\n", encoding="utf-8")
    resolved = resolve_recipe("mine.yaml", ["seed=3"])
    lines = annotated_yaml(config.to_plain(resolved.recipe), resolved.sources).splitlines()
    assert "model: gpt-tiny  # base.yaml" in lines
    assert "  weights: resident  # base.yaml" in lines
    assert "  update: host" in lines
    assert "steps: 20  # mine.yaml" in lines  # also where it is the default
    assert "seed: 3  # --set" in lines
    assert sum("#" in line for line in lines) == 4


def test_files_are_called_by_their_short_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert source_name(str(FOLDER / "peak_memory" / "_base.yaml")) == "peak_memory/_base.yaml"
    assert source_name(str(tmp_path / "a" / "b.yaml")) == "a/b.yaml"
    assert source_name("/elsewhere/b.yaml") == "/elsewhere/b.yaml"
    assert source_name("--set") == "--set"
    # A recipe that is made small from another one names that one.
    sources = resolve_recipe(find_recipe("peak_memory_tiny/streamed")).sources
    assert source_name(sources["plan.weights"]) == "peak_memory/streamed.yaml"
