"""Texts from files and from the hub, and what is said when they cannot be read."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lowtide.errors import ConfigError, MissingExtraError
from lowtide.lab.corpus.texts import find_files, read_samples, read_split
from lowtide.lab.recipe_parts import HubDataset


def test_blank_lines_part_the_samples(tmp_path: Path) -> None:
    file = tmp_path / "tales.txt"
    file.write_bytes("\ufeff\n\n One.\nStill one. \n\n\n \t\nTwo.\r\n\r\nThree.\n".encode())
    assert read_samples(file) == ["One.\nStill one.", "Two.", "Three."]


def test_a_folder_in_the_order_of_the_names(tmp_path: Path) -> None:
    for name, text in [("b.txt", "second"), ("a.txt", "first"), ("c.md", "not this"), ("d.txt", "")]:
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "e.txt").mkdir()
    assert read_samples(tmp_path) == ["first", "second"]
    assert [file.name for file in find_files(tmp_path)] == ["a.txt", "b.txt", "d.txt"]


def test_a_file_of_any_ending(tmp_path: Path) -> None:
    (tmp_path / "tales.md").write_text("a text", encoding="utf-8")
    assert read_samples(tmp_path / "tales.md") == ["a text"]


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file or folder .*nowhere: give a text file, or a folder"):
        read_samples(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="has no .txt files: put some there"):
        read_samples(tmp_path)


def test_empty_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(" \n\n \n", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no text: a.txt is empty") as raised:
        read_samples(tmp_path / "a.txt")
    assert raised.value.key == "data.path"
    (tmp_path / "b.txt").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"a.txt, b.txt are empty"):
        read_samples(tmp_path)


def test_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match="a.txt is not text in UTF-8"):
        read_samples(tmp_path)


def test_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("text", encoding="utf-8")

    def refuse(*args: object, **kwargs: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(ConfigError, match="cannot read .*a.txt: Permission denied"):
        read_samples(tmp_path)


DATA = HubDataset(name="somebody/tales")


class Table:
    def __init__(self, columns: dict[str, list[object]]) -> None:
        self.columns = columns
        self.column_names = list(columns)

    def __getitem__(self, column: str) -> list[object]:
        return self.columns[column]


def stand_in(monkeypatch: pytest.MonkeyPatch, answer: Table | Exception) -> list[tuple[str, str]]:
    asked: list[tuple[str, str]] = []

    def load_dataset(name: str, *, split: str) -> Table:
        asked.append((name, split))
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return asked


def test_a_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = stand_in(monkeypatch, Table({"text": ["one", "two"], "score": [1, 2]}))
    assert list(read_split(DATA, "train[:10%]")) == ["one", "two"]
    assert asked == [("somebody/tales", "train[:10%]")]


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"'somebody/tales' needs.*pip install \"lowtide\[datasets\]\""):
        read_split(DATA, "train")


@pytest.mark.parametrize(
    "error", [ConnectionError("no route"), ValueError("Unknown split"), RuntimeError("offline mode")]
)
def test_out_of_reach(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, error)
    with pytest.raises(
        ConfigError, match=f"cannot load the split 'train' of .*{error}.*network.*kind: stories"
    ) as raised:
        read_split(DATA, "train")
    assert raised.value.key == "data.name"


def test_another_column(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, Table({"story": ["one"], "score": [1]}))
    with pytest.raises(ConfigError, match="no column 'text'; it has story, score"):
        read_split(DATA, "train")


def test_a_column_of_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, Table({"text": [1]}))
    with pytest.raises(ConfigError, match="holds int, not text; choose one of text"):
        read_split(DATA, "train")
