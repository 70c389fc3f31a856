"""Records of folders: all that can be read, and the names of those that cannot."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.records import RESULTS
from lowtide.config import from_plain, to_plain
from lowtide.errors import ConfigError
from lowtide.lab.budget import BudgetPoint, BudgetSweep, write_sweep
from lowtide.lab.progress import named_surroundings
from lowtide.lab.recipe import Recipe
from lowtide.lab.record import Outcome, RunRecord, read_record, write_record
from lowtide.lab.records import by_configuration, collect, flat_settings, generations, newest_records, settings_apart
from tests.lab.report.samples import SURROUNDINGS, record


def write(path: Path, name: str) -> None:
    surroundings = named_surroundings("none")
    write_record(RunRecord(name=name, outcome=Outcome.FAILED, surroundings=surroundings, recipe={"seed": 0}), path)


def test_good_ones_are_read_and_bad_ones_named(tmp_path: Path) -> None:
    write(tmp_path / "records" / "b" / "seed-0.json", "b")
    write(tmp_path / "records" / "a" / "c" / "seed-0.json", "a/c")
    bad = {
        "cut.json": (tmp_path / "records" / "b" / "seed-0.json").read_bytes()[:-20],
        "empty.json": b"",
        "bytes.json": b"\xff\xfe\x00",
        "list.json": b"[1, 2]",
        "other.json": b'{"schema": "lowtide.check/1"}',
        "lacking.json": b'{"schema": "lowtide.lab_run/1", "recipe": {}, "session": null}',
    }
    for name, content in bad.items():
        (tmp_path / "records" / name).write_bytes(content)
    (tmp_path / "records" / "half.part").write_bytes(b"{")
    (tmp_path / "unrelated.json").write_bytes(b"{}")
    said: list[str] = []
    found = collect([tmp_path], said.append)
    assert [record.name for record in found.records] == ["a/c", "b"]
    assert len(found.skipped) == len(bad)
    for name in bad:
        assert any(line.startswith(f"{tmp_path.resolve()}/records/{name}: ") for line in found.skipped)
    assert said[-1] == "record 8 of 8"


def test_places_may_be_files_and_plain_folders_and_count_once(tmp_path: Path) -> None:
    write(tmp_path / "one.json", "one")
    write(tmp_path / "two.json", "two")
    found = collect([tmp_path / "two.json", tmp_path, tmp_path / ".." / tmp_path.name])
    assert [record.name for record in found.records] == ["two", "one"]


def test_nothing_to_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder .*none.*lowtide lab run"):
        collect([tmp_path / "none"])
    with pytest.raises(
        ConfigError, match="there are no records and no sweeps in .*; `lowtide lab run NAME` makes some"
    ):
        collect([tmp_path])
    (tmp_path / "bad.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="no record could be read .*bad.json: cannot be read as JSON"):
        collect([tmp_path])


def test_a_sweep_alone_is_enough(tmp_path: Path) -> None:
    point = BudgetPoint(
        budget=1.0, saved_bytes=1, peak_bytes=2, unfused_peak_bytes=3, recomputed_flops_share=0.0, seconds=0.1
    )
    sweep = BudgetSweep(model="m", batch="2x3", dtype="float32", torch="2.13.0", trace_seconds=0.1, points=(point,))
    file = tmp_path / "lab" / "sweeps" / "m.json"
    write_sweep(sweep, file)
    for place in (tmp_path / "lab", file, file.parent):
        found = collect([place])
        assert (found.records, found.sweeps, found.skipped) == ((), (sweep,), ())
    assert collect([tmp_path / "lab", file]).sweeps == (sweep,), "each file once"
    write_sweep(sweep, tmp_path / "copied.json")
    assert collect([tmp_path / "copied.json"]).sweeps == (sweep,)
    write(tmp_path / "lab" / "records" / "sweeps" / "seed-0.json", "sweeps")
    assert [record.name for record in collect([tmp_path / "lab"]).records] == ["sweeps"]


def made(date: str, **changes: object) -> RunRecord:
    return replace(record(**changes), surroundings=replace(SURROUNDINGS, date=date))


def test_one_configuration_is_name_device_and_settings() -> None:
    records = [
        record(),
        record(seed=1),
        record(recipe={"about": "other words", "plan": None}),
        record("peak_memory/fused"),
        record(device="cpu, emulated"),
        record(recipe={"plan": {"update": "host"}}),
        record(recipe={"plan": {"update": "device"}}),
    ]
    groups = by_configuration(records)
    assert [len(runs) for runs in groups.values()] == [3, 1, 1, 1, 1]


def test_a_record_from_before_a_list_was_known_is_the_same_configuration() -> None:
    path = sorted((RESULTS / "lab").glob("control_seed-43_*.json"))[0]
    old = read_record(path)
    assert old.evaluations == ()
    assert "after" not in old.recipe["evaluation"]
    recipe = from_plain(Recipe, old.recipe)
    new = replace(old, recipe=to_plain(recipe))
    assert new.recipe["evaluation"] == {"samples": 500, "batch": 8, "after": []}
    other = replace(old, recipe={**new.recipe, "evaluation": {**new.recipe["evaluation"], "after": [90]}})
    assert [len(runs) for runs in by_configuration([old, new, other]).values()] == [2, 1]


def test_a_run_that_ended_before_it_knew_its_device_is_with_the_others_of_its_experiment() -> None:
    cuda, cpu = {"recipe": {"device": "cuda"}}, {"recipe": {"device": "cpu"}}
    # The name of a card is asked by the run itself; one that was refused or killed before has the recipe's word for it.
    records = [record(**cuda), record(seed=1, device="cuda", **cuda), record(seed=2, device="cuda:0", **cuda)]
    assert [len(runs) for runs in by_configuration(records).values()] == [3]
    records = [record(device="cpu, emulated", **cpu), record(seed=1, device="cpu", **cpu)]
    assert [len(runs) for runs in by_configuration(records).values()] == [2]
    # Where the others have another kind, two cards, or no known one, nobody can say.
    for others in (["cpu, emulated"], ["NVIDIA H200", "NVIDIA A100"], []):
        records = [record("x/lost", device="cuda"), *(record("x/a", device=device) for device in others)]
        assert ("x/lost", "cuda") in {(name, device) for name, device, _ in by_configuration(records)}


def test_newest_records_stay_in_their_order() -> None:
    older, newest = made("2026-03-01T10:00:00+00:00"), made("2026-03-02T10:00:00+00:00")
    other = made("2026-02-01T10:00:00+00:00", seed=1)
    assert newest_records([newest, other, older]) == [newest, other]
    assert newest_records([older, other, newest]) == [other, newest]
    assert newest_records([]) == []


def test_a_record_without_a_date_is_older_and_of_equal_ones_the_later_counts() -> None:
    first, second, undated = made("2026-03-01T10:00:00+00:00"), made("2026-03-01T10:00:00+00:00"), made("no date")
    ages = generations([undated, first, second])
    assert [[id(run) for run in runs] for runs in ages] == [[id(second)], [id(first)], [id(undated)]]


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
