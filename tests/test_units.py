"""Sizes, durations and counts, as typed and as shown."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import ConfigError
from lowtide.units import GiB, KiB, MiB, TiB, format_bytes, format_count, format_seconds, parse_bytes, parse_dtype


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("24GiB", 24 * 2**30),
        ("24 GB", 24 * 10**9),
        ("24gib", 24 * 2**30),
        (" 1.5 KiB ", 1536),
        (".5MiB", 2**19),
        ("512", 512),
        ("7 B", 7),
        ("2TB", 2 * 10**12),
        ("1_000kB", 10**6),
        (0, 0),
        (2**60 + 1, 2**60 + 1),
        ("1152921504606846977", 2**60 + 1),
    ],
)
def test_parse_bytes(text: str | int, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "much", "-1GiB", "1.2.3GiB", "1e3", None, True, [], "1GiB extra"])
def test_parse_bytes_refuses_what_is_not_a_size(text: Any) -> None:
    with pytest.raises(ConfigError, match="is not a size; write an int of bytes or text such as '24GiB'"):
        parse_bytes(text)


def test_parse_bytes_names_the_unknown_unit() -> None:
    with pytest.raises(ConfigError, match="unknown unit 'GiBs' in the size '24GiBs'; use one of B, KiB"):
        parse_bytes("24GiBs")


def test_parse_bytes_refuses_negative_numbers() -> None:
    with pytest.raises(ConfigError, match="cannot be negative, got -5"):
        parse_bytes(-5)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (900, "900 B"),
        (KiB, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (MiB, "1.0 MiB"),
        (GiB - 1, "1.0 GiB"),
        (GiB, "1.0 GiB"),
        (141 * GiB, "141.0 GiB"),
        (3 * TiB, "3.0 TiB"),
        (5000 * TiB, "5000.0 TiB"),
        (-2 * GiB, "-2.0 GiB"),
        (float("inf"), "inf B"),
    ],
)
def test_format_bytes(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


@given(st.integers(0, 2**52))
def test_shown_size_reads_back_within_its_last_digit(num_bytes: int) -> None:
    text = format_bytes(num_bytes)
    assert re.fullmatch(r"\d+ B|\d+\.\d (Ki|Mi|Gi|Ti)B", text)
    unit_bytes = parse_bytes(f"1{text.split()[1]}")
    assert abs(parse_bytes(text) - num_bytes) <= 0.05 * unit_bytes + 1
    # Never "1024.0 MiB": every size has one way to be shown.
    assert unit_bytes == TiB or parse_bytes(text) < 1024 * unit_bytes


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (2e-9, "2.0 ns"),
        (3.25e-6, "3.2 µs"),
        (0.0125, "12.5 ms"),
        (0.99999, "1.0 s"),
        (3.2, "3.2 s"),
        (59.97, "1 min 00 s"),
        (245, "4 min 05 s"),
        (3599.6, "1 h 00 min"),
        (7380, "2 h 03 min"),
        (-2.0, "-2.0 s"),
        (float("nan"), "nan s"),
    ],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (950, "950"),
        (999.6, "1.00K"),
        (1000, "1.00K"),
        (9_996, "10.0K"),
        (124_439_808, "124M"),
        (999_700_000, "1.00B"),
        (8_030_261_248, "8.03B"),
        (70_553_706_496, "70.6B"),
        (2 * 10**12, "2.00T"),
        (5 * 10**15, "5000T"),
        (-1500, "-1.50K"),
    ],
)
def test_format_count(count: float, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("fp32", "float32", "torch.float32", "FP32", torch.float32), "float32"),
        (("bf16", "bfloat16", "torch.bfloat16", " bf16 ", torch.bfloat16), "bfloat16"),
        (("fp16", "float16", "torch.float16", torch.float16, torch.half), "float16"),
    ],
)
def test_parse_dtype(words: tuple[object, ...], name: str) -> None:
    assert {parse_dtype(word, key="dtype") for word in words} == {name}


@pytest.mark.parametrize("word", ["float8", "", "torch.", 32, torch.float64, None])
def test_parse_dtype_refuses_what_a_model_cannot_be_trained_in(word: object) -> None:
    with pytest.raises(ConfigError, match=f"dtype is '{word}'; give float32, bfloat16 or float16") as caught:
        parse_dtype(word, key="dtype")
    assert caught.value.key == "dtype"
