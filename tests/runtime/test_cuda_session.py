"""On a GPU: bit-identical under deterministic algorithms, poisoned buffers, budgets held by the allocator's own limit."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.memory.chunk import lay_out
from lowtide.memory.groups import find_groups
from tests.runtime.test_identity import CHUNK_BYTES, PLACES, place_name, two_groups, warm_up_then_decay
from tests.zoo import ZOO, ZooModel, assert_same, train, zoo

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class HostStep:
    """The reference for updates on the host: plain torch, whose gradients are copied to the CPU and stepped there, fused: the
    step that the host of a CUDA model takes where the choice is torch's.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.twins = {name: nn.Parameter(value.detach().cpu()) for name, value in model.named_parameters()}
        twin_of = {id(value): self.twins[name] for name, value in model.named_parameters()}
        groups = [
            {**group, "params": [twin_of[id(parameter)] for parameter in group["params"]]}
            for group in two_groups(model)
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)

    def step(self) -> None:
        for name, parameter in self.model.named_parameters():
            self.twins[name].grad = None if parameter.grad is None else parameter.grad.detach().cpu()
        self.optimizer.step()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.twins[name])

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None


def run(
    model: ZooModel, place: dict[str, Any] | None, *, dtype: torch.dtype, **loop: Any
) -> tuple[nn.Module, list[float]]:
    """From the same seed on the GPU; host updates have their own reference, because a CPU's sums are not a GPU's."""
    network = model.build(True, dtype)
    batches = model.batches(20, device="cuda")
    if place is not None and "plain" not in place:
        optimizer = torch.optim.AdamW(two_groups(network), lr=1e-2)
        layout = lay_out(find_groups(network), chunk_bytes=CHUNK_BYTES)
        session = lowtide.manage(network, optimizer, lowtide.make_plan(layout, **place), poison=True)
        losses = train(
            network, optimizer, batches, scheduler=warm_up_then_decay(optimizer), loss=model.loss, seed=7, **loop
        )
        session.close()
        return network, losses
    network.to("cuda")
    if place is not None:
        step = HostStep(network)
        scheduler = warm_up_then_decay(step.optimizer)
        losses = train(network, step, batches, scheduler=scheduler, loss=model.loss, seed=7, **loop)  # type: ignore[arg-type]
    else:
        optimizer = torch.optim.AdamW(two_groups(network), lr=1e-2)
        losses = train(
            network, optimizer, batches, scheduler=warm_up_then_decay(optimizer), loss=model.loss, seed=7, **loop
        )
    return network, losses


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("schedule", ["deferred", "in_backward"])
@pytest.mark.parametrize("place", PLACES, ids=place_name)
@pytest.mark.parametrize("name", tuple(ZOO))
def test_identity(name: str, place: dict[str, Any], schedule: str, dtype: torch.dtype) -> None:
    is_on_host = place["update"] == "host"
    loop: dict[str, Any] = {}
    if schedule == "deferred":
        loop = {"accumulation": 4}
        if not is_on_host:
            loop["clip"] = 1.0
    plain = run(zoo(name), {"plain": True} if is_on_host else None, dtype=dtype, **loop)
    managed = run(zoo(name), {**place, "schedule": schedule}, dtype=dtype, **loop)
    assert_same(plain[0].cpu(), managed[0].cpu(), plain[1], managed[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize(("ours", "theirs"), [({}, {"fused": True}), ({"foreach": False}, {"foreach": False})], ids=str)
@pytest.mark.filterwarnings("ignore:the host updates")
def test_the_host_takes_torchs_fused_step_unless_the_user_chose(
    kind: Any, dtype: torch.dtype, ours: dict[str, bool], theirs: dict[str, bool]
) -> None:
    gradients = [torch.randn(257, 33, generator=torch.Generator().manual_seed(step)).to(dtype) for step in range(3)]
    weight = torch.randn(257, 33, generator=torch.Generator().manual_seed(9)).to(dtype)
    plain = nn.Parameter(weight.clone())
    reference = kind([plain], lr=1e-2, **theirs)
    model = nn.Linear(33, 257, bias=False, dtype=dtype)
    model.weight.data.copy_(weight)
    optimizer = kind(model.parameters(), lr=1e-2, **ours)
    with lowtide.manage(model, optimizer, lowtide.make_plan(model, update="host"), device="cuda"):
        for gradient in gradients:
            plain.grad = gradient.clone()
            reference.step()
            (model(torch.eye(33, dtype=dtype, device="cuda")).T * gradient.cuda()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(model.weight.detach().cpu(), plain.detach())


def test_a_slow_update_is_warned_of_with_the_words_that_are_fast() -> None:
    model = nn.Linear(64, 64).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.warns(UserWarning, match="precision='bf16 exact' updates them by Lowtide's kernel"):
        lowtide.manage(model, optimizer, lowtide.make_plan(model), device="cuda").close()
    lowtide.manage(model, optimizer, lowtide.make_plan(model), device="cuda", precision="bf16 exact").close()
    lowtide.manage(model, optimizer, lowtide.make_plan(model, update="device"), device="cuda").close()


@pytest.mark.parametrize("is_held", [True, False])
def test_memory_that_old_tensors_hold_in_pieces_is_said(recwarn: pytest.WarningsRecorder, is_held: bool) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    whole = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    del whole
    if not is_held:
        torch.cuda.empty_cache()
    piece = torch.empty(16 << 20, dtype=torch.uint8, device="cuda")  # out of the whole, where that is still there
    model = nn.Linear(8, 8)
    plan = lowtide.make_plan(model, weights="streamed", device_memory="2GiB")
    with lowtide.manage(model, None, plan, device="cuda"):
        told = [str(warning.message) for warning in recwarn if "torch cannot release it" in str(warning.message)]
    assert len(told) == is_held
    del piece
