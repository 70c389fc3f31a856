"""Every optimizer class of torch and of the packages around it under management: the same bits as plain torch, or refused.

python -m benchmarks.optim.classes --commit 0123abc    # one record; the table in docs/supported_optimizers.md is made from it

The tests run the same survey and compare it with the record.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import io
import random
import sys
import time
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from benchmarks.records import RESULTS, machine
from lowtide.errors import LowtideError
from lowtide.lab.record import write_json

SCHEMA = "lowtide.optimizer_classes/1"
PACKAGES = {
    "torch": "torch.optim",
    "lowtide": "lowtide.optim",
    "dadaptation": "dadaptation",
    "lion-pytorch": "lion_pytorch",
    "madgrad": "madgrad",
    "prodigyopt": "prodigyopt",
    "pytorch_optimizer": "pytorch_optimizer",
    "schedulefree": "schedulefree",
    "timm": "timm.optim",
}
"""By the name that they are installed under, the module whose classes are looked at."""

PLANS: dict[str, dict[str, str]] = {
    "deferred": {"weights": "streamed", "update": "host", "schedule": "deferred"},
    "in_backward": {"weights": "streamed", "update": "device", "schedule": "in_backward"},
}
LOOPS = ("plain", "closure", "graph")
"""Backward and step; a step with a closure; a step after a backward that can be differentiated again."""
NUM_STEPS = 6
"""More than the five after which a Lookahead looks back."""

IDENTICAL, REFUSED, DIFFERENT, NOT_RUN = "identical", "refused", "different", "not run"

Optimizer = torch.optim.Optimizer
Make = Callable[[nn.Module], Optimizer]


class Small(nn.Module):
    """Matrices, vectors and a table: the kinds of parameters that rules treat differently."""

    is_sparse = False

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8, sparse=self.is_sparse)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.table(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        out: Tensor = self.head(self.norm(x))
        return out


class Wide(nn.Module):
    """A matrix that is large enough for rules that treat such ones otherwise; it is not trained here."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 160, bias=False)


class Sparse(Small):
    """With a table whose gradients are sparse."""

    is_sparse = True


class Matrices(nn.Module):
    """For rules that take nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
        self.head = nn.Linear(8, 4, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.table(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        out: Tensor = self.head(x)
        return out


def installed_packages() -> dict[str, types.ModuleType]:
    """The modules of those packages that are there."""
    found = {}
    for package, module in PACKAGES.items():
        if importlib.util.find_spec(module.partition(".")[0]) is not None:
            found[package] = _timm_optim() if package == "timm" else importlib.import_module(module)
    return found


def _timm_optim() -> types.ModuleType:
    """`timm.optim` by itself: the whole of timm needs torchvision, which its optimizers do not use."""
    spec = importlib.util.find_spec("timm")
    assert spec is not None
    whole, models = types.ModuleType("timm"), types.ModuleType("timm.models")
    whole.__path__ = list(spec.submodule_search_locations or ())
    vars(models).update(group_parameters=None, group_modules=None)
    before = dict(sys.modules)
    sys.modules.update({"timm": whole, "timm.models": models})
    try:
        return importlib.import_module("timm.optim")
    finally:
        # Whoever else asks for timm gets the true one, or torch's word that it is not there.
        for name in set(sys.modules) - set(before):
            if name.partition(".")[0] == "timm":
                del sys.modules[name]


def classes_of(package: str, module: types.ModuleType) -> dict[str, type[Optimizer]]:
    """Its optimizer classes by name; a package's own alone, where it shows torch's as well."""
    own = PACKAGES[package]
    found = {
        name: value
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, Optimizer) and value is not Optimizer
    }
    if package == "timm":
        for inner in vars(module).values():
            if inspect.ismodule(inner):
                found.update({name: kind for name, kind in vars(inner).items() if inspect.isclass(kind)})
    return {
        name: kind
        for name, kind in sorted(found.items())
        if issubclass(kind, Optimizer) and kind.__module__.startswith(own.partition(".")[0])
    }


def _split(model: nn.Module) -> list[dict[str, Any]]:
    """As Muon is meant to be used: matrices by it, all else by AdamW."""
    matrices = [each for each in model.parameters() if each.dim() >= 2]
    others = [each for each in model.parameters() if each.dim() < 2]
    return [{"params": params, "use_muon": flag} for params, flag in ((matrices, True), (others, False)) if params]


def _ways(kind: type[Optimizer]) -> Iterator[tuple[type[nn.Module], Make]]:
    """How an optimizer of the class may be made, the plainest first; the class alone knows which of them is right."""
    make: Any = kind
    sgd = torch.optim.SGD
    names = inspect.signature(kind.__init__).parameters
    more: dict[str, Any] = {}
    if "num_iterations" in names:
        more["num_iterations"] = 20
    if "num_data" in names:
        more["num_data"] = 20
    if "base_optimizer" in names:
        if "model" in names:
            yield Small, lambda model: make(model, model.parameters(), base_optimizer=sgd, lr=0.01)
        yield Small, lambda model: make(model.parameters(), base_optimizer=sgd, lr=0.01)
        yield Small, lambda model: make(sgd(model.parameters(), lr=0.01, momentum=0.9))
        return
    if "optimizer" in names:
        yield Small, lambda model: make(sgd(model.parameters(), lr=0.01, momentum=0.9))
        return
    if "model" in names:
        yield Small, lambda model: make(model)
        return
    yield Small, lambda model: make(_split(model), **more)
    yield Small, lambda model: make(model.parameters(), **more)
    yield Small, lambda model: make(model.parameters(), lr=0.01, **more)
    yield Matrices, lambda model: make(model.parameters(), **more)
    yield Sparse, lambda model: make(model.table.parameters(), **more)


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return build()


def _loss(model: nn.Module, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 11, (6,), generator=generator)
    return F.mse_loss(model(tokens), torch.randn(6, 4, generator=generator))


def _train(model: nn.Module, optimizer: Optimizer, loop: str) -> list[Tensor]:
    """One of `LOOPS`."""
    losses: list[Tensor] = []
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()  # type: ignore[attr-defined]  # schedule-free ones have it
    for seed in range(NUM_STEPS):

        def closure(seed: int = seed) -> Tensor:
            optimizer.zero_grad()
            with torch.enable_grad():
                loss = _loss(model, seed)
                loss.backward(create_graph=loop == "graph")
            return loss.detach()

        losses.append(closure().clone())
        optimizer.step(closure) if loop == "closure" else optimizer.step()  # type: ignore[arg-type]  # a tensor, not a float
    return losses


class _Numbers:
    """The same random numbers in each run, and the caller's afterwards."""

    def __enter__(self) -> None:
        self._torch, self._python = torch.get_rng_state(), random.getstate()
        torch.manual_seed(0)
        random.seed(0)

    def __exit__(self, *_: object) -> None:
        torch.set_rng_state(self._torch)
        random.setstate(self._python)


def _plain_run(kind: type[Optimizer]) -> tuple[type[nn.Module], Make, str, dict[str, Any]]:
    """How the class can be used in plain torch, and what it leaves behind then."""
    failed: Exception | None = None
    for build, make in _ways(kind):
        for loop in LOOPS:
            try:
                with _Numbers():
                    model = _seeded(build)
                    optimizer = make(model)
                    losses = _train(model, optimizer, loop)
                return build, make, loop, _left_behind(model, optimizer, losses)
            except Exception as error:
                failed = failed or error
    assert failed is not None
    raise failed


def _left_behind(model: nn.Module, optimizer: Optimizer, losses: list[Tensor]) -> dict[str, Any]:
    saved = optimizer.state_dict()
    return {
        "losses": losses,
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "state": saved.get("state"),
        "groups": saved.get("param_groups"),
    }


def _same(one: Any, other: Any) -> bool:
    """To the bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple | deque) and isinstance(other, list | tuple | deque):
        return len(one) == len(other) and all(map(_same, one, other))
    if hasattr(one, "__dict__") and type(one) is type(other) and not callable(one):
        tensors = (
            {
                name: value
                for name, value in vars(each).items()
                if isinstance(value, Tensor | int | float | list | tuple)
            }
            for each in (one, other)
        )
        return _same(*tensors)  # objects of the package's own in the state
    return type(one) is type(other) and bool(one == other or (one != one and other != other))


def survey(kind: type[Optimizer]) -> dict[str, str]:
    """What becomes of the class under each plan: one of the words above, and the reason where there is one."""
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            build, make, loop, expected = _plain_run(kind)
        except Exception as error:
            reason = f"plain torch does not run it so: {type(error).__name__}: {error}"
            return {**dict.fromkeys(PLANS, NOT_RUN), "reason": " ".join(reason.split())[:300]}
        found: dict[str, str] = {}
        for plan, words in PLANS.items():
            verdict, reason = _under(words, build, make, loop, expected)
            if verdict == IDENTICAL and (at_large := _refusal_at_large(words, make)):
                verdict, reason = REFUSED, f"identical for small matrices; for larger ones {at_large}"
            found[plan] = verdict
            if reason:
                found.setdefault("reason", reason)
        return found


def _refusal_at_large(words: Mapping[str, str], make: Make) -> str:
    """Why `manage` refuses the class with a larger matrix; empty where it does not."""
    model = Wide()
    try:
        lowtide.manage(model, make(model), lowtide.make_plan(model, **words), device="cpu").close()
    except LowtideError as error:
        return _in_short(error)
    except Exception:  # the class itself does not take such a model: nothing is said about it
        return ""
    return ""


def _in_short(error: LowtideError) -> str:
    return str(error).partition("; Lowtide updates chunk by chunk")[0]  # what to do is the same for all


def _under(
    words: Mapping[str, str], build: type[nn.Module], make: Make, loop: str, expected: dict[str, Any]
) -> tuple[str, str]:
    model = _seeded(build)
    with _Numbers():
        optimizer = make(model)
        try:
            session = lowtide.manage(model, optimizer, lowtide.make_plan(model, **words), device="cpu")
        except LowtideError as error:
            return REFUSED, str(error).partition("; Lowtide updates chunk by chunk")[
                0
            ]  # what to do is the same for all
        try:
            with session:
                losses = _train(model, optimizer, loop)
                left = _left_behind(model, optimizer, losses)
        except LowtideError as error:
            return REFUSED, f"{type(error).__name__} in the loop: {error}"
    wrong = [part for part in expected if not _same(expected[part], left[part])]
    return (DIFFERENT, ", ".join(wrong)) if wrong else (IDENTICAL, "")


def all_classes() -> dict[str, type[Optimizer]]:
    """The optimizers of the packages that are installed, by names such as `torch.AdamW`."""
    return {
        f"{package}.{name}": kind
        for package, module in installed_packages().items()
        for name, kind in classes_of(package, module).items()
    }


def main() -> None:
    """Survey all classes, and write the record beside the other results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path, default=RESULTS / "optim")
    arguments = parser.parse_args()
    found = []
    for name, kind in all_classes().items():
        row = {"name": name, **survey(kind)}
        found.append(row)
        print(f"{row['name']}: " + ", ".join(row[plan] for plan in PLANS), row.get("reason", "")[:150], flush=True)
    versions = {package: importlib.metadata.version(package) for package in installed_packages()}
    record = {
        "schema": SCHEMA,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "commit": arguments.commit,
        "hardware": {"name": "emulated device"},
        "machine": machine(),
        "torch": torch.__version__,
        "versions": versions,
        "rows": found,
    }
    name = f"classes_{time.strftime('%Y-%m-%dT%H%M')}_{arguments.commit}.json"
    write_json(arguments.out / name, record)


if __name__ == "__main__":
    main()
