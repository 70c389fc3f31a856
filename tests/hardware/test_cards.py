"""The table of cards: complete, consistent with itself, and found by what people type."""

from __future__ import annotations

import pytest

from lowtide.errors import UnknownNameError
from lowtide.hardware import Hardware, Source, find_hardware, known_hardware
from lowtide.units import GiB, MiB

CARDS = [card for card in known_hardware() if not card.is_host]
by_card = pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)

SOLD_AS_GB = {
    "h200": 141, "h100": 80, "h100-pcie": 80, "a100-80gb": 80, "a100-40gb": 40, "l4": 24, "l40s": 48, "a10g": 24,
    "t4": 16, "v100-32gb": 32, "rtx-3090": 24, "rtx-4090": 24, "rtx-5090": 32, "rtx-4060-ti-16gb": 16, "rtx-3060": 12,
    "b200": 192, "mi300x": 192,
}  # fmt: skip


def test_every_promised_card_is_there_once() -> None:
    names = [card.name for card in known_hardware()]
    assert sorted(names) == sorted([*SOLD_AS_GB, "cpu"])


@by_card
def test_memory_is_a_little_less_than_what_is_sold(card: Hardware) -> None:
    # Sellers' "GB" is 2**30 bytes, but 10**9 on the H200; error correction and the driver take up to 8% off.
    unit = 1e9 if card.name == "h200" else GiB
    assert 0.91 < card.memory_bytes / (SOLD_AS_GB[card.name] * unit) <= 1.07


@by_card
def test_fp32_rate_is_two_operations_a_core_and_cycle(card: Hardware) -> None:
    # The clock that the sheet's fp32 rate implies must be one that such chips run at.
    cores = 64 if card.compute_capability in ((7, 0), (7, 5), (8, 0)) else 128
    assert card.fp32_flops is not None
    assert 1.2e9 < card.fp32_flops / (2 * cores * card.num_sms) < 2.7e9


@by_card
def test_rates_are_in_the_usual_order(card: Hardware) -> None:
    assert card.fp16_flops is not None
    assert card.fp32_flops is not None
    assert card.fp16_flops > card.fp32_flops
    for rate in (card.bf16_flops, card.tf32_flops):
        assert rate is None or card.fp32_flops <= rate <= card.fp16_flops
    assert card.host_link_bytes_per_s is not None
    assert card.memory_bytes_per_s is not None
    assert card.host_link_bytes_per_s < card.memory_bytes_per_s


@by_card
def test_unknown_figures_say_so(card: Hardware) -> None:
    assert (card.context_bytes == 0) == (card.context_source is Source.UNKNOWN)


def test_the_measured_card() -> None:
    h200 = find_hardware("h200")
    assert h200.memory_source is h200.context_source is Source.MEASURED
    assert h200.is_tested
    # nvidia-smi says 143,771 MiB, of which the driver keeps 615 for itself.
    assert h200.memory_bytes == pytest.approx(143_156 * MiB, abs=MiB)
    assert h200.cublas_workspace_bytes == 32 * MiB


@pytest.mark.parametrize("typed", ["rtx-4090", "RTX 4090", " rtx_4090 ", "Rtx-4090"])
def test_spelling_is_forgiven(typed: str) -> None:
    assert find_hardware(typed).name == "rtx-4090"


def test_unknown_names_get_near_ones() -> None:
    with pytest.raises(UnknownNameError, match="no card named 'rtx-4080'; did you mean 'rtx-4090'"):
        find_hardware("rtx-4080")
    with pytest.raises(UnknownNameError, match="'a100-80gb'"):
        find_hardware("a100")
