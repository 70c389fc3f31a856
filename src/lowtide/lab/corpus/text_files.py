"""Samples from text files: pieces of text with blank lines between them."""

from __future__ import annotations

import re
from pathlib import Path

from lowtide.errors import ConfigError

KEY = "data.path"
_BLANK_LINES = re.compile(r"\n\s*\n")


def find_files(path: Path) -> list[Path]:
    """The file itself, or the .txt files of a folder in the order of their names.

    Raises:
        ConfigError: There is no such path, or the folder has none.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(f"there is no file or folder {path}: give a text file, or a folder of .txt files", key=KEY)
    files = sorted(file for file in path.glob("*.txt") if file.is_file())
    if not files:
        raise ConfigError(f"the folder {path} has no .txt files: put some there, or give another folder", key=KEY)
    return files


def read_samples(path: Path) -> list[str]:
    """The samples of all files, in order.

    Raises:
        ConfigError: There are none, or a file cannot be read as UTF-8.
    """
    files = find_files(path)
    samples = [sample for file in files for sample in _split(_read(file))]
    if not samples:
        names = ", ".join(file.name for file in files)
        raise ConfigError(f"{path} holds no text: {names} {'is' if len(files) == 1 else 'are'} empty", key=KEY)
    return samples


def _read(file: Path) -> str:
    try:
        # "-sig": a byte order mark is no part of the text.
        return file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}", key=KEY) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not text in UTF-8: {error}", key=KEY) from error


def _split(text: str) -> list[str]:
    return [sample for piece in _BLANK_LINES.split(text) if (sample := piece.strip())]
