"""Several ranks train as one process does on the whole batch: the same losses and weights, however they are planned."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.errors import RankFailedError
from lowtide.runtime.statistics.session_stats import CacheRow, PhaseSeconds, RanksRow, SessionStats
from tests.ranks import on_ranks
from tests.runtime.rank_jobs import (
    LOOPS,
    Job,
    Trained,
    break_off,
    call_twice_with_statistics,
    manage_differently,
    order_of_events,
    part_from_others,
    prepared,
    prepared_serially,
    run_loop_serially,
    run_loops,
    save_in_a_forward,
    serial,
    statistics_at_entry,
    step_after_no_sync,
    train_all,
    two_in_one_backward,
)

STREAMED: dict[str, Any] = {"weights": "streamed", "update": "host"}
ON_DEVICE: dict[str, Any] = {"weights": "streamed", "update": "device"}
EXACT = {
    "all resident": Job(plan={"weights": "resident"}),
    "streamed, updated on the host": Job(plan=STREAMED),
    "streamed, updated on the device": Job(plan=ON_DEVICE),
    "resident, updated on the host": Job(plan={"weights": "resident", "update": "host"}),
    "in backward, on the host": Job(plan={**STREAMED, "schedule": "in_backward"}),
    "in backward, on the device": Job(plan={**ON_DEVICE, "schedule": "in_backward"}),
    "recomputed, clipped": Job(plan={**STREAMED, "activations": "recompute"}, manage={"max_grad_norm": 0.5}),
    "offloaded, clipped by the loop": Job(plan={**STREAMED, "activations": "offload"}, clips=0.5),
    "accumulated": Job(plan=STREAMED, micro_batches=3),
    "accumulated, sent each time": Job(plan=STREAMED, micro_batches=3, skips_sync=False),
    "accumulated, resident": Job(plan={"weights": "resident"}, micro_batches=3),
    "accumulated, updated on the device": Job(plan=ON_DEVICE, micro_batches=3),
    "a block that one rank uses": Job(plan=STREAMED, uses_extra="rank 0"),
    "a block that one rank uses, accumulated": Job(plan=STREAMED, uses_extra="rank 0", micro_batches=3),
    "a block that one rank uses, resident": Job(plan={"weights": "resident"}, uses_extra="rank 0"),
    "a block that one rank uses, on the device": Job(plan=ON_DEVICE, uses_extra="rank 0"),
    "a block that one rank uses, in backward": Job(plan={**STREAMED, "schedule": "in_backward"}, uses_extra="rank 0"),
}
ROUNDED = {
    "fp32": Job(dtype=torch.float32, plan=STREAMED),
    "fp32, an overflow on one rank": Job(dtype=torch.float32, plan=STREAMED, overflows_at=4),
    "fp32, an overflow on one rank, resident": Job(dtype=torch.float32, plan={"weights": "resident"}, overflows_at=4),
    "fp32, own kernels": Job(dtype=torch.float32, plan=STREAMED, manage={"precision": "fp32"}),
}
HALF = {
    "bf16 exact": Job(dtype=torch.bfloat16, plan=STREAMED, manage={"precision": "bf16 exact"}),
    "bf16 stochastic": Job(dtype=torch.bfloat16, plan=STREAMED, manage={"precision": "bf16 stochastic"}),
}
ALL = {**EXACT, **ROUNDED, **HALF}
FOUR = ("streamed, updated on the host", "accumulated", "a block that one rank uses", "in backward, on the host")


@functools.cache
def trained(size: int) -> list[dict[str, Trained]]:
    """By rank, what each job leaves; all of them in one set of processes, because starting these takes seconds."""
    return on_ranks(train_all, size, ALL if size == 2 else {name: ALL[name] for name in FOUR})


def assert_as_serial(name: str, size: int, tolerance: float) -> None:
    job = ALL[name]
    plain = serial(job, size)
    for found in (answer[name] for answer in trained(size)):
        assert found.losses == pytest.approx(plain.losses, rel=tolerance, nan_ok=True)
        assert found.scales == plain.scales
        for key, value in found.weights.items():
            torch.testing.assert_close(value, plain.weights[key], rtol=100 * tolerance, atol=10 * tolerance, msg=key)


@pytest.mark.parametrize("name", EXACT)
def test_two_ranks_train_as_one(name: str) -> None:
    assert_as_serial(name, 2, 1e-10)


@pytest.mark.parametrize("name", ROUNDED)
def test_two_ranks_train_as_one_in_fp32(name: str) -> None:
    assert_as_serial(name, 2, 1e-5)


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_train_as_one(name: str) -> None:
    assert_as_serial(name, 4, 1e-10)


@pytest.mark.parametrize("name", ALL)
def test_all_ranks_have_the_same_bits(name: str) -> None:
    first, *others = (answer[name].weights for answer in trained(2))
    for other in others:
        for key, value in first.items():
            torch.testing.assert_close(other[key], value, rtol=0, atol=0, msg=key)


def test_the_overflow_of_one_rank_skips_the_step_of_all() -> None:
    for answer in trained(2):
        scales = answer["fp32, an overflow on one rank"].scales
        assert scales[5] == scales[4] / 2


def test_each_gradient_is_sent_once_a_step() -> None:
    """The bytes are those of the trained parameters, each in whole pieces of 64 bytes, and a number for each, times the steps."""
    job = ALL["accumulated"]
    weights = serial(job, 2).weights
    num_elements = num_trained = 0
    for name, value in weights.items():
        if not name.startswith("blocks.1.up"):
            num_elements += -(-value.numel() // 8) * 8
            num_trained += 1
    per_step = 8 * (num_elements + num_trained)
    for answer in trained(2):
        assert answer["accumulated"].num_bytes == job.num_steps * per_step
        assert answer["accumulated, sent each time"].num_bytes == 3 * job.num_steps * per_step


def test_sums_are_under_way_while_gradients_are_made() -> None:
    for events in on_ranks(order_of_events, 2):
        assert events.index("begin") < events.index("gradient 0") < events.index("wait")
        assert events.count("begin") == events.count("wait") == 3


def test_statistics_are_those_of_rank_0() -> None:
    first, second = on_ranks(statistics_at_entry, 2)
    assert first == second
    assert first[1] != first[2]


@functools.cache
def looped() -> list[dict[str, dict[str, torch.Tensor]]]:
    return on_ranks(run_loops, 2)


@pytest.mark.parametrize("name", LOOPS)
def test_no_gradient_is_lost_or_counted_twice(name: str) -> None:
    plain = run_loop_serially(LOOPS[name], 2)
    for found in (answer[name] for answer in looped()):
        for key, value in found.items():
            torch.testing.assert_close(value, plain[key], rtol=1e-8, atol=1e-9, msg=key)


@pytest.mark.parametrize("job", [two_in_one_backward, call_twice_with_statistics])
def test_ranks_do_not_part(job: Callable[[int], dict[str, torch.Tensor]]) -> None:
    first, second = on_ranks(job, 2)
    for key, value in first.items():
        torch.testing.assert_close(second[key], value, rtol=0, atol=0, msg=key)


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("a parameter beside the model", "RanksDifferError", "in weights: parameter 6 of the optimizer"),
        ("a new parameter", "SessionError", "parameter 6 of the optimizer has a gradient that was not averaged"),
        ("another optimizer", "SessionError", "its gradients are those of this rank alone"),
        ("no optimizer", "SessionError", "its gradients are those of this rank alone"),
        ("a hook that raises", "RankLostError", "start all of them again from the last checkpoint"),
    ],
)
def test_a_rank_that_would_part_is_told(how: str, kind: str, words: str) -> None:
    for found, message in on_ranks(part_from_others, 2, how):
        assert found == kind
        assert words in message


def test_a_save_that_one_rank_cannot_make_is_told_on_all(tmp_path: Path) -> None:
    (first, told), (second, own) = on_ranks(save_in_a_forward, 2, str(tmp_path / "run"))
    assert (first, second) == ("RanksDifferError", "SessionError")
    assert own in told


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("seed", "RanksDifferError", ["rank 1 differs from rank 0 in weights: 0.weight", "torch.manual_seed"]),
        ("shape", "RanksDifferError", ["in parameters: 0.weight is float32(16, 16)", "float32(8, 8) on rank 0"]),
        ("plan", "RanksDifferError", ["rank 1 differs from rank 0 in plan"]),
        ("norm", "RanksDifferError", ["in settings: max_grad_norm is 2.0 there, and 1.0 on rank 0"]),
        ("rate", "RanksDifferError", ["in optimizer: lr of group 0 is 0.5 there, and 0.01 on rank 0"]),
        ("frozen", "RanksDifferError", ["in parameters: 1.weight is float32(8, 8), frozen there"]),
        ("warm-up", "ConfigError", ["all ranks need the same plan"]),
        ("sparse", "ConfigError", ["the gradient of 0.weight will be sparse"]),
    ],
)
def test_ranks_that_differ_are_refused_everywhere(what: str, kind: str, words: list[str]) -> None:
    for found, message, can_go_on in on_ranks(manage_differently, 2, what):
        assert found == kind
        for word in words:
            assert word in message
        assert can_go_on


def test_what_one_rank_is_refused_all_are() -> None:
    (first, told, _), (second, own, _) = on_ranks(manage_differently, 2, "error")
    assert (first, second) == ("RanksDifferError", "SessionError")
    assert f"rank 1 could not manage the model, and so rank 0 does not either: SessionError: {own}" == told


def test_an_exception_of_one_rank_reaches_the_others() -> None:
    (told, message, after_s), (own, _, _) = on_ranks(break_off, 2, "raise")
    assert (told, own) == ("RankLostError", "ValueError")
    assert "rank 0 of 2" in message
    assert "start all of them again from the last checkpoint" in message
    assert after_s < 60


def test_a_killed_rank_is_noticed_by_the_others() -> None:
    with pytest.raises(RankFailedError, match="rank 1 of 2: it ended with exit code -9") as raised:
        on_ranks(break_off, 2, "kill")
    assert "rank 0" not in str(raised.value)  # it returned what it was told


@pytest.mark.parametrize("weights", ["resident", "streamed"])
def test_a_step_with_gradients_of_one_rank_is_refused(weights: str) -> None:
    for message, moved in on_ranks(step_after_no_sync, 2, weights):
        assert "step() was called after a backward under no_sync()" in message
        assert not any(moved)


def test_prepare_plans_on_rank_0_for_the_least_budget() -> None:
    losses = prepared_serially()
    plans = set()
    for found, plan, peak_bytes, limit in on_ranks(prepared, 2, ("400KiB", "300KiB")):
        assert found == pytest.approx(losses, rel=1e-5)
        assert limit == 300 * 1024
        assert peak_bytes <= limit
        plans.add(plan)
    assert len(plans) == 1


def test_prepare_says_what_gradients_on_their_way_take() -> None:
    with pytest.raises(RankFailedError, match="gradients on their way to the other ranks take up to") as raised:
        on_ranks(prepared, 2, ("40KiB", "300KiB"))
    assert "rank 0 could not plan, and so rank 1 does not either" in "".join(raised.value.__notes__)


def test_statistics_say_what_was_sent() -> None:
    row = RanksRow(rank=1, size=2, sent_bytes=2048, waited_s=0.5)
    stats = SessionStats(
        num_steps=2,
        moved=(),
        exposed_copy_s=0.0,
        seconds=PhaseSeconds(forward_s=1.0, backward_s=1.0, update_s=1.0, rest_s=1.0),
        chunks=(),
        cache=CacheRow(),
        tiers=(),
        ranks=row,
    )
    assert "rank 1 of 2: 1.0 KiB of gradients a step to the others, waited 250.0 ms a step for theirs" in str(stats)
    assert SessionStats.from_dict(stats.to_dict()) == stats
