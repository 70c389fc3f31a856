"""The tokenizer: its special ids, what it gives back, and that the same text trains the same one."""

from __future__ import annotations

import json
import subprocess
import sys
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lowtide.errors import ConfigError, MissingExtraError
from lowtide.lab.corpus.stories import make_stories
from lowtide.lab.corpus.tokenizer import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    UNKNOWN_ID,
    TextTokenizer,
    library_version,
    read_tokenizer,
    train_tokenizer,
)

VOCAB_SIZE = 700


def trained() -> TextTokenizer:
    return train_tokenizer(make_stories(0, 60), vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return trained()


def test_special_tokens_come_first_and_then_every_byte(tokenizer: TextTokenizer) -> None:
    vocabulary = json.loads(tokenizer.to_json())["model"]["vocab"]
    by_id = sorted(vocabulary, key=vocabulary.__getitem__)
    assert by_id[:4] == ["<bos>", "<pad>", "<eos>", "<unk>"]
    assert (BOS_ID, PAD_ID, EOS_ID, UNKNOWN_ID) == (0, 1, 2, 3)
    assert all(len(token) == 1 for token in by_id[4:260])
    assert sorted(vocabulary.values()) == list(range(VOCAB_SIZE))
    assert tokenizer.vocab_size == VOCAB_SIZE


def test_a_text_begins_with_bos_and_ends_with_nothing(tokenizer: TextTokenizer) -> None:
    ids = next(tokenizer.encode(["Tom had a red kite."]))
    assert ids[0] == BOS_ID
    assert not {BOS_ID, PAD_ID, EOS_ID, UNKNOWN_ID} & set(ids[1:])
    assert next(tokenizer.encode([""])) == [BOS_ID]


@given(text=st.text())
@example("e\u0301 \u00e9")
@example("  two spaces,\n\ttabs\r\n")
@example("<bos><pad> <eos> <unk>")
@example("\x00\ufeff\U0001f9ed")
def test_what_is_decoded_is_what_was_encoded(tokenizer: TextTokenizer, text: str) -> None:
    ids = next(tokenizer.encode([text]))
    assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)
    assert set(range(1, 4)).isdisjoint(ids)


def test_composed_and_decomposed_letters_are_the_same(tokenizer: TextTokenizer) -> None:
    first, second = tokenizer.encode(["caf\u00e9", "cafe\u0301"])
    assert first == second


def test_many_texts_come_back_in_order(tokenizer: TextTokenizer) -> None:
    texts = [f"story {number}" for number in range(2500)]
    assert [tokenizer.decode(ids) for ids in tokenizer.encode(texts)] == texts


def test_written_and_read(tokenizer: TextTokenizer) -> None:
    read = read_tokenizer(tokenizer.to_json())
    texts = [*make_stories(1, 3), "<pad> is a word"]
    assert list(read.encode(texts)) == list(tokenizer.encode(texts))
    assert read.to_json() == tokenizer.to_json()


def test_the_same_text_trains_the_same_tokenizer(tokenizer: TextTokenizer) -> None:
    assert trained().to_json() == tokenizer.to_json()
    # Another process has other hash seeds; and one thread instead of several.
    code = (
        "import sys; from lowtide.lab.corpus.stories import make_stories; "
        "from lowtide.lab.corpus.tokenizer import train_tokenizer; "
        f"sys.stdout.write(train_tokenizer(make_stories(0, 60), vocab_size={VOCAB_SIZE}).to_json())"
    )
    environment = {
        "RAYON_NUM_THREADS": "1",
        "PYTHONHASHSEED": "7",
        "PYTHONPATH": ":".join(sys.path),
        "OMP_NUM_THREADS": "1",
    }
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout == tokenizer.to_json()


def test_merges_are_those_of_frequent_pairs() -> None:
    # "lo" is in all words, so that it is merged first; then "low" ten times, and "lot" four times.
    found = train_tokenizer(["low " * 10 + "lot " * 4], vocab_size=263)
    vocabulary = json.loads(found.to_json())["model"]["vocab"]
    added = sorted((token for token in vocabulary if vocabulary[token] >= 260), key=vocabulary.__getitem__)
    assert added[0] == "lo"
    assert added[1:] == ["\u0120lo", "\u0120low"]


def test_a_text_too_small_says_how_many_tokens_it_gives() -> None:
    with pytest.raises(
        ConfigError, match=r"the training text gives (\d+) tokens, and vocab_size is 5000: set vocab_size to \1"
    ):
        train_tokenizer(["a small text, a small text"], vocab_size=5000)


def test_the_number_that_it_says_is_right() -> None:
    text = ["a small text, a small text"]
    with pytest.raises(ConfigError) as raised:
        train_tokenizer(text, vocab_size=5000)
    assert raised.value.key == "vocab_size"
    count = int(str(raised.value).split()[4])
    assert train_tokenizer(text, vocab_size=count).vocab_size == count


def test_what_is_no_tokenizer() -> None:
    with pytest.raises(ValueError, match="no tokenizer"):
        read_tokenizer('{"version": "1.0"}')


@pytest.mark.parametrize("call", [trained, lambda: read_tokenizer("{}"), library_version])
def test_without_the_package(call: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert callable(call)
    with pytest.raises(MissingExtraError, match=r'a corpus of text needs.*pip install "lowtide\[lab\]"'):
        call()
