from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lowtide.errors import ObserveError
from lowtide.tracing.real_model import device_of, move_batch

META = torch.device("meta")


class Spread(nn.Module):
    """Claims parameters on devices that this machine need not have."""

    def __init__(self, **devices: str) -> None:
        super().__init__()
        self._devices = devices

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        for name, device in self._devices.items():
            yield name, SimpleNamespace(device=torch.device(device))


def test_the_device_of_a_model() -> None:
    assert device_of(nn.Linear(2, 2)) == torch.device("cpu")
    assert device_of(nn.Identity()) == torch.device("cpu")
    assert device_of(Spread(a="cuda:1", b="cuda:1")) == torch.device("cuda:1")


def test_models_that_cannot_be_observed() -> None:
    with pytest.raises(ObserveError, match=r"'weight' of Linear is on the meta device.*Use lowtide\.trace"):
        device_of(nn.Linear(2, 2, device=META))
    with pytest.raises(ObserveError, match=r"Spread is on 2 devices: cuda:0 \(such as 'a'\), cpu \(such as 'b'\)"):
        device_of(Spread(a="cuda:0", b="cpu", c="cpu"))
    with pytest.raises(ObserveError, match="only steps on cpu and cuda"):
        device_of(Spread(a="xla:0"))


def test_a_batch_is_moved_where_it_must() -> None:
    batch = {"ids": torch.ones(2), "more": [torch.ones(3), ("text", torch.ones(1, device=META))], "flag": True}
    moved, origins = move_batch(batch, META)
    assert origins == {torch.device("cpu")}
    assert moved["ids"].device == moved["more"][0].device == META
    assert moved["more"][1][0] == "text"
    assert moved["flag"] is True


def test_a_batch_that_is_there_already_stays_the_same_object() -> None:
    batch = {"ids": torch.ones(2)}
    assert move_batch(batch, torch.device("cpu")) == (batch, set())
    assert move_batch(batch, torch.device("cpu"))[0] is batch


def test_a_batch_without_values() -> None:
    with pytest.raises(ObserveError, match=r"shape \[2, 3\] on the meta device"):
        move_batch([torch.ones(2, 3, device=META)], torch.device("cpu"))
