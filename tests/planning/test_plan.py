"""Plans as data and as JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.activations.policy import CompileBudget, Keep, Offload, Recompute, Selective
from lowtide.errors import BadRecordError, ConfigError
from lowtide.planning.plan import (
    Budgets,
    Collective,
    GroupPlan,
    Plan,
    Schedule,
    Sharding,
    Site,
    Weights,
    load_plan,
    plan_from_json,
    plan_to_json,
    save_plan,
)


@pytest.mark.parametrize("key", ["prefetch_depth", "cached_buffers", "defragment_every"])
def test_counts_below_zero(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} is -1; give a whole number, 0 or more"):
        Plan(groups=(), fingerprint="", chunk_bytes=512, **{key: -1})


def test_another_version() -> None:
    with pytest.raises(ConfigError, match="this plan has version 3, this Lowtide reads version 2"):
        Plan(groups=(), fingerprint="", chunk_bytes=512, version=3)


@pytest.mark.parametrize("key", ["device_bytes", "host_bytes", "pinned_bytes", "window_bytes"])
def test_budgets_below_zero(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} is -5; give 0 or more"):
        Budgets(**{key: -5})


def test_a_part_beyond_its_whole() -> None:
    with pytest.raises(ConfigError, match="pinned_bytes is 2.0 KiB, more than the 1.0 KiB of host_bytes"):
        Budgets(host_bytes=1024, pinned_bytes=2048)
    with pytest.raises(ConfigError, match="window_bytes is 2.0 KiB, more than the 1.0 KiB of device_bytes"):
        Budgets(device_bytes=1024, window_bytes=2048)
    assert Budgets(host_bytes=1024, pinned_bytes=1024).pinned_bytes == 1024


PLAN = Plan(
    groups=(
        GroupPlan(
            name="layers.0",
            weights=Weights.STREAMED,
            sites=(Site.HOST, Site.DEVICE),
            activation=Offload(),
            weight_bytes=100,
        ),
    ),
    fingerprint="0123456789abcdef",
    chunk_bytes=1024,
    schedule=Schedule.IN_BACKWARD,
    prefetch_depth=2,
    budgets=Budgets(device_bytes=4096, pinned_bytes=7),
)

sizes = st.none() | st.integers(0, 2**50)
groups = st.builds(
    GroupPlan,
    name=st.text(max_size=5),
    weights=st.sampled_from([each for each in Weights if each is not Weights.SHARDED]),
    sites=st.lists(st.sampled_from(Site), max_size=3).map(tuple),
    activation=st.sampled_from([Keep(), Selective(), Recompute(segment=4), Offload(depth=3), CompileBudget(share=0.5)]),
    weight_bytes=sizes,
)
plans = st.builds(
    Plan,
    groups=st.lists(groups, max_size=3).map(tuple),
    fingerprint=st.text("0123456789abcdef", min_size=16, max_size=16),
    chunk_bytes=st.integers(512, 2**40),
    schedule=st.sampled_from(Schedule),
    prefetch_depth=st.integers(0, 9),
    cached_buffers=st.integers(0, 9),
    defragment_every=st.integers(0, 9),
    budgets=st.builds(Budgets, device_bytes=sizes, pinned_bytes=sizes),
)


@given(plans)
def test_there_and_back(plan: Plan) -> None:
    assert plan_from_json(plan_to_json(plan)) == plan


def spread(weights: Weights, *sites: Site, shards: int = 4, collective: Collective = Collective.GATHER) -> Plan:
    group = GroupPlan(name="block", weights=weights, sites=sites)
    return replace(PLAN, groups=(group,), sharding=Sharding(shards=shards, collective=collective))


@pytest.mark.parametrize("collective", Collective)
@pytest.mark.parametrize(("weights", "site"), [("streamed", "host"), ("sharded", "device"), ("sharded", "paged")])
def test_a_plan_for_several_ranks(weights: str, site: str, collective: Collective) -> None:
    plan = spread(Weights(weights), Site(site), collective=collective)
    assert plan_from_json(plan_to_json(plan)) == plan
    assert f"over 4 ranks ({collective})" in plan.summary


@pytest.mark.parametrize(
    ("weights", "site", "says"),
    [
        ("streamed", "device", "on the host of each rank .* make it 'sharded'"),
        ("sharded", "host", "on the device of each rank .* make it 'streamed'"),
        ("host", "host", "not spread over ranks"),
    ],
)
def test_parts_are_updated_where_they_are(weights: str, site: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        spread(Weights(weights), Site(site))


def test_sharded_weights_need_ranks() -> None:
    with pytest.raises(ConfigError, match=r"does not say over how many ranks; give sharding="):
        replace(PLAN, groups=(GroupPlan(name="block", weights=Weights.SHARDED, sites=()),))


@pytest.mark.parametrize("shards", [1, 0, -2, True, 2.0])
def test_one_rank_shares_nothing(shards: object) -> None:
    with pytest.raises(ConfigError, match=r"give the number of ranks that share the weights, 2 or more"):
        Sharding(shards=shards)  # type: ignore[arg-type]


def test_as_people_write_it() -> None:
    plain = json.loads(plan_to_json(PLAN))
    assert plain["groups"] == [
        {
            "name": "layers.0",
            "weights": "streamed",
            "sites": ["host", "device"],
            "activation": {"kind": "offload", "recompute": True, "min_bytes": 1048576, "depth": 1},
            "weight_bytes": 100,
        }
    ]
    assert (plain["schedule"], plain["version"]) == ("in_backward", 2)
    least = {"groups": [{"name": "a", "weights": "resident", "sites": []}], "fingerprint": "f", "chunk_bytes": 512}
    assert plan_from_json(json.dumps(least)).groups[0].weights is Weights.RESIDENT


def changed(**changes: object) -> str:
    return json.dumps(json.loads(plan_to_json(PLAN)) | changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (plan_to_json(PLAN)[:50], "this is no plan: not valid JSON"),
        ("[]", "this is JSON, but no plan"),
        ('{"steps": 3}', "this is JSON, but no plan"),
        (changed(version=3), "this plan has version 3, this Lowtide reads version 2"),
        (changed(version=3, lanes=3), "version 3"),
    ],
)
def test_no_plan(text: str, message: str) -> None:
    with pytest.raises(BadRecordError, match=message):
        plan_from_json(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (changed(prefetch=3), "unknown key 'prefetch'; did you mean 'prefetch_depth'"),
        (changed(prefetch_depth="3"), "'prefetch_depth' must be an integer"),
        (changed(prefetch_depth=-3), "prefetch_depth is -3"),
        (changed(schedule="never"), "'schedule' cannot be 'never'"),
        (changed(groups=[{"name": "a", "weights": "streamed"}]), r"missing key 'groups\[0\].sites'"),
        (changed(budgets={"device": 3}), "unknown key 'budgets.device'"),
        ('{"groups": [], "groups": []}', "'groups' is given twice"),
    ],
)
def test_wrong_keys_and_values(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_from_json(text)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save_plan(PLAN, path)
    assert load_plan(path) == PLAN
    path.write_text(changed(version=3))
    with pytest.raises(BadRecordError, match="plan.json: this plan has version 3"):
        load_plan(path)
    path.write_text(changed(lanes=3))
    with pytest.raises(ConfigError, match="plan.json: unknown key 'lanes'"):
        load_plan(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(BadRecordError, match="cannot read the plan .*plan.json"):
        load_plan(path)
    with pytest.raises(BadRecordError, match="cannot read the plan .*none.json"):
        load_plan(tmp_path / "none.json")
