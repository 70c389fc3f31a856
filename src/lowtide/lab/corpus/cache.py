"""Tokenized corpora on disk, so that the runs of a table do not tokenize the same text again and again."""

from __future__ import annotations

import os
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lowtide.lab.corpus.samples import Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What a file of the cache holds."""

    train: Samples
    validation: Samples
    tokenizer_json: str


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/lowtide`, or `~/.cache/lowtide`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The standard says that a relative path there is to be ignored.
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "lowtide"


def read_stored(path: Path) -> Stored | None:
    """The contents of a file; None where it is missing, or damaged in any way."""
    try:
        # A zip file has a checksum for each array. Opened here: what is no zip file, numpy would leave open.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            stored = Stored(
                train=Samples(ids=arrays["train_ids"], offsets=arrays["train_offsets"]),
                validation=Samples(ids=arrays["validation_ids"], offsets=arrays["validation_offsets"]),
                tokenizer_json=arrays["tokenizer"].tobytes().decode("utf-8"),
            )
    except (OSError, ValueError, KeyError, EOFError, TypeError, NotImplementedError, zipfile.BadZipFile):
        return None
    return stored if _is_whole(stored.train) and _is_whole(stored.validation) else None


def write_stored(path: Path, stored: Stored) -> None:
    """Write a file under another name and rename it: whoever reads it finds it whole, or not at all.

    Raises:
        OSError: The folder cannot be written, or the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own for each process: two of them may write the same corpus at once, and the last one wins.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}-", suffix=".part")
    unfinished = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(
                file,
                train_ids=stored.train.ids,
                train_offsets=stored.train.offsets,
                validation_ids=stored.validation.ids,
                validation_offsets=stored.validation.offsets,
                tokenizer=np.frombuffer(stored.tokenizer_json.encode("utf-8"), dtype=np.uint8),
            )
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _is_whole(samples: Samples) -> bool:
    offsets = samples.offsets
    return bool(len(offsets) and offsets[0] == 0 and offsets[-1] == len(samples.ids) and (np.diff(offsets) >= 0).all())
