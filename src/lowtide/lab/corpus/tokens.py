"""Corpus: a recipe's text as token ids, made once and then read from the cache.

A byte-level BPE is trained on the corpus itself. The ids of many samples lie end to end in one array, and numbered batches are
cut from it, every one of the same shape.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowtide import config, plain_text
from lowtide.config import require_least
from lowtide.errors import ConfigError, MissingExtraError
from lowtide.hardware.machine import cache_folder
from lowtide.lab.corpus.texts import TextRecipe, fingerprint, read_texts

if TYPE_CHECKING:
    from tokenizers import Tokenizer


SPECIAL_TOKENS = ("<bos>", "<pad>", "<eos>", "<unk>")
"""The special tokens by id. Only the first two are ever used: a text begins with the first, and no token ends it."""
BOS_ID, PAD_ID, EOS_ID, UNKNOWN_ID = range(4)
CHUNK = 1000
"""Texts encoded at a time."""


class TextTokenizer:
    """Text to ids and back. Text is in Unicode's composed form (NFC); any text can be encoded, byte by byte if need be."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # The words "<pad>" in a text are text: an id of 1 in a sample would be taken for padding.
        self._tokenizer.encode_special_tokens = True

    @property
    def vocab_size(self) -> int:
        """Ids there are, the special ones among them."""
        return self._tokenizer.get_vocab_size()

    def encode(self, texts: Iterable[str]) -> Iterator[list[int]]:
        """The ids of each text, `<bos>` first."""
        remaining = iter(texts)
        while chunk := list(islice(remaining, CHUNK)):
            yield from (encoding.ids for encoding in self._tokenizer.encode_batch_fast(chunk))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=True)

    def to_json(self) -> str:
        """All that `read_tokenizer` needs."""
        return self._tokenizer.to_str()


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> TextTokenizer:
    """A tokenizer of exactly that many tokens, the same for the same texts.

    Raises:
        ConfigError: The texts do not give that many.
        MissingExtraError: `tokenizers` is not installed.
    """
    library = _tokenizers()
    tokenizer: Tokenizer = library.Tokenizer(library.models.BPE(unk_token=SPECIAL_TOKENS[UNKNOWN_ID]))
    tokenizer.normalizer = library.normalizers.NFC()
    # No space before the first word: what is decoded is what was encoded.
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        # A pair that is seen once stands for nothing but itself.
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    found = tokenizer.get_vocab_size()
    if found != vocab_size:
        raise ConfigError(
            f"the training text gives {found} tokens, and vocab_size is {vocab_size}: set vocab_size to {found}, or give "
            "more text",
            key="vocab_size",
        )
    bos = SPECIAL_TOKENS[BOS_ID]
    tokenizer.post_processor = library.processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, BOS_ID)])
    return TextTokenizer(tokenizer)


def read_tokenizer(text: str) -> TextTokenizer:
    """The tokenizer that `to_json` wrote.

    Raises:
        ValueError: The text is none.
        MissingExtraError: `tokenizers` is not installed.
    """
    library = _tokenizers()
    try:
        return TextTokenizer(library.Tokenizer.from_str(text))
    except Exception as error:
        # The library raises a bare Exception.
        raise ValueError(f"no tokenizer: {error}") from error


def library_version() -> str:
    """The version of `tokenizers`: another one may train another vocabulary.

    Raises:
        MissingExtraError: It is not installed.
    """
    version: str = _tokenizers().__version__
    return version


def _tokenizers() -> ModuleType:
    try:
        import tokenizers
    except ImportError as error:
        raise MissingExtraError("lab", "a corpus of text") from error
    return tokenizers


Ids = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """One part of a corpus, in its original order."""

    ids: Ids
    """The ids of all samples, one after the other; 16 bits each where the vocabulary allows."""
    offsets: NDArray[np.int64]
    """Where each sample begins, and where the last one ends: one more than there are samples."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, number: int) -> Ids: ...
    @overload
    def __getitem__(self, number: slice) -> Samples: ...
    def __getitem__(self, number: int | slice) -> Ids | Samples:
        """The ids of one sample, or a run of samples: views, not copies."""
        if isinstance(number, slice):
            start, stop, step = number.indices(len(self))
            if step != 1:
                raise ValueError(f"samples are cut out in a run; the step is {step}")
            offsets = self.offsets[start : max(start, stop) + 1]
            return Samples(ids=self.ids[offsets[0] : offsets[-1]], offsets=offsets - offsets[0])
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        return self.ids[self.offsets[number] : self.offsets[number + 1]]

    def __iter__(self) -> Iterator[Ids]:
        return (self[number] for number in range(len(self)))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample."""
        return np.diff(self.offsets)


def pack(samples: Iterable[list[int]], *, vocab_size: int) -> Samples:
    """Samples from lists of ids."""
    dtype = np.uint16 if vocab_size <= 2**16 else np.int32
    # Arrays at once: lists of Python integers would take twenty times the memory.
    arrays = [np.array(ids, dtype=dtype) for ids in samples]
    offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
    np.cumsum([len(ids) for ids in arrays], out=offsets[1:])
    return Samples(ids=np.concatenate(arrays) if arrays else np.empty(0, dtype=dtype), offsets=offsets)


IGNORED_LABEL = -100
"""What a loss leaves out."""


@dataclass(frozen=True, slots=True)
class TextBatches:
    """One sample a row, cut to `length` and padded on the right to exactly that; nothing is shuffled or packed.

    Labels are the ids themselves, with padding ignored: a model shifts them by one. Tensors are on the host and not
    pinned.

    Example:
        >>> samples = Samples(ids=np.array([0, 7, 8, 0, 9], dtype=np.uint16), offsets=np.array([0, 3, 5]))
        >>> TextBatches(samples, batch=2, length=4)(0)["labels"].tolist()
        [[0, 7, 8, -100], [0, 9, -100, -100]]
    """

    samples: Samples
    _: KW_ONLY
    batch: int
    """How many samples a batch has."""
    length: int
    """How many tokens each row has."""
    pad_id: int = PAD_ID

    def __post_init__(self) -> None:
        require_least(self, 1, "batch")
        # One token has no next one to predict.
        require_least(self, 2, "length")
        if not len(self.samples):
            raise ConfigError(
                "there are no samples to make batches of: for an evaluation, ask the data for a validation part "
                "(num_validation, or validation_share)",
                key="data",
            )

    def __call__(self, number: int) -> dict[str, Tensor]:
        """The batch of that number, from 0: `input_ids` and `labels`, both int64, `[batch, length]`.

        After the last sample comes the first again, within a batch too.
        """
        first = number * self.batch
        return self._gather([index % len(self.samples) for index in range(first, first + self.batch)])

    @property
    def num_batches(self) -> int:
        """Batches in which every sample is once, the last one perhaps with fewer rows than the others."""
        return -(-len(self.samples) // self.batch)

    def partial(self, number: int) -> dict[str, Tensor]:
        """One of these `num_batches`: like the batch of that number, but it ends where the samples do."""
        if not 0 <= number < self.num_batches:
            raise IndexError(f"batch {number} of {self.num_batches}")
        first = number * self.batch
        return self._gather(range(first, min(first + self.batch, len(self.samples))))

    def _gather(self, indices: Sequence[int]) -> dict[str, Tensor]:
        ids = np.full((len(indices), self.length), self.pad_id, dtype=np.int64)
        labels = np.full_like(ids, IGNORED_LABEL)
        for row, index in enumerate(indices):
            sample = self.samples[index][: self.length]
            ids[row, : len(sample)] = labels[row, : len(sample)] = sample
        return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}


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
    """Write a file that a reader finds whole or not at all.

    Raises:
        OSError: The folder cannot be written, or the disk is full.
    """
    with plain_text.written_whole(path) as file:
        np.savez(
            file,
            train_ids=corpus.train.ids,
            train_offsets=corpus.train.offsets,
            validation_ids=corpus.validation.ids,
            validation_offsets=corpus.validation.offsets,
            tokenizer=np.frombuffer(corpus.tokenizer.to_json().encode("utf-8"), dtype=np.uint8),
        )


def _is_whole(samples: Samples) -> bool:
    offsets = samples.offsets
    return bool(len(offsets) and offsets[0] == 0 and offsets[-1] == len(samples.ids) and (np.diff(offsets) >= 0).all())
