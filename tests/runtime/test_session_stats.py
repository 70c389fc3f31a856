from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import BadRecordError, ConfigError
from lowtide.planning.timeline import Lane, Reason
from lowtide.runtime.statistics.session_stats import (
    SCHEMA,
    CacheRow,
    ChunkRow,
    MovedRow,
    PhaseSeconds,
    SessionStats,
    TierRow,
)
from tests.runtime.session_samples import CHUNK_BYTES, Streaming, stats_of

STATS = stats_of(Streaming().timeline(is_emulated=True))

counts = st.integers(0, 2**60)
seconds = st.floats(0, 1e9)
stats_strategy = st.builds(
    SessionStats,
    num_steps=counts,
    moved=st.lists(
        st.builds(
            MovedRow,
            direction=st.sampled_from(["to device", "to host"]),
            reason=st.sampled_from(Reason),
            num_bytes=counts,
            num_copies=counts,
        ),
        max_size=3,
    ).map(tuple),
    exposed_copy_s=seconds,
    host_update_s=seconds,
    seconds=st.builds(PhaseSeconds, forward_s=seconds, backward_s=seconds, update_s=seconds, rest_s=seconds),
    chunks=st.lists(
        st.builds(
            ChunkRow,
            name=st.text(),
            group=st.text(),
            num_bytes=counts,
            weights=st.sampled_from(["resident", "streamed"]),
            site=st.sampled_from(["device", "host"]),
            num_fetches=counts,
            resident_share=st.floats(0, 1),
        ),
        max_size=3,
    ).map(tuple),
    cache=st.builds(CacheRow, hits=counts, misses=counts, held_bytes=counts),
    tiers=st.lists(
        st.builds(
            TierRow,
            tier=st.text(),
            peak_bytes=counts,
            budget_bytes=st.none() | counts,
            predicted_bytes=st.none() | counts,
        ),
        max_size=3,
    ).map(tuple),
    is_emulated=st.booleans(),
)


@given(stats_strategy)
def test_statistics_survive_json(stats: SessionStats) -> None:
    assert SessionStats.from_dict(json.loads(json.dumps(stats.to_dict(), allow_nan=False))) == stats


def test_the_record_names_its_schema_and_spells_out_its_words() -> None:
    record: Any = STATS.to_dict()
    assert record["schema"] == SCHEMA == "lowtide.session_stats/2"
    assert [row["reason"] for row in record["moved"]] == ["fetch weights", "upload", "gradients", "write back"]
    assert record["tiers"][2] == {
        "tier": "pinned",
        "peak_bytes": 2 * 2**30,
        "budget_bytes": None,
        "predicted_bytes": None,
    }


def without(key: str) -> dict[str, Any]:
    record = dict(STATS.to_dict())
    del record[key]
    return record


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([], "are a mapping, got list"),
        (without("schema"), "the schema is None, this Lowtide reads 'lowtide.session_stats/2'"),
        ({**STATS.to_dict(), "schema": "lowtide.session_stats/1"}, "the schema is 'lowtide.session_stats/1'"),
        (without("cache"), "missing key 'cache'"),
        ({**STATS.to_dict(), "colour": 1}, "unknown key 'colour'"),
        ({**STATS.to_dict(), "num_steps": True}, "'num_steps' must be an integer, got True"),
        ({**STATS.to_dict(), "num_steps": -1}, "num_steps is -1, which is below 0"),
        ({**STATS.to_dict(), "cache": {"hits": -2}}, "cache.hits is -2"),
        ({**STATS.to_dict(), "seconds": {"rest_s": -0.5}}, "seconds.rest_s is -0.5"),
        ({**STATS.to_dict(), "host_update_s": -1.0}, "host_update_s is -1.0"),
    ],
)
def test_other_records_are_refused(record: object, message: str) -> None:
    with pytest.raises(BadRecordError, match=message):
        SessionStats.from_dict(record)


def test_numbers_no_session_could_count_are_refused_in_rows_too() -> None:
    chunk = replace(STATS.chunks[0], resident_share=1.5)
    with pytest.raises(BadRecordError, match="the resident share of chunk 'embed/0' is 1.5, not between 0 and 1"):
        SessionStats.from_dict(replace(STATS, chunks=(chunk,)).to_dict())
    moved = replace(STATS.moved[0], num_copies=-1)
    with pytest.raises(BadRecordError, match="moved to device, fetch weights: num_copies is -1"):
        SessionStats.from_dict(replace(STATS, moved=(moved,)).to_dict())
    tier = replace(STATS.tiers[0], budget_bytes=-8)
    with pytest.raises(BadRecordError, match="device: budget_bytes is -8"):
        SessionStats.from_dict(replace(STATS, tiers=(tier,)).to_dict())


def test_what_json_cannot_hold_is_not_written() -> None:
    with pytest.raises(ConfigError, match="'exposed_copy_s' is nan"):
        replace(STATS, exposed_copy_s=float("nan")).to_dict()


def test_moved_bytes_are_summed_by_direction_and_reason() -> None:
    # 3 steps of 12 blocks of 2 chunks, forward and backward; blocks 0, 3, 6 and 9 write one chunk back.
    to_device = STATS.moved_bytes(Lane.TO_DEVICE)
    assert to_device == STATS.moved_bytes("to device", Reason.FETCH_WEIGHTS) + 3 * CHUNK_BYTES
    assert STATS.moved_bytes(reason=Reason.UPLOAD) == 3 * CHUNK_BYTES
    assert STATS.moved_bytes(reason=Reason.WRITE_BACK) == 3 * 4 * CHUNK_BYTES
    assert STATS.moved_bytes() == to_device + STATS.moved_bytes("to host")
    assert STATS.moved_bytes("to host", Reason.UPLOAD) == 0


def test_derived_numbers() -> None:
    assert PhaseSeconds(forward_s=1, backward_s=2, update_s=3, rest_s=4).total_s == 10
    assert CacheRow(hits=3, misses=1).hit_rate == 0.75
    assert CacheRow().hit_rate is None
    tier = TierRow(tier="device", peak_bytes=100, budget_bytes=99, predicted_bytes=110)
    assert tier.prediction_error == pytest.approx(0.1)
    assert tier.is_within_budget is False
    assert TierRow(tier="device", peak_bytes=100, budget_bytes=100).is_within_budget is True
    assert TierRow(tier="device", peak_bytes=0, predicted_bytes=5).prediction_error is None
    assert TierRow(tier="device", peak_bytes=5).is_within_budget is None
