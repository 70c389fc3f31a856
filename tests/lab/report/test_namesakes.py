from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.lab.configurations import flat_settings
from lowtide.lab.report.namesakes import settings_apart

PLAIN = {"batch": "2x32", "steps": 2, "optimizer": {"name": "adamw", "settings": {}}, "compile": None}


def apart(*recipes: dict[str, Any]) -> list[str]:
    flat = [flat_settings(recipe) for recipe in recipes]
    return [settings_apart(mine, flat) for mine in flat]


def test_all_settings_that_differ_are_named() -> None:
    other = {"batch": "1x32", "steps": 3, "optimizer": {"name": "lion", "settings": {}}}
    assert apart(PLAIN, other) == [
        "batch=2x32, steps=2, optimizer.name=adamw",
        "batch=1x32, steps=3, optimizer.name=lion",
    ]
    # Each row has the same keys, whatever tells the others apart.
    assert apart(PLAIN, {**PLAIN, "steps": 5}, {**PLAIN, "batch": "4x32"}) == [
        "batch=2x32, steps=2",
        "batch=2x32, steps=5",
        "batch=4x32, steps=2",
    ]


def test_a_compiled_run_says_so() -> None:
    compiled = {**PLAIN, "steps": 3, "compile": {"scope": "model", "backend": "inductor"}}
    assert apart(PLAIN, compiled) == ["steps=2, compile=none", "steps=3, compile.scope=model"]
    by_block = {**PLAIN, "compile": {"scope": "model", "backend": "aot"}}
    assert apart(PLAIN, {**compiled, "steps": 2}, by_block) == [
        "compile=none",
        "compile.scope=model, compile.backend=inductor",
        "compile.scope=model, compile.backend=aot",
    ]


def test_settings_of_another_kind_and_of_what_is_lacking_are_not_listed() -> None:
    stories, files = {"kind": "stories", "length": 8}, {"kind": "text-files", "path": "a.txt", "length": 8}
    assert apart({"data": stories}, {"data": files}) == ["data.kind=stories", "data.kind=text-files"]
    # What only one kind has says nothing where all of that kind have the same.
    other = {"data": {**files, "path": "b.txt"}}
    assert apart({"data": stories}, {"data": files}, other) == [
        "data.kind=stories",
        "data.kind=text-files, data.path=a.txt",
        "data.kind=text-files, data.path=b.txt",
    ]
    plan = {"weights": "streamed", "activations": {"kind": "recompute", "every": 2}}
    assert apart({"plan": plan}, {"plan": None}) == ["plan.weights=streamed", "plan=none"]
    assert apart({"optimizer": {"settings": {"lr": 0.1}}}, {"optimizer": {"settings": {}}}) == [
        "optimizer.settings.lr=0.1",
        "optimizer.settings=none",
    ]


def test_long_values_are_cut() -> None:
    assert apart({"a": 1, "c": "x" * 99}, {"a": 1}) == [f"c={'x' * 23}…", "c=none"]


values = st.one_of(st.none(), st.integers(0, 2), st.sampled_from(["x", "y"]))
parts = st.dictionaries(st.sampled_from("abc"), values, max_size=3)
recipes = st.dictionaries(st.sampled_from("pqr"), st.one_of(values, parts), max_size=3)


@given(st.lists(recipes, min_size=2, max_size=4))
def test_configurations_that_differ_have_different_words(found: list[dict[str, Any]]) -> None:
    distinct = list({json.dumps(flat_settings(recipe), sort_keys=True): recipe for recipe in found}.values())
    flat = [flat_settings(recipe) for recipe in distinct]
    # An empty part is said to be none, as one that is left out: nothing distinguishes them but a record's age.
    meant = [{key: value for key, value in recipe.items() if value != {}} for recipe in flat]
    if any(one == other for place, one in enumerate(meant) for other in meant[:place]):
        return
    # No recipe has a setting where another has a part of that name.
    keys = {key for recipe in flat for key, value in recipe.items() if value != {}}
    if any(other.startswith(f"{key}.") for key in keys for other in keys):
        return
    words = apart(*distinct)
    assert len(set(words)) == len(words)


@pytest.mark.parametrize("count", [1, 2])
def test_without_namesakes_nothing_is_said(count: int) -> None:
    assert set(apart(*[PLAIN] * count)) == {""}
