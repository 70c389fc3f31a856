"""Budgets that are counted, and the allocator's limit."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.errors import BudgetError, ConfigError, OwnershipError
from lowtide.memory.tier import Tier, allowed_share
from lowtide.units import GiB

OWNERS = ("weights", "gradients", "optimizer", "staging")
operations = st.lists(st.tuples(st.booleans(), st.sampled_from(OWNERS), st.integers(0, 400)), max_size=60)


@settings(max_examples=1000)
@given(budget_bytes=st.integers(0, 1000), trace=operations)
def test_owners_sum_to_what_is_used_and_the_budget_holds(budget_bytes: int, trace: list[tuple[bool, str, int]]) -> None:
    tier = Tier("host", budget_bytes)
    expected = dict.fromkeys(OWNERS, 0)
    peak_bytes = 0
    for take, owner, num_bytes in trace:
        if take:
            fits = sum(expected.values()) + num_bytes <= budget_bytes
            if fits:
                tier.charge(num_bytes, owner)
                expected[owner] += num_bytes
            else:
                with pytest.raises(BudgetError):
                    tier.charge(num_bytes, owner)
        elif num_bytes <= expected[owner]:
            tier.credit(num_bytes, owner)
            expected[owner] -= num_bytes
        else:
            with pytest.raises(OwnershipError):
                tier.credit(num_bytes, owner)
        peak_bytes = max(peak_bytes, sum(expected.values()))
        assert tier.by_owner() == {owner: size for owner, size in expected.items() if size}
        assert tier.used_bytes == sum(expected.values()) <= tier.peak_bytes <= budget_bytes
        assert tier.free_bytes == budget_bytes - tier.used_bytes
    assert tier.peak_bytes == peak_bytes


def test_over_budget_says_who_how_much_and_what_to_do() -> None:
    tier = Tier("device", 10 * GiB)
    for owner, size in (("windows", 1), ("weights", 4), ("optimizer", 3), ("cache", 1)):
        tier.charge(size * GiB, owner)
    with pytest.raises(BudgetError) as caught:
        tier.charge(2 * GiB, "gradients")
    error = caught.value
    assert (error.tier, error.owner) == ("device", "gradients")
    assert (error.needed_bytes, error.free_bytes, error.budget_bytes) == (2 * GiB, 1 * GiB, 10 * GiB)
    assert str(error) == (
        "'gradients' needs 2.0 GiB of the device tier, which has 1.0 GiB free of 10.0 GiB (largest owners: 'weights'"
        " 4.0 GiB, 'optimizer' 3.0 GiB, 'cache' 1.0 GiB); raise the device budget, stream more groups, or update more"
        " chunks on the host"
    )


def test_over_budget_without_owners_on_a_tier_of_another_name() -> None:
    with pytest.raises(BudgetError, match=r"largest owners: nobody\); raise the budget of the disk tier"):
        Tier("disk", 10).charge(11, "state")


def test_owners_come_largest_first() -> None:
    tier = Tier("host", 100)
    for owner, size in (("b", 10), ("a", 10), ("c", 30)):
        tier.charge(size, owner)
    assert list(tier.by_owner().items()) == [("c", 30), ("a", 10), ("b", 10)]


def test_giving_back_more_than_is_held() -> None:
    tier = Tier("host", 4096)
    tier.charge(1024, "weights")
    with pytest.raises(OwnershipError, match=r"'weights' gives 2.0 KiB back to the host tier, but holds 1.0 KiB"):
        tier.credit(2048, "weights")
    assert tier.used_bytes == 1024


def test_negative_sizes() -> None:
    with pytest.raises(ConfigError, match="budget of the host tier is -1 bytes"):
        Tier("host", -1)
    tier = Tier("host", 10)
    for call in (tier.charge, tier.credit):
        with pytest.raises(ConfigError, match="'weights' asks -5 bytes of the host tier"):
            call(-5, "weights")


def test_threads_never_exceed_the_budget_together() -> None:
    num_threads, num_rounds = 4, 2000
    tier = Tier("host", 2)  # half of the threads may hold a byte at the same time
    holding: list[int] = []
    start = threading.Barrier(num_threads)

    def work(owner: str) -> None:
        start.wait()
        for _ in range(num_rounds):
            try:
                tier.charge(1, owner)
            except BudgetError:
                continue
            holding.append(tier.used_bytes)
            tier.credit(1, owner)

    threads = [threading.Thread(target=work, args=(f"thread {index}",)) for index in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(holding) <= 2
    assert tier.used_bytes == 0
    assert tier.by_owner() == {}
    assert tier.peak_bytes <= 2


@pytest.mark.parametrize(
    ("budgets", "share"),
    [([], 1.0), ([None], 1.0), ([25], 0.25), ([25, 50], 0.75), ([25, None], 1.0), ([80, 80], 1.0)],
)
def test_the_sum_of_the_budgets(budgets: list[int | None], share: float) -> None:
    assert allowed_share(budgets, 100) == share
