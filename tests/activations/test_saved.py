"""Span: what goes to the host for a tensor, and that it comes back without the gaps it had."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowtide.activations.saved import MAX_SPREAD, geometry_of, span_of

LARGE = torch.arange(64 * 64 * 16, dtype=torch.float32)

VIEWS = {
    "rows": LARGE.view(64, 1024)[3:5],
    "column": LARGE.view(1024, 64)[:, 0],
    "channels last": LARGE.view(64, 16, 64)[:4, ::4, :8].transpose(1, 2),
    "near": LARGE.view(512, 128)[::2, :64][:20],
    "repeated": LARGE.view(1024, 64)[:, 5:6].expand(1024, 3),
    "scalar": LARGE[7],
    "long steps": LARGE[::100],
}


def brought(view: Tensor) -> Tensor:
    """There and back."""
    span = span_of(view)
    assert span is not None
    buffer = torch.empty(span.num_bytes, dtype=torch.uint8)
    span.in_buffer(buffer).copy_(span.source(view))
    target = span.empty(torch.device("cpu"))
    target.copy_(span.in_buffer(buffer))
    return span.restored(geometry_of(view), target, is_source=False)


@pytest.mark.parametrize("name", VIEWS)
def test_a_small_view_comes_back_small(name: str) -> None:
    view = VIEWS[name]
    back = brought(view)
    assert torch.equal(back, view)
    different = len(set(view.flatten().tolist())) * view.element_size()
    assert back.untyped_storage().nbytes() <= MAX_SPREAD * different
    # The same dimension is the innermost, and what shared memory still does.
    order = sorted(range(view.dim()), key=lambda dim: view.stride(dim))
    assert sorted(range(view.dim()), key=lambda dim: back.stride(dim)) == order
    assert [stride == 0 for stride in back.stride()] == [stride == 0 for stride in view.stride()]


def test_a_view_with_few_gaps_keeps_its_strides() -> None:
    view = LARGE.view(1024, 64)[:20, :48]
    assert brought(view).stride() == view.stride()


def test_a_view_that_overlaps_itself_stays() -> None:
    assert span_of(LARGE.as_strided((8, 8), (1, 1))) is None
    assert span_of(LARGE.as_strided((8, 8), (4, 1))) is None
    assert span_of(LARGE.as_strided((8, 8), (8, 1))) is not None
