"""The values of a whole storage, so that a write through one view is seen through all the others.

Models build masks and positions piece by piece (`mask[:, 0] = 1`), and look at the whole afterwards. Values are recipes (see
`values`): nothing is computed until somebody reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from lowtide.tracing.ghost.values import MAX_ELEMENTS, Known

if TYPE_CHECKING:
    from lowtide.tracing.ghost.tensor import Ghost


def begin(ghost: Ghost) -> None:
    """A new storage: where its first tensor has known values and fills it, its content is known."""
    life = ghost.life
    if life.version == 0 and life.content is None and ghost.known is not None and _is_whole(ghost):
        life.content, life.content_version = (ghost.known, ghost.dtype), 0


def written(ghost: Ghost, known: Known | None) -> None:
    """A tensor was written to, with these values; None where they are not known."""
    life = ghost.life
    content = life.content if life.content_version == life.version else None
    life.version += 1
    ghost.known, ghost.known_version = known, life.version
    life.content = None
    if known is None:
        return
    if _is_whole(ghost):
        life.content = (known, ghost.dtype)
    elif content is not None and content[1] is ghost.dtype:
        patched = Known(func=_patch, args=(content[0], known, ghost.size(), ghost.stride(), ghost.storage_offset()))
        life.content = (patched, ghost.dtype)
    life.content_version = life.version


def seen_through(ghost: Ghost) -> Known | None:
    """The values of a tensor whose storage has been written to through another one; None where they are not known."""
    life = ghost.life
    if life.content is None or life.content_version != life.version or life.content[1] is not ghost.dtype:
        return None
    if ghost.inner.untyped_storage().nbytes() > MAX_ELEMENTS:
        return None
    return Known(func=_look, args=(life.content[0], ghost.size(), ghost.stride(), ghost.storage_offset()))


def _is_whole(ghost: Ghost) -> bool:
    inner = ghost.inner
    return (
        inner.is_contiguous()
        and inner.storage_offset() == 0
        and inner.untyped_storage().nbytes() == inner.numel() * inner.element_size()
    )


def _look(content: Tensor, size: list[int], stride: list[int], offset: int) -> Tensor:
    return content.reshape(-1).as_strided(size, stride, offset)


def _patch(content: Tensor, values: Tensor, size: list[int], stride: list[int], offset: int) -> Tensor:
    flat = content.reshape(-1).clone()
    flat.as_strided(size, stride, offset).copy_(values)
    return flat
