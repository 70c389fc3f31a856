"""Ranks on a GPU: one rank under NCCL, two over gloo on one card, and what NCCL refuses."""

from __future__ import annotations

import pytest

from tests.ranks import on_ranks
from tests.runtime.rank_jobs import train_on_cuda, two_on_one_card

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("schedule", ["deferred", "in_backward"])
@pytest.mark.parametrize("weights", ["resident", "streamed"])
def test_one_rank_under_nccl_is_a_session_without_ranks(weights: str, schedule: str) -> None:
    ((alone, with_group),) = on_ranks(train_on_cuda, 1, "nccl", weights, schedule)
    assert with_group == alone


def test_two_ranks_share_a_card_over_gloo() -> None:
    for found, whole in on_ranks(train_on_cuda, 2, "gloo", "streamed", "deferred"):
        assert found == pytest.approx(whole, rel=1e-5)


def test_two_nccl_ranks_on_one_card_are_one_sentence() -> None:
    for kind, message in on_ranks(two_on_one_card, 2):
        assert kind in ("ConfigError", "RankLostError")
        assert "same GPU" in message or "cannot reach the others" in message
