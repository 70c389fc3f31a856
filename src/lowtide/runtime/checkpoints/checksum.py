"""CRC-32 of tensors that are written in pieces: the pieces' checksums give the whole's, without reading a byte again.

zlib has this as `crc32_combine`, which Python's module does not offer. A CRC is a remainder of polynomials over two
elements: to append n bytes multiplies the first part's by x to the power 8n.
"""

from __future__ import annotations

from collections.abc import Iterable

_POLYNOMIAL = 0xEDB88320
"""Of CRC-32, with the coefficient of x to the power 31 in the lowest bit."""
_ONE = 1 << 31


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


def _squares(count: int) -> tuple[int, ...]:
    squares = [1 << 30]
    for _ in range(count - 1):
        squares.append(_times(squares[-1], squares[-1]))
    return tuple(squares)


_SQUARES = _squares(66)
"""x to the powers 1, 2, 4, 8 and so on."""


def _power(num_bytes: int) -> int:
    power = _ONE
    for exponent in range(num_bytes.bit_length()):
        if num_bytes >> exponent & 1:
            power = _times(_SQUARES[exponent + 3], power)
    return power
