"""Errors on the terminal."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

import pytest
import typer
from rich.console import Console

from lowtide.cli import console
from lowtide.errors import ConfigError


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What goes to a terminal of 40 columns."""
    file = io.StringIO()
    monkeypatch.setattr(console, "ERR", Console(width=40, file=file))
    return file


def test_an_error_is_broken_where_the_terminal_ends(said: io.StringIO) -> None:
    with pytest.raises(typer.Exit), console.friendly_errors():
        raise ConfigError("steps is 0; give a number from 1 on, such as [bold]20[/]")
    assert [line.rstrip() for line in said.getvalue().splitlines()] == [
        "ConfigError: steps is 0; give a number",
        "from 1 on, such as [bold]20[/]",
    ]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_takes_no_more_is_one_message(said: io.StringIO, code: int) -> None:
    with pytest.raises(typer.Exit) as caught, console.friendly_errors():
        raise OSError(code, os.strerror(code), "lab.html")
    assert caught.value.exit_code == 1
    words = " ".join(said.getvalue().split())
    assert f"{os.strerror(code)}: 'lab.html'; make room, or have it written elsewhere" in words


class TestWritable:
    def test_a_file_that_is_there_stays_as_it_is_and_a_new_one_is_not_made(self, tmp_path: Path) -> None:
        old, new = tmp_path / "old.html", tmp_path / "a" / "new.html"
        old.write_text("before")
        console.require_writable("--report", [old, new, None])
        assert old.read_text() == "before"
        assert [path.name for path in tmp_path.iterdir()] == ["old.html"]

    def test_a_link_to_a_file_that_is_not_there_yet_stays(self, tmp_path: Path) -> None:
        link = tmp_path / "page.html"
        link.symlink_to(tmp_path / "elsewhere.html")
        console.require_writable("--report", [link])
        assert link.is_symlink()
        assert not link.exists()

    def test_folders_are_looked_at_and_not_made(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        console.require_writable("--out", [Path("a"), Path("b/c")], are_folders=True)
        assert list(tmp_path.iterdir()) == []
        (tmp_path / "file").touch()
        with pytest.raises(
            ConfigError, match=r"--out 'file/below' cannot be written: Not a directory; give a folder that"
        ):
            console.require_writable("--out", [Path("file/below")], are_folders=True)

    def test_a_folder_is_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"--out '.*' cannot be written: Is a directory; give ") as caught:
            console.require_writable("--out", [tmp_path])
        assert caught.value.key == "out"

    def test_a_name_that_is_too_long(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"cannot be written: File name too long"):
            console.require_writable("--png", [tmp_path / f"{'x' * 300}.png"])

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
    def test_a_folder_that_is_closed(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o500)
        with pytest.raises(ConfigError, match=r"cannot be written: Permission denied"):
            console.require_writable("--report", [tmp_path / "page.html"])

    def test_a_pipe_is_not_opened_for_nothing(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        console.require_writable("--markdown", [tmp_path / "pipe"])  # opening it would wait for a reader


def test_another_error_of_the_system_is_a_bug(said: io.StringIO) -> None:
    with pytest.raises(FileNotFoundError), console.friendly_errors():
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "a/template")
    assert said.getvalue() == ""
