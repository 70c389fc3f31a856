"""Staging buffers of CUDA reductions against an H200 (132 multiprocessors, torch 2.11)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.tracing.ghost.reductions import Reduction, describe, staging_bytes
from lowtide.units import MiB

H200_SMS = 132

# fmt: off
MEASURED = [
    # dtype, shape, strides where they are not the usual ones, reduced dimensions, peak less what was left after the call
    ("bfloat16", (1024, 1024), None, (), 1024),  # llama-bf16-adafactor
    ("float32", (64, 12, 64, 64), None, (0, 2, 3), 2048),  # swinv2-autocast
    ("float32", (65536, 32), None, (0,), 1049088),  # segformer-fp32
    ("float32", (1024, 768), None, (0,), 6291968),  # deberta-v2-fp32
    ("bfloat16", (8192, 128), None, (0,), 8389120),  # electra-bf16
    ("bfloat16", (2048, 768), None, (0,), 12976640),  # bart-bf16
    ("float32", (2048, 1024), None, (0,), 16777728),  # opt-fp32
    ("float32", (8, 512, 512), None, (0, 1), 16777728),  # t5-fp32
    ("float32", (32, 56, 56, 96), None, (0, 1, 2), 19268096),  # convnext-fp32
    ("bfloat16", (2816, 1024), None, (-2,), 23069184),  # llama-bf16-adafactor
    ("float32", (4096, 768), None, (0,), 25166336),  # gpt2-fp32
    ("bfloat16", (2, 1024, 16, 128), (2097152, 128, 131072, 1), (0, 1, 2), 33554944),  # qwen3-bf16
    ("float32", (4, 1024, 1024), None, (0, 1), 33554944),  # llama-fp32
    ("float32", (1568, 3072), None, (0,), 39322112),  # swin-fp32
    ("float32", (8192, 768), None, (0,), 50332160),  # distilbert-fp32
    ("float32", (4096, 2048), None, (0,), 67109376),  # nn-transformer-fp32
    ("bfloat16", (12608, 768), None, (0,), 77595136),  # vit-bf16
    ("float32", (4096, 3072), None, (0,), 100663808),  # gpt2-fp32
    ("float32", (100352, 384), None, (0,), 138412544),  # swin-fp32
    ("float32", (32, 56, 56, 384), None, (1, 2), 138412544),  # convnextv2-fp32
    ("float32", (4096, 16000), None, (0,), 139264512),  # nn-transformer-fp32
    ("bfloat16", (1, 256, 1024), None, (0, 1), 0),  # llama-bf16-small-batch
    ("bfloat16", (256, 1024), None, (-2,), 0),  # llama-bf16-adafactor
    ("bfloat16", (4, 4, 4, 1024, 64), (1048576, 262144, 65536, 1, 1024), (2,), 0),  # llama-bf16-eager-attention
    ("bfloat16", (64, 2048, 7, 7), None, (-1, -2), 0),  # resnet-bf16
    ("float32", (16, 196, 768), (151296, 768, 1), (1,), 0),  # beit-fp32
    ("float32", (2, 8, 2, 1024, 128), (2097152, 262144, 131072, 1, 1024), (2,), 0),  # qwen3-fp32-fused
    ("float32", (32, 1000), None, (0,), 0),  # swin-fp32
    ("float32", (4, 4, 4, 1024, 64), None, (2,), 0),  # llama-fp32
    ("float32", (8, 512, 512), None, (2,), 0),  # t5-fp32
    ("float32", (2048, 32000), None, (0,), 147457024),  # deberta-v2-fp32
]
# fmt: on
"""Of the 305 different reductions in the suite's models: every seventh that stages, every twentieth that does not, the largest."""


def blocks_of(nbytes: int) -> int:
    """What the allocator makes of a request."""
    return -(-nbytes // 512) * 512


@pytest.mark.parametrize(("dtype", "shape", "strides", "dims", "measured"), MEASURED)
def test_as_measured_on_the_card(
    dtype: str, shape: tuple[int, ...], strides: tuple[int, ...] | None, dims: tuple[int, ...], measured: int
) -> None:
    kind = getattr(torch, dtype)
    tensor = torch.empty(shape, dtype=kind, device="meta")
    if strides is not None:
        tensor = torch.empty_strided(shape, strides, dtype=kind, device="meta")
    staging, semaphores = staging_bytes(describe(tensor, dims, 4), H200_SMS)
    exact = blocks_of(staging) + blocks_of(semaphores)
    # A block of the large pool is not split when less than 1 MiB would be left of it: the card's figure may hold that too.
    assert exact <= measured <= exact + MiB


def test_a_bias_gradient_by_hand() -> None:
    """4096 x 768 over the rows: 4 outputs a thread, 32 x 4 threads wide, so 6 columns of blocks and 64 rows of them."""
    reduction = describe(torch.empty(4096, 768, device="meta"), [0], 4)
    assert (reduction.num_outputs, reduction.inputs_per_output, reduction.vector) == (768, 4096, 4)
    assert not reduction.reduces_fastest
    staging, semaphores = staging_bytes(reduction, H200_SMS)
    assert staging == 24 * MiB == 768 * 4 * 64 * 128
    assert semaphores == 4 * 6


def test_merged_dimensions_are_one_reduction() -> None:
    flat = describe(torch.empty(4096, 1024, device="meta"), [0], 4)
    assert describe(torch.empty(4, 1024, 1024, device="meta"), [0, 1], 4) == flat
    assert describe(torch.empty(4, 1024, 1024, device="meta"), [-3, -2], 4) == flat


def test_no_dimensions_mean_all_of_them() -> None:
    tensor = torch.empty(8, 16, device="meta")
    assert describe(tensor, [], 4) == describe(tensor, [0, 1], 4)
    assert describe(tensor, [], 4).num_outputs == 1


def test_the_layout_decides_what_is_fastest() -> None:
    tensor = torch.empty(64, 32, device="meta")
    assert describe(tensor, [1], 4).reduces_fastest
    assert not describe(tensor.t(), [1], 4).reduces_fastest
    assert describe(tensor.t(), [0], 4).reduces_fastest


@pytest.mark.parametrize(("columns", "vector"), [(64, 4), (66, 2), (65, 1)])
def test_outputs_side_by_side_need_aligned_rows(columns: int, vector: int) -> None:
    assert describe(torch.empty(128, columns, device="meta"), [0], 4).vector == vector


@given(
    rows=st.integers(0, 200_000),
    columns=st.integers(0, 5_000),
    vector=st.sampled_from([1, 2, 4]),
    fastest=st.booleans(),
    sms=st.integers(1, 200),
)
def test_whole_partial_results_or_nothing(rows: int, columns: int, vector: int, fastest: bool, sms: int) -> None:
    reduction = Reduction(
        num_outputs=columns * vector,
        inputs_per_output=rows,
        reduces_fastest=fastest,
        vector=1 if fastest else vector,
        accumulator_bytes=4,
    )
    staging, semaphores = staging_bytes(reduction, sms)
    if staging == 0:
        assert semaphores == 0
    else:
        assert staging % (4 * reduction.num_outputs) == 0
        assert staging >= 2 * 4 * reduction.num_outputs  # two blocks at least, or there is nothing to hand over
        assert semaphores % 4 == 0
        # No more blocks in all than there are threads on the card, or than the inputs ask for.
        assert semaphores // 4 <= sms * 2048
