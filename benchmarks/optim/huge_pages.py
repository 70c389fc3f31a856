"""Asks the system for large pages behind long-lived host memory.

An update walks through six streams at once. With pages of 4 KiB each of them meets the end of a page every few tiles, where
the address has to be looked up and the hardware's prefetch begins anew; with pages of 2 MiB that is rare. So the expectation;
the rows `huge` and `huge apart` of `benchmarks.optim.host_kernel` say that it is not so, and the library does without them.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable

import torch

HUGE_PAGE_BYTES = 2 << 20
"""On x86 and on most of ARM."""


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def advise(begin: int, num_bytes: int, advice: int) -> int:
        return int(function(begin, num_bytes, advice))

    return advise


def advise_huge_pages(tensor: torch.Tensor) -> int:
    """Ask for large pages behind a host tensor's memory; how many bytes the system accepted that for, 0 for none.

    Best before the memory is first written: pages that exist are only merged later, in the background. A page that the tensor
    fills in part keeps its size. Advice changes speed, never values.

    Example:
        >>> advise_huge_pages(torch.empty(16))
        0
    """
    advise = _madvise()
    if advise is None or not tensor.is_cpu or not tensor.is_contiguous():
        return 0
    begin = -(-tensor.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = (tensor.data_ptr() + tensor.nbytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if end <= begin or advise(begin, end - begin, mmap.MADV_HUGEPAGE) != 0:
        return 0
    return end - begin
