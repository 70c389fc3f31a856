from __future__ import annotations

import pytest
import torch

from lowtide.errors import BatchMismatchError
from lowtide.models.batches import TokenBatch
from lowtide.models.text_batches import PairBatch, SequenceLabelBatch, SpanBatch, TokenLabelBatch

TOKENS = TokenBatch(vocab_size=50, default_batch=8, default_length=16, max_length=32)


def test_pairs() -> None:
    form = PairBatch(tokens=TOKENS)
    assert {name: t.shape for name, t in form("4x12x5").items()} == {"input_ids": (4, 12), "labels": (4, 5)}
    assert form("4x12")["labels"].shape == (4, 12)
    assert form("4")["labels"].shape == (4, 16)
    assert not torch.equal(form("4x12")["labels"], form("4x12")["input_ids"])
    with pytest.raises(BatchMismatchError, match="4 sizes, and this model takes two sequences"):
        form("4x12x5x6")
    with pytest.raises(BatchMismatchError, match="33 tokens"):
        form("4x12x33")


def test_one_label_a_sequence() -> None:
    labels = SequenceLabelBatch(tokens=TOKENS, num_labels=3)("64x5")["labels"]
    assert labels.shape == (64,)
    assert set(labels.tolist()) == {0, 1, 2}
    assert SequenceLabelBatch(tokens=TOKENS, num_labels=1)("4x5")["labels"].dtype == torch.float32


def test_one_label_a_token() -> None:
    batch = TokenLabelBatch(tokens=TOKENS, num_labels=3)("4x5")
    assert batch["labels"].shape == batch["input_ids"].shape == (4, 5)
    assert batch["labels"].max() < 3


def test_spans_lie_inside_the_sequence() -> None:
    batch = SpanBatch(tokens=TOKENS)("64x5")
    assert (batch["start_positions"] <= batch["end_positions"]).all()
    assert batch["end_positions"].max() < 5


def test_defaults_are_those_of_the_tokens() -> None:
    forms = [
        PairBatch(tokens=TOKENS),
        SequenceLabelBatch(tokens=TOKENS, num_labels=2),
        TokenLabelBatch(tokens=TOKENS, num_labels=2),
        SpanBatch(tokens=TOKENS),
    ]
    assert {form.default for form in forms} == {"8x16"}
