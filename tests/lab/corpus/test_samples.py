"""Samples: the lists that were packed, as views into one array."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.lab.corpus.samples import pack

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
