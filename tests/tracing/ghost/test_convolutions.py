"""Workspaces of cuDNN convolutions: the rule as arithmetic, and how far it holds on an H200 (torch 2.11, cuDNN 9.19).

`data/convolutions-h200.json` is every 17th call of a grid of 4,600 (those whose tensors exceed 4 MiB together), chosen by
position, whatever the rule says about it. "Within tolerance" is within 15% or 4 MiB of the measured scratch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.tracing.ghost.convolutions import backward_bytes, forward_bytes, is_channels_last
from lowtide.units import MiB

SMS = 132
WANTED = {"both": [True, True, False], "input": [True, False, False], "weight": [False, True, False]}
DATA = json.loads((Path(__file__).parent / "data" / "convolutions-h200.json").read_text())


def meta(shape: tuple[int, ...], dtype: str, *, is_last: bool = False) -> Tensor:
    plain = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
    return plain.to(memory_format=torch.channels_last) if is_last else plain


def scratch(
    call: str,
    shape: tuple[int, int, int, int],
    out: int,
    kernel: int,
    *,
    stride: int = 1,
    padding: int = 0,
    groups: int = 1,
    is_transposed: bool = False,
    dtype: str = "float32",
    is_last: bool = False,
) -> int:
    """Predicted bytes of the largest stage of `fwd` or of a backward that wants `both`, `input` or `weight`."""
    channels = shape[1]
    weight_shape = (channels, out, kernel, kernel) if is_transposed else (out, channels // groups, kernel, kernel)
    inputs, weight = meta(shape, dtype, is_last=is_last), meta(weight_shape, dtype, is_last=is_last)
    rest = ([stride] * 2, [padding] * 2, [1, 1], is_transposed, [0, 0], groups)
    output_shape = torch.ops.aten.convolution(inputs, weight, None, *rest).shape
    output = meta(tuple(output_shape), dtype, is_last=is_last)
    if call == "fwd":
        stages = forward_bytes((inputs, weight, None, *rest), output, SMS)
    else:
        stages = backward_bytes((output, inputs, weight, None, *rest, WANTED[call]), None, SMS)
    return max((sum(stage) for stage in stages), default=0)


def is_within(predicted: int, measured: int) -> bool:
    return abs(predicted - measured) <= max(4 * MiB, 0.15 * measured)


class TestTheRule:
    def test_channels_first_are_rearranged_input_weight_and_output(self) -> None:
        predicted = scratch("fwd", (8, 64, 32, 32), 128, 3, padding=1)
        assert predicted == 4 * (8 * 64 * 32 * 32 + 128 * 64 * 3 * 3 + 8 * 128 * 32 * 32)

    @pytest.mark.parametrize(("dtype", "padded"), [("float32", 4), ("bfloat16", 8)])
    def test_rearranged_channels_fill_sixteen_bytes(self, dtype: str, padded: int) -> None:
        size = getattr(torch, dtype).itemsize
        predicted = scratch("fwd", (2, 3, 16, 16), 64, 3, padding=1, dtype=dtype)
        assert predicted == size * (2 * padded * 256 + 64 * padded * 9 + 2 * 64 * 256)

    @pytest.mark.parametrize("call", ["fwd", "both", "input", "weight"])
    def test_channels_last_need_nothing(self, call: str) -> None:
        assert scratch(call, (8, 64, 32, 32), 64, 3, padding=1, dtype="bfloat16", is_last=True) == 0

    @pytest.mark.parametrize("call", ["fwd", "both"])
    def test_a_pointwise_convolution_is_a_product(self, call: str) -> None:
        assert scratch(call, (8, 64, 32, 32), 256, 1) == 0
        assert scratch(call, (8, 64, 32, 32), 256, 1, stride=2) > 0

    def test_a_depthwise_one_has_a_kernel_of_its_own(self) -> None:
        assert scratch("fwd", (8, 96, 56, 56), 96, 7, padding=3, groups=96) == 0

    def test_a_frozen_weight_needs_no_scratch_for_its_gradient(self) -> None:
        inputs, both = (scratch(call, (8, 256, 56, 56), 256, 3, padding=1) for call in ("input", "both"))
        assert inputs == scratch("fwd", (8, 256, 56, 56), 256, 3, padding=1) <= both
        only_weight = scratch("weight", (8, 256, 56, 56), 256, 3, padding=1)
        assert both == max(inputs, only_weight)

    def test_a_strided_gradient_is_copied(self) -> None:
        inputs, weight = meta((2, 4, 8, 8), "float32"), meta((4, 4, 3, 3), "float32")
        gradient = meta((2, 8, 8, 4), "float32").permute(0, 3, 1, 2)
        args = (gradient, inputs, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
        assert all(4 * gradient.numel() in stage for stage in backward_bytes(args, None, SMS))

    def test_which_tensors_are_channels_last(self) -> None:
        assert is_channels_last(meta((2, 4, 8, 8), "float32", is_last=True))
        assert not is_channels_last(meta((2, 4, 8, 8), "float32"))
        assert not is_channels_last(meta((2, 4, 1, 1), "float32", is_last=True))  # both at once: nothing to rearrange
        assert not is_channels_last(meta((2, 4, 8), "float32"))


MET_IN_MODELS = [
    # measured bytes, call
    (93061632, "fwd", dict(shape=(64, 3, 224, 224), out=768, kernel=16, stride=16)),  # vit-fp32
    (52428800, "fwd", dict(shape=(64, 128, 28, 28), out=128, kernel=3, padding=1)),  # resnet-fp32-sgd
    (77070848, "fwd", dict(shape=(64, 1024, 14, 14), out=2048, kernel=1, stride=2)),  # resnet-fp32-sgd
    (65011712, "fwd", dict(shape=(64, 128, 56, 56), out=128, kernel=3, stride=2, padding=1, dtype="bfloat16")),
    (14025216, "fwd", dict(shape=(64, 256, 14, 14), out=256, kernel=3, padding=1, dtype="bfloat16")),  # resnet-bf16
    (16056832, "fwd", dict(shape=(64, 2048, 7, 7), out=512, kernel=1, dtype="bfloat16")),  # resnet-bf16
    (75760640, "fwd", dict(shape=(8, 256, 64, 64), out=256, kernel=3, padding=1)),  # unet-fp32
    (69206528, "fwd", dict(shape=(8, 1024, 32, 32), out=512, kernel=3, padding=1)),  # unet-fp32
    (201458176, "fwd", dict(shape=(8, 128, 128, 128), out=64, kernel=2, stride=2, is_transposed=True)),  # unet-fp32
    (25756160, "fwd", dict(shape=(8, 128, 64, 64), out=256, kernel=3, padding=1, dtype="bfloat16")),  # unet-bf16
    (8462848, "fwd", dict(shape=(4, 32, 128, 128), out=64, kernel=3, stride=2, padding=1)),  # segformer-fp32
    (
        96559616,
        "fwd",
        dict(shape=(64, 192, 56, 56), out=192, kernel=3, stride=2, padding=1, groups=3, dtype="bfloat16"),
    ),
    (40501760, "both", dict(shape=(64, 2048, 7, 7), out=512, kernel=1)),  # resnet-fp32-sgd
    (316670976, "both", dict(shape=(64, 256, 56, 56), out=512, kernel=1, stride=2)),  # resnet-fp32-sgd
    (66880000, "both", dict(shape=(64, 128, 56, 56), out=128, kernel=3, stride=2, padding=1, dtype="bfloat16")),
    (407208448, "both", dict(shape=(8, 128, 256, 256), out=64, kernel=3, padding=1)),  # unet-fp32
    (77593600, "both", dict(shape=(8, 256, 64, 64), out=256, kernel=3, padding=1)),  # unet-fp32
    (54522368, "both", dict(shape=(8, 1024, 16, 16), out=1024, kernel=3, padding=1)),  # unet-fp32
    (205520384, "both", dict(shape=(8, 128, 256, 256), out=64, kernel=3, padding=1, dtype="bfloat16")),  # unet-bf16
    (34602496, "both", dict(shape=(8, 1024, 32, 32), out=512, kernel=3, padding=1, dtype="bfloat16")),  # unet-bf16
    (
        102695424,
        "both",
        dict(shape=(8, 128, 128, 128), out=64, kernel=2, stride=2, is_transposed=True, dtype="bfloat16"),
    ),
    (72909312, "both", dict(shape=(64, 128, 56, 56), out=192, kernel=1, stride=2, dtype="bfloat16")),  # regnet-autocast
    (104857600, "weight", dict(shape=(64, 3, 224, 224), out=32, kernel=3, stride=2, padding=1, dtype="bfloat16")),
]
"""Every sixth of the calls in the suite's models that the rule meets: 146 of the 251 above 4 MiB. Some others: `KNOWN_MISSES`."""


@pytest.mark.parametrize(("measured", "call", "facts"), MET_IN_MODELS)
def test_met_in_models(measured: int, call: str, facts: dict[str, Any]) -> None:
    assert is_within(scratch(call, **facts), measured)


class TestOnTheCard:
    rows = [dict(zip(DATA["fields"], row, strict=True)) for row in DATA["rows"]]  # noqa: RUF012

    def share(self, keep: Callable[[dict[str, Any]], bool]) -> float:
        hits = [
            is_within(
                scratch(
                    row["call"],
                    (row["batch"], row["in"], row["size"], row["size"]),
                    row["out"],
                    row["kernel"],
                    stride=row["stride"],
                    padding=row["padding"],
                    groups=row["groups"],
                    is_transposed=row["transposed"],
                    dtype=row["dtype"],
                    is_last=row["channels_last"],
                ),
                row["scratch_bytes"],
            )
            for row in self.rows
            if keep(row)
        ]
        assert len(hits) > 5
        return sum(hits) / len(hits)

    @pytest.mark.parametrize(("call", "floor"), [("fwd", 0.78), ("input", 0.80), ("weight", 0.55), ("both", 0.55)])
    def test_no_worse_than_it_was(self, call: str, floor: float) -> None:
        """The whole grid: 83% of the forwards, 86% of the inputs' gradients, 62% of the weights', 62% of both."""
        assert self.share(lambda row: row["call"] == call) >= floor

    def test_every_depthwise_forward_is_met(self) -> None:
        assert self.share(lambda row: row["groups"] > 1 and row["call"] in ("fwd", "input")) == 1.0

    @pytest.mark.xfail(reason="cuDNN picks other kernels than the rule knows for a quarter of the calls")
    def test_almost_all_calls_are_met(self) -> None:
        """What it would take to call the rule right. Known to be missed: the weight's gradient of 1x1 convolutions, fp32 with
        channels last, and images of three channels, where the forward needs nothing."""
        assert self.share(lambda row: True) >= 0.95


KNOWN_MISSES = [
    # measured bytes, call: from the accuracy suite's models, where the rule is off by more than 15% and 4 MiB
    (0, "fwd", dict(shape=(8, 3, 256, 256), out=64, kernel=3, padding=1)),  # unet-fp32
    (0, "fwd", dict(shape=(64, 3, 224, 224), out=32, kernel=3, stride=2, padding=1, dtype="bfloat16")),  # regnet
    (0, "fwd", dict(shape=(64, 32, 112, 112), out=128, kernel=1, stride=2, dtype="bfloat16")),  # regnet
    (0, "fwd", dict(shape=(64, 1024, 14, 14), out=256, kernel=1, dtype="bfloat16")),  # resnet-bf16
    (67108864, "both", dict(shape=(64, 256, 14, 14), out=1024, kernel=1)),  # resnet-fp32-sgd
    (33554432, "both", dict(shape=(64, 512, 28, 28), out=256, kernel=1, dtype="bfloat16")),  # resnet-bf16
    (38588416, "both", dict(shape=(32, 96, 56, 56), out=192, kernel=2, stride=2, is_last=True)),  # convnext-fp32
]


@pytest.mark.xfail(reason="cuDNN's choice is not modelled")
@pytest.mark.parametrize(("measured", "call", "facts"), KNOWN_MISSES)
def test_known_misses(measured: int, call: str, facts: dict[str, Any]) -> None:
    assert is_within(scratch(call, **facts), measured)
