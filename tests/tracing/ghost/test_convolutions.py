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

from lowtide.tracing.ghost.convolutions import ALIGNMENT_BYTES, backward_course, forward_course, layout
from lowtide.tracing.ghost.operators import FREE, Course
from lowtide.units import MiB

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
    """Predicted bytes of scratch at its highest in `fwd` or in a backward that wants `both`, `input` or `weight`; without the
    bytes for alignment.
    """
    channels = shape[1]
    weight_shape = (channels, out, kernel, kernel) if is_transposed else (out, channels // groups, kernel, kernel)
    inputs, weight = meta(shape, dtype, is_last=is_last), meta(weight_shape, dtype, is_last=is_last)
    rest = ([stride] * 2, [padding] * 2, [1, 1], is_transposed, [0, 0], groups)
    output_shape = torch.ops.aten.convolution(inputs, weight, None, *rest).shape
    output = meta(tuple(output_shape), dtype, is_last=is_last)
    if call == "fwd":
        return highest(forward_course((inputs, weight, None, *rest), output))
    wanted = [tensor if is_wanted else None for tensor, is_wanted in zip((inputs, weight), WANTED[call], strict=False)]
    return highest(backward_course((output, inputs, weight, None, *rest, WANTED[call]), [*wanted, None]))


def highest(course: Course) -> int:
    taken, most = [0], 0
    course = [step - ALIGNMENT_BYTES if isinstance(step, int) and step > ALIGNMENT_BYTES else step for step in course]
    for step in course:
        if isinstance(step, int) and step != FREE:
            taken.append(step)
        elif isinstance(step, int):
            taken.pop()
        most = max(most, sum(taken))
    return most


def is_within(predicted: int, measured: int) -> bool:
    return abs(predicted - measured) <= max(4 * MiB, 0.15 * measured)


class TestTheRule:
    def test_channels_first_are_rearranged_input_weight_and_output(self) -> None:
        predicted = scratch("fwd", (8, 64, 32, 32), 128, 3, padding=1)
        assert predicted == 4 * (8 * 64 * 32 * 32 + 128 * 64 * 3 * 3 + 8 * 128 * 32 * 32)

    @pytest.mark.parametrize(("dtype", "padded"), [("float32", 4), ("bfloat16", 8)])
    def test_rearranged_channels_fill_sixteen_bytes(self, dtype: str, padded: int) -> None:
        size = getattr(torch, dtype).itemsize
        predicted = scratch("fwd", (2, 3, 16, 16), 64, 8, stride=8, dtype=dtype)
        assert predicted == size * (2 * padded * 256 + 64 * padded * 64 + 2 * 64 * 4)

    @pytest.mark.parametrize("call", ["fwd", "input"])
    def test_channels_last_need_nothing(self, call: str) -> None:
        assert scratch(call, (8, 64, 32, 32), 64, 3, padding=1, dtype="bfloat16", is_last=True) == 0

    def test_a_weights_gradient_is_summed_in_parts(self) -> None:
        part = 4 * 128 * 256
        assert scratch("weight", (48, 256, 48, 48), 128, 1, dtype="bfloat16", is_last=True) == 32 * part
        assert scratch("weight", (8, 256, 64, 64), 128, 1) == 8 * part  # channels first: one product for each image
        assert scratch("weight", (12, 128, 40, 40), 128, 3, padding=1, is_last=True) == 14 * 4 * 128 * 128 * 9

    @pytest.mark.parametrize("call", ["fwd", "input"])
    def test_a_pointwise_convolution_is_a_product(self, call: str) -> None:
        assert scratch(call, (8, 192, 32, 32), 256, 1) == 0
        assert scratch(call, (8, 192, 32, 32), 256, 1, stride=2) == 4 * 8 * (192 * 32 * 32 + 256 * 16 * 16)

    def test_a_depthwise_one_has_a_kernel_of_its_own(self) -> None:
        assert scratch("fwd", (8, 96, 56, 56), 96, 7, padding=3, groups=96) == 0
        assert scratch("both", (8, 96, 56, 56), 96, 7, padding=3, groups=96) == 0

    def test_the_weight_of_a_depthwise_one_with_channels_last(self) -> None:
        shape = dict(out=96, kernel=7, padding=3, groups=96, is_last=True)
        assert scratch("weight", (24, 96, 48, 48), dtype="bfloat16", **shape) == 8 * 24 * 4 * 96 * 49
        measured = {24: 76295168, 48: 119873536}  # 128 and 64 channels, 24 images
        for size, channels in ((24, 128), (48, 64)):
            shape = dict(out=channels, kernel=7, padding=3, groups=channels, is_last=True)
            assert scratch("weight", (24, channels, size, size), **shape) == pytest.approx(measured[size], rel=0.01)

    def test_a_frozen_weight_needs_no_scratch_for_its_gradient(self) -> None:
        inputs, both = (scratch(call, (8, 256, 56, 56), 256, 3, padding=1) for call in ("input", "both"))
        assert inputs == scratch("fwd", (8, 256, 56, 56), 256, 3, padding=1) <= both
        only_weight = scratch("weight", (8, 256, 56, 56), 256, 3, padding=1)
        assert both == max(inputs, only_weight)

    def test_few_channels_are_read_as_they_are_by_small_kernels(self) -> None:
        assert scratch("fwd", (8, 3, 64, 64), 64, 3, padding=1) == 0
        assert scratch("fwd", (8, 3, 64, 64), 64, 7, stride=2, padding=3) > 0
        padded = 2 * (8 * 8 * 64 * 64 + 64 * 8 * 49)
        assert scratch("fwd", (8, 3, 64, 64), 64, 7, stride=2, padding=3, dtype="bfloat16", is_last=True) == padded

    def test_an_image_read_in_fp32_is_not_padded(self) -> None:
        """128.286 MiB in resnet-34-fp32-sgd, 178.161 in resnet-18-fp32, 64.161 in densenet-fp32-sgd."""
        for batch, size, measured in ((48, 192, 128.286), (96, 160, 178.161), (24, 192, 64.161)):
            predicted = scratch("fwd", (batch, 3, size, size), 64, 7, stride=2, padding=3)
            assert predicted / MiB == pytest.approx(measured, abs=0.001)

    @pytest.mark.parametrize(
        ("batch", "size", "out", "kernel", "stride", "dtype", "measured"),
        [
            (40, 208, 64, 7, 2, "bfloat16", 85.105),  # resnet-50-bf16
            (24, 192, 64, 7, 2, "bfloat16", 46.386),  # bit-autocast
            (48, 192, 64, 7, 2, "float32", 140.790),  # resnet-34-fp32-sgd
            (4, 320, 64, 3, 1, "bfloat16", 58.403),  # unet-bf16-shallow
            (5, 176, 96, 3, 1, "bfloat16", 33.953),  # unet-autocast-wide-sgd
        ],
    )
    def test_the_gradient_of_an_images_weight_is_summed_in_padded_parts(
        self, batch: int, size: int, out: int, kernel: int, stride: int, dtype: str, measured: float
    ) -> None:
        shape = dict(kernel=kernel, stride=stride, padding=kernel // 2, dtype=dtype)
        assert scratch("weight", (batch, 3, size, size), out, **shape) / MiB == pytest.approx(measured, abs=0.11)

    @pytest.mark.parametrize(
        ("call", "channels", "size", "stride", "measured"),
        [
            ("fwd", 96, 96, 2, 157.641),
            ("fwd", 96, 48, 1, 63.141),
            ("fwd", 432, 12, 1, 18.352),
            ("input", 96, 48, 1, 63.141),
            ("input", 96, 96, 2, 118.204),
        ],
    )
    def test_groups_of_48_channels_take_the_room_of_64(
        self, call: str, channels: int, size: int, stride: int, measured: float
    ) -> None:
        """As measured in regnet-autocast-narrow; 64 (regnet-autocast) and 16 channels stay as they are."""
        facts = dict(kernel=3, stride=stride, padding=1, groups=channels // 48, dtype="bfloat16")
        predicted = scratch(call, (56, channels, size, size), channels, **facts)
        assert predicted / MiB == pytest.approx(measured, abs=0.001)

    @pytest.mark.parametrize(
        ("batch", "before", "after", "measured"),
        [(56, 1008, 1008, 7.752), (40, 1152, 192, 3.691), (40, 192, 1152, 3.691), (24, 512, 2048, 4.219)],
    )
    def test_half_precision_rearranges_products_of_short_rows(
        self, batch: int, before: int, after: int, measured: float
    ) -> None:
        """Rows of 6x6 are 72 bytes: regnet-autocast-narrow, efficientnet-autocast-fused, bit-autocast."""
        predicted = scratch("fwd", (batch, before, 6, 6), after, 1, dtype="bfloat16")
        assert predicted / MiB == pytest.approx(measured, abs=0.001)
        assert scratch("fwd", (batch, before, 6, 6), after, 1) == 0
        assert scratch("fwd", (batch, before, 14, 14), after, 1, dtype="bfloat16") == 0

    @pytest.mark.parametrize(
        ("batch", "before", "after", "size", "measured"),
        [
            (40, 256, 512, 52, 80.219),  # resnet-50-bf16
            (40, 512, 1024, 26, 39.609),
            (40, 1024, 2048, 13, 20.859),
            (24, 256, 512, 48, 41.500),  # bit-autocast
            (56, 96, 192, 48, 36.375),  # regnet-autocast-narrow
        ],
    )
    def test_a_strided_pointwise_weight_is_not_rearranged(
        self, batch: int, before: int, after: int, size: int, measured: float
    ) -> None:
        predicted = scratch("weight", (batch, before, size, size), after, 1, stride=2, dtype="bfloat16")
        assert predicted / MiB == pytest.approx(measured, abs=0.06)

    def test_a_workspace_of_whole_mebibytes_does_not_fit_into_as_many(self) -> None:
        inputs, weight = meta((8, 64, 64, 64), "float32"), meta((64, 64, 3, 3), "float32")
        out = meta((8, 64, 64, 64), "float32")
        rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        workspace = forward_course((inputs, weight, None, *rest), out)[-1]
        assert workspace == sum(each.nbytes for each in (inputs, weight, out)) + 16
        product = forward_course((inputs, meta((64, 64, 1, 1), "float32"), None, *rest), out)
        assert product[-1] == 0


class TestTheLayout:
    def test_channels_last_in_the_input_or_in_the_weight(self) -> None:
        first, last = meta((2, 4, 8, 8), "float32"), meta((2, 4, 8, 8), "float32", is_last=True)
        assert layout(first, first) is layout(first[:, :, 0], first[:, :, 0]) is torch.contiguous_format
        assert layout(last, first) is layout(first, last) is torch.channels_last
        video = torch.empty(2, 4, 3, 8, 8, device="meta")
        assert layout(video, video) is torch.contiguous_format
        assert layout(video, video.to(memory_format=torch.channels_last_3d)) is torch.channels_last_3d

    def test_a_1x1_weight_tells_by_its_strides(self) -> None:
        inputs, weight = meta((2, 4, 8, 8), "float32"), meta((16, 4, 1, 1), "float32")
        assert weight.is_contiguous(memory_format=torch.channels_last)
        assert layout(inputs, weight) is torch.contiguous_format
        assert layout(inputs, weight.to(memory_format=torch.channels_last)) is torch.channels_last

    def test_what_is_in_the_other_layout_is_copied_before_the_output(self) -> None:
        inputs, weight = meta((2, 64, 8, 8), "bfloat16"), meta((64, 64, 3, 3), "bfloat16", is_last=True)
        rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        out = meta((2, 64, 8, 8), "bfloat16", is_last=True)
        assert forward_course((inputs, weight, None, *rest), out)[:2] == [2 * inputs.numel(), out]

    def test_a_backward_copies_first_and_takes_a_workspace_after_each_gradient(self) -> None:
        inputs, weight = meta((2, 64, 8, 8), "float32"), meta((64, 64, 3, 3), "float32")
        gradient = meta((2, 8, 8, 64), "float32").permute(0, 3, 1, 2)
        args = (gradient, inputs, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
        copied, first, _, free, second, _, last = backward_course(args, [inputs, weight, None])
        assert copied == 4 * gradient.numel()
        assert first is inputs
        assert second is weight
        assert free == last == FREE


MET_IN_MODELS = [
    # measured bytes, call
    (40501760, "both", dict(shape=(64, 2048, 7, 7), out=512, kernel=1)),  # resnet-fp32-sgd
    (0, "fwd", dict(shape=(8, 3, 256, 256), out=64, kernel=3, padding=1)),  # unet-fp32
    (0, "fwd", dict(shape=(64, 3, 224, 224), out=32, kernel=3, stride=2, padding=1, dtype="bfloat16")),  # regnet
    (0, "fwd", dict(shape=(64, 32, 112, 112), out=128, kernel=1, stride=2, dtype="bfloat16")),  # regnet
    (0, "fwd", dict(shape=(64, 1024, 14, 14), out=256, kernel=1, dtype="bfloat16")),  # resnet-bf16
    (67108864, "both", dict(shape=(64, 256, 14, 14), out=1024, kernel=1)),  # resnet-fp32-sgd
    (33554432, "both", dict(shape=(64, 512, 28, 28), out=256, kernel=1, dtype="bfloat16")),  # resnet-bf16
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
"""Calls in the suite's models, where it was found that the rule meets them. Some others: `KNOWN_MISSES`."""


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

    @pytest.mark.parametrize(("call", "floor"), [("fwd", 0.85), ("input", 0.88), ("weight", 0.74), ("both", 0.67)])
    def test_no_worse_than_it_was(self, call: str, floor: float) -> None:
        """They were 85% of these rows' forwards, 88% of the inputs' gradients, 75% of the weights', 68% of both."""
        assert self.share(lambda row: row["call"] == call) >= floor

    def test_almost_all_calls_in_half_precision_are_met(self) -> None:
        assert self.share(lambda row: row["dtype"] == "bfloat16") >= 0.95

    def test_every_depthwise_forward_is_met(self) -> None:
        assert self.share(lambda row: row["groups"] == row["in"] and row["call"] in ("fwd", "input")) == 1.0

    @pytest.mark.xfail(reason="cuDNN picks other kernels than the rule knows for a fifth of the calls")
    def test_almost_all_calls_are_met(self) -> None:
        """What it would take to call the rule right. Known to be missed: fp32, above all with channels last."""
        assert self.share(lambda row: True) >= 0.95


KNOWN_MISSES = [
    # measured bytes, call: from models, where the rule is off by more than 15% and 4 MiB
    (38588416, "both", dict(shape=(32, 96, 56, 56), out=192, kernel=2, stride=2, is_last=True)),  # convnext-fp32
    (35000320, "fwd", dict(shape=(96, 512, 5, 5), out=512, kernel=3, padding=1)),  # resnet-18-fp32
    (0, "fwd", dict(shape=(48, 3, 224, 224), out=512, kernel=16, stride=16)),  # mlp-mixer-fp32-sgd
]


@pytest.mark.xfail(reason="cuDNN's choice is not modelled")
@pytest.mark.parametrize(("measured", "call", "facts"), KNOWN_MISSES)
def test_known_misses(measured: int, call: str, facts: dict[str, Any]) -> None:
    assert is_within(scratch(call, **facts), measured)
