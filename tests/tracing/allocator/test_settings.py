"""The allocator's size rules and the limits of its settings."""

from __future__ import annotations

import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import ConfigError
from lowtide.tracing.allocator import AllocatorSettings, parse_allocator_conf
from lowtide.units import GiB, KiB, MiB


@pytest.mark.parametrize(
    ("requested", "block"), [(1, 512), (512, 512), (513, 1024), (MiB, MiB), (MiB + 1, MiB + 512), (GiB - 1, GiB)]
)
def test_requests_round_up_to_512_bytes(requested: int, block: int) -> None:
    assert AllocatorSettings().block_bytes(requested) == block


@pytest.mark.parametrize(
    ("block", "segment"),
    [
        (512, 2 * MiB),
        (MiB, 2 * MiB),
        (MiB + 512, 20 * MiB),
        (10 * MiB - 512, 20 * MiB),
        (10 * MiB, 10 * MiB),
        (10 * MiB + 512, 12 * MiB),
        (GiB, GiB),
    ],
)
def test_segments(block: int, segment: int) -> None:
    assert AllocatorSettings().segment_bytes(block) == segment


def test_large_segments_can_be_larger() -> None:
    assert AllocatorSettings(large_segment_bytes=64 * MiB).segment_bytes(2 * MiB) == 64 * MiB


def test_divisions_round_up_between_powers_of_two() -> None:
    settings = AllocatorSettings(roundup_power2_divisions=(4,) * 16)
    # Between 1 and 2 MiB there are the steps 1, 1.25, 1.5 and 1.75 MiB.
    assert settings.block_bytes(MiB + 1) == MiB + 256 * KiB
    assert settings.block_bytes(MiB + 256 * KiB) == MiB + 256 * KiB
    assert settings.block_bytes(2 * MiB - 1) == 2 * MiB
    assert settings.block_bytes(2 * KiB) == 2 * KiB  # at most 512 bytes a division: rounded as without
    assert settings.block_bytes(2 * KiB - 1) == 2 * KiB
    assert settings.block_bytes(2 * KiB + 1) == 2 * KiB + 512


def test_divisions_are_set_by_interval() -> None:
    divisions = (0, 2, *(0,) * 13, 8)
    settings = AllocatorSettings(roundup_power2_divisions=divisions)
    assert settings.block_bytes(MiB + 1) == MiB + 512
    assert settings.block_bytes(2 * MiB + 1) == 3 * MiB
    assert settings.block_bytes(4 * MiB + 1) == 4 * MiB + 512
    assert settings.block_bytes(32 * GiB + 1) == 36 * GiB
    assert settings.block_bytes(200 * GiB) == 208 * GiB  # beyond the last interval: as the last


@given(requested=st.integers(1, 2**40), divisions=st.sampled_from([0, 1, 2, 4, 8, 64]))
def test_rounding_never_shrinks_and_is_stable(requested: int, divisions: int) -> None:
    settings = AllocatorSettings(roundup_power2_divisions=(divisions,) * 16)
    block = settings.block_bytes(requested)
    assert block >= requested
    assert block % 512 == 0
    assert settings.block_bytes(block) == block
    assert block <= max(requested + 511, requested * (1 + 1 / max(divisions, 1)), 1024)
    assert settings.segment_bytes(block) >= block


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"capacity_bytes": 0}, "capacity_bytes must be positive, got 0"),
        ({"allowed_bytes": -5}, "allowed_bytes must be positive, got -5"),
        ({"large_segment_bytes": 10 * MiB}, "more than 10 MiB, got 10485760"),
        ({"large_segment_bytes": 20 * MiB + 1}, "whole MiB"),
        ({"max_split_bytes": 19 * MiB}, "max_split_bytes must be at least large_segment_bytes"),
        ({"max_non_split_rounding_bytes": MiB}, "max_non_split_rounding_bytes must be at least"),
        ({"garbage_collection_threshold": 1.0}, "between 0 and 1, got 1.0"),
        ({"roundup_power2_divisions": (4,)}, "must be 16 powers of two"),
        ({"roundup_power2_divisions": (3,) * 16}, "must be 16 powers of two"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AllocatorSettings(**wrong)  # type: ignore[arg-type]


def test_nothing_set_is_the_default() -> None:
    assert parse_allocator_conf("") == parse_allocator_conf("  ") == AllocatorSettings()
    assert parse_allocator_conf("", capacity_bytes=GiB).capacity_bytes == GiB


def test_every_setting_that_changes_sizes() -> None:
    conf = (
        "expandable_segments:True, max_split_size_mb:64,max_non_split_rounding_mb:48,"
        "garbage_collection_threshold:0.8,large_segment_size_mb:40"
    )
    assert parse_allocator_conf(conf) == AllocatorSettings(
        expandable_segments=True,
        max_split_bytes=64 * MiB,
        max_non_split_rounding_bytes=48 * MiB,
        garbage_collection_threshold=0.8,
        large_segment_bytes=40 * MiB,
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4", (4,) * 16),
        ("[256:1,512:2,1024:4,>:8]", (1,) * 9 + (2, 4) + (8,) * 5),
        ("[4:2,64:8]", (2, 2, 2, 0, 0, 0, 8) + (0,) * 9),
        ("[65536:4]", (4,) * 16),
    ],
)
def test_divisions(text: str, expected: tuple[int, ...]) -> None:
    settings = parse_allocator_conf(f"roundup_power2_divisions:{text},expandable_segments:False")
    assert settings.roundup_power2_divisions == expected


def test_memory_fraction_needs_the_card() -> None:
    conf = "per_process_memory_fraction:0.25"
    assert parse_allocator_conf(conf, total_bytes=8 * GiB).allowed_bytes == 2 * GiB
    assert parse_allocator_conf(conf, capacity_bytes=4 * GiB).allowed_bytes == GiB
    assert parse_allocator_conf("per_process_memory_fraction:1.0", total_bytes=GiB).allowed_bytes is None
    with pytest.warns(UserWarning, match="pass total_bytes"):
        assert parse_allocator_conf(conf).allowed_bytes is None


def test_settings_without_effect_on_sizes_are_passed_over() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settings = parse_allocator_conf("pinned_use_background_threads:True,backend:native")
    assert settings == AllocatorSettings()


def test_unknown_keys_and_backends_are_warned_about() -> None:
    with pytest.warns(UserWarning, match="'max_split_size' is ignored; did you mean 'max_split_size_mb'"):
        assert parse_allocator_conf("max_split_size:64") == AllocatorSettings()
    with pytest.warns(UserWarning, match="backend 'cudaMallocAsync' is not modelled"):
        parse_allocator_conf("backend:cudaMallocAsync")


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ("expandable_segments", "near 'expandable_segments'; write key:value"),
        ("expandable_segments:", "write key:value"),
        ("expandable_segments:yes", "needs True or False, got 'yes'"),
        ("max_split_size_mb:big", "needs a whole number, got 'big'"),
        ("max_split_size_mb:-1", "needs a whole number"),
        ("max_split_size_mb:10", "max_split_bytes must be at least"),
        ("garbage_collection_threshold:x", "needs a number"),
        ("garbage_collection_threshold:2", "between 0 and 1"),
        ("per_process_memory_fraction:2", "between 0 and 1, got 2.0"),
        ("roundup_power2_divisions:[3:4]", "intervals of roundup_power2_divisions must be powers of two, got 3"),
        ("roundup_power2_divisions:[256:3]", "16 powers of two"),
        ("roundup_power2_divisions:[256:4", "write key:value"),
    ],
)
def test_wrong_texts_are_refused(conf: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_allocator_conf(conf)
