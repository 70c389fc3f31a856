"""Rates against their formulas."""

from __future__ import annotations

import pytest

from lowtide.hardware import UpdateKind, find_hardware
from lowtide.hardware.rates import PRODUCT_S, HostRates, KernelRate
from tests.hardware.samples import RATES, UPDATES


def test_a_small_kernel_is_mostly_its_start() -> None:
    rate = KernelRate(per_s=1e12, start_s=4e-6)
    assert rate.seconds(1e12) == pytest.approx(1.000004)
    assert rate.seconds(4e6) == pytest.approx(8e-6)  # half of the peak, where work and start take as long


def test_the_longer_of_arithmetic_and_traffic_counts() -> None:
    assert RATES.seconds(num_bytes=2e11) == pytest.approx(1 + 3e-6)
    assert RATES.seconds(num_bytes=2e11, flops=3e13, dtype="torch.bfloat16") == pytest.approx(1 + 3e-6)
    assert RATES.seconds(num_bytes=2e9, flops=6e13, dtype="torch.bfloat16") == pytest.approx(1 + 5e-6)
    assert RATES.seconds(num_bytes=0) == 0.0


def test_types_without_a_rate_have_that_of_fp32() -> None:
    for dtype in ("torch.float16", "float32", "torch.float64"):
        assert RATES.seconds(num_bytes=1, flops=1e13, dtype=dtype) == pytest.approx(1 + 1e-6)


def test_attention_reaches_a_share_of_products_and_its_backward_another() -> None:
    name = "aten._scaled_dot_product_flash_attention"
    for operator, seconds in ((name, 2.5), (f"{name}_backward", 9.0)):
        found = RATES.seconds(num_bytes=5e11, flops=6e13, dtype="bfloat16", operator=operator)
        assert found == pytest.approx(seconds + 5e-6)


def test_each_kind_of_update_has_its_rate() -> None:
    assert [UPDATES.of(kind) for kind in UpdateKind] == [1e9, 2e9, 3e9, 4e9, 5e9]
    assert [UPDATES.times(2).of(kind) for kind in UpdateKind] == [2e9, 4e9, 6e9, 8e9, 10e9]


def test_a_slower_host_is_slower_in_all_its_python() -> None:
    ours, slow = HostRates(), HostRates().launching(54e-6)
    assert slow.launch_s == 54e-6
    for name in ("window_s", "watched_s", "finished_s"):
        assert getattr(slow, name) == pytest.approx(3 * getattr(ours, name))
    assert (slow.updates, slow.slowdown_beside_updates) == (ours.updates, ours.slowdown_beside_updates)


def test_a_data_sheet_is_taken_for_what_an_h200_reaches_of_its_own() -> None:
    """The shares of every card are those of the H200, whose figures they were measured with."""
    h200, card = find_hardware("h200"), find_hardware("rtx-4090")
    assert h200.rates is not None
    assert card.rates is not None
    assert card.rates.bf16 is not None
    assert h200.rates.bf16 is not None
    assert card.bf16_flops is not None
    assert h200.bf16_flops is not None
    assert card.rates.bf16.per_s / card.bf16_flops == pytest.approx(h200.rates.bf16.per_s / h200.bf16_flops)
    assert card.rates.bf16.start_s == h200.rates.bf16.start_s == PRODUCT_S
    assert find_hardware("24GiB").rates is None
    assert find_hardware("cpu").rates is None
    turing = find_hardware("t4").rates
    assert turing is not None
    assert turing.bf16 is None
