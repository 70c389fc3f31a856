"""How much staging memory a CUDA reduction takes: blocks that share an output hand partial results over in global memory.

Summing a gradient over all tokens for a bias of some thousand elements takes up to 130 MiB of it on an H200, more than the bias
and its gradient by orders of magnitude. The rules are those of torch's `Reduce.cuh`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

MAX_THREADS = 512
WARP = 32
MIN_VALUES_PER_THREAD = 16
MAX_VALUES_PER_THREAD = 256
THREADS_PER_SM = 2048


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction as the kernel sees it, dimensions merged."""

    num_outputs: int
    inputs_per_output: int
    reduces_fastest: bool
    """Whether the dimension of the smallest stride is reduced."""
    vector: int
    """Outputs computed by one thread side by side."""
    accumulator_bytes: int


def describe(tensor: Tensor, dims: Sequence[int], accumulator_bytes: int) -> Reduction:
    """The reduction of a tensor over some dimensions (all of them when none is given)."""
    reduced = {d % tensor.dim() for d in dims} if dims else set(range(tensor.dim()))
    sizes = tensor.shape
    inputs = outputs = 1
    for d, size in enumerate(sizes):
        if d in reduced:
            inputs *= size
        else:
            outputs *= size
    reduced_strides = [tensor.stride(d) for d in reduced if sizes[d] > 1]
    kept = [(tensor.stride(d), sizes[d]) for d in range(tensor.dim()) if d not in reduced and sizes[d] > 1]
    reduces_fastest = not kept or (bool(reduced_strides) and min(reduced_strides) < min(kept)[0])
    vector = 1
    if not reduces_fastest and kept and min(kept)[0] == 1:
        others = [*reduced_strides, *(stride for stride, _ in kept if stride != 1)]
        for candidate in (4, 2):
            if min(kept)[1] % candidate == 0 and all(stride % candidate == 0 for stride in others):
                vector = candidate
                break
    return Reduction(
        num_outputs=outputs,
        inputs_per_output=inputs,
        reduces_fastest=reduces_fastest,
        vector=vector,
        accumulator_bytes=accumulator_bytes,
    )


def staging_bytes(reduction: Reduction, num_sms: int) -> tuple[int, int]:
    """Bytes of the staging buffer and of its semaphores; zeros where one block finishes each output alone."""
    outputs, inputs = reduction.num_outputs, reduction.inputs_per_output
    if outputs == 0 or inputs == 0:
        return 0, 0
    threads = MAX_THREADS // reduction.vector
    width_of, height_of = (inputs, outputs) if reduction.reduces_fastest else (outputs // reduction.vector, inputs)
    width_limit = threads if width_of >= threads else _last_power(width_of)
    height_limit = threads if height_of >= threads else _last_power(height_of)
    width = min(width_limit, WARP)
    height = min(height_limit, threads // width)
    width = min(width_limit, threads // height)
    step_input, step_output = (width, 1) if reduction.reduces_fastest else (1, width)
    values = -(-inputs // step_input)
    splits_warps = values >= min(height * 16, MAX_VALUES_PER_THREAD)
    if splits_warps:
        step_input *= height
        values = -(-inputs // step_input)
    else:
        step_output *= height
    grid = -(-(outputs // reduction.vector) // step_output)
    target = num_sms * (THREADS_PER_SM // (width * height))
    if not (splits_warps and values >= MAX_VALUES_PER_THREAD and grid <= target):
        return 0, 0
    blocks = max(min(-(-target // grid), -(-values // MIN_VALUES_PER_THREAD)), -(-values // MAX_VALUES_PER_THREAD))
    if blocks <= 1:
        return 0, 0
    staging = reduction.accumulator_bytes * outputs * blocks
    if not reduction.reduces_fastest:
        staging *= width * reduction.vector
    return staging, 4 * grid


def _last_power(number: int) -> int:
    return 1 << max(number.bit_length() - 1, 0)
