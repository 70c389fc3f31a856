"""Text files: what parts samples, and every way in which files can be missing or unreadable."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowtide.errors import ConfigError
from lowtide.lab.corpus.text_files import find_files, read_samples


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
