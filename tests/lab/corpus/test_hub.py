"""Data sets of the hub, through a stand-in for their package: no test goes to the network."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from lowtide.errors import ConfigError, MissingExtraError
from lowtide.lab.corpus.hub import read_split
from lowtide.lab.data_recipe import HubDataset

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
