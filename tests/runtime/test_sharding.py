"""Weights that are spread over ranks train as one process does on the whole batch, however they are spread."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide
from lowtide.errors import ConfigError, RankFailedError
from lowtide.planning.plan import Collective, Sharding, Site, Weights
from lowtide.units import parse_bytes
from tests.ranks import on_ranks
from tests.runtime.rank_jobs import Job, Trained, serial, train_all
from tests.runtime.sharding_jobs import (
    BAD,
    Prepared,
    break_off,
    bytes_of_a_rank,
    bytes_sent,
    change_gathered,
    events_of_a_step,
    four_steps_serially,
    manage_alone,
    manage_badly,
    prepared_in,
    read_outside,
    resumed,
    save_between,
    saved,
    scaled_beside_resident,
    see_and_change,
)


def host(size: int, **words: Any) -> dict[str, Any]:
    """Parts on the hosts."""
    return {"weights": "streamed", "sharding": Sharding(shards=size), **words}


def device(size: int, **words: Any) -> dict[str, Any]:
    """Parts on the devices."""
    return {"weights": "sharded", "sharding": Sharding(shards=size), **words}


def owned(plan: dict[str, Any]) -> dict[str, Any]:
    """The same, one to all."""
    return {**plan, "sharding": Sharding(shards=plan["sharding"].shards, collective=Collective.ONE_TO_ALL)}


MIXED = {
    "weights": {"*": "sharded", "blocks.0": "streamed", "blocks.2": "resident"},
    "update": {"*": "device", "blocks.0": "host"},
}


def jobs(size: int) -> dict[str, Job]:
    """In float64."""
    return {
        "host": Job(plan=host(size)),
        "device": Job(plan=device(size)),
        "host, one to all": Job(plan=owned(host(size))),
        "device, one to all": Job(plan=owned(device(size))),
        "host, in backward": Job(plan=host(size, schedule="in_backward")),
        "device, in backward": Job(plan=device(size, schedule="in_backward")),
        "one to all, in backward": Job(plan=owned(host(size, schedule="in_backward"))),
        "host, clipped": Job(plan=host(size), manage={"max_grad_norm": 0.1}),
        "device, clipped, one to all": Job(plan=owned(device(size)), manage={"max_grad_norm": 0.1}),
        "host, recomputed": Job(plan=host(size, activations="recompute")),
        "device, offloaded": Job(plan=device(size, activations="offload")),
        "host, accumulated": Job(plan=host(size), micro_batches=3),
        "device, accumulated": Job(plan=device(size), micro_batches=3),
        "host, accumulated, sent each time": Job(plan=host(size), micro_batches=3, skips_sync=False),
        "device, accumulated, sent each time": Job(plan=device(size), micro_batches=3, skips_sync=False),
        "a block that all use": Job(plan=device(size), uses_extra="everybody"),
        "resident, streamed and sharded": Job(plan={**MIXED, "sharding": Sharding(shards=size)}),
        "two groups ahead": Job(plan=host(size, prefetch_depth=2)),
    }


FOUR = (
    "host", "device", "device, one to all", "host, in backward", "host, clipped", "host, recomputed", "device, accumulated",
)  # fmt: skip
SILENCE_S = 400.0
"""All trainings of a set of processes are one answer."""
HYBRID = {
    "hybrid, host": Job(plan=host(2)),
    "hybrid, device": Job(plan=device(2)),
    "hybrid, one to all, clipped": Job(plan=owned(host(2)), manage={"max_grad_norm": 0.1}),
    "hybrid, in backward": Job(plan=device(2, schedule="in_backward")),
}
FP32 = {
    "fp32": Job(dtype=torch.float32, plan=host(2)),
    "an overflow on one rank": Job(dtype=torch.float32, plan=host(2), overflows_at=4),
    "an overflow on one rank, device": Job(dtype=torch.float32, plan=device(2), overflows_at=4),
}
KERNELS = {
    "fp32, 8 bit": (torch.float32, {"precision": "fp32", "moments": "8bit"}),
    "bf16 exact": (torch.bfloat16, {"precision": "bf16 exact"}),
    "bf16 stochastic, 8 bit": (torch.bfloat16, {"precision": "bf16 stochastic", "moments": "8bit"}),
}
PLACES = {
    "host": host(2),
    "device": device(2),
    "paged": device(2, update="paged"),
    "host, in backward": host(2, schedule="in_backward"),
    "one to all": owned(device(2)),
}
WHOLE = {"host": {"weights": "streamed", "update": "host"}, "device": {"weights": "resident", "update": "device"}}


def kernel_jobs() -> dict[str, Job]:
    found = {}
    for words, (dtype, manage) in KERNELS.items():
        for place, plan in {**PLACES, **{f"whole on the {key}": plan for key, plan in WHOLE.items()}}.items():
            found[f"{words}: {place}"] = Job(dtype=dtype, plan=plan, manage=manage, num_steps=6)
    return found


@functools.cache
def trained(size: int) -> list[dict[str, Trained]]:
    """By rank, what each job leaves; all of them in one set of processes, because starting these takes seconds."""
    if size == 4:
        return on_ranks(train_all, 4, {**{name: jobs(4)[name] for name in FOUR}, **HYBRID}, silence_s=SILENCE_S)
    return on_ranks(train_all, 2, {**jobs(2), **FP32, **kernel_jobs()}, silence_s=SILENCE_S)


def assert_as_serial(name: str, job: Job, size: int, tolerance: float) -> None:
    plain = serial(job, size)
    for found in (answer[name] for answer in trained(size)):
        assert found.losses == pytest.approx(plain.losses, rel=tolerance, nan_ok=True)
        assert found.scales == plain.scales
        for key, value in found.weights.items():
            torch.testing.assert_close(value, plain.weights[key], rtol=100 * tolerance, atol=10 * tolerance, msg=key)


@pytest.mark.parametrize("name", jobs(2))
def test_two_ranks_train_as_one(name: str) -> None:
    assert_as_serial(name, jobs(2)[name], 2, 1e-10)


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_train_as_one(name: str) -> None:
    assert_as_serial(name, jobs(4)[name], 4, 1e-10)


@pytest.mark.parametrize("name", HYBRID)
def test_two_sets_of_two_ranks_train_as_one(name: str) -> None:
    assert_as_serial(name, HYBRID[name], 4, 1e-10)


@pytest.mark.parametrize("name", FP32)
def test_ranks_train_as_one_in_fp32(name: str) -> None:
    assert_as_serial(name, FP32[name], 2, 1e-5)


def test_the_overflow_of_one_rank_skips_the_step_of_all() -> None:
    for answer in trained(2):
        for name in ("an overflow on one rank", "an overflow on one rank, device"):
            assert answer[name].scales[5] == answer[name].scales[4] / 2


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("words", KERNELS)
def test_own_kernels_have_the_bits_of_whole_weights(words: str, place: str) -> None:
    """Also where rounding is by chance, and where states are in blocks of 8 bits: pieces know where they begin."""
    first = "host" if "host" in place else "device"
    for answer in trained(2):
        whole, spread = answer[f"{words}: whole on the {first}"], answer[f"{words}: {place}"]
        assert spread.losses == whole.losses
        for key, value in whole.weights.items():
            assert torch.equal(spread.weights[key], value), key


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("weights", ["streamed", "sharded"])
def test_a_rank_has_its_share_of_the_state_and_a_window(weights: str, size: int) -> None:
    """Model state is weights, gradients and two moments; what is on the device at once besides are two blocks."""
    for found in on_ranks(bytes_of_a_rank, size, weights):
        share = found.state_bytes / size
        held = found.held_on_host if weights == "streamed" else found.held_on_device
        assert held == pytest.approx(share, rel=0.05)
        other = found.held_on_device if weights == "streamed" else found.held_on_host
        assert other < 0.05 * share
        assert found.window_bytes == pytest.approx(2 * found.block_bytes, rel=0.05)


# -- the order of events -----------------------------------------------------------------------------------------------


def test_the_next_group_is_gathered_while_one_computes() -> None:
    for forward, _ in on_ranks(events_of_a_step, 2, "sharded"):
        for number in range(1, 5):
            gather, compute = forward.index(f"gather {number}"), forward.index(f"compute {number - 1}")
            assert gather < compute < forward.index(f"compute {number}"), forward


@pytest.mark.parametrize("weights", ["streamed", "sharded"])
def test_the_next_group_is_gathered_while_a_backward_computes(weights: str) -> None:
    """The last two groups are still there from the forward."""
    for _, backward in on_ranks(events_of_a_step, 2, weights):
        for number in range(3):
            gather, compute = backward.index(f"gather {number}"), backward.index(f"compute {number + 1}")
            assert gather < compute < backward.index(f"compute {number}"), backward


def test_what_hosts_update_is_gathered_behind_the_group_before() -> None:
    """So that the loop does not wait for an update before it has told the device what to compute."""
    for forward, _ in on_ranks(events_of_a_step, 2, "streamed"):
        for number in range(1, 5):
            assert forward.index(f"compute {number - 1}") < forward.index(f"gather {number}"), forward


# -- bytes between ranks -----------------------------------------------------------------------------------------------


SENT = {
    (2, "host"): host(2),
    (2, "device, in backward"): device(2, schedule="in_backward"),
    (2, "one to all"): owned(host(2)),
    (4, "hybrid"): device(2),
    (4, "hybrid, one to all"): owned(device(2)),
}


@pytest.mark.parametrize(("size", "way"), SENT)
def test_the_planner_knows_what_ranks_send(size: int, way: str) -> None:
    """To the byte, from as many fetches as there were."""
    for counted, predicted in on_ranks(bytes_sent, size, SENT[size, way]):
        assert counted == predicted


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["streamed", "sharded"])
@pytest.mark.parametrize("collective", ["gather", "one to all"])
def test_a_checkpoint_of_four_ranks_goes_on_in_any_number(weights: str, collective: str, tmp_path: Path) -> None:
    losses, values = on_ranks(saved, 4, weights, collective, str(tmp_path))[0]
    for size in (4, 3, 2, 1):
        for found, weights_after in on_ranks(resumed, size, weights, collective, str(tmp_path)):
            assert found == (losses if size == 4 else pytest.approx(losses, rel=1e-10))
            for key, value in values.items():
                torch.testing.assert_close(
                    weights_after[key], value, rtol=0 if size == 4 else 1e-8, atol=0 if size == 4 else 1e-9
                )


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", BAD)
def test_refused_on_every_rank(case: str) -> None:
    for kind, message in on_ranks(manage_badly, 2, case):
        assert (kind, BAD[case] in message) == (kind, True), message


def test_what_is_spread_is_not_read_as_if_it_were_whole() -> None:
    for told in on_ranks(read_outside, 2):
        for what, message in told.items():
            assert "spread over the ranks" in message, (what, message)


def test_gathered_shows_and_keeps_whole_values() -> None:
    for before, after, again in on_ranks(see_and_change, 2):
        assert before
        assert after
        assert again


def test_ranks_that_call_other_modules_are_told() -> None:
    job = Job(plan=device(2), uses_extra="rank 0", num_steps=3)
    with pytest.raises(
        RankFailedError, match=r"is about to exchange the weights of chunk .* all ranks\s+must call the same"
    ):
        on_ranks(train_all, 2, {"": job})


@pytest.mark.parametrize("where", ["the loop", "a forward", "a backward"])
def test_a_rank_that_breaks_off_ends_the_others(where: str) -> None:
    first, second = on_ranks(break_off, 2, where)
    assert second == "ValueError: broken"
    assert first.startswith(("RankLostError", "RanksDifferError")), first


# -- prepare -----------------------------------------------------------------------------------------------------------

ONE_TO_ALL = Sharding(shards=2, collective=Collective.ONE_TO_ALL)
PREPARED: dict[str, dict[str, Any]] = {
    # On the devices, by the hosts' memory; torch's own step takes temporaries there.
    "gather, device": {"sharding": "gather", "device_memory": "420KiB", "host_memory": "100KiB", "foreach": True},
    "one to all, device": {
        "sharding": "one to all",
        "device_memory": "380KiB",
        "host_memory": "100KiB",
        "foreach": True,
    },
    # On the hosts, by the devices' memory; 2 ranks share 450 KiB, of which each needs 225 by what its session counts.
    "gather, host": {"sharding": "gather", "device_memory": "220KiB", "host_memory": "452KiB"},
    "one to all, host": {"sharding": "one to all", "device_memory": "200KiB", "host_memory": "476KiB"},
    "in backward": {"sharding": "gather", "device_memory": "300KiB", "schedule": "in_backward"},
    "own kernels": {"sharding": "gather", "device_memory": "420KiB", "host_memory": "100KiB", "precision": "fp32"},
    "auto, much memory": {"sharding": "auto", "device_memory": "500KiB"},
    "auto, little of the host": {"sharding": "auto", "device_memory": "420KiB", "host_memory": "100KiB"},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no device memory": (
        {"sharding": "gather", "device_memory": "100KiB"},
        "PlanError: no plan on 2 ranks fits 100.0 KiB of each device",
    ),
    "no host memory": (
        {"sharding": "gather", "device_memory": "220KiB", "host_memory": "446KiB"},
        "'sharded, host', the nearest, takes about 213.7 KiB of the device and 225.0 KiB of the host; give more ranks",
    ),
    "nothing": (
        {"sharding": "auto", "device_memory": "20KiB"},
        "PlanError: no way to train on 2 ranks fits 20.0 KiB of each device",
    ),
    "a word": ({"sharding": "scatter", "device_memory": "1MiB"}, "sharding is 'scatter'; give 'gather', 'one to all'"),
    "three": ({"sharding": Sharding(shards=3), "device_memory": "1MiB"}, "3 shards do not divide 2 ranks"),
}
HYBRID_PREPARED: dict[str, dict[str, Any]] = {
    "by hand": {"sharding": Sharding(shards=2), "device_memory": "220KiB"},
    "one to all": {"sharding": ONE_TO_ALL, "device_memory": "220KiB"},
    "a mesh": {"sharding": "gather", "device_memory": "220KiB", "mesh": (2, 2)},
    "auto on a mesh": {"sharding": "auto", "device_memory": "420KiB", "host_memory": "200KiB", "mesh": (2, 2)},
}


@functools.cache
def prepared_on(size: int) -> list[dict[str, Prepared | str]]:
    jobs = {**PREPARED, **{name: words for name, (words, _) in REFUSED.items()}} if size == 2 else HYBRID_PREPARED
    return on_ranks(prepared_in, size, jobs)


def assert_prepared(name: str, words: dict[str, Any], size: int) -> lowtide.Plan:
    """It has the losses of one process, and is inside what it was given."""
    plans = []
    for answer in prepared_on(size):
        found = answer[name]
        assert isinstance(found, Prepared), found
        assert found.losses == pytest.approx(four_steps_serially(), rel=1e-5)
        assert found.device_bytes <= parse_bytes(words["device_memory"])
        assert found.plan.budgets.device_bytes == parse_bytes(words["device_memory"])
        if "host_memory" in words:
            share = parse_bytes(words["host_memory"]) // size
            assert found.host_bytes <= share == found.plan.budgets.host_bytes
        plans.append(found.plan)
    assert plans == plans[:1] * size
    return plans[0]


@pytest.mark.parametrize("name", PREPARED)
def test_prepare_plans_inside_what_each_rank_has(name: str) -> None:
    words = PREPARED[name]
    plan = assert_prepared(name, words, 2)
    is_whole = name == "auto, much memory"
    assert (plan.sharding is None) is is_whole
    if is_whole:
        return
    if words["sharding"] != "auto":
        assert plan.sharding == (ONE_TO_ALL if "one to all" in name else Sharding(shards=2))
    is_on_device = words.get("host_memory") == "100KiB"
    assert {group.weights for group in plan.groups} == {Weights.SHARDED if is_on_device else Weights.STREAMED}
    assert {site for group in plan.groups for site in group.sites} == {Site.DEVICE if is_on_device else Site.HOST}


@pytest.mark.parametrize("name", HYBRID_PREPARED)
def test_prepare_spreads_over_each_set(name: str) -> None:
    plan = assert_prepared(name, HYBRID_PREPARED[name], 4)
    assert plan.sharding is not None
    assert plan.sharding.shards == 2
    assert (plan.sharding.collective is Collective.ONE_TO_ALL) or name != "one to all"


@pytest.mark.parametrize("name", REFUSED)
def test_prepare_says_what_no_way_has(name: str) -> None:
    first, second = (answer[name] for answer in prepared_on(2))
    assert isinstance(first, str)
    assert isinstance(second, str)
    assert REFUSED[name][1] in first
    assert second.startswith(("RanksDifferError: rank 0 could not plan", "ConfigError"))
    assert REFUSED[name][1] in second


def test_sharding_needs_ranks() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(
        ConfigError, match="sharding='gather' spreads weights over several processes, and this is one; start"
    ):
        lowtide.prepare(model, optimizer, torch.ones(2), device="cpu", device_memory="1MiB", sharding="gather")
    (alone,) = on_ranks(prepared_in, 1, {"": {"sharding": "gather", "device_memory": "1MiB"}})
    assert "sharding='gather' spreads weights over ranks, and there is 1; start the script with torchrun" in alone[""]


# -- what a review found -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["in place", "other memory"])
def test_gathered_keeps_changes_past_autograd(how: str) -> None:
    for share, told in on_ranks(change_gathered, 2, how):
        assert (share, told) == (1.0, "")


def test_gathered_refuses_ranks_that_change_differently() -> None:
    for _, told in on_ranks(change_gathered, 2, "on one rank"):
        assert told.startswith("RanksDifferError: the weights of chunk ")
        assert "the whole would be a mixture" in told


def test_a_save_between_backward_and_step_is_refused(tmp_path: Path) -> None:
    for told in on_ranks(save_between, 2, str(tmp_path)):
        assert "was called between a backward and its step()" in told


@pytest.mark.parametrize("case", ["another plan", "a late failure"])
def test_a_rank_that_cannot_manage_is_told_to_all(case: str) -> None:
    first, second = on_ranks(manage_alone, 2, case)
    assert first.startswith("RanksDifferError: rank 1 ")
    assert second.startswith("RanksDifferError: rank 1 " if case == "another plan" else "MemoryError: no room")


@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_scaler_over_spread_and_resident_gradients(is_reversed: bool) -> None:
    """torch asks one class alone of all that are in its list."""
    for distance, scale, after in on_ranks(scaled_beside_resident, 2, is_reversed):
        assert distance < 1e-6
        assert scale == 1024.0
        assert after == 512.0
