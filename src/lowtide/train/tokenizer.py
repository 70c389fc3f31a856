"""The tokenizer of a run: a text's own bytes, or that of a Hugging Face folder, whose tokens are made once and kept."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lowtide import plain_text
from lowtide.errors import ConfigError, MissingExtraError
from lowtide.hardware.machine import cache_folder
from lowtide.models.huggingface import PREFIX
from lowtide.train.data import Ids, fingerprint, mapped_bytes, mapped_tokens

BYTES = "bytes"
_SCHEMA = "lowtide.tokens/1"
_PIECE = 1 << 20
"""Characters that are tokenized at a time, up to the end of a line."""
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""One of them is in a folder that has a tokenizer."""
TOKENIZER_FILES = (
    *_FILES, "merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
)  # fmt: skip
"""What belongs to a tokenizer in a Hugging Face folder: a result has copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTokenizer:
    """Turns files of text into ids."""

    folder: Path | None
    """Of a Hugging Face tokenizer; None: the bytes are the tokens."""

    @property
    def words(self) -> str:
        """What it is, for messages."""
        return BYTES if self.folder is None else f"the tokenizer of {self.folder}"

    @property
    def files(self) -> list[Path]:
        """What it is made of; nothing for bytes."""
        if self.folder is None:
            return []
        return [file for name in TOKENIZER_FILES if (file := self.folder / name).is_file()]

    @property
    def vocab_size(self) -> int:
        """Ids that it may give."""
        return 256 if self.folder is None else len(_loaded(self.folder))

    def tokens_of(self, files: Sequence[Path], say: Callable[[str], None]) -> list[Ids]:
        """The ids of each file, mapped, from the cache where it has them; each document ends with the end-of-text token.

        Raises:
            ConfigError: A file cannot be read.
        """
        if self.folder is None:
            return [mapped_bytes(file) for file in files]
        return [self._cached(self.folder, file, say) for file in files]

    def _cached(self, folder: Path, file: Path, say: Callable[[str], None]) -> Ids:
        key = hashlib.sha256("\n".join((_SCHEMA, fingerprint(self.files), fingerprint([file]))).encode()).hexdigest()
        path = cache_folder() / f"tokens-{key[:24]}.npy"
        with contextlib.suppress(ConfigError):  # missing, or damaged: it is made again
            return mapped_tokens(path, "uint32")
        pieces = []
        for number, piece in enumerate(_pieces(file)):
            say(f"tokenizing {file.name}, {number} MiB")
            pieces.append(_encoded(_loaded(folder), piece))
        end = _loaded(folder).eos_token_id
        ids = np.concatenate([*pieces, np.array([] if end is None else [end], dtype=np.uint32)])
        try:
            with plain_text.written_whole(path) as written:
                np.save(written, ids, allow_pickle=False)
        except OSError as error:
            say(f"the tokens are not cached: cannot write {path}: {error.strerror}")
            return ids
        return mapped_tokens(path, "uint32")


def find_tokenizer(asked: str | None, model: str) -> RunTokenizer:
    """The one that is asked for, else that of the model's folder, else bytes.

    Raises:
        ConfigError: The folder that is asked for has none.
    """
    if asked == BYTES:
        return RunTokenizer(folder=None)
    spec = model if asked is None else asked
    if spec.startswith(PREFIX):
        folder = Path(spec.removeprefix(PREFIX)).expanduser()
        folder = folder.parent if folder.is_file() else folder
        if any((folder / name).is_file() for name in _FILES):
            return RunTokenizer(folder=folder)
        raise ConfigError(
            f"{folder} has no tokenizer ({', '.join(_FILES)}): give data.tokenizer=hf:FOLDER, data.tokenizer=bytes, or tokens "
            "that were made before as data.tokens",
            key="data.tokenizer",
        )
    return RunTokenizer(folder=None)


_LOADED: dict[Path, Any] = {}


def _loaded(folder: Path) -> Any:
    """Transformers' own object, once: it takes a second."""
    if folder not in _LOADED:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise MissingExtraError("transformers", f"the tokenizer of {folder}") from error
        try:
            _LOADED[folder] = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # it fails in as many ways as there are kinds of tokenizers
            raise ConfigError(f"the tokenizer of {folder} cannot be loaded: {error}", key="data.tokenizer") from error
    return _LOADED[folder]


def _encoded(tokenizer: Any, text: str) -> Ids:
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return np.array(ids, dtype=np.uint32)


def _pieces(file: Path) -> Iterator[str]:
    """The text in pieces that end where a line does."""
    lines: list[str] = []
    size = 0
    try:
        with file.open(encoding="utf-8-sig", newline="") as text:
            for line in text:
                lines.append(line)
                size += len(line)
                if size >= _PIECE:
                    yield "".join(lines)
                    lines, size = [], 0
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}", key="data.text") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not text in UTF-8: {error}", key="data.text") from error
    if lines:
        yield "".join(lines)
