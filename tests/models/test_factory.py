from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import pytest
import torch

from lowtide.errors import BatchMismatchError, ConfigError, UnknownNameError, ValueReadError
from lowtide.models import resolve_model

MODULE = """
import torch
from torch import nn

from lowtide.models.layers import ModelOutput

DEPTH = 3


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.types = nn.Embedding(2, 8)
        self.tokens = nn.Embedding(40, 8)
        self.head = nn.Linear(8, 40)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.tokens(input_ids))
        return ModelOutput(nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


class Pictures(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3)
        self.head = nn.Linear(8, 7)

    def forward(self, pixel_values, labels):
        ...


class Regression(nn.Linear):
    def forward(self, x, y):
        return ModelOutput(nn.functional.mse_loss(super().forward(x), y), x)


class Zoo:
    tagger = Tagger


def sized(batch="5x3"):
    rows, width = (int(part) for part in (batch or "5x3").split("x"))
    return nn.Linear(width, 2), {"input": torch.randn(rows, width)}, lambda model, batch: model(**batch).square().mean()


def loss_alone():
    return nn.Linear(3, 2), None, lambda model, batch: model(**batch)


def no_loss():
    return nn.Linear(3, 2), {"input": torch.randn(5, 3)}, "mean"


def regression():
    return Regression(3, 2), {
        "x": torch.randn(5, 3),
        "y": torch.randn(5, 2, dtype=torch.float64),
        "mask": torch.zeros(5, dtype=torch.bool),
        "ids": torch.arange(5),
        "real": torch.arange(5, device="cpu"),
    }


def unbatched():
    return nn.Linear(3, 2)


def number():
    return 7


def list_batch():
    return nn.Linear(3, 2), [torch.ones(2, 3)]


def scalar_batch():
    return nn.Linear(3, 2), {"x": torch.tensor(1.0)}


def reader():
    return nn.Linear(int(torch.tensor(3).item()), 2)


def broken():
    raise KeyError("a bug of the user's")
"""


@pytest.fixture(autouse=True)
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module in the current folder, which is not on the path, as for a console script."""
    (tmp_path / "user_models.py").write_text(MODULE)
    (tmp_path / "needs_more.py").write_text("import a_package_that_is_not_installed\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(Path.cwd()))])
    yield
    sys.modules.pop("user_models", None)


def test_a_class_is_a_factory() -> None:
    source = resolve_model("user_models:Tagger")
    assert source.family == "factory"
    assert source.default_batch == "8x512"
    model = source.build(torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}
    batch = source.make_batch("3x5")
    assert batch["input_ids"].shape == (3, 5)
    assert 2 < batch["input_ids"].max() < 40


def test_nested_names() -> None:
    assert type(resolve_model("user_models:Zoo.tagger").build(None)).__name__ == "Tagger"


def test_pictures_are_inferred() -> None:
    source = resolve_model("user_models:Pictures")
    assert source.default_batch == "8x4x224x224"
    assert source.make_batch("50x4x6x6")["labels"].max() == 6


def test_a_batch_of_its_own_gets_values() -> None:
    source = resolve_model("user_models:regression")
    assert source.default_batch == "5x3"
    batch = source.make_batch(source.default_batch)
    assert {t.device.type for t in batch.values()} == {"cpu"}
    assert batch["x"].shape == (5, 3)
    assert batch["x"].std() > 0.1
    assert batch["y"].dtype == torch.float64
    assert batch["mask"].all()
    assert batch["ids"].tolist() == [1] * 5
    assert batch["real"].tolist() == [0, 1, 2, 3, 4]


def test_text_cannot_change_a_batch_of_its_own() -> None:
    with pytest.raises(BatchMismatchError, match="returns a batch of its own, 5x3, so '8x3' has no effect"):
        resolve_model("user_models:regression").make_batch("8x3")


def test_a_factory_may_take_the_batch_and_bring_its_loss() -> None:
    source = resolve_model("user_models:sized")
    assert source.default_batch == "5x3"
    assert source.make_batch("7x3")["input"].shape == (7, 3)
    assert source.make_batch("5x3")["input"].shape == (5, 3)
    assert source.loss is not None
    model, batch = source.build_on_host(None), source.make_batch("7x3")  # type: ignore[misc]
    assert source.loss(model, batch).item() == pytest.approx(model(batch["input"]).square().mean().item())
    assert resolve_model("user_models:regression").loss is None


def test_travels_by_name() -> None:
    source = cloudpickle.loads(cloudpickle.dumps(resolve_model("user_models:regression")))
    assert source.build(None).weight.shape == (2, 3)
    assert set(source.make_batch("5x3")) == {"x", "y", "mask", "ids", "real"}


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        (
            "unbatched",
            BatchMismatchError,
            r"forward of user_models:unbatched takes \(input\), .* return \(model, batch\)",
        ),
        ("loss_alone", ConfigError, "user_models:loss_alone returned a loss and no batch; return the batch"),
        ("no_loss", ConfigError, "the loss that user_models:no_loss returned is str, which cannot be called; return"),
        ("number", ConfigError, "user_models:number returned int; a factory returns an nn.Module"),
        ("list_batch", BatchMismatchError, "not a mapping from the forward's argument names to tensors"),
        ("scalar_batch", BatchMismatchError, "'x', the first tensor of the batch .* has no dimensions"),
        ("DEPTH", ConfigError, "is int, which cannot be called"),
        ("Taggr", UnknownNameError, "no factory in user_models named 'Taggr'; did you mean 'Tagger'"),
        ("reader", ValueReadError, "user_models:reader reads the values of tensors"),
        ("broken", KeyError, "a bug of the user's"),
    ],
)
def test_bad_factories(name: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        resolve_model(f"user_models:{name}")


def test_missing_modules() -> None:
    with pytest.raises(
        UnknownNameError, match=r"no module \(installed, or in the current folder\) named 'nowhere.models'"
    ):
        resolve_model("nowhere.models:make")
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_installed"):
        resolve_model("needs_more:make")


def test_recompute_needs_the_method() -> None:
    source = resolve_model("user_models:Tagger", recompute=True)
    with pytest.raises(
        ConfigError, match=r"user_models:Tagger cannot recompute .* Tagger has no gradient_checkpointing_enable"
    ):
        source.build(None)
