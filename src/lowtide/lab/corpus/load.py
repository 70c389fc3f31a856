"""Corpus: a recipe's text as token ids, made once and then read from the cache."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lowtide import config
from lowtide.hardware.machine import cache_folder
from lowtide.lab.corpus.texts import TextRecipe, fingerprint, read_texts
from lowtide.lab.corpus.tokens import Samples, TextTokenizer, library_version, pack, read_tokenizer, train_tokenizer

SCHEMA = "lowtide.corpus/1"
TELL_EVERY = 2000
"""Samples between two words of progress."""

OnProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Corpus:
    """What a model reads."""

    train: Samples
    validation: Samples
    """Empty where the recipe asks for none."""
    tokenizer: TextTokenizer


def load_corpus(data: TextRecipe, *, cache: Path | None = None, on_progress: OnProgress | None = None) -> Corpus:
    """The corpus of a recipe, from the cache where it is there.

    The cache goes by the recipe, the contents of the files, and the version of `tokenizers`. A data
    set of the hub is taken to stay as it is. A file of the cache that is damaged is made again; a folder that cannot be
    written is told, and costs only time.

    Args:
        data: What to read.
        cache: Folder for tokenized corpora; None: `lowtide` in the user's cache folder.
        on_progress: Called with a few words on what is being done.

    Raises:
        ConfigError: The text is missing, empty, or too small for the tokenizer; the message says what is needed.
        MissingExtraError: `tokenizers`, or for a data set of the hub `datasets`, is not installed.
    """
    say = on_progress or (lambda _: None)
    path = (cache_folder() if cache is None else cache) / f"corpus-{_key(data)}.npz"
    corpus = read_corpus(path)
    if corpus is None:
        texts = read_texts(data, say)
        say(f"training a tokenizer of {data.vocab_size} tokens on {len(texts.train)} samples")
        tokenizer = train_tokenizer(texts.train, vocab_size=data.vocab_size)
        corpus = Corpus(
            train=_tokenize(tokenizer, texts.train, "training", say),
            validation=_tokenize(tokenizer, texts.validation, "validation", say),
            tokenizer=tokenizer,
        )
        try:
            write_corpus(path, corpus)
        except OSError as error:
            say(f"the corpus is not cached: cannot write {path}: {error.strerror}")
    return corpus


def _tokenize(tokenizer: TextTokenizer, texts: Sequence[str], part: str, say: OnProgress) -> Samples:
    def told() -> Iterator[list[int]]:
        # A blank sample has nothing to predict, and a batch of such ones no loss.
        for number, ids in enumerate(tokenizer.encode(text for text in texts if text.strip())):
            if number % TELL_EVERY == 0:
                say(f"tokenizing {part} samples, {number} of {len(texts)}")
            yield ids

    return pack(told(), vocab_size=tokenizer.vocab_size)


def _key(data: TextRecipe) -> str:
    # What the files hold, not where they are.
    recipe = {key: value for key, value in config.to_plain(data).items() if key != "path"}
    parts = [SCHEMA, library_version(), type(data).__name__, recipe, fingerprint(data)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def read_corpus(path: Path) -> Corpus | None:
    """The corpus of a file of the cache; None where it is missing, or damaged in any way."""
    try:
        # A zip file has a checksum for each array. Opened here: what is no zip file, numpy would leave open.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            corpus = Corpus(
                train=Samples(ids=arrays["train_ids"], offsets=arrays["train_offsets"]),
                validation=Samples(ids=arrays["validation_ids"], offsets=arrays["validation_offsets"]),
                tokenizer=read_tokenizer(arrays["tokenizer"].tobytes().decode("utf-8")),
            )
    except (OSError, ValueError, KeyError, EOFError, TypeError, NotImplementedError, zipfile.BadZipFile):
        return None
    return corpus if _is_whole(corpus.train) and _is_whole(corpus.validation) else None


def write_corpus(path: Path, corpus: Corpus) -> None:
    """Write a file under another name and rename it, so that a reader finds it whole or not at all.

    Raises:
        OSError: The folder cannot be written, or the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own for each process: two of them may write the same corpus at once, and the last one wins.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}-", suffix=".part")
    unfinished = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(
                file,
                train_ids=corpus.train.ids,
                train_offsets=corpus.train.offsets,
                validation_ids=corpus.validation.ids,
                validation_offsets=corpus.validation.offsets,
                tokenizer=np.frombuffer(corpus.tokenizer.to_json().encode("utf-8"), dtype=np.uint8),
            )
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _is_whole(samples: Samples) -> bool:
    offsets = samples.offsets
    return bool(len(offsets) and offsets[0] == 0 and offsets[-1] == len(samples.ids) and (np.diff(offsets) >= 0).all())
