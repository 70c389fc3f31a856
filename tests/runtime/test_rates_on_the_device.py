"""Settings that are tensors, as a learning rate on the device is: read by the loop's thread, once for all chunks."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import lowtide
from lowtide.memory.chunk import lay_out
from lowtide.memory.groups import find_groups

WIDTH = 16


class Distant(torch.Tensor):
    """Stands for a tensor on a real device: whoever reads its value is written down. `cpu` gives a plain one."""

    reads: ClassVar[list[tuple[str, str]]] = []
    READING: ClassVar[frozenset[object]] = frozenset(
        {torch.Tensor.item, torch.Tensor.cpu, torch.Tensor.__float__, torch.Tensor.tolist}
    )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_worker = threading.current_thread().name == "lowtide host worker"
        if func in cls.READING or is_worker:
            cls.reads.append(("worker" if is_worker else "loop", getattr(func, "__name__", str(func))))
        found: Any = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]  # torch's
        return found.as_subclass(torch.Tensor) if func is torch.Tensor.cpu else found


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rate: torch.Tensor) -> list[list[tuple[str, str]]]:
    """Three steps; who read the rate in each of them."""
    found = []
    for step in range(3):
        rate.fill_(0.1 / (1 + step))
        Distant.reads.clear()
        model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if hasattr(optimizer, "settle_for_test"):
            optimizer.settle_for_test()
        found.append(list(Distant.reads))
    return found


@pytest.mark.parametrize("precision", [None, "fp32"])
@pytest.mark.parametrize("schedule", ["deferred", "in_backward"])
@pytest.mark.parametrize("update", ["host", 0.5])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_the_worker_never_reads_them(kind: Any, update: Any, schedule: str, precision: str | None) -> None:
    plain, model = network(), network()
    own_rate = torch.tensor(0.1)
    train(plain, kind(plain.parameters(), lr=own_rate), own_rate)
    rate = torch.tensor(0.1).as_subclass(Distant)
    optimizer = kind(model.parameters(), lr=rate)
    layout = lay_out(find_groups(model), chunk_bytes=512)
    plan = lowtide.make_plan(layout, update=update, schedule=schedule)
    with lowtide.manage(model, optimizer, plan, device="cpu", precision=precision) as session:
        optimizer.settle_for_test = session.settle
        reads = train(model, optimizer, rate)
    for each in reads:
        assert [who for who, _ in each if who == "worker"] == []
        if update == "host" or precision is not None:
            # However many chunks there are: in `step()`, and in backward for what is updated there.
            assert 1 <= len(each) <= (1 if schedule == "deferred" else 2), each
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        if precision is None:
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_betas_are_read_there_too() -> None:
    plain, model = network(), network()
    values = (0.8, 0.9)
    own = tuple(map(torch.tensor, values))
    rate = torch.tensor(0.1)
    settings = {"lr": 0.1, "foreach": False}
    optimizers = [torch.optim.AdamW(each.parameters(), **settings) for each in (plain, model)]  # type: ignore[arg-type]
    optimizers[0].param_groups[0]["betas"] = values
    optimizers[1].param_groups[0]["betas"] = tuple(beta.as_subclass(Distant) for beta in own)
    train(plain, optimizers[0], rate)
    with lowtide.manage(model, optimizers[1], lowtide.make_plan(model), device="cpu", precision="fp32") as session:
        optimizers[1].settle_for_test = session.settle  # type: ignore[attr-defined]  # ours
        reads = train(model, optimizers[1], rate)
    assert [who for each in reads for who, _ in each] == ["loop"] * 2 * 3
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [None, "fp32"])
@pytest.mark.parametrize("schedule", ["deferred", "in_backward"])
@pytest.mark.parametrize("update", ["host", "device", 0.5])
def test_a_rate_on_a_real_device(update: Any, schedule: str, precision: str | None) -> None:
    trained = []
    for is_managed in (False, True):
        model = network()
        rate = torch.tensor(0.1, device="cuda" if is_managed else "cpu")
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        plan = lowtide.make_plan(model, update=update, schedule=schedule)
        session = lowtide.manage(model, optimizer, plan, device="cuda", precision=precision) if is_managed else None
        for step in range(3):
            rate.fill_(0.1 / (1 + step))
            rows = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
            model(rows.to("cuda" if is_managed else "cpu")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if session is not None:
            session.close()
        trained.append([parameter.detach().cpu() for parameter in model.parameters()])
    for one, other in zip(*trained, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
