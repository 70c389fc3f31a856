"""Workspaces of cuDNN convolutions.

cuDNN's fast kernels want channels last, in multiples of 16 bytes. Tensors that have them first are rearranged in the
workspace, all three of them: input, weight and output. A 1x1 convolution of stride one is a matrix product on the tensors as
they are, and a depthwise one has a kernel of its own.

That is a rule, and cuDNN picks among many kernels by heuristics of its own. Measured on an H200 (cuDNN 9.19), 73% of
4,600 calls with operands above 4 MiB need what the rule says to within 15% or 4 MiB; the misses are mostly weight gradients of 1x1
convolutions, fp32 with channels last, and inputs of three channels (see tests/tracing/ghost/test_convolutions.py). What a
step allocates at its peak hardly feels them, what the allocator reserves does, by some percent.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

SMALL_CHANNELS = {torch.float32: 16}
"""Below this many channels a 1x1 convolution is not run as a plain product for the weight's gradient; elsewhere 8."""
WIDE_CHANNELS = 1024
"""From here on, rows that are not multiples of 16 bytes make cuDNN rearrange 1x1 convolutions too."""
SPLIT_BYTES = {torch.float32: 8 * 2**20}
MAX_SPLITS = 14
"""The weight's gradient is summed in up to this many parts, in fp32, as long as they fit into `SPLIT_BYTES` (elsewhere 16 MiB)."""
DEPTHWISE_FACTOR = 8.25
"""Measured: the fp32 gradient of a depthwise weight of 5x5 or more, channels last, from 28x28 on, over the input's bytes."""

Stages = list[list[int]]


def forward_bytes(args: Any, out: Any, num_sms: int) -> Stages:
    """Scratch of `aten.convolution`."""
    inputs, weight, stride = args[0], args[1], args[3]
    if is_channels_last(inputs) or _is_depthwise(inputs, weight):
        return []
    if _is_product(weight, stride):
        return [[_bytes(inputs) + _bytes(out)]] if _has_odd_rows(inputs, weight) else []
    return [[_rearranged(inputs, weight, out)]]


def backward_bytes(args: Any, out: Any, num_sms: int) -> Stages:
    """Scratch of `aten.convolution_backward`: first for the input's gradient, then for the weight's."""
    gradient, inputs, weight, stride = args[0], args[1], args[2], args[4]
    wants_input, wants_weight = args[10][0], args[10][1]
    copied = 0
    if not gradient.is_contiguous() and not is_channels_last(inputs):
        copied = _bytes(gradient)
    if _is_depthwise(inputs, weight):
        is_large = weight.size(-1) >= 5 and inputs.size(-1) >= 28 and inputs.dtype is torch.float32
        if is_channels_last(inputs) and is_large and wants_weight:
            return [[copied, int(DEPTHWISE_FACTOR * _bytes(inputs))]]
        return [[copied]]
    if is_channels_last(inputs):
        return [[copied]]
    if _is_product(weight, stride):
        if _has_odd_rows(inputs, weight) or min(weight.shape[:2]) < SMALL_CHANNELS.get(weight.dtype, 8):
            return [[copied, _rearranged(inputs, weight, gradient)]]
        return [[copied]]
    rearranged = _rearranged(inputs, weight, gradient)
    weight_stage = [copied, rearranged + _split_bytes(weight, args[9])]
    return [*([[copied, rearranged]] if wants_input else []), *([weight_stage] if wants_weight else [])]


def _split_bytes(weight: Tensor, groups: int) -> int:
    nbytes = weight.numel() * 4
    limit = SPLIT_BYTES.get(weight.dtype, 16 * 2**20)
    return min(limit // max(nbytes, 1), MAX_SPLITS // groups) * nbytes


def _has_odd_rows(inputs: Tensor, weight: Tensor) -> bool:
    row = math.prod(inputs.shape[2:]) * inputs.element_size()
    return row % 16 != 0 and max(weight.shape[:2]) >= WIDE_CHANNELS


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def is_channels_last(tensor: Tensor) -> bool:
    """Whether the channels are innermost in memory."""
    return tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)


def _is_depthwise(inputs: Tensor, weight: Tensor) -> bool:
    return weight.size(1) == 1 and inputs.size(1) > 1


def _is_product(weight: Tensor, stride: Any) -> bool:
    return all(size == 1 for size in weight.shape[2:]) and all(step == 1 for step in stride)


def _rearranged(inputs: Tensor, weight: Tensor, output: Tensor) -> int:
    return sum(_padded_bytes(tensor, 1) for tensor in (inputs, weight, output))


def _padded_bytes(tensor: Tensor, channel_dim: int) -> int:
    unit = 16 // tensor.element_size()
    channels = tensor.size(channel_dim)
    return tensor.numel() // max(channels, 1) * (-(-channels // unit) * unit) * tensor.element_size()
