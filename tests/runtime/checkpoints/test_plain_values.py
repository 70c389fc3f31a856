"""Plain values come back as they were, to the bit and of the same type; what has no plain form is named."""

from __future__ import annotations

import enum
import fractions
import json
import math
import pickle
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import CheckpointError, ConfigError
from lowtide.runtime.checkpoints.plain_values import Decoder, Encoder


def through_text(value: object) -> Any:
    encoder = Encoder("state")
    text = json.dumps(encoder.encode(value, "state['x']"))
    return Decoder(lambda name: encoder.tensors[name].clone()).decode(json.loads(text))


PLAIN = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False),
        st.text(),
        st.binary(max_size=8),
        st.complex_numbers(allow_nan=False),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(deque),
        st.dictionaries(
            st.one_of(st.text(max_size=3), st.integers(), st.none(), st.tuples(st.integers())), inner, max_size=3
        ),
        st.dictionaries(st.sampled_from(["$", "a"]), inner, max_size=2).map(OrderedDict),
        st.sets(st.one_of(st.integers(), st.text(max_size=3)), max_size=3),
    ),
    max_leaves=12,
)


@given(PLAIN)
def test_a_value_comes_back_of_its_type(value: Any) -> None:
    found = through_text(value)
    assert found == value
    assert pickle.dumps(types_in(found)) == pickle.dumps(types_in(value))


def types_in(value: object) -> Any:
    """The types of all that is in a value, and the signs of zeros."""
    if isinstance(value, float):
        return "float", math.copysign(1, value)
    if isinstance(value, dict):
        return type(value).__name__, [(types_in(key), types_in(item)) for key, item in value.items()]
    if isinstance(value, list | tuple | deque):
        return type(value).__name__, [types_in(item) for item in value]
    return type(value).__name__


@given(st.integers(0, 2**64 - 1))
def test_floats_keep_their_bits(bits: int) -> None:
    """Also those of a NaN."""
    value = struct.unpack(">d", bits.to_bytes(8))[0]
    if value != value and not bits & 1 << 51:
        return  # a signalling NaN, which processors make quiet
    assert struct.pack(">d", through_text(value)) == struct.pack(">d", value)


def test_containers_of_the_standard_library() -> None:
    lists: defaultdict[int, list[int]] = defaultdict(list, {3: [1, 2]})
    found = through_text({"milestones": Counter({5: 2}), "lists": lists, "last": deque([1, 2], maxlen=2)})
    assert type(found["milestones"]) is Counter
    assert found["milestones"] == {5: 2}
    assert found["lists"][7] == []
    assert found["lists"].default_factory is list
    assert found["last"].maxlen == 2


def test_tensors_arrays_and_torchs_words() -> None:
    value = {
        "bf16": torch.tensor([1.5, math.nan]).bfloat16(),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(7),
        "array": np.arange(6, dtype=">u2").reshape(2, 3),
        "number": np.float32(0.1),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", 1),
    }
    found = through_text(value)
    assert found["bf16"].dtype is torch.bfloat16
    assert torch.equal(found["bf16"].view(torch.int16), value["bf16"].view(torch.int16))  # type: ignore[attr-defined]
    assert found["empty"].shape == (0, 3)
    assert found["scalar"].shape == ()
    assert found["array"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["array"].flags.writeable
    assert type(found["number"]) is np.float32
    assert found["number"] == np.float32(0.1)
    assert (found["dtype"], found["device"]) == (torch.bfloat16, torch.device("cuda", 1))


def test_generators_of_numpy_go_as_their_state() -> None:
    generator = np.random.default_rng(3)
    other = np.random.default_rng(4)
    other.bit_generator.state = through_text(generator.bit_generator.state)
    assert other.random() == generator.random()


class Colour(enum.Enum):
    RED = 1


class Point(NamedTuple):
    x: int


class Text(str):
    __slots__ = ()


def holds_itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: {"queue": [1, fractions.Fraction(1, 2)]},
            r"state\['x'\]\['queue'\]\[1\] is a fractions.Fraction, .* no code",
        ),
        (lambda: {Colour.RED: 1}, r"a key of state\['x'\] is a .*Colour"),
        (lambda: Point(1), r"is a .*Point, which has no plain form"),
        (lambda: Text("a"), r"is a .*Text, which has no plain form"),
        (lambda: lambda x: x, r"is a builtins.function"),
        (lambda: defaultdict(lambda: 3), r"is a defaultdict of <function .* give dict\(state\['x'\]\)"),
        (lambda: np.array(["a"], dtype=object), r"is a NumPy array of object"),
        (lambda: torch.zeros(2).to_sparse(), r"is a Tensor \(torch.sparse_coo\), and a checkpoint holds dense tensors"),
        (lambda: torch.zeros(2, device="meta"), r"is a Tensor \(on the meta device\)"),
        (holds_itself, r"is nested more than 100 deep, or holds itself"),
    ],
)
def test_what_has_no_plain_form_is_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Encoder("state").encode(make(), "state['x']")


@pytest.mark.parametrize(
    "text",
    ['{"$": "object"}', '{"$": "tuple"}', '{"$": "float", "bits": "zz"}', '{"$": "dtype", "name": "os.system"}', '{"$": 3}',
     '{"$": "defaultdict", "items": [], "factory": "eval"}'],
)  # fmt: skip
def test_unknown_words_are_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match="which this version of Lowtide does not know"):
        Decoder(lambda name: torch.zeros(1)).decode(json.loads(text))
