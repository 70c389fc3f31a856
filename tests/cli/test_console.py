"""Errors on the terminal."""

from __future__ import annotations

import errno
import io
import os

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


def test_another_error_of_the_system_is_a_bug(said: io.StringIO) -> None:
    with pytest.raises(FileNotFoundError), console.friendly_errors():
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "a/template")
    assert said.getvalue() == ""
