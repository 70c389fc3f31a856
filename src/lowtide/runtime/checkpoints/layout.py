"""Where each tensor's bytes are in a checkpoint's safetensors files: known from names, dtypes and shapes, before any value is.

A file is eight bytes that hold the length of its header, the header in JSON, and the tensors without gaps. So a file can be
given its full length at once, and its tensors written in any order, by any thread.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from lowtide.errors import ConfigError
from lowtide.units import GiB

MAX_FILE_BYTES = 4 * GiB
"""A file takes tensors until it would be larger than this; a larger tensor has a file of its own."""
_MOST_BYTES = 2**62
"""More than any tensor can have: sizes beyond are refused before they are computed with."""
_MOST_HEADER_BYTES = 100_000_000
"""The safetensors library reads no longer headers."""
_METADATA = "__metadata__"
_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
"""The word that safetensors has for each dtype."""
DTYPES = {code: dtype for dtype, code in _CODES.items()}
_SECTION = re.compile(r"[a-z][a-z0-9_]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """What a tensor is, without its values.

    Raises:
        ConfigError: The files have no word for the dtype, or the shape is none that a tensor can have.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in _CODES:
            raise ConfigError(f"safetensors files have no {self.dtype}; save the tensor as one of {', '.join(DTYPES)}")
        if any(size < 0 for size in self.shape) or math.prod(max(size, 1) for size in self.shape) > _MOST_BYTES // 16:
            raise ConfigError(f"no tensor can have the shape {list(self.shape)}")

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The spec of a tensor, wherever it is."""
        return cls(dtype=tensor.dtype, shape=tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def code(self) -> str:
        """The dtype's name in the file."""
        return _CODES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the bytes of one tensor are: `offset` counts from the file's first byte."""

    spec: TensorSpec
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One safetensors file: its header, which begins it, and its tensors in the order of their bytes."""

    name: str
    header: bytes
    places: Mapping[str, Place]
    num_bytes: int


def shards_of(file: str, specs: Mapping[str, TensorSpec], max_file_bytes: int = MAX_FILE_BYTES) -> tuple[Shard, ...]:
    """The files for the tensors of one section (`model`), in their order as far as alignment allows.

    They have Hugging Face's names: `model.safetensors`, or `model-00001-of-00003.safetensors` and so on.

    Raises:
        ConfigError: The section or a tensor has a name that cannot be used.
    """
    check_section_name(file)
    if _METADATA in specs:
        raise ConfigError(f"a tensor cannot be named {_METADATA!r} in a safetensors file; save it under another name")
    split = [*_split(specs, max_file_bytes)]
    return tuple(laid_out(shard_name(file, number, len(split)), some) for number, some in enumerate(split))


def check_section_name(file: str) -> None:
    """Refuse what is no plain word: it becomes the beginning of a file's name.

    Raises:
        ConfigError: The word has other signs in it.
    """
    if not _SECTION.fullmatch(file):
        raise ConfigError(f"{file!r} cannot name a file of tensors; use small letters, digits and underscores")


def shard_name(file: str, number: int, count: int) -> str:
    """The name of a section's file, counted from 0."""
    return f"{file}.safetensors" if count == 1 else f"{file}-{number + 1:05d}-of-{count:05d}.safetensors"


def laid_out(name: str, specs: Mapping[str, TensorSpec]) -> Shard:
    """The layout of one file. Wide dtypes come first, so that each tensor begins at a multiple of its element's size."""
    ordered = dict(sorted(specs.items(), key=lambda item: -item[1].dtype.itemsize))
    entries: dict[str, object] = {_METADATA: {"format": "pt"}}
    end = 0
    for tensor, spec in ordered.items():
        entries[tensor] = {
            "dtype": spec.code,
            "shape": list(spec.shape),
            "data_offsets": [end, end + spec.nbytes],
        }
        end += spec.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MOST_HEADER_BYTES:
        raise ConfigError(
            f"{name} would have {len(ordered)} tensors and a header of {len(text):,} bytes; the safetensors library reads "
            f"{_MOST_HEADER_BYTES:,} at most: give it a smaller max_file_bytes"
        )
    header = len(text).to_bytes(8, "little") + text
    places, offset = {}, len(header)
    for tensor, spec in ordered.items():
        places[tensor] = Place(spec=spec, offset=offset)
        offset += spec.nbytes
    return Shard(name=name, header=header, places=places, num_bytes=offset)


def hugging_face_index(shards: Sequence[Shard]) -> dict[str, object]:
    """What `model.safetensors.index.json` says: the file of each tensor."""
    total = sum(place.spec.nbytes for shard in shards for place in shard.places.values())
    weight_map = {tensor: shard.name for shard in shards for tensor in shard.places}
    return {"metadata": {"total_size": total}, "weight_map": weight_map}


def _split(specs: Mapping[str, TensorSpec], max_file_bytes: int) -> Iterator[dict[str, TensorSpec]]:
    some: dict[str, TensorSpec] = {}
    num_bytes = 0
    for name, spec in specs.items():
        if some and num_bytes + spec.nbytes > max_file_bytes:
            yield some
            some, num_bytes = {}, 0
        some[name] = spec
        num_bytes += spec.nbytes
    yield some
