"""Advice on large pages: which bytes it covers, and that nothing changes."""

from __future__ import annotations

import mmap

import pytest
import torch

from benchmarks.optim.huge_pages import HUGE_PAGE_BYTES, advise_huge_pages


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="needs Linux")
def test_whole_pages_inside_are_advised() -> None:
    tensor = torch.empty(5 * HUGE_PAGE_BYTES, dtype=torch.uint8)
    accepted = advise_huge_pages(tensor)
    # 0 where the system has no such pages; else all but what lies outside of whole ones.
    assert accepted in (0, 4 * HUGE_PAGE_BYTES, 5 * HUGE_PAGE_BYTES)
    tensor.fill_(7)
    advise_huge_pages(tensor)
    assert (tensor == 7).all()


def test_nothing_to_advise() -> None:
    assert advise_huge_pages(torch.empty(0)) == 0
    assert advise_huge_pages(torch.empty(1000)) == 0
    assert advise_huge_pages(torch.empty(HUGE_PAGE_BYTES, device="meta")) == 0
    assert advise_huge_pages(torch.empty(HUGE_PAGE_BYTES * 4)[::2]) == 0
