from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import BatchMismatchError, TooLargeError
from lowtide.models.batches import (
    ImageBatch,
    PairBatch,
    TokenBatch,
    parse_sizes,
    sequence_labels,
    spans,
    token_labels,
)

TOKENS = TokenBatch(vocab_size=50, default_batch=8, default_length=16, max_length=32)
IMAGES = ImageBatch(num_classes=10, default_batch=4, num_channels=3, height=20, width=30)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=5))
def test_sizes_round_trip(sizes: list[int]) -> None:
    assert parse_sizes("x".join(map(str, sizes)), accepted="") == tuple(sizes)
    assert parse_sizes(" X ".join(map(str, sizes)), accepted="") == tuple(sizes)


@pytest.mark.parametrize(
    "text", ["", "x", "8x", "x8", "0x16", "-8x16", "8,16", "8x1.5", "eight", "8 x x 16", "08x16", "8×16"]
)
def test_text_that_is_no_batch(text: str) -> None:
    with pytest.raises(BatchMismatchError, match="is not a batch: write BATCHxLENGTH such as 8x16"):
        TOKENS(text)


def test_token_batch() -> None:
    batch = TOKENS("3x12")
    assert set(batch) == {"input_ids", "labels"}
    assert batch["input_ids"].shape == (3, 12)
    assert batch["input_ids"].dtype == torch.int64
    assert batch["input_ids"].min() >= 0
    assert batch["input_ids"].max() < 50
    assert torch.equal(batch["input_ids"], batch["labels"])
    assert batch["input_ids"].data_ptr() != batch["labels"].data_ptr()
    assert torch.equal(TOKENS("3x12")["input_ids"], batch["input_ids"])


def test_batch_alone_takes_the_default_length() -> None:
    assert TOKENS("5")["labels"].shape == (5, 16)
    assert TOKENS(TOKENS.default)["labels"].shape == (8, 16)
    assert IMAGES("5")["pixel_values"].shape == (5, 3, 20, 30)
    assert IMAGES(IMAGES.default)["pixel_values"].shape == (4, 3, 20, 30)


def test_sequences_beyond_the_positions() -> None:
    assert TOKENS("2x32")["input_ids"].shape == (2, 32)
    with pytest.raises(BatchMismatchError, match="33 tokens, and this model has 32 positions: write 2x32 or shorter"):
        TOKENS("2x33")


def test_wrong_number_of_sizes() -> None:
    with pytest.raises(BatchMismatchError, match="has 4 sizes, and this model takes token ids: write BATCHxLENGTH"):
        TOKENS("8x3x224x224")
    with pytest.raises(
        BatchMismatchError, match="has 2 sizes, and this model takes images: write BATCHxCHANNELSxHEIGHTxWIDTH"
    ):
        IMAGES("8x16")


def test_wrong_channels() -> None:
    with pytest.raises(BatchMismatchError, match="images of 4 channels, and this model takes 3"):
        IMAGES("2x4x20x30")


def test_image_batch() -> None:
    batch = IMAGES("6x3x8x9")
    assert batch["pixel_values"].shape == (6, 3, 8, 9)
    assert batch["pixel_values"].dtype == torch.float32
    assert batch["labels"].shape == (6,)
    assert batch["labels"].max() < 10


def test_a_batch_too_large_for_any_card_is_not_allocated() -> None:
    with pytest.raises(TooLargeError, match="1000000x32000000 takes .* before the model runs") as caught:
        TokenBatch(vocab_size=50, default_batch=8, default_length=16)("1000000x32000000")
    assert caught.value.needed_bytes == 8 * 32 * 10**12


TEXT_TOKENS = TokenBatch(vocab_size=50, default_batch=8, default_length=16, max_length=32)


def test_pairs() -> None:
    form = PairBatch(tokens=TEXT_TOKENS)
    assert {name: t.shape for name, t in form("4x12x5").items()} == {"input_ids": (4, 12), "labels": (4, 5)}
    assert form("4x12")["labels"].shape == (4, 12)
    assert form("4")["labels"].shape == (4, 16)
    assert not torch.equal(form("4x12")["labels"], form("4x12")["input_ids"])
    with pytest.raises(BatchMismatchError, match="4 sizes, and this model takes two sequences"):
        form("4x12x5x6")
    with pytest.raises(BatchMismatchError, match="33 tokens"):
        form("4x12x33")


def test_one_label_a_sequence() -> None:
    labels = replace(TEXT_TOKENS, labels=partial(sequence_labels, 3))("64x5")["labels"]
    assert labels.shape == (64,)
    assert set(labels.tolist()) == {0, 1, 2}
    assert replace(TEXT_TOKENS, labels=partial(sequence_labels, 1))("4x5")["labels"].dtype == torch.float32


def test_one_label_a_token() -> None:
    batch = replace(TEXT_TOKENS, labels=partial(token_labels, 3))("4x5")
    assert batch["labels"].shape == batch["input_ids"].shape == (4, 5)
    assert batch["labels"].max() < 3


def test_spans_lie_inside_the_sequence() -> None:
    batch = replace(TEXT_TOKENS, labels=spans)("64x5")
    assert (batch["start_positions"] <= batch["end_positions"]).all()
    assert batch["end_positions"].max() < 5


def test_defaults_are_those_of_the_tokens() -> None:
    forms = [
        PairBatch(tokens=TEXT_TOKENS),
        replace(TEXT_TOKENS, labels=partial(sequence_labels, 2)),
        replace(TEXT_TOKENS, labels=partial(token_labels, 2)),
        replace(TEXT_TOKENS, labels=spans),
    ]
    assert {form.default for form in forms} == {"8x16"}
