"""PYTORCH_ALLOC_CONF as torch reads it."""

from __future__ import annotations

import warnings

import pytest

from lowtide.errors import ConfigError
from lowtide.tracing.allocator import AllocatorSettings, parse_allocator_conf
from lowtide.units import GiB, MiB


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
