"""The index of a checkpoint: its step, its plain state, and what each of its files must hold.

It is written last, so that a folder with an index had all its files. Its last line is a checksum of the text before.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lowtide import plain_text
from lowtide.errors import BadRecordError, ConfigError
from lowtide.plain_text import Plain
from lowtide.runtime.checkpoints.layout import DTYPES, Shard, TensorSpec, check_section_name, laid_out, shard_name

SCHEMA = "lowtide.checkpoint/1"
INDEX_NAME = "checkpoint.json"
_ENDING = re.compile(rb',\n "crc32": "([0-9a-f]{8})"\n\}\n')
_ENDING_BYTES = 25
_MOST_DEPTH = 100
"""What is nested deeper might be written, and be too deep for the parser."""
_TEXT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFile:
    """A file that is not of tensors, such as `config.json`."""

    num_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """All that is known of a checkpoint without reading its tensors."""

    step: int
    state: Mapping[str, Plain]
    files: Mapping[str, tuple[Shard, ...]]
    """The safetensors files of each section: of `model`, of `optimizer`."""
    checksums: Mapping[str, Mapping[str, int]]
    """The CRC-32 of each tensor's bytes, by section and name."""
    texts: Mapping[str, TextFile]

    @property
    def num_bytes(self) -> int:
        """Bytes of all files but the index."""
        shards = (shard.num_bytes for shards in self.files.values() for shard in shards)
        return sum(shards) + sum(text.num_bytes for text in self.texts.values())

    @property
    def file_names(self) -> frozenset[str]:
        """Every file of the folder that belongs to the checkpoint."""
        return frozenset((INDEX_NAME, *self.texts, *(shard.name for shards in self.files.values() for shard in shards)))


def check_text_name(name: str) -> None:
    """Refuse what is no plain name of a file.

    Raises:
        ConfigError: It is a path, hidden, or taken.
    """
    if not _TEXT_NAME.fullmatch(name) or name == INDEX_NAME or name.endswith(".safetensors"):
        raise ConfigError(f"{name!r} cannot name a file of a checkpoint; give a plain name such as 'config.json'")


def check_plain(value: object, where: str = "state", depth: int = 0) -> None:
    """Refuse what JSON would turn into something else: a tuple into a list, a number as a key into text.

    Raises:
        ConfigError: Something in it is not plain data.
    """
    if depth > _MOST_DEPTH:
        raise ConfigError(f"{where[:60]}... is nested more than {_MOST_DEPTH} deep; save it flatter", key="state")
    if type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise ConfigError(f"{where} has the key {key!r}; keys of a checkpoint's state are text", key=where)
            check_plain(item, f"{where}[{key!r}]", depth + 1)
    elif type(value) is list:
        for number, item in enumerate(value):
            check_plain(item, f"{where}[{number}]", depth + 1)
    elif type(value) not in {bool, int, float, str, type(None)}:
        raise ConfigError(
            f"{where} is a {type(value).__name__}; a checkpoint's state is made of dicts, lists, text, numbers, True, False "
            "and None, and its tensors are saved as tensors",
            key=where,
        )


def to_text(index: Index) -> bytes:
    """The index as it stands in its file."""
    plain: dict[str, object] = {
        "schema": SCHEMA,
        "step": index.step,
        "files": {
            file: [_shard_to_plain(shard, index.checksums[file]) for shard in shards]
            for file, shards in index.files.items()
        },
        "texts": {
            name: {"bytes": text.num_bytes, "crc32": f"{text.crc32:08x}"} for name, text in sorted(index.texts.items())
        },
        "state": index.state,
    }
    # Numbers that are not finite are kept: schedulers begin with a best loss of infinity.
    body = json.dumps(plain, indent=1).removesuffix("\n}").encode()
    return body + f',\n "crc32": "{zlib.crc32(body):08x}"\n}}\n'.encode()


def from_text(text: bytes) -> Index:
    """The index that a file holds.

    Raises:
        BadRecordError: It is cut short, changed, of another schema, or describes what cannot be.
    """
    ending = _ENDING.fullmatch(text, max(0, len(text) - _ENDING_BYTES))
    plain = _plain(text)
    schema = plain.get("schema")
    if schema != SCHEMA:
        raise BadRecordError(f"its schema is {schema!r}, and this Lowtide reads {SCHEMA!r}")
    if ending is None or int(ending[1], 16) != zlib.crc32(text[: ending.start()]):
        raise BadRecordError("its checksum does not fit its text")
    try:
        return _index(plain)
    except (ConfigError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadRecordError(f"it describes what cannot be: {type(error).__name__}: {error}") from error


def _plain(text: bytes) -> dict[str, Plain]:
    try:
        plain = plain_text.parse(text.decode(), "json")
    except (ConfigError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise BadRecordError(f"it is not whole: {error}") from error
    if not isinstance(plain, dict):
        raise BadRecordError("it is JSON, but no index of a checkpoint")
    return plain


def _index(plain: Mapping[str, Plain]) -> Index:
    files, checksums = {}, {}
    for file, rows in _mapping(plain["files"]).items():
        files[file], checksums[file] = _shards(file, _sequence(rows))
    texts = {}
    for name, entry in _mapping(plain["texts"]).items():
        check_text_name(name)
        texts[name] = TextFile(num_bytes=_whole(_mapping(entry)["bytes"]), crc32=_crc32(_mapping(entry)["crc32"]))
    return Index(
        step=_whole(plain["step"]),
        state=_mapping(plain["state"]),
        files=files,
        checksums=checksums,
        texts=texts,
    )


def _shard_to_plain(shard: Shard, checksums: Mapping[str, int]) -> dict[str, object]:
    tensors = {
        name: {
            "dtype": place.spec.code,
            "shape": list(place.spec.shape),
            "bytes": place.spec.nbytes,
            "crc32": f"{checksums[name]:08x}",
        }
        for name, place in shard.places.items()
    }
    return {"name": shard.name, "bytes": shard.num_bytes, "tensors": tensors}


def _shards(file: str, rows: Sequence[Plain]) -> tuple[tuple[Shard, ...], dict[str, int]]:
    """The layout follows from the specs. So the index holds no path and no offset that could point elsewhere."""
    check_section_name(file)
    shards: list[Shard] = []
    checksums: dict[str, int] = {}
    for number, plain in enumerate(map(_mapping, rows)):
        specs = {}
        for name, entry in _mapping(plain["tensors"]).items():
            if name in checksums:
                raise ValueError(f"the tensor {name!r} is in two files of {file}")
            specs[name] = _spec(_mapping(entry))
            checksums[name] = _crc32(_mapping(entry)["crc32"])
        expected = laid_out(shard_name(file, number, len(rows)), specs)
        is_own = (plain["name"], plain["bytes"]) == (expected.name, expected.num_bytes)
        if not is_own or list(specs) != list(expected.places):
            raise ValueError(f"{plain['name']!r} cannot be file {number + 1} of {len(rows)} of {file}")
        shards.append(expected)
    return tuple(shards), checksums


def _spec(entry: Mapping[str, Plain]) -> TensorSpec:
    spec = TensorSpec(dtype=DTYPES[str(entry["dtype"])], shape=tuple(map(_whole, _sequence(entry["shape"]))))
    if entry["bytes"] != spec.nbytes:
        raise ValueError(f"{list(spec.shape)} in {spec.code} has {spec.nbytes} bytes, not {entry['bytes']}")
    return spec


def _mapping(value: Plain) -> dict[str, Plain]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is no object")
    return value


def _sequence(value: Plain) -> list[Plain]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is no list")
    return value


def _whole(value: Plain) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no whole number from 0 on")
    return value


def _crc32(value: Plain) -> int:
    if not isinstance(value, str) or not re.fullmatch(r"[0-9a-f]{8}", value):
        raise ValueError(f"{value!r} is no CRC-32 in eight hexadecimal digits")
    return int(value, 16)
