"""Hardware as data, and the kinds known by name."""

from __future__ import annotations

import itertools
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from lowtide.errors import ConfigError, UnknownNameError
from lowtide.hardware import (
    ASSUMED_CONTEXT_BYTES,
    Hardware,
    Source,
    cublas_workspace_bytes,
    find_hardware,
    known_hardware,
    parse_cublas_workspace_config,
)
from lowtide.units import GiB, KiB, MiB


@pytest.mark.parametrize(
    ("capability", "torch_version", "expected"),
    [
        ((7, 5), "2.13.0", 8 * MiB + 128 * KiB),
        ((8, 0), "2.11.0+cu130", 8 * MiB + 128 * KiB),
        ((8, 9), "2.13.0", 8 * MiB + 128 * KiB),
        ((9, 0), "2.11.0+cu130", 32 * MiB),
        ((9, 0), "2.13.0", 32 * MiB),
        ((10, 0), "2.11.0", 8 * MiB + 128 * KiB),
        ((10, 0), "2.12.1", 32 * MiB),
        ((12, 0), "2.13.0", 32 * MiB),
    ],
)
def test_workspace_follows_the_generation_and_the_version(
    capability: tuple[int, int], torch_version: str, expected: int
) -> None:
    assert cublas_workspace_bytes(capability, torch_version) == expected


def test_a_separate_workspace_for_fused_products_ends_with_torch_2_12() -> None:
    h200 = find_hardware("h200")
    # Measured on an H200 under 2.11: a second allocation of 1 MiB at the first addmm.
    assert h200.cublaslt_workspace_for("2.11.0+cu130") == MiB
    assert h200.cublaslt_workspace_for("2.13.0") == 0


def test_other_vendors_keep_their_own_workspaces() -> None:
    mi300x = find_hardware("mi300x")
    assert (mi300x.cublas_workspace_for("2.11"), mi300x.cublaslt_workspace_for("2.13")) == (128 * MiB, 76 * MiB)
    cpu = find_hardware("cpu")
    assert (cpu.cublas_workspace_for("2.11"), cpu.cublaslt_workspace_for("2.11")) == (0, 0)


def test_workspace_config_is_size_times_count() -> None:
    assert parse_cublas_workspace_config(":4096:2:16:8") == 2 * 4 * MiB + 8 * 16 * KiB
    assert parse_cublas_workspace_config(":4096:8") == 32 * MiB
    with pytest.raises(ConfigError, match="'big' is not a cuBLAS workspace configuration"):
        parse_cublas_workspace_config("big")


def test_versions_must_be_readable() -> None:
    with pytest.raises(ConfigError, match="'new' is not a torch version"):
        cublas_workspace_bytes((9, 0), "new")


def test_types_without_a_unit_run_at_the_rate_of_fp32() -> None:
    t4, h200 = find_hardware("t4"), find_hardware("h200")
    assert t4.flops("torch.bfloat16") == t4.flops("float32") == t4.fp32_flops == 8.1e12
    assert t4.flops("float32", allow_tf32=True) == 8.1e12
    assert h200.flops("float32", allow_tf32=True) == h200.tf32_flops
    assert h200.flops("float64") == h200.fp32_flops
    assert find_hardware("cpu").flops("bfloat16") is None


def test_negative_figures_are_refused() -> None:
    card: Hardware = find_hardware("l4")
    with pytest.raises(ConfigError, match="memory_bytes of the hardware 'l4' cannot be negative, got -1"):
        replace(card, memory_bytes=-1)


CARDS = [card for card in known_hardware() if not card.is_host]
by_card = pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)

# Within a series the smaller board first, each with its memory in GB as sold, boost clock in MHz, bus in bits and Gbit/s a
# pin, from which the table's rates must follow.
# fmt: off
SERIES: dict[tuple[int, int], dict[str, tuple[int, int, int, float]]] = {
    (8, 6): {
        "rtx-3050": (8, 1777, 128, 14), "rtx-3060": (12, 1777, 192, 15), "rtx-3060-ti": (8, 1665, 256, 14),
        "rtx-3070": (8, 1725, 256, 14), "rtx-3070-ti": (8, 1770, 256, 19), "rtx-3080-10gb": (10, 1710, 320, 19),
        "rtx-3080-12gb": (12, 1710, 384, 19), "rtx-3080-ti": (12, 1665, 384, 19), "rtx-3090": (24, 1695, 384, 19.5),
        "rtx-3090-ti": (24, 1860, 384, 21),
    },
    (8, 9): {
        "rtx-4060": (8, 2460, 128, 17), "rtx-4060-ti-8gb": (8, 2535, 128, 18), "rtx-4060-ti-16gb": (16, 2535, 128, 18),
        "rtx-4070": (12, 2475, 192, 21), "rtx-4070-super": (12, 2475, 192, 21), "rtx-4070-ti": (12, 2610, 192, 21),
        "rtx-4070-ti-super": (16, 2610, 256, 21), "rtx-4080": (16, 2505, 256, 22.4), "rtx-4080-super": (16, 2550, 256, 23),
        "rtx-4090": (24, 2520, 384, 21),
    },
    (12, 0): {
        "rtx-5060": (8, 2497, 128, 28), "rtx-5060-ti-16gb": (16, 2572, 128, 28), "rtx-5070": (12, 2512, 192, 28),
        "rtx-5070-ti": (16, 2452, 256, 28), "rtx-5080": (16, 2617, 256, 30), "rtx-5090": (32, 2407, 512, 28),
    },
}
WITH_EIGHT_LANES = {"rtx-3050", "rtx-4060", "rtx-4060-ti-8gb", "rtx-4060-ti-16gb", "rtx-5060", "rtx-5060-ti-16gb"}
GEFORCE = [(capability, name, *sheet) for capability, boards in SERIES.items() for name, sheet in boards.items()]
SOLD_AS_GB = {
    "h200": 141, "h100": 80, "h100-pcie": 80, "a100-80gb": 80, "a100-40gb": 40, "l4": 24, "l40s": 48, "a10g": 24,
    "t4": 16, "v100-16gb": 16, "v100-32gb": 32, "a40": 48, "rtx-a6000": 48, "rtx-6000-ada": 48, "b200": 192, "mi300x": 192,
    **{name: sold for _, name, sold, *_ in GEFORCE},
}
# fmt: on


def test_the_page_lists_every_name() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tracing.md").read_text(encoding="utf-8")
    listed = re.findall(r"`([a-z0-9-]+)`", page.partition("| series | names |")[2].partition("\n\n")[0])
    assert sorted(listed) == sorted(card.name for card in known_hardware())


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


@pytest.mark.parametrize(("capability", "name", "sold", "mhz", "bits", "gbps"), GEFORCE, ids=lambda value: str(value))
def test_rates_of_geforce_boards_follow_from_clock_and_bus(
    capability: tuple[int, int], name: str, sold: int, mhz: int, bits: int, gbps: float
) -> None:
    card = find_hardware(name)
    assert card.compute_capability == capability
    assert card.fp32_flops == pytest.approx(2 * 128 * card.num_sms * mhz * 1e6, rel=0.006)
    assert card.memory_bytes_per_s == pytest.approx(bits / 8 * gbps * 1e9, rel=0.001)
    assert card.bf16_flops == card.fp16_flops == pytest.approx(2 * card.fp32_flops, rel=0.01)
    assert card.tf32_flops == card.fp32_flops
    slot = 63.0e9 if capability == (12, 0) else 31.5e9
    assert card.host_link_bytes_per_s == (slot / 2 if name in WITH_EIGHT_LANES else slot)
    assert card.memory_bytes < sold * GiB


@pytest.mark.parametrize("boards", SERIES.values(), ids=str)
def test_larger_boards_of_a_series_have_no_less(boards: dict[str, tuple[int, int, int, float]]) -> None:
    cards = [find_hardware(name) for name in boards]
    for smaller, larger in itertools.pairwise(cards):
        assert 0 < smaller.num_sms <= larger.num_sms
        assert smaller.memory_bytes_per_s <= larger.memory_bytes_per_s
        assert smaller.fp32_flops <= larger.fp32_flops
        assert smaller.host_link_bytes_per_s <= larger.host_link_bytes_per_s


def test_estimated_memory_is_the_median_of_boards_sold_with_as_much() -> None:
    reported: dict[int, list[int]] = {}
    for _, name, sold, *_ in GEFORCE:
        if find_hardware(name).memory_source is Source.REPORTED:
            reported.setdefault(sold, []).append(find_hardware(name).memory_bytes)
    estimated = {card.name: card for card in CARDS if card.memory_source is Source.ESTIMATED}
    assert set(estimated) == {"rtx-3050", "rtx-3080-12gb", "rtx-4070-super", "rtx-5060"}
    for name, card in estimated.items():
        assert card.memory_bytes == statistics.median(reported[SOLD_AS_GB[name]])


@by_card
def test_a_context_that_is_not_known_is_assumed(card: Hardware) -> None:
    is_known = card.name == "h200"
    assert (card.context_source is Source.ASSUMED) != is_known
    assert is_known or card.context_bytes == ASSUMED_CONTEXT_BYTES


def test_the_assumed_context_is_the_measured_one_rounded_up() -> None:
    measured = find_hardware("h200").context_bytes
    assert measured <= ASSUMED_CONTEXT_BYTES < measured + 10 * MiB
    cpu = find_hardware("cpu")
    assert (cpu.context_bytes, cpu.context_source) == (0, Source.UNKNOWN)
    own = replace(find_hardware("l4"), context_bytes=0, context_source=Source.MEASURED)
    assert own.context_bytes == 0  # somebody who has looked is believed


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
    with pytest.raises(UnknownNameError, match="no hardware named 'rtx-4085'; did you mean 'rtx-4080'"):
        find_hardware("rtx-4085")
    with pytest.raises(UnknownNameError, match="'RTX 3080'; did you mean .*'rtx-3080-12gb' or 'rtx-3080-10gb'"):
        find_hardware("RTX 3080")
    with pytest.raises(UnknownNameError, match="'a100-80gb'"):
        find_hardware("a100")


@pytest.mark.parametrize(
    ("typed", "name", "num_bytes"),
    [("24GiB", "24GiB", 24 * GiB), (" 7.5 gib", "7.5gib", 15 * GiB // 2), ("24 GB", "24GB", 24 * 10**9)],
)
def test_a_capacity_stands_for_a_common_gpu_without_rates(typed: str, name: str, num_bytes: int) -> None:
    card = find_hardware(typed)
    assert (card.name, card.memory_bytes, card.memory_source) == (name, num_bytes, Source.GIVEN)
    assert card.compute_capability == (8, 9)
    assert "8.9" in card.label
    assert card.note is not None
    assert "compute capability 8.9 with 128 multiprocessors" in card.note
    assert card.num_sms == find_hardware("rtx-4090").num_sms == 128
    assert (card.context_bytes, card.context_source) == (ASSUMED_CONTEXT_BYTES, Source.ASSUMED)
    for release in ("2.11.0", "2.13.0"):
        assert card.cublas_workspace_for(release) == find_hardware("rtx-4090").cublas_workspace_for(release)
    assert card.flops("bfloat16") is card.memory_bytes_per_s is card.host_link_bytes_per_s is None
    assert card not in known_hardware()


@pytest.mark.parametrize("typed", ["24", "-1GiB", "24 bananas", "0GiB", "4090", "1.2.3GiB"])
def test_what_is_no_capacity_is_refused(typed: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{typed}' is neither the name of a device nor a capacity; write .* 24GiB"):
        find_hardware(typed)
