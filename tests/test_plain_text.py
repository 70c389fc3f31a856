"""JSON and YAML text: YAML 1.2 scalars, repeated keys, and a lossless round trip."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import ConfigError
from lowtide.plain_text import Format, Plain, format_of, parse, render

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
TREES = st.recursive(SCALARS, lambda child: st.lists(child, max_size=4) | st.dictionaries(st.text(), child, max_size=4))


@given(plain=TREES, text_format=st.sampled_from(["json", "yaml"]))
def test_round_trip(plain: Plain, text_format: Format) -> None:
    again = parse(render(plain, text_format), text_format)
    assert again == plain
    # 1, 1.0 and True are equal to Python and different in a config.
    assert repr(again) == repr(plain)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("-1.5E+3", -1500.0),
        ("5.", 5.0),
        (".5", 0.5),
        ("off", "off"),
        ("No", "No"),
        ("true", True),
        ("1:30", "1:30"),
        ("2024-05-01", "2024-05-01"),
        ("010", "010"),
        ("1_000", 1000),
        ("8x2048", "8x2048"),
        ("~", None),
        ("", None),
        ("e5", "e5"),
        (".", "."),
    ],
)
def test_yaml_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    parsed = parse(f"key: {text}", "yaml")
    assert parsed == {"key": value}
    assert isinstance(parsed, dict)
    assert type(parsed["key"]) is type(value)


@pytest.mark.parametrize(("text", "text_format"), [('{"a": 1, "a": 2}', "json"), ("a: 1\nb: 3\na: 2\n", "yaml")])
def test_repeated_key_is_refused(text: str, text_format: Format) -> None:
    with pytest.raises(ConfigError, match="the key 'a' is given twice; keep one") as caught:
        parse(text, text_format)
    assert caught.value.key == "a"


@pytest.mark.parametrize(
    ("text", "text_format"), [("{", "json"), ("a: [1", "yaml"), ("!!python/name:os.system", "yaml")]
)
def test_invalid_text_says_which_format(text: str, text_format: Format) -> None:
    with pytest.raises(ConfigError, match=f"not valid {text_format.upper()}: "):
        parse(text, text_format)


def test_format_comes_from_the_name() -> None:
    assert format_of(Path("a.json")) == "json"
    assert format_of(Path("a.yml")) == format_of(Path("a.yaml")) == "yaml"
    with pytest.raises(ConfigError, match=r"cannot tell the format of a\.toml; name it \.json, \.yaml or \.yml"):
        format_of(Path("a.toml"))
