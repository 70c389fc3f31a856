"""Hardware profiles: torch's workspace rules and the rates of types without a unit of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowtide.errors import ConfigError
from lowtide.hardware import Hardware, cublas_workspace_bytes, find_hardware, parse_cublas_workspace_config
from lowtide.units import KiB, MiB


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
