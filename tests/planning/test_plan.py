"""Plan and its parts refuse what cannot be meant."""

from __future__ import annotations

import pytest

from lowtide.errors import ConfigError
from lowtide.planning.plan import Budgets, Plan


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
