"""Bytes, seconds, counts and types of numbers, between what people type, what code computes with, and what people read.

Input may say `24GB` (decimal) or `24GiB` (binary); output is always binary and always says so, because a GPU sold as
"24 GB" has 24 GiB and mixing the two hides a 7% error.
"""

from __future__ import annotations

import math
import re

from lowtide.errors import ConfigError

KiB = 1024
MiB = 1024**2
GiB = 1024**3
TiB = 1024**4

_BYTE_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": KiB,
    "mib": MiB,
    "gib": GiB,
    "tib": TiB,
}
_NUMBER_AND_UNIT = re.compile(r"\s*(?P<number>\d+(?:_\d+)*(?:\.\d+)?|\.\d+)\s*(?P<unit>[A-Za-z]*)\s*")


def parse_bytes(size: str | int) -> int:
    """A size in bytes from what a person wrote; fractions are rounded to the nearest byte.

    Example:
        >>> parse_bytes("24GiB"), parse_bytes("1.5 kB"), parse_bytes(512)
        (25769803776, 1500, 512)

    Raises:
        ConfigError: The text is not a size, its unit is unknown, or the size is negative.
    """
    # bool is an int: `device_memory=True` would otherwise mean one byte.
    if isinstance(size, bool):
        raise ConfigError(f"{size!r} is not a size; write an int of bytes or text such as '24GiB'")
    if isinstance(size, int):
        if size < 0:
            raise ConfigError(f"a size cannot be negative, got {size}; write an int of bytes or text such as '24GiB'")
        return size
    match = _NUMBER_AND_UNIT.fullmatch(str(size))
    if match is None:
        raise ConfigError(f"{size!r} is not a size; write an int of bytes or text such as '24GiB'")
    number, unit = match["number"], match["unit"]
    factor = _BYTE_UNITS.get(unit.casefold())
    if factor is None:
        raise ConfigError(
            f"unknown unit {unit!r} in the size {size!r}; use one of B, KiB, MiB, GiB, TiB, kB, MB, GB, TB"
        )
    # An integer stays exact beyond 2**53; only a fraction goes through a float.
    return int(number) * factor if "." not in number else round(float(number) * factor)


DTYPES = ("float32", "bfloat16", "float16")
"""torch's names of the types that a model can be trained in."""
_SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def parse_dtype(word: object, *, key: str) -> str:
    """The name that torch has for a type of numbers, from any way in which people write it, or from torch's own object.

    Args:
        word: Such as `bf16`, `bfloat16`, `torch.bfloat16`, or `torch.bfloat16` itself.
        key: The setting, for the message.

    Example:
        >>> parse_dtype("bf16", key="dtype"), parse_dtype("torch.float32", key="dtype")
        ('bfloat16', 'float32')

    Raises:
        ConfigError: It is none of `DTYPES`.
    """
    name = str(word).strip().casefold().removeprefix("torch.")
    name = _SHORT_DTYPES.get(name, name)
    if name not in DTYPES:
        raise ConfigError(f"{key} is {str(word)!r}; give {', '.join(DTYPES[:-1])} or {DTYPES[-1]}", key=key)
    return name


def format_bytes(num_bytes: float) -> str:
    """A size for people, in the largest binary unit that keeps it at 1 or more: `23.4 GiB`, `512 B`.

    Example:
        >>> format_bytes(25_125_558_682), format_bytes(512), format_bytes(-3 * 1024)
        ('23.4 GiB', '512 B', '-3.0 KiB')
    """
    if not math.isfinite(num_bytes):
        return f"{num_bytes} B"
    sign, size = ("-" if num_bytes < 0 else ""), abs(num_bytes)
    for unit, factor in (("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        # Compare what will be shown, so that one byte short of a GiB reads 1.0 GiB, not 1024.0 MiB.
        if round(size / factor, 1) >= 1.0:
            return f"{sign}{size / factor:.1f} {unit}"
    return f"{sign}{size:.0f} B"


def format_seconds(seconds: float) -> str:
    """A duration for people: `12.5 ms`, `3.2 s`, `4 min 05 s`, `2 h 03 min`.

    Example:
        >>> format_seconds(0.0125), format_seconds(245), format_seconds(7380)
        ('12.5 ms', '4 min 05 s', '2 h 03 min')
    """
    if not math.isfinite(seconds):
        return f"{seconds} s"
    sign, length = ("-" if seconds < 0 else ""), abs(seconds)
    if length == 0:
        return "0 s"
    for unit, factor in (("ns", 1e9), ("µs", 1e6), ("ms", 1e3), ("s", 1.0)):
        limit = 60.0 if unit == "s" else 1000.0
        if round(length * factor, 1) < limit:
            return f"{sign}{length * factor:.1f} {unit}"
    minutes, rest = divmod(round(length), 60)
    if minutes < 60:
        return f"{sign}{minutes} min {rest:02d} s"
    hours, minutes = divmod(round(length / 60), 60)
    return f"{sign}{hours} h {minutes:02d} min"


def format_count(count: float) -> str:
    """A number of things in three significant digits: `8.03B`, `124M`, `950`.

    Example:
        >>> format_count(8_030_261_248), format_count(124_439_808), format_count(950)
        ('8.03B', '124M', '950')
    """
    if not math.isfinite(count):
        return str(count)
    sign, size = ("-" if count < 0 else ""), abs(count)
    if size < 999.5:
        return f"{sign}{size:.3g}"
    for suffix, factor in (("K", 1e3), ("M", 1e6), ("B", 1e9), ("T", 1e12)):
        scaled = size / factor
        if scaled < 999.5:
            decimals = 2 if round(scaled, 2) < 10 else 1 if round(scaled, 1) < 100 else 0
            return f"{sign}{scaled:.{decimals}f}{suffix}"
    return f"{sign}{size / 1e12:.0f}T"
