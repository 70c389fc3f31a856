"""Token ids: a tokenizer that gives every text back, samples in one array, and batches of one shape."""

from __future__ import annotations

import json
import subprocess
import sys
import unicodedata

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.stories.generator import make_stories
from lowtide.errors import ConfigError, MissingExtraError
from lowtide.lab.corpus.tokens import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    UNKNOWN_ID,
    TextBatches,
    TextTokenizer,
    library_version,
    pack,
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
        "import sys; from benchmarks.stories.generator import make_stories; "
        "from lowtide.lab.corpus.tokens import train_tokenizer; "
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


LISTS = st.lists(st.lists(st.integers(0, 999), min_size=1, max_size=6), max_size=8)


@given(lists=LISTS, start=st.integers(0, 9), stop=st.integers(0, 9))
def test_what_was_packed(lists: list[list[int]], start: int, stop: int) -> None:
    samples = pack(lists, vocab_size=1000)
    assert [sample.tolist() for sample in samples] == lists
    assert samples.lengths.tolist() == [len(ids) for ids in lists]
    run = samples[start:stop]
    assert [sample.tolist() for sample in run] == lists[start:stop]
    assert len(run.ids) == sum(map(len, lists[start:stop]))


def test_no_more_bits_than_the_vocabulary_needs() -> None:
    assert pack([[65_535]], vocab_size=65_536).ids.dtype == np.uint16
    assert pack([[65_536]], vocab_size=65_537).ids.dtype == np.int32
    assert pack([], vocab_size=10).ids.dtype == np.uint16


def test_views() -> None:
    samples = pack([[1, 2], [3]], vocab_size=10)
    assert np.shares_memory(samples[0], samples.ids)
    assert np.shares_memory(samples[1:].ids, samples.ids)


def test_out_of_range() -> None:
    samples = pack([[1]], vocab_size=10)
    with pytest.raises(IndexError, match="sample 1 of 1"):
        samples[1]
    with pytest.raises(IndexError, match="sample -1 of 1"):
        samples[-1]
    with pytest.raises(ValueError, match="the step is 2"):
        samples[::2]


# 1 is a token like any other here: padding is told by where a sample ends, not by its id.
SOME_LISTS = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), min_size=1, max_size=7)


def reference(rows: list[list[int]], length: int, pad: int) -> list[list[int]]:
    return [(ids + [pad] * length)[:length] for ids in rows]


@given(
    lists=SOME_LISTS,
    batch=st.integers(1, 5),
    length=st.integers(2, 11),
    number=st.integers(0, 20),
    pad=st.integers(0, 5),
)
def test_batches_go_round(lists: list[list[int]], batch: int, length: int, number: int, pad: int) -> None:
    made = TextBatches(pack(lists, vocab_size=100), batch=batch, length=length, pad_id=pad)(number)
    endless = lists * (batch * 21)
    rows = endless[number * batch : (number + 1) * batch]
    assert made["input_ids"].tolist() == reference(rows, length, pad)
    assert made["labels"].tolist() == reference(rows, length, -100)
    assert {tensor.dtype for tensor in made.values()} == {torch.int64}
    assert {tuple(tensor.shape) for tensor in made.values()} == {(batch, length)}


@given(lists=SOME_LISTS, batch=st.integers(1, 5), length=st.integers(2, 11))
def test_partial_batches_have_every_sample_once(lists: list[list[int]], batch: int, length: int) -> None:
    batches = TextBatches(pack(lists, vocab_size=100), batch=batch, length=length)
    made = [batches.partial(number) for number in range(batches.num_batches)]
    assert [row for part in made for row in part["input_ids"].tolist()] == reference(lists, length, 1)
    assert [row for part in made for row in part["labels"].tolist()] == reference(lists, length, -100)
    assert all(len(part["input_ids"]) == batch for part in made[:-1])
    assert 1 <= len(made[-1]["input_ids"]) <= batch


def test_a_batch_does_not_write_through_to_the_corpus() -> None:
    samples = pack([[5, 6]], vocab_size=10)
    batches = TextBatches(samples, batch=1, length=2)
    batches(0)["input_ids"].fill_(9)
    assert batches(0)["input_ids"].tolist() == [[5, 6]]


def test_the_loss_of_padding_is_left_out() -> None:
    batch = TextBatches(pack([[0, 4]], vocab_size=10), batch=1, length=8)(0)
    logits = torch.zeros(1, 8, 10)
    logits[:, 1:] = torch.randn(1, 7, 10, generator=torch.Generator().manual_seed(0)) * 50
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    assert loss.item() == pytest.approx(torch.tensor(10.0).log().item())


def test_settings_that_cannot_be() -> None:
    samples = pack([[1, 2]], vocab_size=10)
    with pytest.raises(ConfigError, match="batch is 0; give 1 or more"):
        TextBatches(samples, batch=0, length=4)
    with pytest.raises(ConfigError, match="length is 1; give 2 or more"):
        TextBatches(samples, batch=1, length=1)
    with pytest.raises(ConfigError, match="no samples to make batches of.*num_validation"):
        TextBatches(samples[1:], batch=1, length=4)
    with pytest.raises(IndexError, match="batch 1 of 1"):
        TextBatches(samples, batch=1, length=4).partial(1)
