"""Adafactor through our own kernels inside a session: as a plain loop over the same kernel, wherever chunks are updated."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import OptimizerStateError, UnsupportedOptimizerError
from lowtide.memory.chunk import lay_out
from lowtide.memory.groups import find_groups
from lowtide.optim import Adafactor
from lowtide.optim.device import kernel as device_kernel
from lowtide.optim.rules import Adafactor as AdafactorRule
from lowtide.optim.rules import require_rule
from lowtide.optim.state import ParameterState, new_state
from lowtide.optim.update_types import MatrixPiece, numerics_of, rounding_for, update_key
from tests.runtime.kernel_loops import PLACES, WIDTH, assert_same, batch, network, one_step, train, trained_in_turn
from tests.zoo import bf16_safe


@pytest.fixture(autouse=True)
def safe() -> Iterator[None]:
    with bf16_safe():
        yield


def adafactor(model: nn.Module) -> Adafactor:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0, "clip_threshold": 0.5},
    ]
    return Adafactor(groups, lr=1e-2)


class PlainKernels:
    """The reference loop: gradients of plain autograd, and the same kernel on each parameter by itself."""

    def __init__(self, optimizer: torch.optim.Optimizer, precision: str, seed: int) -> None:
        self.optimizer = optimizer
        self.numerics = numerics_of(precision, seed=seed)[1]
        self.states: dict[int, ParameterState] = {}

    def step(self, max_norm: float | None = None) -> None:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        factor = 1.0
        if max_norm is not None:
            norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float32) for p in parameters]
            factor = float(torch.clamp(max_norm / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-6), max=1.0))
        number = 0
        for group in self.optimizer.param_groups:
            rule = require_rule(self.optimizer, group)
            assert isinstance(rule, AdafactorRule)
            for p in group["params"]:
                state = self.states.setdefault(id(p), new_state(p, rule, self.numerics))
                state.step += 1
                piece = MatrixPiece(
                    weight=p.detach().view(-1),
                    gradient=p.grad.flatten(),
                    state=state.tensors,
                    rule=rule,
                    step=state.step,
                    shape=tuple(p.shape),
                    stride=p.stride(),
                    remainder=state.remainder,
                    master=state.master,
                    key=update_key(self.numerics.seed, number, state.step),
                )
                device_kernel.update_matrices([piece], rounding=rounding_for(p, self.numerics), gradient_factor=factor)
                number += 1

    def zero_grad(self) -> None:
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.grad = None


def run(
    place: dict[str, Any] | None,
    precision: str,
    moments: str = "fp32",
    *,
    clip: float | None = None,
    accumulate: int = 1,
    schedule: str = "deferred",
) -> tuple[nn.Module, list[float]]:
    model = network(numerics_of(precision)[0].dtype)
    optimizer = adafactor(model)
    # From zero, as a warm-up does.
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 4)
    if place is None:
        plain = PlainKernels(optimizer, precision, 5)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # the scheduler asks
        return model, train(model, plain, scheduler, accumulate=accumulate, clip=clip)
    plan = lowtide.make_plan(lay_out(find_groups(model), chunk_bytes=1 << 14), schedule=schedule, **place)
    with lowtide.manage(
        model, optimizer, plan, device="cpu", precision=precision, moments=moments, seed=5, max_grad_norm=clip
    ):
        losses = train(model, optimizer, scheduler, accumulate=accumulate)
    return model, losses


plain_run = functools.cache(functools.partial(run, None))
"""The reference of many places, made once."""


@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place['weights']} {place['update']}")
@pytest.mark.parametrize("precision", ["fp32", "bf16 exact", "bf16 stochastic", "bf16 nearest", "fp16 exact"])
@pytest.mark.parametrize("schedule", ["deferred", "in_backward"])
def test_as_the_plain_loop(place: dict[str, Any], precision: str, schedule: str) -> None:
    assert_same(plain_run(precision), run(place, precision, schedule=schedule))


@pytest.mark.parametrize("moments", ["bf16", "8bit"])
def test_the_format_of_moments_is_not_that_of_its_vectors(moments: str) -> None:
    place: dict[str, Any] = {"weights": "streamed", "update": 0.5}
    with pytest.warns(UserWarning, match=f"moments='{moments}' has no effect with Adafactor.*leave moments out"):
        other = run(place, "bf16 exact", moments)
    assert_same(run(place, "bf16 exact"), other)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place['weights']} {place['update']}")
@pytest.mark.parametrize("accumulate", [1, 3])
def test_clipping_by_a_factor(place: dict[str, Any], accumulate: int) -> None:
    plain = plain_run("bf16 stochastic", clip=0.01, accumulate=accumulate)
    assert_same(plain, run(place, "bf16 stochastic", clip=0.01, accumulate=accumulate))
    assert plain[1] != plain_run("bf16 stochastic", accumulate=accumulate)[1]


def test_fp32_sessions_go_where_the_optimizer_goes() -> None:
    plain, model = network(torch.float32), network(torch.float32)
    optimizers = adafactor(plain), adafactor(model)
    with lowtide.manage(model, optimizers[1], lowtide.make_plan(model), device="cpu", precision="fp32"):
        for step in range(10):
            one_step(plain, optimizers[0], step)
            one_step(model, optimizers[1], step)
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("update", ["host", "device"])
def test_exact_weights_are_an_fp32_master_bit_for_bit(update: str) -> None:
    """Same gradients in, same numbers: against an fp32 copy that the same code updates."""
    model = network(torch.bfloat16)
    master = copy.deepcopy(model).float()
    optimizer, plain = adafactor(model), PlainKernels(adafactor(master), "fp32", 0)
    plan = lowtide.make_plan(model, update=update)
    with lowtide.manage(model, optimizer, plan, device="cpu", precision="bf16 exact"):
        for step in range(20):
            model(batch(step, torch.bfloat16)).float().square().mean().backward()
            for exact, full in zip(model.parameters(), master.parameters(), strict=True):
                assert exact.grad is not None
                full.grad = exact.grad.float()
            optimizer.step()
            plain.step()
            optimizer.zero_grad()
        saved = optimizer.state_dict()
    masters = [saved["state"][key]["master"] for group in saved["param_groups"] for key in group["params"]]
    parameters = [p for group in plain.optimizer.param_groups for p in group["params"]]
    for expected, found in zip(parameters, masters, strict=True):
        assert torch.equal(found.view(torch.int32), expected.detach().view(torch.int32))


@pytest.mark.parametrize("update", [0.5, "paged"])
@pytest.mark.parametrize("precision", ["bf16 exact", "bf16 stochastic"])
def test_resume_is_exact(precision: str, update: Any) -> None:
    def part(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            one_step(model, optimizer, step)

    def manage(model: nn.Module, optimizer: torch.optim.Optimizer) -> lowtide.Session:
        plan = lowtide.make_plan(model, update=update)
        return lowtide.manage(model, optimizer, plan, device="cpu", precision=precision, seed=3)

    whole, first, second = (network(torch.bfloat16) for _ in range(3))
    optimizer = adafactor(whole)
    with manage(whole, optimizer):
        part(whole, optimizer, range(8))
    optimizer = adafactor(first)
    with manage(first, optimizer):
        part(first, optimizer, range(4))
        saved = copy.deepcopy((first.state_dict(), optimizer.state_dict()))
    entries = saved[1]["state"][0]
    assert set(entries) == {"step", "row", "col", "master" if precision == "bf16 exact" else "moments"}
    assert entries["step"] == 4
    assert (entries["row"].dtype, entries["row"].shape) == (torch.float32, (2 * WIDTH,))
    second.load_state_dict(saved[0])
    optimizer = adafactor(second)
    with manage(second, optimizer):
        optimizer.load_state_dict(saved[1])
        part(second, optimizer, range(4, 8))
    for (name, one), other in zip(whole.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_state_from_before_goes_on() -> None:
    """Three plain steps, three managed ones, three plain ones: as nine of the optimizer's own, to rounding."""
    plain, model, optimizer = trained_in_turn(adafactor)
    entries = optimizer.state[next(model.parameters())]
    assert entries["step"] == 9
    assert type(entries["step"]) is int
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_closed_bf16_session_leaves_an_optimizer_that_steps() -> None:
    model = network(torch.bfloat16)
    optimizer = adafactor(model)
    with lowtide.manage(model, optimizer, lowtide.make_plan(model), device="cpu", precision="bf16 stochastic"):
        one_step(model, optimizer, 0)
        assert not optimizer.state
    one_step(model, optimizer, 1)
    entries = optimizer.state[next(model.parameters())]
    assert entries["step"] == 2
    assert entries["row"].dtype is torch.bfloat16


def test_a_convolution_in_another_order_of_memory() -> None:
    def trained(memory_format: torch.memory_format) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)).to(memory_format=memory_format)  # type: ignore[call-overload]
        optimizer = Adafactor(model.parameters(), lr=1e-2)
        with lowtide.manage(model, optimizer, lowtide.make_plan(model), device="cpu", precision="fp32"):
            for step in range(3):
                image = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(step))
                model(image).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            optimizer.load_state_dict(optimizer.state_dict())
        return [parameter.detach().clone() for parameter in model.parameters()]

    for one, other in zip(trained(torch.contiguous_format), trained(torch.channels_last), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_gradients_that_the_kernel_unscales() -> None:
    ends = []
    for scale in (1.0, 1024.0):
        model = network(torch.float32)
        optimizer = adafactor(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        with lowtide.manage(
            model, optimizer, lowtide.make_plan(model), device="cpu", precision="fp32", max_grad_norm=0.1
        ):
            for step in range(3):
                scaler.scale(model(batch(step, torch.float32)).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        ends.append([parameter.detach().clone() for parameter in model.parameters()])
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_host_bytes_are_foreseen() -> None:
    model = network(torch.bfloat16)
    optimizer = adafactor(model)
    num_elements = sum(p.numel() for p in model.parameters())
    num_statistics = sum(sum(p.shape) for p in model.parameters())
    plan = lowtide.make_plan(model, schedule="deferred", staging_memory="64KiB")
    needed = {}
    for precision in ("bf16 exact", "bf16 stochastic"):
        with lowtide.manage(model, optimizer, plan, device="cpu", precision=precision) as session:
            needed[precision] = next(row.predicted_bytes for row in session.stats().tiers if row.tier == "host")
    # Weights and gradients 2 each, a remainder 2, and the two vectors in fp32.
    assert needed["bf16 exact"] - needed["bf16 stochastic"] == 2 * num_elements
    rest = needed["bf16 stochastic"] - 4 * num_elements - 4 * num_statistics
    assert 0 <= rest <= (64 << 10) + 4096 + 512 * 2 * len(list(model.parameters()))


@pytest.mark.parametrize("precision", ["bf16 exact", "bf16 stochastic", "bf16 nearest"])
def test_an_update_takes_little_memory_of_the_device(precision: str) -> None:
    """A matrix of 4 Mi elements: its own step makes five fp32 copies, 80 MiB; ours some MiB, whatever its size."""
    peaks = {}
    for chosen in (None, precision):
        model = nn.Sequential(nn.Linear(1024, 4096, bias=False), nn.Linear(4096, 8, bias=False)).to(torch.bfloat16)
        weights = sum(p.nbytes for p in model.parameters())
        optimizer = Adafactor(model.parameters(), lr=1e-3)
        plan = lowtide.make_plan(model, weights="resident", update="device")
        with lowtide.manage(model, optimizer, plan, device="cpu", precision=chosen) as session:
            for step in range(2):
                inputs = torch.randn(4, 1024, generator=torch.Generator().manual_seed(step)).bfloat16()
                model(inputs).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            peaks[chosen] = next(row.peak_bytes for row in session.stats().tiers if row.tier == "device")
    remainder = weights if precision == "bf16 exact" else 0
    # Weights, gradients, remainder, and vectors; then temporaries.
    assert peaks[precision] - 2 * weights - remainder <= 9 << 20
    assert peaks[None] - 2 * weights >= 5 * 4 * 1024 * 4096


def test_what_has_no_kernel_and_what_is_not_its_state() -> None:
    model = network(torch.float32)
    plan = lowtide.make_plan(model)
    with pytest.raises(
        UnsupportedOptimizerError, match="torch.optim.Adafactor looks at whole .*lowtide.optim.Adafactor"
    ):
        lowtide.manage(model, torch.optim.Adafactor(model.parameters()), plan, device="cpu", precision="fp32")
    optimizer = Adafactor(model.parameters())
    other = torch.optim.AdamW(model.parameters())
    one_step(model, other, 0)
    with lowtide.manage(model, optimizer, plan, device="cpu", precision="fp32"):
        with pytest.raises(OptimizerStateError, match="Adafactor with these settings keeps step, row, col"):
            optimizer.load_state_dict(other.state_dict())
        one_step(model, optimizer, 0)


ON_THE_DEVICE = [place for place in PLACES if place["update"] in ("device", "paged")]


@pytest.mark.gpu
@pytest.mark.parametrize("place", ON_THE_DEVICE, ids=lambda place: f"{place['weights']} {place['update']}")
@pytest.mark.parametrize("precision", ["fp32", "bf16 exact", "bf16 stochastic"])
@pytest.mark.parametrize("schedule", ["deferred", "in_backward"])
def test_on_a_gpu_as_the_plain_loop(place: dict[str, Any], precision: str, schedule: str) -> None:
    dtype = numerics_of(precision)[0].dtype

    def steps(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        for step in range(4):
            model(batch(step, dtype).cuda()).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach().cpu().clone() for parameter in model.parameters()]

    plain, model = network(dtype).cuda(), network(dtype)
    expected = steps(plain, PlainKernels(adafactor(plain), precision, 5))
    optimizer = adafactor(model)
    plan = lowtide.make_plan(model, schedule=schedule, **place)
    with lowtide.manage(model, optimizer, plan, device="cuda", precision=precision, seed=5):
        found = steps(model, optimizer)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
