"""Corpora: what is in them, when they are made again, and what is said when they cannot be made."""

from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.stories.__main__ import write_stories
from benchmarks.stories.generator import Part, make_stories
from lowtide.errors import ConfigError, MissingExtraError
from lowtide.hardware.machine import cache_folder
from lowtide.lab.corpus import tokens
from lowtide.lab.corpus.texts import read_stories, stories_folder
from lowtide.lab.corpus.tokens import Corpus, Samples, load_corpus, pack, read_corpus, train_tokenizer, write_corpus
from lowtide.lab.recipe_file import find_recipe, known_recipes, read_recipe
from lowtide.lab.recipe_parts import HubDataset, Stories, TextFiles

STORIES = Stories(num_stories=60, num_validation=7, vocab_size=600)
TALES = [f"Tale {number}: the fox and the hen met the fox again." for number in range(40)]


@pytest.fixture(autouse=True)
def no_stories_of_the_user(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("user")))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("\n\n".join(TALES[:25]), encoding="utf-8")
    (folder / "b.txt").write_text("\n\n".join(TALES[25:]), encoding="utf-8")
    return folder


def making_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a tokenizer is trained although the corpus is cached")

    monkeypatch.setattr(tokens, "train_tokenizer", refuse)


def same(first: Corpus, second: Corpus) -> bool:
    return first.tokenizer.to_json() == second.tokenizer.to_json() and all(
        np.array_equal(one.ids, other.ids) and np.array_equal(one.offsets, other.offsets)
        for one, other in ((first.train, second.train), (first.validation, second.validation))
    )


def decoded(corpus: Corpus, part: str) -> list[str]:
    return [corpus.tokenizer.decode(ids.tolist()) for ids in getattr(corpus, part)]


def test_stories(tmp_path: Path) -> None:
    said: list[str] = []
    corpus = load_corpus(STORIES, cache=tmp_path, on_progress=said.append)
    assert decoded(corpus, "train") == list(make_stories(0, 60))
    assert decoded(corpus, "validation") == list(make_stories(0, 7, part=Part.VALIDATION))
    assert corpus.tokenizer.vocab_size == 600
    assert all(ids[0] == 0 for ids in corpus.train)
    assert corpus.train.ids.dtype == np.uint16
    assert said[0] == "reading stories of seed 0"
    assert "training a tokenizer of 600 tokens on 60 samples" in said


def test_stories_that_were_written_come_before_those_of_the_package(tmp_path: Path) -> None:
    write_stories(stories_folder(), seed=3, training=30, validation=2)
    corpus = load_corpus(Stories(seed=3, num_stories=20, num_validation=2, vocab_size=300), cache=tmp_path)
    assert decoded(corpus, "train") == list(make_stories(3, 20))
    # A file with fewer than the package has does not hide the package's.
    write_stories(stories_folder(), seed=0, training=3, validation=0)
    assert decoded(load_corpus(STORIES, cache=tmp_path), "train") == list(make_stories(0, 60))


@pytest.mark.parametrize(
    ("data", "command"),
    [
        (Stories(), "`python -m benchmarks.stories`"),
        (
            Stories(seed=7, num_stories=10, num_validation=600),
            "`python -m benchmarks.stories --seed 7 --validation 600`",
        ),
        (Stories(num_stories=30_000), "`python -m benchmarks.stories --training 30000`"),
    ],
)
def test_missing_stories_say_the_command_that_writes_them(data: Stories, command: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"run {command} in a checkout of Lowtide")):
        load_corpus(data, cache=tmp_path)


def test_the_package_has_the_stories_of_the_tiny_recipes() -> None:
    for name in known_recipes():
        if name.startswith("peak_memory_tiny/") and isinstance(data := read_recipe(find_recipe(name)).data, Stories):
            texts = read_stories(data)
            assert texts.train == list(make_stories(0, 400))
            assert texts.validation == list(make_stories(0, 12, part=Part.VALIDATION))


def test_the_lengths_of_stories(tmp_path: Path) -> None:
    """As long as those of the table that the lab regenerates: 150 to 300 tokens of a vocabulary of 8,000."""
    write_stories(stories_folder(), seed=0, training=3000, validation=0)
    corpus = load_corpus(Stories(num_stories=3000, num_validation=0), cache=tmp_path)
    lengths = corpus.train.lengths
    assert 190 < lengths.mean() < 235
    assert 20 < lengths.std() < 60
    assert ((lengths >= 140) & (lengths <= 300)).mean() > 0.95
    # None is cut in a batch of the experiment.
    assert lengths.max() < 768
    # The vocabulary is used, not only reached.
    assert len(np.unique(corpus.train.ids)) > 0.75 * corpus.tokenizer.vocab_size


def test_the_cache_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_corpus(STORIES, cache=tmp_path)
    making_is_forbidden(monkeypatch)
    said: list[str] = []
    assert same(load_corpus(STORIES, cache=tmp_path, on_progress=said.append), first)
    assert said == []
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("change", [{"num_stories": 61}, {"num_validation": 8}, {"vocab_size": 601}])
def test_another_recipe_is_another_corpus(change: dict[str, int], tmp_path: Path) -> None:
    load_corpus(STORIES, cache=tmp_path)
    settings = {"num_stories": 60, "num_validation": 7, "vocab_size": 600} | change
    load_corpus(Stories(**settings), cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("name", ["fingerprint", "library_version"])
def test_another_text_or_library_is_another_corpus(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_corpus(STORIES, cache=tmp_path)
    monkeypatch.setattr(f"lowtide.lab.corpus.tokens.{name}", lambda *_: "another")
    load_corpus(STORIES, cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_the_default_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load_corpus(STORIES)
    assert len(list((tmp_path / "lowtide").glob("corpus-*.npz"))) == 1


@pytest.mark.parametrize("damage", [b"", b"rubbish"])
def test_a_damaged_cache_is_made_again(damage: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_corpus(STORIES, cache=tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage)
    assert same(load_corpus(STORIES, cache=tmp_path), first)
    making_is_forbidden(monkeypatch)
    assert same(load_corpus(STORIES, cache=tmp_path), first)


def test_a_damaged_tokenizer_is_made_again(tmp_path: Path) -> None:
    first = load_corpus(STORIES, cache=tmp_path)
    (file,) = tmp_path.iterdir()
    with np.load(file) as arrays:
        changed = dict(arrays) | {"tokenizer": np.frombuffer(b"{}", dtype=np.uint8)}
    with file.open("wb") as opened:
        np.savez(opened, **changed)
    assert same(load_corpus(STORIES, cache=tmp_path), first)


def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    said: list[str] = []
    corpus = load_corpus(STORIES, cache=tmp_path / "file", on_progress=said.append)
    assert len(corpus.train) == 60
    assert said[-1].startswith("the corpus is not cached: cannot write")


def test_too_few_stories_for_the_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"gives \d+ tokens, and vocab_size is 8000: set vocab_size to \d+, or give more text"
    ):
        load_corpus(Stories(num_stories=2, num_validation=0), cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_text_files(texts: Path, tmp_path: Path) -> None:
    corpus = load_corpus(TextFiles(path=texts, validation_share=0.1, vocab_size=280), cache=tmp_path / "cache")
    assert decoded(corpus, "train") == TALES[:36]
    assert decoded(corpus, "validation") == TALES[36:]


def test_text_files_go_by_what_they_hold(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    first = load_corpus(TextFiles(path=texts, vocab_size=280), cache=cache)
    moved = texts.rename(tmp_path / "moved")
    with monkeypatch.context() as patched:
        making_is_forbidden(patched)
        assert same(load_corpus(TextFiles(path=moved, vocab_size=280), cache=cache), first)
    (moved / "b.txt").write_text("\n\n".join(reversed(TALES[25:])), encoding="utf-8")
    assert not same(load_corpus(TextFiles(path=moved, vocab_size=280), cache=cache), first)
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (0.001, 1), (0.5, 20)])
def test_the_share_of_validation(share: float, expected: int, texts: Path, tmp_path: Path) -> None:
    corpus = load_corpus(TextFiles(path=texts, validation_share=share, vocab_size=270), cache=tmp_path / "cache")
    assert (len(corpus.train), len(corpus.validation)) == (40 - expected, expected)


def test_one_sample_cannot_be_parted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one sample " * 50, encoding="utf-8")
    with pytest.raises(ConfigError, match="holds 1 sample, and validation_share is 0.05.*blank lines, or set"):
        load_corpus(TextFiles(path=tmp_path, vocab_size=260), cache=tmp_path / "cache")


def test_no_text_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file or folder"):
        load_corpus(TextFiles(path=tmp_path / "nowhere"), cache=tmp_path)


def test_text_files_that_cannot_be_read(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ConfigError, match="cannot read .*a.txt: Permission denied"):
        load_corpus(TextFiles(path=texts), cache=tmp_path)


def hub(monkeypatch: pytest.MonkeyPatch, splits: dict[str, list[str]]) -> None:
    class Table(dict[str, list[str]]):
        column_names = ("text",)

    loaded = SimpleNamespace(load_dataset=lambda name, split: Table(text=splits[split]))
    monkeypatch.setitem(sys.modules, "datasets", loaded)


def test_a_data_set_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, {"train": [TALES[0], " \n", *TALES[1:30]], "validation": TALES[30:]})
    data = HubDataset(name="somebody/tales", vocab_size=280)
    corpus = load_corpus(data, cache=tmp_path)
    # The blank one is left out: it has nothing to predict.
    assert decoded(corpus, "train") == TALES[:30]
    assert decoded(corpus, "validation") == TALES[30:]
    # And again without the package and the network.
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert same(load_corpus(data, cache=tmp_path), corpus)


def test_an_empty_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, {"train": [], "validation": TALES})
    with pytest.raises(ConfigError, match="the split 'train' of 'somebody/tales' is empty"):
        load_corpus(HubDataset(name="somebody/tales"), cache=tmp_path)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match=r"lowtide\[lab\]"):
        load_corpus(STORIES, cache=tmp_path)


STORED = Corpus(
    train=pack([[0, 5, 6], [0, 7]], vocab_size=300),
    validation=pack([], vocab_size=300),
    tokenizer=train_tokenizer(["é"], vocab_size=260),
)


def same_stored(first: Corpus | None, second: Corpus) -> bool:
    assert first is not None
    return first.tokenizer.to_json() == second.tokenizer.to_json() and all(
        np.array_equal(one.ids, other.ids)
        and np.array_equal(one.offsets, other.offsets)
        and one.ids.dtype == other.ids.dtype
        for one, other in ((first.train, second.train), (first.validation, second.validation))
    )


def test_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "corpus.npz"
    assert read_corpus(path) is None
    write_corpus(path, STORED)
    assert same_stored(read_corpus(path), STORED)
    assert [file.name for file in path.parent.iterdir()] == ["corpus.npz"]


@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_cut_short(kept: float, tmp_path: Path) -> None:
    path = tmp_path / "corpus.npz"
    write_corpus(path, STORED)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole))])
    assert read_corpus(path) is None


def test_any_bit_of_the_arrays_that_flips(tmp_path: Path) -> None:
    path = tmp_path / "corpus.npz"
    write_corpus(path, STORED)
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x40]) + whole[place + 1 :])
        read = read_corpus(path)
        # Some bytes of the container, such as a file's date, mean nothing.
        assert read is None or same_stored(read, STORED), place


@pytest.mark.parametrize("content", [b"", b"not a zip file", b"PK\x03\x04", b"\x80\x04N."])
def test_something_else(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "corpus.npz"
    path.write_bytes(content)
    assert read_corpus(path) is None


def test_arrays_that_do_not_fit_together(tmp_path: Path) -> None:
    path = tmp_path / "corpus.npz"
    offsets = np.array([0, 3, 9])
    write_corpus(
        path,
        replace(STORED, train=Samples(ids=STORED.train.ids, offsets=offsets)),
    )
    assert read_corpus(path) is None
    np.savez(path, train_ids=STORED.train.ids)
    assert read_corpus(path) is None


def test_several_write_at_once_and_readers_find_it_whole(tmp_path: Path) -> None:
    path = tmp_path / "corpus.npz"
    write_corpus(path, STORED)
    with ThreadPoolExecutor(8) as pool:
        writing = [pool.submit(write_corpus, path, STORED) for _ in range(40)]
        reading = [pool.submit(read_corpus, path) for _ in range(40)]
        assert all(same_stored(future.result(), STORED) for future in reading)
        assert all(future.result() is None for future in writing)
    assert [file.name for file in tmp_path.iterdir()] == ["corpus.npz"]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space left"):
        write_corpus(tmp_path / "corpus.npz", STORED)
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
