"""Plans by hand: words for all, overrides by name, shares."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.activations.policy import Recompute
from lowtide.errors import ConfigError, PlanError, UnknownNameError
from lowtide.memory.chunk import Layout
from lowtide.planning.hand_plan import host_chunks, make_plan
from lowtide.planning.placement import is_trained
from lowtide.planning.plan import Budgets, Plan, Schedule, Site, Weights
from lowtide.units import GiB, MiB
from tests.memory.small_layouts import group, layout, random_layouts
from tests.memory.test_groups import NamedNet
from tests.zoo import ZOO

MODEL = layout(
    group("embedding", [2048]),
    group("layers.0", [1024, 1024]),
    group("layers.1", [1024, 1024]),
    group("adapter", [1024, 1024], frozen=(0,)),
    group("", [512]),
    chunk_bytes=1024,
)


def weights(plan: Plan) -> dict[str, str]:
    return {spec.name: spec.weights.value for spec in plan.groups}


def sites(plan: Plan) -> dict[str, str]:
    return {spec.name: "".join(site.value[0] for site in spec.sites) for spec in plan.groups}


def test_by_default_all_is_streamed_but_the_rest() -> None:
    plan = make_plan(MODEL)
    assert weights(plan) == dict.fromkeys(("embedding", "layers.0", "layers.1", "adapter"), "streamed") | {
        "": "resident"
    }
    assert {site for spec in plan.groups for site in spec.sites} == {Site.HOST}
    assert (plan.fingerprint, plan.chunk_bytes) == (MODEL.fingerprint, 1024)
    assert (plan.schedule, plan.budgets) == (Schedule.DEFERRED, Budgets())


def test_the_rest_is_streamed_when_it_is_named() -> None:
    assert weights(make_plan(MODEL, weights={"": "streamed"}))[""] == "streamed"


def test_a_tied_group_that_is_always_open_is_resident() -> None:
    tied = layout(group("table", [512], modules=("", "embedding")), group("head", [512]))
    assert weights(make_plan(tied)) == {"table": "resident", "head": "streamed"}


def test_overrides_by_name() -> None:
    plan = make_plan(
        MODEL,
        weights={"*": Weights.RESIDENT, "layers.1": "streamed"},
        update={"*": "device", "layers.0": 0.5, "layers.1": Site.HOST},
    )
    assert weights(plan) == dict.fromkeys(("embedding", "layers.0", "adapter", ""), "resident") | {
        "layers.1": "streamed"
    }
    assert sites(plan) == {"embedding": "d", "layers.0": "dh", "layers.1": "hh", "adapter": "dd", "": "d"}


def test_a_share_goes_to_the_host_from_the_end() -> None:
    # Trained: 2048 + 2048 + 2048 + 1024 + 512 bytes; a third is 2560.
    assert sites(make_plan(MODEL, update=1 / 3)) == {
        "embedding": "d",
        "layers.0": "dd",
        "layers.1": "dh",
        "adapter": "hh",
        "": "h",
    }


@given(random_layouts(), st.floats(0, 1))
def test_the_share_is_reached_and_no_chunk_too_many(made: Layout, share: float) -> None:
    trained = [chunk for chunk in made.chunks if is_trained(chunk)]
    on_host = host_chunks(made.chunks, share)
    held = [chunk for chunk in trained if chunk.name in on_host]
    assert held == trained[len(trained) - len(held) :]
    wanted = share * sum(chunk.nbytes for chunk in trained)
    assert sum(chunk.nbytes for chunk in held) >= wanted
    assert not held or sum(chunk.nbytes for chunk in held[1:]) < wanted


def test_a_model_is_laid_out() -> None:
    plan = make_plan(ZOO["gpt"].build(False, torch.float32), device_memory="1 MiB", schedule="in_backward")
    assert [spec.name for spec in plan.groups][:2] == ["token_embedding.weight", "layers.0"]
    assert plan.schedule is Schedule.IN_BACKWARD


def test_sizes_and_settings_arrive() -> None:
    plan = make_plan(
        MODEL,
        prefetch_depth=3,
        cached_buffers=0,
        defragment_every=7,
        device_memory="14GiB",
        host_memory=GiB,
        pinned_memory="1MiB",
        window_memory="2MiB",
    )
    assert plan.budgets == Budgets(device_bytes=14 * GiB, host_bytes=GiB, pinned_bytes=MiB, window_bytes=2 * MiB)
    assert (plan.prefetch_depth, plan.cached_buffers, plan.defragment_every) == (3, 0, 7)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": {"layer.0": "resident"}}, r"no group \(weights\) named 'layer.0'; did you mean 'layers.0'"),
        ({"update": {"layers.9": "host"}}, r"no group \(update\) named 'layers.9'"),
        ({"weights": "on the device"}, "is 'on the device'; give 'resident' or 'streamed' or 'host'"),
        ({"weights": {"layers.0": "disk"}}, r"weights\['layers.0'\] is 'disk'"),
        ({"update": "disk"}, "^update is 'disk'; give 'device', 'host', 'paged' or the share of the host"),
        ({"update": 1.5}, "^update is 1.5; give 'device', 'host', 'paged' or the share of the host, from 0 to 1"),
        ({"update": {"*": True}}, r"^update\['\*'\] is True; give 'device'"),
        ({"update": {"layers.0": True}}, r"update\['layers.0'\] is True"),
        ({"update": float("nan")}, "is nan"),
        ({"schedule": "late"}, "schedule is 'late'; give 'deferred' or 'in_backward'"),
        ({"device_memory": "14 apples"}, "unknown unit 'apples'"),
    ],
)
def test_words_that_are_none(settings: dict[str, Any], message: str) -> None:
    kind = UnknownNameError if "no group" in message else ConfigError
    with pytest.raises(kind, match=message):
        make_plan(MODEL, **settings)


def test_the_rest_may_be_named_where_there_is_none() -> None:
    assert weights(make_plan(layout(group("a", [5])), weights={"": "resident"})) == {"a": "streamed"}


# Names


@pytest.mark.parametrize("depth", [2, 8, 32])
def test_a_small_table_is_found_at_any_depth(depth: int) -> None:
    plan = make_plan(
        NamedNet(depth),
        weights={"*": "streamed", "tok": "host"},
        update={"*": "device", "pos": "host"},
        activations={"blocks.0.2": "recompute"},
    )
    assert weights(plan)["tok"] == "host"
    assert (sites(plan)["pos"], sites(plan)["blocks.0"]) == ("h", "d")
    assert next(spec for spec in plan.groups if spec.name == "blocks.0.2").activation == Recompute()


def test_patterns() -> None:
    plan = make_plan(
        MODEL,
        weights={"*": "streamed", "layers.*": "resident", "layers.1": "streamed"},
        update={"layers.?": "device"},
        activations={"layers.[0]": "recompute"},
    )
    assert weights(plan) == {
        "embedding": "streamed",
        "layers.0": "resident",
        "layers.1": "streamed",
        "adapter": "streamed",
        "": "resident",
    }
    assert sites(plan) == {"embedding": "h", "layers.0": "dd", "layers.1": "dd", "adapter": "hh", "": "h"}
    assert [spec.name for spec in plan.groups if spec.activation == Recompute()] == ["layers.0"]


def test_a_later_pattern_goes_before_an_earlier_one() -> None:
    plan = make_plan(MODEL, weights={"layers.*": "resident", "*.1": "streamed"})
    assert (weights(plan)["layers.0"], weights(plan)["layers.1"]) == ("resident", "streamed")


@pytest.mark.parametrize("named", ["tok", "head", "tok.weight"])
def test_a_tied_table_by_any_name(named: str) -> None:
    assert weights(make_plan(NamedNet(32, is_tied=True), weights={named: "streamed"}))["tok.weight"] == "streamed"
    with pytest.raises(PlanError, match=r"group 'tok.weight' is tied: 'tok' and 'head' use the same .* on the host"):
        make_plan(NamedNet(32, is_tied=True), weights={"*": "streamed", named: "host"})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("blocks", r"weights\['blocks'\]: it holds 8 groups, 'blocks.0' the first; .* by 'blocks.\*'"),
        ("blcks.*", r"no group \(weights\) named 'blcks.\*'; did you mean 'blocks.\d'"),
        ("zzz", r"choose one of '' \(the rest of the model\), attention, blocks.0"),
        ("start", r"weights\['start'\]: it has no group of its own .* '' \(the rest of the model\)"),
    ],
)
def test_names_that_are_none(name: str, message: str) -> None:
    with pytest.raises((ConfigError, UnknownNameError), match=message):
        make_plan(NamedNet(8), weights={name: "resident"})


def test_two_names_of_one_group() -> None:
    with pytest.raises(ConfigError, match=r"has 'tok' and 'head', which are both the group 'tok.weight'"):
        make_plan(NamedNet(8, is_tied=True), weights={"tok": "resident", "head": "streamed"})
