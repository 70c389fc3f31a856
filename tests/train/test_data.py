"""Sequences, their order and their batches; and the thread that makes them ahead."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import ConfigError, DataError
from lowtide.lab.training import Batch
from lowtide.train import data as data_module
from lowtide.train.data import (
    Prefetch,
    SequenceBatches,
    Sequences,
    divided,
    fingerprint,
    mapped_bytes,
    mapped_tokens,
    mixed_seed,
    permuted,
    token_files,
)


@given(st.integers(1, 300), st.integers(0, 2**64 - 1))
def test_an_order_has_each_thing_once(count: int, key: int) -> None:
    assert sorted(permuted(index, count, key) for index in range(count)) == list(range(count))


def test_orders_are_unlike_one_another_and_unlike_none() -> None:
    orders = [
        tuple(permuted(index, 1000, mixed_seed(seed, epoch)) for index in range(1000))
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    assert len(set(orders)) == 4
    for order in orders:
        # Of a random order about one thing in a thousand keeps its place, and neighbours part.
        assert sum(index == place for index, place in enumerate(order)) < 12
        distances = np.abs(np.diff(order))
        assert 280 < distances.mean() < 390, "a third of 1000"
        assert abs(np.corrcoef(order, range(1000))[0, 1]) < 0.15


def test_an_order_of_billions_needs_no_table() -> None:
    places = {permuted(index, 10**12, 5) for index in range(1000)}
    assert len(places) == 1000
    assert max(places) > 9 * 10**11


def made(*lengths: int, length: int = 4) -> Sequences:
    """Files of so many tokens, numbered through."""
    arrays, start = [], 0
    for count in lengths:
        arrays.append(np.arange(start, start + count, dtype=np.uint16))
        start += count
    return Sequences(arrays=arrays, names=[f"file {number}" for number in range(len(lengths))], length=length)


def test_sequences_are_whole_and_of_one_file() -> None:
    sequences = made(9, 3, 8)
    assert len(sequences) == 4
    assert [sequences[number].tolist() for number in range(4)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [12, 13, 14, 15],
        [16, 17, 18, 19],
    ]
    assert sequences.where(3) == "file 2, at token 4"


def test_an_epoch_reads_every_sequence_once_whatever_the_batch() -> None:
    sequences = made(4 * 7)
    batches = SequenceBatches(sequences=sequences, batch=3, vocab_size=100, seed=5)
    first = [row[0] // 4 for number in range(7) for row in batches(number)["input_ids"].tolist()]
    assert [sorted(first[start : start + 7]) for start in (0, 7, 14)] == [list(range(7))] * 3
    assert first[:7] != first[7:14]
    in_order = SequenceBatches(sequences=sequences, batch=3, vocab_size=100, seed=None)
    assert [row[0] // 4 for number in range(3) for row in in_order(number)["input_ids"].tolist()] == [
        0,
        1,
        2,
        3,
        4,
        5,
        6,
        0,
        1,
    ]
    assert torch.equal(batches(6)["labels"], batches(6)["input_ids"])
    assert batches(6)["labels"] is not batches(6)["input_ids"]


def test_held_out_sequences_are_the_last_and_never_trained_on() -> None:
    train, held_out = divided(made(4 * 10, 4 * 10), 0.25)
    assert held_out is not None
    assert (len(train), len(held_out)) == (15, 5)
    assert held_out[0].tolist() == [60, 61, 62, 63]
    batches = SequenceBatches(sequences=held_out, batch=2, vocab_size=100, seed=0).in_order(50)
    assert [len(batch["input_ids"]) for batch in batches] == [2, 2, 1]
    assert torch.cat([batch["input_ids"] for batch in batches]).flatten().tolist() == list(range(60, 80))
    trained = {
        row[0]
        for number in range(30)
        for row in SequenceBatches(sequences=train, batch=1, vocab_size=100, seed=0)(number)["input_ids"].tolist()
    }
    assert max(trained) < 60
    assert len(divided(made(4 * 10), 0.001)[1] or ()) == 1
    assert divided(made(4 * 10), 0.0)[1] is None
    with pytest.raises(
        ConfigError, match="has 1 sequences of 4 tokens, and data.held_out_share=0.5 leaves none to train on"
    ):
        divided(made(4), 0.5)


def test_a_token_beyond_the_vocabulary_is_named_with_its_place() -> None:
    batches = SequenceBatches(sequences=made(9, 8), batch=4, vocab_size=14, seed=None)
    with pytest.raises(
        DataError, match=r"token 16 of the sequence in file 1, at token 4, is not one of the model's 14"
    ):
        batches(0)


class TestFiles:
    def test_every_form_gives_the_same_tokens(self, tmp_path: Path) -> None:
        ids = np.array([5, 300, 65535, 0], dtype=np.uint16)
        np.save(tmp_path / "a.npy", ids)
        ids.tofile(tmp_path / "b.bin")
        ids.astype("<u4").tofile(tmp_path / "c.bin")
        assert token_files(tmp_path) == [tmp_path / "a.npy", tmp_path / "b.bin", tmp_path / "c.bin"]
        for name, kind in (("a.npy", "uint32"), ("b.bin", "uint16"), ("c.bin", "uint32")):
            assert mapped_tokens(tmp_path / name, kind).tolist() == ids.tolist()

    def test_what_holds_no_tokens_is_refused(self, tmp_path: Path) -> None:
        np.save(tmp_path / "floats.npy", np.ones(4))
        np.save(tmp_path / "table.npy", np.ones((2, 2), dtype=np.int32))
        (tmp_path / "odd.bin").write_bytes(b"123")
        (tmp_path / "torn.npy").write_bytes(b"\x93NUMPY\x01")
        for name, message in (
            ("floats.npy", "an array of float64 with 1 dimensions: give whole numbers in one"),
            ("table.npy", "an array of int32 with 2 dimensions"),
            ("odd.bin", "has 3 bytes, which is no whole number of uint16: set data.bin_type"),
            ("torn.npy", "cannot read the tokens of"),
            ("none.npy", "cannot read the tokens of"),
        ):
            with pytest.raises(ConfigError, match=message):
                mapped_tokens(tmp_path / name, "uint16")
        (tmp_path / "text.txt").write_text("words")
        with pytest.raises(
            ConfigError, match=r"text.txt is no token file: give a .npy or .bin file, or a text as data.text"
        ):
            token_files(tmp_path / "text.txt")
        with pytest.raises(ConfigError, match="there is no file or folder"):
            token_files(tmp_path / "none")
        (tmp_path / "empty").mkdir()
        with pytest.raises(ConfigError, match="has no .npy or .bin files"):
            token_files(tmp_path / "empty")

    def test_a_text_is_its_bytes(self, tmp_path: Path) -> None:
        (tmp_path / "text.txt").write_text("Ebbe ü", encoding="utf-8")
        assert mapped_bytes(tmp_path / "text.txt").tolist() == list("Ebbe ü".encode())
        (tmp_path / "empty.txt").touch()
        assert len(mapped_bytes(tmp_path / "empty.txt")) == 0
        with pytest.raises(ConfigError, match="cannot read"):
            mapped_bytes(tmp_path / "none.txt")

    def test_a_fingerprint_sees_changes_also_of_large_files(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(data_module, "_WHOLE", 64)
        monkeypatch.setattr(data_module, "_PIECE", 4)
        file = tmp_path / "large.bin"
        file.write_bytes(bytes(1000))
        before = fingerprint([file])
        assert fingerprint([file]) == before
        changed = bytearray(1000)
        changed[0] = 1
        file.write_bytes(changed)
        assert fingerprint([file]) != before
        file.write_bytes(bytes(1001))
        assert fingerprint([file]) != before
        with pytest.raises(ConfigError, match="cannot read"):
            fingerprint([tmp_path / "none"])


class TestPrefetch:
    def test_batches_come_in_order_and_only_some_ahead(self) -> None:
        asked: list[int] = []

        def make(number: int) -> Batch:
            asked.append(number)
            return {"input_ids": torch.tensor([number])}

        batches = Prefetch(make, 7, depth=2)
        assert [int(batches.take()["input_ids"]) for _ in range(5)] == [7, 8, 9, 10, 11]
        time.sleep(0.05)
        batches.close()
        assert len(asked) <= 5 + 2 + 1
        assert not [thread for thread in threading.enumerate() if thread.name == "lowtide-data"]

    def test_what_a_batch_fails_with_is_told_with_its_number(self) -> None:
        def make(number: int) -> Batch:
            if number == 2:
                raise OSError("the disk is gone")
            return {}

        batches = Prefetch(make, 0)
        batches.take()
        batches.take()
        with pytest.raises(DataError, match="batch 2 could not be made: OSError: the disk is gone"):
            batches.take()
        assert not [thread for thread in threading.enumerate() if thread.name == "lowtide-data"]

    def test_one_that_hangs_does_not_hold_the_end_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(data_module, "_PATIENCE_S", 0.1)
        forever = threading.Event()

        def make(number: int) -> Batch:
            forever.wait()
            return {}

        batches = Prefetch(make, 0)
        batches.close()
        forever.set()
