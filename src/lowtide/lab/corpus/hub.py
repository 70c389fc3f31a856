"""Samples from a data set of the Hugging Face hub, through its own package."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from lowtide.errors import ConfigError, MissingExtraError
from lowtide.lab.data_recipe import HubDataset


def read_split(data: HubDataset, split: str) -> Sequence[str]:
    """The texts of a split, read as they are asked for.

    Raises:
        MissingExtraError: The package `datasets` is not installed.
        ConfigError: The hub cannot be reached, or has no such data set, split or column of text.
    """
    datasets = _datasets(data)
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


def _datasets(data: HubDataset) -> ModuleType:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError("datasets", f"the data set {data.name!r}") from error
    module: ModuleType = datasets
    return module
