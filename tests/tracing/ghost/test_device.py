"""`torch.cuda` in a trace: the target card's answers, and the old ones afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.hardware import find_hardware
from lowtide.tracing.ghost.device import cuda_functions
from tests.tracing.ghost.ghost_process import GhostProcess, Lab


def test_it_answers_for_the_card() -> None:
    card = find_hardware("rtx-4090")
    with cuda_functions(card):
        assert torch.cuda.is_available()
        assert (torch.cuda.device_count(), torch.cuda.current_device()) == (1, 0)
        assert torch.cuda.get_device_capability() == card.compute_capability
        assert torch.cuda.get_device_properties(0).total_memory == card.memory_bytes
        assert torch.cuda.mem_get_info() == (card.memory_bytes, card.memory_bytes)
        assert torch.cuda.memory_allocated() == 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.manual_seed_all(3)
        torch.cuda.nvtx.range_push("block")
        torch.cuda.nvtx.range_pop()


def test_everything_is_put_back() -> None:
    before = dict(vars(torch.cuda)), dict(vars(torch.cuda.nvtx))
    with pytest.raises(KeyError), cuda_functions(find_hardware("h200")):
        raise KeyError
    assert (dict(vars(torch.cuda)), dict(vars(torch.cuda.nvtx))) == before


def test_every_way_to_name_the_device(ghosts: GhostProcess) -> None:
    def step(lab: Lab) -> list[str]:
        from lowtide.tracing.ghost.device import LiteralDevices

        host, card = torch.arange(3), lab.ghost(3)
        with LiteralDevices(lab.machine.device):
            made = [
                torch.zeros(3, device="cuda"), torch.tensor([1.0], device="cuda:0"), torch.empty(2, device=torch.device("cuda", 0)),
                torch.arange(4, device="cuda"), torch.randn(2, 2, device="cuda"), torch.zeros_like(host, device="cuda"),
                host.new_ones(2, device="cuda"), torch.as_tensor([1], device="cuda"), torch.linspace(0, 1, 3, device="cuda"),
                host.to("cuda"), host.to("cuda", torch.float16), host.to(device="cuda"), host.cuda(), host.cuda(0),
                host.to(torch.device("cuda")), card.cuda(), card.to("cuda"),
            ]  # fmt: skip
            with torch.device("cuda"):
                made.append(torch.zeros(3))
        return [str(tensor.device) for tensor in made]

    assert set(ghosts(step)) == {"ghost:0"}


def test_other_devices_stay_what_they_are(ghosts: GhostProcess) -> None:
    def step(lab: Lab) -> list[str]:
        from lowtide.tracing.ghost.device import LiteralDevices

        with LiteralDevices(lab.machine.device):
            made = [
                torch.zeros(2),
                torch.zeros(2, device="cpu"),
                torch.zeros(2, device="meta"),
                torch.ones(2).to("cpu"),
            ]
        return [tensor.device.type for tensor in made]

    assert ghosts(step) == ["cpu", "cpu", "meta", "cpu"]


class SaysCuda(nn.Module):
    """Names the device in the forward, in a checkpoint (run again in the backward) and asks for the card."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def block(self, x: Tensor) -> Tensor:
        return self.linear(x) + torch.ones(64, device="cuda")

    def forward(self, x: Tensor) -> Tensor:
        if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
            raise AssertionError
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        hidden: Tensor = checkpoint(self.block, x.cuda(), use_reentrant=False)
        return hidden.pin_memory().mean() if not hidden.is_cuda else hidden.mean()


class SaysNothing(SaysCuda):
    """The same with the tensor's own device."""

    def block(self, x: Tensor) -> Tensor:
        return self.linear(x) + torch.ones(64, device=x.device)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return hidden.mean()


def test_a_model_that_says_cuda_costs_what_one_that_does_not() -> None:
    batch = (torch.randn(512, 64),)
    said, unsaid = (lowtide.trace(model, batch, optimizer=torch.optim.AdamW) for model in (SaysCuda(), SaysNothing()))
    assert said.curve.tolist() == unsaid.curve.tolist()


def test_the_caller_is_untouched() -> None:
    was_available = torch.cuda.is_available()
    lowtide.trace(SaysCuda(), (torch.randn(8, 64),))
    assert torch.cuda.is_available() == was_available
    if not was_available:
        with pytest.raises((AssertionError, RuntimeError)):
            torch.zeros(1, device="cuda")
