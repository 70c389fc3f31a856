"""Batches against a reference that pads one sample after the other in plain Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import ConfigError
from lowtide.lab.corpus import TextBatches
from lowtide.lab.corpus.samples import pack

# 1 is a token like any other here: padding is told by where a sample ends, not by its id.
LISTS = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), min_size=1, max_size=7)


def reference(rows: list[list[int]], length: int, pad: int) -> list[list[int]]:
    return [(ids + [pad] * length)[:length] for ids in rows]


@given(
    lists=LISTS, batch=st.integers(1, 5), length=st.integers(2, 11), number=st.integers(0, 20), pad=st.integers(0, 5)
)
def test_batches_go_round(lists: list[list[int]], batch: int, length: int, number: int, pad: int) -> None:
    made = TextBatches(pack(lists, vocab_size=100), batch=batch, length=length, pad_id=pad)(number)
    endless = lists * (batch * 21)
    rows = endless[number * batch : (number + 1) * batch]
    assert made["input_ids"].tolist() == reference(rows, length, pad)
    assert made["labels"].tolist() == reference(rows, length, -100)
    assert {tensor.dtype for tensor in made.values()} == {torch.int64}
    assert {tuple(tensor.shape) for tensor in made.values()} == {(batch, length)}


@given(lists=LISTS, batch=st.integers(1, 5), length=st.integers(2, 11))
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
