"""What is taken of a data sheet, and of the host, against the calibration of an H200 that it comes from."""

from __future__ import annotations

import pytest

from lowtide.hardware import UpdateKind, find_hardware
from lowtide.hardware.rates import KERNEL_S, LINK_EFFICIENCY, PRODUCT_S, UPDATE_EFFICIENCY, HostRates
from tests.hardware.h200_record import measured_rates, measurements

MEASURED, RATES = measurements(), measured_rates()
SHEET = find_hardware("h200")


def test_attention_reaches_what_was_measured() -> None:
    assert SHEET.rates is not None
    assert SHEET.rates.bf16 is not None
    assert RATES.bf16 is not None
    for ours, theirs in (
        (SHEET.rates.attention, RATES.attention),
        (SHEET.rates.attention_backward, RATES.attention_backward),
    ):
        assert ours.share * SHEET.rates.bf16.per_s == pytest.approx(theirs.share * RATES.bf16.per_s, rel=0.05)
        assert ours.bytes_per_s == pytest.approx(theirs.bytes_per_s, rel=0.15)


def test_kernels_start_as_quickly_as_measured() -> None:
    assert RATES.bf16 is not None
    assert pytest.approx(RATES.bf16.start_s, rel=0.15) == PRODUCT_S
    assert pytest.approx(RATES.memory.start_s, rel=0.15) == KERNEL_S


def test_products_and_memory_of_whole_steps_are_near_those_of_kernels() -> None:
    """They are fitted to seven steps of other machines, some years of commits before: a tenth is what machines differ by."""
    assert SHEET.rates is not None
    assert SHEET.rates.bf16 is not None
    assert RATES.bf16 is not None
    assert SHEET.rates.bf16.per_s == pytest.approx(RATES.bf16.per_s, rel=0.1)
    assert SHEET.rates.memory.per_s == pytest.approx(RATES.memory.per_s, rel=0.15)


def test_copies_reach_what_was_measured_both_ways_at_once() -> None:
    assert SHEET.host_link_bytes_per_s is not None
    for rate in (RATES.to_device_bytes_per_s, RATES.to_host_bytes_per_s):
        assert rate / SHEET.host_link_bytes_per_s == pytest.approx(LINK_EFFICIENCY, rel=0.02)


@pytest.mark.parametrize("where", ["", ", beside copies"])
def test_kinds_of_updates_on_the_host_stand_to_one_another_as_measured(where: str) -> None:
    host = HostRates().updates_beside_copies if where else HostRates().updates
    exact = MEASURED[f"update on the host, {UpdateKind.EXACT}{where}"].per_s
    for kind in UpdateKind:
        found = MEASURED[f"update on the host, {kind}{where}"].per_s / exact
        assert host.of(kind) / host.exact == pytest.approx(found, rel=0.1)


@pytest.mark.parametrize(
    ("kind", "other"), [(UpdateKind.EIGHT_BIT, UpdateKind.EXACT), (UpdateKind.TORCH, UpdateKind.TORCH_FUSED)]
)
def test_kinds_of_updates_on_the_device_do_so_too(kind: UpdateKind, other: UpdateKind) -> None:
    found = (MEASURED[f"update on the device, {each}"].per_s for each in (kind, other))
    share = UPDATE_EFFICIENCY[kind.name.lower()] / UPDATE_EFFICIENCY[other.name.lower()]
    assert share == pytest.approx(next(found) / next(found), rel=0.05)
