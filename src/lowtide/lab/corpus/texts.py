"""The texts that recipes name: stories, text files, and data sets of the Hugging Face hub."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lowtide.errors import ConfigError, MissingExtraError
from lowtide.hardware.machine import cache_folder
from lowtide.lab.recipe_parts import HubDataset, Stories, TextFiles

KEY = "data.path"
_BLANK_LINES = re.compile(r"\n\s*\n")

TextRecipe = Stories | TextFiles | HubDataset
Say = Callable[[str], None]

_SAMPLE = Path(__file__).parent / "stories"
"""The first stories of seed 0, which come with the package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """The texts of a corpus, one a sample."""

    train: Sequence[str]
    validation: Sequence[str]


def read_texts(data: TextRecipe, say: Say) -> Texts:
    """The texts of a recipe.

    Raises:
        ConfigError: They are missing or empty; the message says what is needed.
        MissingExtraError: A data set of the hub needs the package `datasets`.
    """
    match data:
        case Stories():
            say(f"reading stories of seed {data.seed}")
            return read_stories(data)
        case TextFiles():
            say(f"reading {data.path}")
            return _parted(data, read_samples(data.path))
        case HubDataset():
            say(f"loading the data set {data.name}")
            texts = Texts(train=read_split(data, data.train_split), validation=read_split(data, data.validation_split))
            if not texts.train:
                raise ConfigError(
                    f"the split {data.train_split!r} of {data.name!r} is empty; choose another", key="data.train_split"
                )
            return texts


def fingerprint(data: TextRecipe) -> str:
    """A hash of what the texts of a recipe hold; "" for a data set of the hub, which is taken to stay as it is.

    Raises:
        ConfigError: The texts are missing, or cannot be read.
    """
    match data:
        case Stories():
            texts = read_stories(data)
            return hashlib.sha256("\n\n".join((*texts.train, *texts.validation)).encode()).hexdigest()
        case TextFiles():
            # A hash of hashes: the same text cut into files elsewhere is other samples.
            return " ".join(map(_digest, find_files(data.path)))
        case HubDataset():
            return ""


def stories_folder() -> Path:
    """Where stories are looked for, before those of the package."""
    return cache_folder() / "stories"


def story_file(folder: Path, seed: int, part: str) -> Path:
    """The file of one part, "training" or "validation", of the stories of a seed."""
    return folder / f"seed-{seed}_{part}.txt"


def read_stories(data: Stories) -> Texts:
    """The first stories of both parts.

    Raises:
        ConfigError: No file holds as many; the message has the command that writes one.
    """
    return Texts(
        train=_first_stories(data, "training", data.num_stories),
        validation=_first_stories(data, "validation", data.num_validation),
    )


def _first_stories(data: Stories, part: str, count: int) -> list[str]:
    if not count:
        return []
    most = 0
    for file in (story_file(folder, data.seed, part) for folder in (stories_folder(), _SAMPLE)):
        stories = _split(_read(file)) if file.is_file() else []
        if len(stories) >= count:
            return stories[:count]
        most = max(most, len(stories))
    raise ConfigError(
        f"{count:,} {part} stories of seed {data.seed} are asked for, and {stories_folder()} has {most:,}: run "
        f"`python -m benchmarks.stories{_options(data)}` in a checkout of Lowtide, which writes them there",
        key="data",
    )


def _options(data: Stories) -> str:
    """What the command must be given: it makes the default numbers of stories by itself."""
    default = Stories()
    options = [("--seed", data.seed, data.seed != default.seed)]
    options.append(("--training", data.num_stories, data.num_stories > default.num_stories))
    options.append(("--validation", data.num_validation, data.num_validation > default.num_validation))
    return "".join(f" {option} {value}" for option, value, is_needed in options if is_needed)


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


def read_split(data: HubDataset, split: str) -> Sequence[str]:
    """The texts of a split, read as they are asked for.

    Raises:
        MissingExtraError: The package `datasets` is not installed.
        ConfigError: The hub cannot be reached, or has no such data set, split or column of text.
    """
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError("datasets", f"the data set {data.name!r}") from error
    try:
        table = datasets.load_dataset(data.name, split=split)
    except Exception as error:
        # Which exceptions a missing name, a missing split and a missing network raise changes with the package's versions.
        raise ConfigError(
            f"cannot load the split {split!r} of the data set {data.name!r}: {type(error).__name__}: {error}; check the "
            "name and the split, and the network: without one, the data set must be in the local cache of the package "
            "`datasets`, or use `kind: stories`, which needs none",
            key="data.name",
        ) from error
    if data.column not in table.column_names:
        raise ConfigError(
            f"the data set {data.name!r} has no column {data.column!r}; it has {', '.join(table.column_names)}",
            key="data.column",
        )
    texts: Sequence[str] = table[data.column]
    if len(texts) and not isinstance(texts[0], str):
        raise ConfigError(
            f"the column {data.column!r} of {data.name!r} holds {type(texts[0]).__name__}, not text; choose one of "
            f"{', '.join(table.column_names)}",
            key="data.column",
        )
    return texts


def _parted(data: TextFiles, samples: list[str]) -> Texts:
    # At least one, where any are asked for; rounding down would give a small file none.
    num_validation = max(1, int(len(samples) * data.validation_share)) if data.validation_share else 0
    num_train = len(samples) - num_validation
    if num_train < 1:
        raise ConfigError(
            f"{data.path} holds {len(samples)} sample, and validation_share is {data.validation_share}, so that none is "
            "left to train on: part the text into more samples with blank lines, or set validation_share to 0",
            key="data.validation_share",
        )
    return Texts(train=samples[:num_train], validation=samples[num_train:])


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", key=KEY) from error
