"""Layout: a model's groups cut into chunks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence

from lowtide.errors import ConfigError
from lowtide.memory.chunk_search import search_chunk_bytes
from lowtide.memory.layout_types import ALIGNMENT_BYTES, ChunkSpec, GroupSpec, Layout, ParameterSpec, Span
from lowtide.memory.packing import aligned, next_fit


def lay_out(groups: Sequence[GroupSpec], *, chunk_bytes: int | None = None) -> Layout:
    """The chunks of groups, as `find_groups` gives them.

    Within a group the parameters are packed in order, each into the last chunk or, where that is full, into a new
    one. Trained parameters and frozen ones do not share a chunk: a frozen chunk has no gradient and is never updated.

    Args:
        groups: In the order of their first use.
        chunk_bytes: The most that a chunk of several parameters may hold, rounded up to 512. None: the size with the
            least waste, see `search_chunk_bytes`.

    Example:
        >>> from torch import nn
        >>> from lowtide.memory.groups import find_groups
        >>> layout = lay_out(find_groups(nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))))
        >>> [(chunk.name, chunk.nbytes) for chunk in layout.chunks]
        [('0/0', 2048), ('1/0', 2560)]
    """
    if chunk_bytes is None:
        chunk_bytes = search_chunk_bytes(groups)
    elif chunk_bytes <= 0:
        raise ConfigError(f"chunk_bytes is {chunk_bytes}; give at least {ALIGNMENT_BYTES}", key="chunk_bytes")
    chunk_bytes = aligned(chunk_bytes)
    return Layout(
        groups=tuple(groups),
        chunks=tuple(chunk for group in groups for chunk in _chunks(group, chunk_bytes)),
        chunk_bytes=chunk_bytes,
        fingerprint=fingerprint(groups),
    )


def fingerprint(groups: Iterable[GroupSpec]) -> str:
    """Sixteen hexadecimal digits that change when a name, shape, dtype, tie, freeze or grouping changes."""
    facts = [[group.name, group.windows, [_facts(parameter) for parameter in group.parameters]] for group in groups]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _facts(parameter: ParameterSpec) -> list[object]:
    return [parameter.name, parameter.shape, str(parameter.dtype), parameter.requires_grad]


def _chunks(group: GroupSpec, chunk_bytes: int) -> list[ChunkSpec]:
    found = []
    for number, packed in enumerate(next_fit(group.parameters, chunk_bytes)):
        spans, offset = [], 0
        for parameter in packed:
            spans.append(Span(parameter=parameter, offset_bytes=offset))
            offset += aligned(parameter.nbytes)
        found.append(ChunkSpec(name=f"{group.name}/{number}", group=group.name, spans=tuple(spans), nbytes=offset))
    return found
