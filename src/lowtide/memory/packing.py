"""Packing: which parameters of a group share a chunk."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.memory.layout_types import ALIGNMENT_BYTES, ParameterSpec


def aligned(num_bytes: int) -> int:
    """The next multiple of 512.

    Example:
        >>> aligned(1), aligned(512), aligned(513)
        (512, 512, 1024)
    """
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def next_fit(parameters: Sequence[ParameterSpec], chunk_bytes: int) -> list[list[ParameterSpec]]:
    """Parameters in chunks of at most `chunk_bytes`, in order; one that is larger has a chunk to itself.

    Next fit, not first fit: parameters that are used one after the other stay together. The trained and the frozen ones
    are packed apart, each in their order, so that adapters between frozen weights do not break the chunks of both.
    """
    chunks: list[list[ParameterSpec]] = []
    last: dict[bool, list[ParameterSpec]] = {}
    filled: dict[bool, int] = {}
    for parameter in parameters:
        trained, size = parameter.requires_grad, aligned(parameter.nbytes)
        if trained not in last or filled[trained] + size > chunk_bytes:
            last[trained], filled[trained] = [], 0
            chunks.append(last[trained])
        last[trained].append(parameter)
        filled[trained] += size
    return chunks
