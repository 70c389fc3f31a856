"""The layout of a model in memory, as plain data: parameters in groups, groups in chunks.

A group is what one module call needs at once. A chunk is a slice of a group's flat buffer, made of whole parameters: the
unit of placement, movement and update. Parameters that several groups' modules use (tied weights) form a group of
their own, which each of those modules opens beside its own: they are stored once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

ALIGNMENT_BYTES = 512
"""Where a parameter may start in its chunk: what the caching allocator gives to a tensor of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """What one parameter looks like, without its values."""

    name: str
    """The first name under which `named_parameters` gives it; tied names are left out."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Kept, so that a channels-last weight stays one and its kernels stay the same."""
    dtype: torch.dtype
    requires_grad: bool
    nbytes: int
    """Of its elements, without padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """The parameters that are needed together."""

    name: str
    """The path of the module that opens it; of a tied group the path of its parameter; "" for the rest of the model."""
    windows: tuple[str, ...]
    """Paths of the modules whose call needs the group, "" for the whole model."""
    parameters: tuple[ParameterSpec, ...]
    """In the order of `named_parameters`."""
    is_block: bool = False
    """Whether its module is a repeated block of the model."""

    @property
    def nbytes(self) -> int:
        """Bytes of the group's parameters, without padding."""
        return sum(parameter.nbytes for parameter in self.parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Where a parameter lies in its chunk."""

    parameter: ParameterSpec
    offset_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSpec:
    """A slice of a group: whole parameters, one after the other, each aligned to 512 bytes."""

    name: str
    """Group and number, such as `layers.3/0`."""
    group: str
    spans: tuple[Span, ...]
    nbytes: int
    """With padding, a multiple of 512."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All groups of a model and their chunks, in the order in which the model first uses them."""

    groups: tuple[GroupSpec, ...]
    chunks: tuple[ChunkSpec, ...]
    """Those of one group stand together."""
    chunk_bytes: int
    """The chunk size that was searched for: no chunk is larger, unless one parameter alone is."""
    fingerprint: str
    """Changes when a name, shape, dtype, tie or grouping changes: a plan says for which layout it was made."""

    def chunks_of(self, group: str) -> tuple[ChunkSpec, ...]:
        """The chunks of one group, in order."""
        return tuple(chunk for chunk in self.chunks if chunk.group == group)
