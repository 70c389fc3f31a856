"""Which records are runs of the same thing, and which of them is the newest."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.render import RESULTS
from lowtide.config import from_plain, to_plain
from lowtide.lab.configurations import by_configuration, generations, newest_records
from lowtide.lab.recipe import Recipe
from lowtide.lab.record import RunRecord, read_record
from tests.lab.report.samples import SURROUNDINGS, record


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
    # Of another kind, of two cards, or of no known one: nobody can say.
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
