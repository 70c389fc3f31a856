"""Plain values: what objects give as their state, as JSON and tensors, and back to the bit. Nothing is pickled.

JSON has lists, text keys and finite numbers. What it lacks stands under a tag: `{"$": "tuple", "items": [...]}`. Tensors are
taken out and written to a file of tensors under a name, and so are NumPy's arrays. A value of any other type is refused,
because to bring back an object of a class, code would have to be named in the file.
"""

from __future__ import annotations

import base64
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from lowtide import compat
from lowtide.errors import CheckpointError, ConfigError
from lowtide.plain_text import Plain

TAG = "$"
"""The key of a JSON object that stands for something else."""
_FACTORIES: dict[str, Callable[[], Any] | None] = {
    "none": None,
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "list": list,
    "dict": dict,
    "set": set,
    "tuple": tuple,
}
"""What a `defaultdict` may make where a key is missing."""
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_MOST_NESTED = 100


class Encoder:
    """Turns values into JSON, and gathers their tensors.

    Args:
        prefix: What the names of the tensors begin with.

    Example:
        >>> encoder = Encoder("loader")
        >>> encoder.encode((1, None), "state['loader']")
        {'$': 'tuple', 'items': [1, None]}
        >>> encoder.encode(torch.ones(2), "state['loader']"), list(encoder.tensors)
        ({'$': 'tensor', 'name': 'loader.0'}, ['loader.0'])
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.tensors: dict[str, torch.Tensor] = {}
        """By name: what must be written beside the JSON. They are the values' own, not copies."""

    def encode(self, value: object, place: str) -> Plain:
        """The value as JSON.

        Args:
            value: Anything.
            place: How a message names the value, as Python code: `state['scheduler']['milestones']`.

        Raises:
            ConfigError: It, or something in it, has no plain form.
        """
        return self._encode(value, place, 0)

    def _encode(self, value: object, place: str, depth: int) -> Plain:
        if depth > _MOST_NESTED:
            raise ConfigError(
                f"{place} is nested more than {_MOST_NESTED} deep, or holds itself; a checkpoint holds plain values: give "
                "what is needed to make it again",
                key=place,
            )
        if value is None or isinstance(value, bool):
            return value
        kind = type(value)
        if kind is int or kind is str:
            return value  # type: ignore[return-value]  # it is one of these
        if kind is float:
            assert isinstance(value, float)
            # Python writes the shortest text that reads back as the same number; JSON has none for these three.
            return value if math.isfinite(value) else {TAG: "float", "bits": struct.pack(">d", value).hex()}
        if isinstance(value, torch.Tensor | np.ndarray | np.generic):
            return self._encode_array(value, place)
        inside = self._encode_container(value, place, depth)
        if inside is not None:
            return inside
        return _encode_rest(value, place)

    def _encode_container(self, value: object, place: str, depth: int) -> Plain | None:
        kind = type(value)
        if kind in (list, tuple, deque):
            assert isinstance(value, list | tuple | deque)
            items: list[Plain] = [
                self._encode(item, f"{place}[{index}]", depth + 1) for index, item in enumerate(value)
            ]
            if isinstance(value, list):
                return items
            most: dict[str, Plain] = {"most": value.maxlen} if isinstance(value, deque) else {}
            return {TAG: kind.__name__, "items": items, **most}
        if kind in (set, frozenset):
            assert isinstance(value, set | frozenset)
            # In an order of its own, so that the same set gives the same file.
            members = sorted(value, key=repr)
            return {TAG: kind.__name__, "items": [self._encode(item, f"{place}[...]", depth + 1) for item in members]}
        if kind in (dict, OrderedDict, defaultdict, Counter):
            assert isinstance(value, dict)
            return self._encode_dict(value, place, depth)
        return None

    def _encode_dict(self, value: dict[Any, Any], place: str, depth: int) -> Plain:
        pairs = [(key, self._encode(item, f"{place}[{key!r}]", depth + 1)) for key, item in value.items()]
        if type(value) is dict and all(type(key) is str for key in value) and TAG not in value:
            return dict(pairs)
        items: list[Plain] = [[self._encode(key, f"a key of {place}", depth + 1), item] for key, item in pairs]
        encoded: dict[str, Plain] = {TAG: type(value).__name__, "items": items}
        if isinstance(value, defaultdict):
            names = [name for name, factory in _FACTORIES.items() if factory is value.default_factory]
            if not names:
                raise ConfigError(
                    f"{place} is a defaultdict of {value.default_factory!r}, and a checkpoint holds no code; give "
                    f"dict({place}), or one of {', '.join(_FACTORIES)}",
                    key=place,
                )
            encoded["factory"] = names[0]
        return encoded

    def _encode_array(self, value: torch.Tensor | np.ndarray[Any, Any] | np.generic, place: str) -> Plain:
        if isinstance(value, torch.Tensor):
            require_plain_tensor(value, place)
            return {TAG: "tensor", "name": self._keep(value.detach())}
        array = np.asarray(value)
        if array.dtype.kind not in "biufc":
            raise ConfigError(
                f"{place} is a NumPy array of {array.dtype}, and a checkpoint holds numbers; give them as a list of plain values",
                key=place,
            )
        flat = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="))).reshape(-1).view(np.uint8)
        name = self._keep(torch.from_numpy(flat.copy()))
        is_array = isinstance(value, np.ndarray)
        shape: list[Plain] = list(array.shape)
        return {TAG: "array" if is_array else "scalar", "dtype": array.dtype.str[1:], "shape": shape, "name": name}

    def _keep(self, tensor: torch.Tensor) -> str:
        name = f"{self._prefix}.{len(self.tensors)}"
        self.tensors[name] = tensor
        return name


def _encode_rest(value: object, place: str) -> Plain:
    kind = type(value)
    if kind is bytes:
        assert isinstance(value, bytes)
        return {TAG: "bytes", "text": base64.b64encode(value).decode()}
    if kind is complex:
        assert isinstance(value, complex)
        return {TAG: "complex", "bits": struct.pack(">dd", value.real, value.imag).hex()}
    if isinstance(value, torch.dtype):
        return {TAG: "dtype", "name": str(value)}
    if isinstance(value, torch.device):
        return {TAG: "device", "name": str(value)}
    raise ConfigError(
        f"{place} is a {kind.__module__}.{kind.__qualname__}, which has no plain form, and a checkpoint holds no code; give "
        "numbers, text, lists, tuples, sets, dictionaries and tensors, or an object with state_dict() and load_state_dict()",
        key=place,
    )


def require_plain_tensor(value: torch.Tensor, place: str) -> None:
    """Refuse a tensor whose values are not simply its bytes: quantised, sparse, of a class of its own, or without any.

    Raises:
        ConfigError: It is. `place` is how the message names it.
    """
    kind = type(value)
    is_plain = kind in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or getattr(
        kind, "is_plain_when_settled", False
    )
    if is_plain and value.layout is torch.strided and not value.is_quantized and not value.is_meta:
        return
    what = "on the meta device" if value.is_meta else "quantised" if value.is_quantized else f"{value.layout}"
    raise ConfigError(
        f"{place} is a {kind.__name__} ({what}), and a checkpoint holds dense tensors with values; give its dense parts",
        key=place,
    )


class Decoder:
    """Turns JSON of an `Encoder` back into values.

    Args:
        tensor: Reads a tensor by its name; the value is the caller's own.
    """

    def __init__(self, tensor: Callable[[str], torch.Tensor]) -> None:
        self._tensor = tensor

    def decode(self, value: Plain) -> Any:
        """The value.

        Raises:
            CheckpointError: Somebody else wrote the JSON, or a later version.
        """
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        if TAG not in value:
            return {key: self.decode(item) for key, item in value.items()}
        try:
            return self._decode_tagged(value)
        except (KeyError, TypeError, ValueError, AttributeError, struct.error) as error:
            raise CheckpointError(
                f"the checkpoint's state has {str(value)[:80]!r}, which this version of Lowtide does not know; load it with the "
                "version that wrote it"
            ) from error

    def _decode_tagged(self, value: dict[str, Any]) -> Any:
        tag = value[TAG]
        if tag == "float":
            return struct.unpack(">d", bytes.fromhex(value["bits"]))[0]
        if tag == "complex":
            return complex(*struct.unpack(">dd", bytes.fromhex(value["bits"])))
        if tag == "bytes":
            return base64.b64decode(value["text"])
        if tag == "tensor":
            return self._tensor(value["name"])
        if tag in ("array", "scalar"):
            flat = np.frombuffer(_bytes_of(self._tensor(value["name"])), dtype=np.dtype(value["dtype"]))
            array = flat.reshape(value["shape"]).copy()
            return array if tag == "array" else array[()]
        if tag == "dtype":
            return _DTYPES[value["name"]]
        if tag == "device":
            return torch.device(value["name"])
        return self._decode_container(tag, value)

    def _decode_container(self, tag: str, value: dict[str, Any]) -> Any:
        if tag in ("tuple", "set", "frozenset", "deque"):
            items = [self.decode(item) for item in value["items"]]
            if tag == "deque":
                return deque(items, value["most"])
            kinds: dict[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
            return kinds[tag](items)
        pairs = [(self.decode(key), self.decode(item)) for key, item in value["items"]]
        if tag == "defaultdict":
            return defaultdict(_FACTORIES[value["factory"]], pairs)
        made: Mapping[str, Callable[[Any], Any]] = {
            "dict": dict,
            "OrderedDict": OrderedDict,
            "Counter": lambda items: Counter(dict(items)),
        }
        return made[tag](pairs)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    with compat.without_modes():
        return bytes(tensor.cpu().contiguous().view(-1).numpy())
