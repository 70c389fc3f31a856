"""Corpus: a recipe's text as token ids, made once and then read from the cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lowtide import config
from lowtide.errors import ConfigError
from lowtide.lab.corpus import cache as files
from lowtide.lab.corpus import hub, stories, text_files
from lowtide.lab.corpus.samples import Samples, pack
from lowtide.lab.corpus.tokenizer import TextTokenizer, library_version, read_tokenizer, train_tokenizer
from lowtide.lab.data_recipe import HubDataset, Stories, TextFiles

SCHEMA = "lowtide.corpus/1"
TELL_EVERY = 2000
"""Samples between two words of progress."""

TextRecipe = Stories | TextFiles | HubDataset
OnProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Corpus:
    """What a model reads."""

    name: str
    train: Samples
    validation: Samples
    """Empty where the recipe asks for none."""
    tokenizer: TextTokenizer

    @property
    def vocab_size(self) -> int:
        """Of the tokenizer: the model needs as many rows."""
        return self.tokenizer.vocab_size


@dataclass(frozen=True, slots=True, kw_only=True)
class _Texts:
    train: Sequence[str]
    validation: Sequence[str]


def load_corpus(data: TextRecipe, *, cache: Path | None = None, on_progress: OnProgress | None = None) -> Corpus:
    """The corpus of a recipe, from the cache where it is there.

    The cache goes by the recipe, the generator's sources or the files' contents, and the version of `tokenizers`. A data
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
    path = (files.cache_folder() if cache is None else cache) / f"corpus-{_key(data)}.npz"
    stored = files.read_stored(path)
    tokenizer = None if stored is None else _read_tokenizer(stored)
    if stored is None or tokenizer is None:
        tokenizer, stored = _make(data, say)
        try:
            files.write_stored(path, stored)
        except OSError as error:
            say(f"the corpus is not cached: cannot write {path}: {error.strerror}")
    return Corpus(name=_name(data), train=stored.train, validation=stored.validation, tokenizer=tokenizer)


def _make(data: TextRecipe, say: OnProgress) -> tuple[TextTokenizer, files.Stored]:
    texts = _read_texts(data, say)
    say(f"training a tokenizer of {data.vocab_size} tokens on {len(texts.train)} samples")
    tokenizer = train_tokenizer(texts.train, vocab_size=data.vocab_size)
    return tokenizer, files.Stored(
        train=_tokenize(tokenizer, texts.train, "training", say),
        validation=_tokenize(tokenizer, texts.validation, "validation", say),
        tokenizer_json=tokenizer.to_json(),
    )


def _tokenize(tokenizer: TextTokenizer, texts: Sequence[str], part: str, say: OnProgress) -> Samples:
    def told() -> Iterator[list[int]]:
        # A blank sample has nothing to predict, and a batch of such ones no loss.
        for number, ids in enumerate(tokenizer.encode(text for text in texts if text.strip())):
            if number % TELL_EVERY == 0:
                say(f"tokenizing {part} samples, {number} of {len(texts)}")
            yield ids

    return pack(told(), vocab_size=tokenizer.vocab_size)


def _read_texts(data: TextRecipe, say: OnProgress) -> _Texts:
    match data:
        case Stories():
            return _Texts(
                train=_make_stories(data, data.num_stories, stories.Part.TRAINING, say),
                validation=_make_stories(data, data.num_validation, stories.Part.VALIDATION, say),
            )
        case TextFiles():
            say(f"reading {data.path}")
            return _split(data, text_files.read_samples(data.path))
        case HubDataset():
            say(f"loading the data set {data.name}")
            texts = _Texts(
                train=hub.read_split(data, data.train_split), validation=hub.read_split(data, data.validation_split)
            )
            if not texts.train:
                raise ConfigError(
                    f"the split {data.train_split!r} of {data.name!r} is empty; choose another", key="data.train_split"
                )
            return texts


def _make_stories(data: Stories, count: int, part: stories.Part, say: OnProgress) -> list[str]:
    made: list[str] = []
    for story in stories.make_stories(data.seed, count, part=part):
        if len(made) % TELL_EVERY == 0:
            say(f"writing {part.name.lower()} stories, {len(made)} of {count}")
        made.append(story)
    return made


def _split(data: TextFiles, samples: list[str]) -> _Texts:
    # At least one, where any are asked for; rounding down would give a small file none.
    num_validation = max(1, int(len(samples) * data.validation_share)) if data.validation_share else 0
    num_train = len(samples) - num_validation
    if num_train < 1:
        raise ConfigError(
            f"{data.path} holds {len(samples)} sample, and validation_share is {data.validation_share}, so that none is "
            "left to train on: part the text into more samples with blank lines, or set validation_share to 0",
            key="data.validation_share",
        )
    return _Texts(train=samples[:num_train], validation=samples[num_train:])


def _read_tokenizer(stored: files.Stored) -> TextTokenizer | None:
    try:
        return read_tokenizer(stored.tokenizer_json)
    except ValueError:
        return None


def _key(data: TextRecipe) -> str:
    recipe = config.to_plain(data)
    match data:
        case Stories():
            source = stories.fingerprint()
        case TextFiles():
            # What the files hold, not where they are.
            recipe = {key: value for key, value in recipe.items() if key != "path"}
            source = _digest(text_files.find_files(data.path))
        case HubDataset():
            source = ""
    parts = [SCHEMA, library_version(), type(data).__name__, recipe, source]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def _digest(paths: Sequence[Path]) -> str:
    # A hash of hashes: the same text cut into files elsewhere is other samples.
    parts = []
    for path in paths:
        try:
            with path.open("rb") as file:
                parts.append(hashlib.file_digest(file, "sha256").hexdigest())
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}", key=text_files.KEY) from error
    return " ".join(parts)


def _name(data: TextRecipe) -> str:
    match data:
        case Stories():
            return f"{data.num_stories:,} stories of seed {data.seed}"
        case TextFiles():
            return str(data.path)
        case HubDataset():
            return data.name
