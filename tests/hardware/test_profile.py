"""Hardware as data, and the kinds known by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowtide.errors import ConfigError, UnknownNameError
from lowtide.hardware import (
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
    with pytest.raises(UnknownNameError, match="no hardware named 'rtx-4080'; did you mean 'rtx-4090'"):
        find_hardware("rtx-4080")
    with pytest.raises(UnknownNameError, match="'a100-80gb'"):
        find_hardware("a100")
