"""The cache: what is written is read, and what is damaged in any way counts as not there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from lowtide.lab.corpus.cache import Stored, cache_folder, read_stored, write_stored
from lowtide.lab.corpus.samples import Samples, pack

STORED = Stored(
    train=pack([[0, 5, 6], [0, 7]], vocab_size=300),
    validation=pack([], vocab_size=300),
    tokenizer_json='{"é": 1}',
)


def same(first: Stored | None, second: Stored) -> bool:
    assert first is not None
    return first.tokenizer_json == second.tokenizer_json and all(
        np.array_equal(one.ids, other.ids)
        and np.array_equal(one.offsets, other.offsets)
        and one.ids.dtype == other.ids.dtype
        for one, other in ((first.train, second.train), (first.validation, second.validation))
    )


def test_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "corpus.npz"
    assert read_stored(path) is None
    write_stored(path, STORED)
    assert same(read_stored(path), STORED)
    assert [file.name for file in path.parent.iterdir()] == ["corpus.npz"]


@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_cut_short(kept: float, tmp_path: Path) -> None:
    path = tmp_path / "corpus.npz"
    write_stored(path, STORED)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole))])
    assert read_stored(path) is None


def test_any_bit_of_the_arrays_that_flips(tmp_path: Path) -> None:
    path = tmp_path / "corpus.npz"
    write_stored(path, STORED)
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x40]) + whole[place + 1 :])
        read = read_stored(path)
        # Some bytes of the container, such as a file's date, mean nothing.
        assert read is None or same(read, STORED), place


@pytest.mark.parametrize("content", [b"", b"not a zip file", b"PK\x03\x04", b"\x80\x04N."])
def test_something_else(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "corpus.npz"
    path.write_bytes(content)
    assert read_stored(path) is None


def test_arrays_that_do_not_fit_together(tmp_path: Path) -> None:
    path = tmp_path / "corpus.npz"
    offsets = np.array([0, 3, 9])
    write_stored(
        path,
        Stored(train=Samples(ids=STORED.train.ids, offsets=offsets), validation=STORED.validation, tokenizer_json=""),
    )
    assert read_stored(path) is None
    np.savez(path, train_ids=STORED.train.ids)
    assert read_stored(path) is None


def test_several_write_at_once_and_readers_find_it_whole(tmp_path: Path) -> None:
    path = tmp_path / "corpus.npz"
    write_stored(path, STORED)
    with ThreadPoolExecutor(8) as pool:
        writing = [pool.submit(write_stored, path, STORED) for _ in range(40)]
        reading = [pool.submit(read_stored, path) for _ in range(40)]
        assert all(same(future.result(), STORED) for future in reading)
        assert all(future.result() is None for future in writing)
    assert [file.name for file in tmp_path.iterdir()] == ["corpus.npz"]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space left"):
        write_stored(tmp_path / "corpus.npz", STORED)
    assert list(tmp_path.iterdir()) == []


def test_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "lowtide"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for ignored in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_folder() == tmp_path / "home" / ".cache" / "lowtide"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / "home" / ".cache" / "lowtide"
