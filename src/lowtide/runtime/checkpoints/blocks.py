"""The bytes of tensors to and from files, a block at a time, with their CRC-32 on the way.

The CRC-32 of a tensor that is written in pieces follows from those of the pieces, without reading a byte again. zlib has
this as `crc32_combine`, which Python's module does not offer. A CRC is a remainder of polynomials over two elements: to
append n bytes multiplies the first part's by x to the power 8n.
"""

from __future__ import annotations

import itertools
import mmap
import os
import zlib
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from lowtide.errors import BadRecordError, CheckpointError
from lowtide.runtime.checkpoints.disk import Disk
from lowtide.units import MiB

BLOCK_BYTES = MiB
"""What is read and checksummed at a time: it is in the processor's cache for the second of the two."""
WRITE_BYTES = 32 * MiB
"""What is checksummed and written at a time. After each call a writer waits for the interpreter's lock, for 5 ms where the loop is
busy in Python, and the loop then waits for the writer: so few, large calls are faster for both."""
DIRECT_BYTES = 4 * MiB
"""A tensor of so many bytes is written past the page cache."""
PAGE_BYTES = max(4096, mmap.PAGESIZE)
"""What is written past the page cache begins and ends at a multiple of this, in the file and in memory. No page of a file is
written both ways, so that the page cache has none of what it was not told."""
_STAGED_BYTES = 16 * MiB
"""What is read at a time for a tensor that the disk cannot be read into: one on a device."""
_POLYNOMIAL = 0xEDB88320
"""Of CRC-32, with the coefficient of x to the power 31 in the lowest bit."""
_ONE = 1 << 31


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host.

    Raises:
        CheckpointError: It is on a device, or its values are not one after another.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise CheckpointError(
            f"a tensor on {tensor.device} of stride {tensor.stride()} cannot be saved as it is; give a contiguous copy on "
            "the host"
        )
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy 1 has no Buffer


def write_all(disk: Disk, descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of it, however little the disk takes at a time."""
    while data:
        written = disk.write(descriptor, data, offset)
        if written <= 0:
            raise OSError(f"the disk took none of {len(data):,} bytes")
        data, offset = data[written:], offset + written


def blocks_of(data: memoryview, offset: int) -> Iterator[tuple[slice, bool]]:
    """The bytes a block at a time, and whether each can be written past the page cache.

    Args:
        data: What is to be written.
        offset: Where in the file.
    """
    first, last = -offset % PAGE_BYTES, len(data) - (offset + len(data)) % PAGE_BYTES
    if first >= last or (np.frombuffer(data, dtype=np.uint8).ctypes.data - offset) % PAGE_BYTES:
        first = last = 0
    for begin, end, fits in ((0, first, False), (first, last, True), (last, len(data), False)):
        for place in range(begin, end, WRITE_BYTES):
            yield slice(place, min(end, place + WRITE_BYTES)), fits


def read_all(descriptor: int, data: memoryview, offset: int, checksum: int = 0) -> int:
    """Fill the memory from the file, and give the CRC-32 of what came, after what has this one."""
    while data:
        count = os.preadv(descriptor, [data[:BLOCK_BYTES]], offset)
        if count == 0:
            raise BadRecordError("it ends early")
        checksum = zlib.crc32(data[:count], checksum)
        data, offset = data[count:], offset + count
    return checksum


def read_in_blocks(descriptor: int, values: torch.Tensor, offset: int) -> int:
    """Fill a flat tensor on a device, and give the CRC-32 of what came."""
    staged = torch.empty(min(values.numel(), _STAGED_BYTES // values.itemsize), dtype=values.dtype)
    pieces = []
    for begin in range(0, values.numel(), max(1, staged.numel())):
        block = staged[: values.numel() - begin]
        data = bytes_of(block)
        pieces.append((len(data), read_all(descriptor, data, offset + begin * values.itemsize)))
        values[begin : begin + block.numel()].copy_(block)
    return combined(pieces)


def checksum_of(descriptor: int, offset: int, num_bytes: int) -> int:
    """The CRC-32 of a stretch of a file."""
    buffer = memoryview(bytearray(min(num_bytes, BLOCK_BYTES)))
    checksum = 0
    for begin in range(0, num_bytes, BLOCK_BYTES):
        checksum = read_all(descriptor, buffer[: num_bytes - begin], offset + begin, checksum)
    return checksum


def combined(pieces: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of the pieces one after another.

    Args:
        pieces: For each, its number of bytes and its CRC-32, in order.
    """
    checksum = 0
    for num_bytes, piece in pieces:
        checksum = _times(_power(num_bytes), checksum) ^ piece
    return checksum


def _times(one: int, other: int) -> int:
    product = 0
    while one:
        if one & _ONE:
            product ^= other
        one = one << 1 & 0xFFFFFFFF
        other = other >> 1 ^ _POLYNOMIAL if other & 1 else other >> 1
    return product


_SQUARES = tuple(itertools.accumulate(range(65), lambda square, _: _times(square, square), initial=1 << 30))
"""x to the powers 1, 2, 4, 8 and so on."""


def _power(num_bytes: int) -> int:
    power = _ONE
    for exponent in range(num_bytes.bit_length()):
        if num_bytes >> exponent & 1:
            power = _times(_SQUARES[exponent + 3], power)
    return power
