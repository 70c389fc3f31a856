"""Memory of cuDNN convolutions: torch's copies of the operands, and cuDNN's workspaces.

Torch brings all operands into one layout first: channels last as soon as the input or the weight has them last. cuDNN's fast
kernels want channels last, in multiples of 16 bytes. Where the channels are first, the workspace holds all three tensors
rearranged: input, weight and output. A 1x1 convolution of stride one is a matrix product on the tensors as they are. A depthwise
one with channels first is torch's own kernel, without a workspace. The gradient of a weight is summed in parts, in fp32, and the
workspace holds the parts.

These are rules, and cuDNN picks among many kernels by heuristics of its own. They were read off all calls of the `fresh` suite's
models and off a grid of 4,600 calls, on an H200 with cuDNN 9.19 (tests/tracing/ghost/test_convolutions.py says how many calls
they meet). In half precision they meet almost all but weights' gradients of groups. What they miss is fp32: with channels first
where products of few tiles are split, and with channels last. What a step allocates at its peak hardly feels the misses, what
the allocator reserves does, by some percent.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.tracing.ghost.operators import FREE, Course

MiB = 2**20
ALIGNMENT_BYTES = 16
"""A workspace has at least these in addition: one of whole MiB does not fit into a block of as many."""
FEW_CHANNELS = 4
"""Up to here small kernels have implementations that read channels first as they are."""
NARROW_INPUT, NARROW_OUTPUT, NARROW_POSITIONS = 32, 15, 2**19
"""Up to here a 1x1 convolution in fp32 is not run as a plain product for one of the gradients."""
STRIDED_CHANNELS, STRIDED_GRADIENT_CHANNELS = 64, 128
"""Up to here strided 1x1 convolutions read their input as it is; the latter for the input's gradient."""
MAX_PARTS_SHARE = 2.5
"""If one part for each image takes more than this share of input and output, these are rearranged instead."""
WIDE_CHANNELS = 1024
"""From here on, rows that are not multiples of 8 bytes make cuDNN rearrange 1x1 convolutions too."""
SHORT_ROW = 64
"""In half precision, rows of fewer positions do so unless they are multiples of 16 bytes, whatever the channels."""
SPLIT_BYTES, MAX_SPLITS = 8 * MiB, 14
"""In fp32 the weight's gradient is summed in up to this many parts, as long as they fit into `SPLIT_BYTES`."""
LAST_SPLIT_BYTES, LAST_MAX_SPLITS = 4 * MiB, 54
"""The same in half precision with channels last."""
TILE, NUM_TILES, POSITIONS_PER_SPLIT = 128 * 128, 132, 8192
"""In half precision with channels first it is split where its tiles leave processors idle and each part sums up enough positions;
strided ones in two dimensions only."""
POINTWISE_SPLIT_BYTES = MiB
"""Parts of a strided 1x1 weight in half precision fit into these, however many positions there are."""
IMAGE_SPLITS = 160
"""The same for inputs of few channels, with channels last."""
IMAGE_PARTS, IMAGE_TILE, POSITIONS_PER_IMAGE_PART = 122, 256, 1280
"""And with channels first, where a kernel's steps overlap: as many parts, fewer for each tile, each of enough positions."""
DEPTHWISE_PARTS = 8
"""Parts for each image of the gradient of a depthwise weight, half precision, channels last."""
DEPTHWISE_FACTOR, DEPTHWISE_SIZE = 6.46, 24
"""Measured: the fp32 gradient of a depthwise weight of 5x5 or more, channels last, over the input's bytes with its border;
from this size on."""


def forward_course(args: Any, out: Tensor) -> Course:
    """Memory of `aten.convolution`, in order: copies, the output, the workspace."""
    inputs, weight = args[0], args[1]
    form = layout(inputs, weight)
    call = ConvolutionCall(inputs, weight, out, tuple(args[3]), args[8], form is not torch.contiguous_format)
    return [*_copies(form, inputs, weight), out, _aligned(forward_bytes(call))]


def backward_course(args: Any, out: Any) -> Course:
    """Memory of `aten.convolution_backward`, in order: copies, then each gradient with its workspace."""
    gradient, inputs, weight = args[0], args[1], args[2]
    form = layout(inputs, weight)
    call = ConvolutionCall(inputs, weight, gradient, tuple(args[4]), args[9], form is not torch.contiguous_format)
    course: Course = [*_copies(form, gradient, weight, *([inputs] if args[10][1] else []))]
    for result, rule in ((out[0], input_gradient_bytes), (out[1], weight_gradient_bytes)):
        if result is not None:
            workspace = _aligned(rule(call))
            course += [result, *([workspace, FREE] if workspace else [])]
    return course


def layout(inputs: Tensor, weight: Tensor) -> torch.memory_format:
    """The layout in which torch hands a convolution to cuDNN."""
    for dims, form in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if inputs.dim() == dims and (_has_channels_last(inputs) or _has_channels_last(weight)):
            return form
    return torch.contiguous_format


class ConvolutionCall(NamedTuple):
    """What a workspace depends on."""

    inputs: Tensor
    weight: Tensor
    output: Tensor
    """The output, or its gradient."""
    stride: tuple[int, ...]
    groups: int
    is_last: bool
    """Whether the channels are last."""

    @property
    def is_depthwise(self) -> bool:
        """Whether each channel has a kernel of its own."""
        return self.groups > 1 and self.weight.size(1) == 1

    @property
    def is_pointwise(self) -> bool:
        """Whether the kernel is 1x1."""
        return all(size == 1 for size in self.weight.shape[2:])

    @property
    def is_product(self) -> bool:
        """Whether it is a matrix product on the tensors as they are."""
        return self.is_pointwise and all(step == 1 for step in self.stride)

    @property
    def has_few_channels(self) -> bool:
        """Whether the input is an image, say, or a waveform."""
        return self.inputs.size(1) <= FEW_CHANNELS and self.groups == 1

    @property
    def has_small_kernel(self) -> bool:
        """Whether there are kernels for inputs of few channels."""
        sizes = self.weight.shape[2:]
        return max(sizes) <= 4 or (self.weight.dtype is torch.float32 and math.prod(sizes) <= 16)

    @property
    def reads_image(self) -> bool:
        """Whether the kernel's steps overlap in an image or a waveform with channels first."""
        overlaps = all(size > step for size, step in zip(self.weight.shape[2:], self.stride, strict=True))
        return self.has_few_channels and self.inputs.dim() <= 4 and not self.is_last and overlaps

    @property
    def moved_bytes(self) -> int:
        """Input and output."""
        return self.inputs.nbytes + self.output.nbytes

    @property
    def rearranged_bytes(self) -> int:
        """Input, weight and output with channels last; a 1x1 weight is the same memory either way."""
        if self.is_pointwise and self.weight.dtype is not torch.float32:
            return self.moved_bytes
        return sum(map(_padded_bytes, (self.inputs, self.weight, self.output)))

    @property
    def grouped_bytes(self) -> int:
        """The same with groups whose channels fill a power of two, as half precision wants them."""
        if self.groups == 1 or self.weight.dtype is torch.float32:
            return self.rearranged_bytes
        before, after = self.weight.size(1), self.weight.size(0) // self.groups
        wide_before, wide_after = (1 << (width - 1).bit_length() for width in (before, after))
        inputs, output = self.inputs.nbytes // before * wide_before, self.output.nbytes // after * wide_after
        return inputs + output + self.weight.nbytes // (before * after) * wide_before * wide_after

    @property
    def part_bytes(self) -> int:
        """One part of the weight's gradient."""
        return self.weight.numel() * 4


def forward_bytes(call: ConvolutionCall) -> int:
    """Workspace of the forward."""
    if call.is_depthwise:
        return 0
    if call.has_few_channels and call.has_small_kernel and (not call.is_last or max(call.stride) > 1):
        return 0
    if call.is_last:
        is_padded = call.has_few_channels
        return _padded_bytes(call.inputs) + _padded_bytes(call.weight) if is_padded else 0
    if call.is_product:
        return call.moved_bytes if _has_odd_rows(call) else 0
    if call.is_pointwise:
        return call.moved_bytes if call.inputs.size(1) > STRIDED_CHANNELS else 0
    if call.reads_image and call.weight.dtype is torch.float32:
        return call.moved_bytes + call.weight.nbytes
    return call.grouped_bytes


def input_gradient_bytes(call: ConvolutionCall) -> int:
    """Workspace for the input's gradient."""
    if call.is_depthwise:
        return 0
    if call.is_product:
        return call.rearranged_bytes if call.is_last and _is_narrow(call) else 0
    if call.is_last:
        return call.moved_bytes if call.groups > 1 else 0
    if call.is_pointwise:
        return call.moved_bytes if call.inputs.size(1) > STRIDED_GRADIENT_CHANNELS else 0
    return call.grouped_bytes if max(call.stride) == 1 else call.rearranged_bytes


def weight_gradient_bytes(call: ConvolutionCall) -> int:
    """Workspace for the weight's gradient."""
    is_single = call.weight.dtype is torch.float32
    if call.is_depthwise:
        return _depthwise_bytes(call) if call.is_last else 0
    if call.has_few_channels and call.has_small_kernel and is_single and call.inputs.dim() < 5:
        return 0
    if call.is_last:
        if call.has_few_channels and not is_single:
            return _padded_bytes(call.inputs) + min(IMAGE_SPLITS * call.part_bytes, 2 * LAST_SPLIT_BYTES)
        return _split_bytes(call)
    if not call.is_product:
        return call.rearranged_bytes + _split_bytes(call)
    is_short = call.output.numel() // call.output.size(1) <= NARROW_POSITIONS
    if _is_narrow(call) or (is_single and is_short and call.inputs.size(1) <= NARROW_INPUT):
        return call.rearranged_bytes
    if _has_odd_rows(call):
        return call.rearranged_bytes
    # One product for each image, summed afterwards.
    parts_bytes = call.inputs.size(0) * call.part_bytes
    return parts_bytes if parts_bytes <= MAX_PARTS_SHARE * call.moved_bytes else call.moved_bytes


def _split_bytes(call: ConvolutionCall) -> int:
    if call.reads_image:
        positions = call.output.numel() // max(call.output.size(1), 1)
        part_bytes = _padded_bytes(call.weight) // call.weight.element_size() * 4
        num_tiles = -(-part_bytes // (4 * call.weight.size(0)) // IMAGE_TILE)
        enough = POSITIONS_PER_IMAGE_PART if call.inputs.dim() == 4 else POSITIONS_PER_SPLIT
        return min(IMAGE_PARTS // num_tiles, positions // enough) * part_bytes
    if call.weight.dtype is torch.float32:
        splits = min(SPLIT_BYTES // max(call.part_bytes, 1), MAX_SPLITS // call.groups)
    elif call.is_last:
        splits = min(LAST_SPLIT_BYTES // max(call.part_bytes, 1), LAST_MAX_SPLITS)
    elif call.is_pointwise:
        splits = POINTWISE_SPLIT_BYTES // max(call.part_bytes, 1)
    elif max(call.stride) > 1 and call.inputs.dim() != 4:
        splits = 0
    else:
        positions = call.output.numel() // max(call.output.size(1), 1)
        splits = min(
            NUM_TILES // -(-call.weight.numel() // TILE), positions // (POSITIONS_PER_SPLIT * max(call.stride))
        )
    return splits * call.part_bytes


def _is_narrow(call: ConvolutionCall) -> bool:
    return call.weight.dtype is torch.float32 and min(call.weight.shape[:2]) <= NARROW_OUTPUT and call.output.dim() > 3


def _depthwise_bytes(call: ConvolutionCall) -> int:
    inputs, kernel = call.inputs, call.weight.size(-1)
    if call.weight.dtype is not torch.float32:
        return DEPTHWISE_PARTS * inputs.size(0) * call.part_bytes
    if kernel < 5 or inputs.size(-1) < DEPTHWISE_SIZE:
        return 0
    bordered = math.prod(size + kernel for size in inputs.shape[2:])
    return int(DEPTHWISE_FACTOR * inputs.size(0) * inputs.size(1) * bordered * 4)


def _aligned(workspace: int) -> int:
    return workspace + ALIGNMENT_BYTES if workspace else 0


def _copies(form: torch.memory_format, *tensors: Tensor) -> list[int]:
    return [tensor.nbytes for tensor in tensors if not tensor.is_contiguous(memory_format=form)]


def _has_channels_last(tensor: Tensor) -> bool:
    """Whether the strides say so, as torch reads them: a 1x1 weight is the same memory either way, with other strides."""
    least, strides = 0, tensor.stride()
    if strides[1] == 0:
        return False
    for dim in (1, *range(tensor.dim() - 1, 1, -1), 0):
        if tensor.size(dim) == 0 or strides[dim] < least or (dim == 0 and least == strides[1]):
            return False
        least = strides[dim] * max(tensor.size(dim), 1)
    return True


def _has_odd_rows(call: ConvolutionCall) -> bool:
    positions = math.prod(call.inputs.shape[2:])
    row = positions * call.inputs.element_size()
    if call.inputs.dtype is not torch.float32 and positions < SHORT_ROW and call.inputs.dim() == 4:
        return row % 16 != 0
    return row % 8 != 0 and max(call.weight.shape[:2]) >= WIDE_CHANNELS


def _padded_bytes(tensor: Tensor) -> int:
    """With channels that fill 16 bytes."""
    multiple, channels = 16 // tensor.element_size(), tensor.size(1)
    return tensor.numel() // max(channels, 1) * (-(-channels // multiple) * multiple) * tensor.element_size()
