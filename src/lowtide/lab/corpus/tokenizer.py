"""TextTokenizer: byte-level BPE trained on the corpus itself, with four special tokens in front."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from types import ModuleType
from typing import TYPE_CHECKING

from lowtide.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIAL_TOKENS = ("<bos>", "<pad>", "<eos>", "<unk>")
"""By id. Only the first two are ever used: a text begins with the first, and no token ends it."""
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
        rest = iter(texts)
        while chunk := list(islice(rest, CHUNK)):
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
    """Of `tokenizers`: another one may train another vocabulary.

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
