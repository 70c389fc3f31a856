"""The inputs of a run: its files as tokens, by a tokenizer or as they are, cut into batches and parted into what is trained on
and what is held out. The tokens that a tokenizer makes are kept in the cache.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lowtide import plain_text
from lowtide.errors import ConfigError, MissingExtraError, UnknownNameError
from lowtide.hardware.machine import cache_folder
from lowtide.lab.training import Batch
from lowtide.models.huggingface import PREFIX, find_config
from lowtide.plain_text import Plain
from lowtide.runtime.checkpoints.contents import tokenizer_files
from lowtide.train.data import (
    Ids,
    SequenceBatches,
    Sequences,
    divided,
    fingerprint,
    mapped_bytes,
    mapped_tokens,
    source_files,
)
from lowtide.train.model import Subject

BYTES = "bytes"
_SCHEMA = "lowtide.tokens/1"
_PIECE = 1 << 20
"""Characters that are tokenized at a time, up to the end of a line."""


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
        return tokenizer_files(self.folder)

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
    try:
        folder = huggingface_folder(spec)
        tokenizer_files(folder)
    except (ConfigError, UnknownNameError) as error:
        raise ConfigError(
            f"{spec.removeprefix(PREFIX)} has no tokenizer: give data.tokenizer=hf:FOLDER, data.tokenizer=bytes, or tokens that "
            "were made before as data.tokens",
            key="data.tokenizer",
        ) from error
    return RunTokenizer(folder=folder)


def huggingface_folder(spec: str) -> Path | None:
    """The folder that `hf:FOLDER`, `hf:FOLDER/config.json` or `hf:OWNER/MODEL` in the local cache names; None for other models.

    Raises:
        UnknownNameError: There is none.
    """
    if not spec.startswith(PREFIX):
        return None
    path = Path(spec.removeprefix(PREFIX)).expanduser()
    # A folder with a tokenizer alone has no config.
    return path if path.is_dir() else find_config(str(path)).parent


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


# -- batches -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """What a run reads."""

    batches: SequenceBatches
    held_out: Sequence[Batch]
    steps: int
    record: dict[str, Plain]
    """Of what it is made, for the run's folder."""


def read_inputs(subject: Subject, tokenizer: RunTokenizer | None, say: Callable[[str], None]) -> Inputs:
    """The data of a recipe as numbered batches.

    Raises:
        ConfigError: It is missing, too short, or not for the model.
    """
    recipe, (rows, length) = subject.recipe, subject.shape
    data = recipe.data
    source = data.text if data.tokens is None else data.tokens
    assert source is not None, "a recipe names text or tokens"
    if tokenizer is not None and tokenizer.vocab_size > subject.vocab_size:
        raise ConfigError(
            f"{tokenizer.words} has {tokenizer.vocab_size:,} tokens, and {recipe.model} has rows for {subject.vocab_size:,}: give "
            "the model's own tokenizer, or set model_settings.vocab_size of a built-in model",
            key="data.tokenizer",
        )
    files = source_files(data, source)
    sequences = _sequences(subject, tokenizer, files, length, say)
    train, held_out = divided(sequences, data.held_out_share)
    if data.held_out is not None:
        held_out_files = source_files(data, data.held_out)
        held_out = _sequences(subject, tokenizer, held_out_files, length, say)
        files = [*files, *held_out_files]
    batches = SequenceBatches(
        sequences=train, batch=rows, vocab_size=subject.vocab_size, seed=recipe.seed if data.shuffle else None
    )
    evaluated: Sequence[Batch] = ()
    if held_out is not None:
        evaluated = replace(batches, sequences=held_out).in_order(recipe.evaluation.batches)
    per_epoch = len(train) / (rows * recipe.accumulation)
    steps = recipe.steps if recipe.steps is not None else max(1, round(recipe.epochs * per_epoch))
    say(f"{len(train):,} sequences of {length} tokens, {steps / per_epoch:.2g} epochs")
    made_of = [] if tokenizer is None else tokenizer.files
    record: dict[str, Plain] = {
        "files": ", ".join(str(file) for file in files[:8]),
        "fingerprint": fingerprint([*files, *made_of]),
        "tokenizer": None if tokenizer is None else tokenizer.words,
        "sequences": len(train),
        "held_out": 0 if held_out is None else len(held_out),
    }
    return Inputs(batches=batches, held_out=evaluated, steps=steps, record=record)


def _sequences(
    subject: Subject, tokenizer: RunTokenizer | None, files: Sequence[Path], length: int, say: Callable[[str], None]
) -> Sequences:
    if tokenizer is None:
        arrays = [mapped_tokens(file, subject.recipe.data.bin_type) for file in files]
    else:
        arrays = tokenizer.tokens_of(files, say)
    found = Sequences(arrays=arrays, names=[str(file) for file in files], length=length)
    if not len(found):
        raise ConfigError(
            f"{files[0]}{' and others' if len(files) > 1 else ''} gives {sum(map(len, arrays)):,} tokens, fewer than one "
            f"sequence of {length}: give more text, or shorter sequences, such as --set batch={subject.shape[0]}x"
            f"{max(2, max(map(len, arrays)) // 2)}",
            key="data",
        )
    return found
