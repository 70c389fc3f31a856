"""Updates through our own kernels inside a session: as a plain loop over the reference, wherever chunks are updated."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import ConfigError, OptimizerStateError, UnknownNameError, UnsupportedOptimizerError
from lowtide.planning.timeline import Reason
from tests.runtime.kernel_loops import (
    PLACES,
    adamw,
    assert_same,
    batch,
    network,
    one_step,
    run,
)
from tests.zoo import bf16_safe


@pytest.fixture(autouse=True)
def safe() -> Iterator[None]:
    with bf16_safe():
        yield


plain_run = functools.cache(functools.partial(run, None))
"""The reference of many places, made once."""


@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place['weights']} {place['update']}")
@pytest.mark.parametrize(
    ("precision", "moments"),
    [
        ("fp32", "fp32"),
        ("bf16 exact", "fp32"),
        ("bf16 exact", "8bit"),
        ("bf16 exact", "bf16"),
        ("bf16 stochastic", "fp32"),
        ("bf16 nearest", "fp32"),
        ("fp16 exact", "fp32"),
    ],
)
@pytest.mark.parametrize("schedule", ["deferred", "in_backward"])
def test_as_the_plain_loop(place: dict[str, Any], precision: str, moments: str, schedule: str) -> None:
    assert_same(plain_run(precision, moments), run(place, precision, moments, schedule=schedule))


@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place['weights']} {place['update']}")
@pytest.mark.parametrize("accumulate", [1, 3])
def test_clipping_by_a_factor(place: dict[str, Any], accumulate: int) -> None:
    plain = plain_run("bf16 exact", clip=0.01, accumulate=accumulate)
    assert_same(plain, run(place, "bf16 exact", clip=0.01, accumulate=accumulate))
    assert plain[1] != plain_run("bf16 exact", accumulate=accumulate)[1]


def test_exact_bf16_weights_are_the_rounded_fp32_ones() -> None:
    """Same gradients in, same master: against an fp32 copy that takes the same steps."""
    model = network(torch.bfloat16)
    master = copy.deepcopy(model).float()
    optimizers = torch.optim.AdamW(model.parameters(), lr=1e-4), torch.optim.AdamW(master.parameters(), lr=1e-4)
    with lowtide.manage(model, optimizers[0], lowtide.make_plan(model), device="cpu", precision="bf16 exact"):
        for step in range(20):
            model(batch(step, torch.bfloat16)).float().square().mean().backward()
            for exact, full in zip(model.parameters(), master.parameters(), strict=True):
                assert exact.grad is not None
                full.grad = exact.grad.float()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for exact, full in zip(model.parameters(), master.parameters(), strict=True):
        torch.testing.assert_close(exact.float(), full.bfloat16().float(), rtol=0, atol=1e-3)
        assert (exact == full.bfloat16()).float().mean() > 0.99


def test_host_bytes_are_foreseen() -> None:
    model = network(torch.bfloat16)
    optimizer = adamw(model)
    num_elements = sum(p.numel() for p in model.parameters())
    plan = lowtide.make_plan(model, schedule="in_backward")
    with lowtide.manage(model, optimizer, plan, device="cpu", precision="bf16 exact") as session:
        host = next(row for row in session.stats().tiers if row.tier == "host")
    # 2 for the weight, 2 for the remainder, 4 and 4 for the moments; staging for gradients of chunks on top.
    assert 12 * num_elements <= host.predicted_bytes <= 16 * num_elements + 8192


def test_bad_input() -> None:
    model = network(torch.float32)
    optimizer = adamw(model)
    plan = lowtide.make_plan(model)
    with pytest.raises(UnknownNameError, match="bf16 exact"):
        lowtide.manage(model, optimizer, plan, device="cpu", precision="bf16 exakt")
    with pytest.raises(UnknownNameError, match="8bit"):
        lowtide.manage(model, optimizer, plan, device="cpu", precision="fp32", moments="8 bit")
    with pytest.raises(ConfigError, match=r"seed is 1\.5; give a whole number"):
        lowtide.manage(model, optimizer, plan, device="cpu", precision="fp32", seed=1.5)  # type: ignore[arg-type]  # the point
    with pytest.raises(ConfigError, match=r"convert it before the optimizer is made: model.to\(torch.bfloat16\)"):
        lowtide.manage(model, optimizer, plan, device="cpu", precision="bf16 exact")
    with pytest.raises(ConfigError, match="give precision= as well"):
        lowtide.manage(model, optimizer, plan, device="cpu", moments="8bit")
    with pytest.raises(UnsupportedOptimizerError, match="no kernel"):
        lowtide.manage(model, torch.optim.Adagrad(model.parameters()), plan, device="cpu", precision="fp32")
    with lowtide.manage(model, optimizer, plan, device="cpu", precision="fp32"):
        other = torch.optim.AdamW(nn.Linear(3, 3).parameters())
        with pytest.raises(OptimizerStateError, match="param groups"):
            optimizer.load_state_dict(other.state_dict())
        optimizer.param_groups[0]["lr"] = None
        model(batch(0, torch.float32)).square().mean().backward()
        with pytest.raises(ConfigError, match="lr of a param group is None"):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 1e-3
        optimizer.step()


def test_visiting_state_is_copied_in_and_out_and_not_kept() -> None:
    model = network(torch.bfloat16)
    optimizer = adamw(model)
    plan = lowtide.make_plan(model, update="paged", schedule="in_backward")
    num_elements = sum(parameter.numel() for parameter in model.parameters())
    with lowtide.manage(model, optimizer, plan, device="cpu", precision="bf16 exact", moments="8bit") as session:
        for step in range(3):
            model(batch(step, torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        stats = session.stats()
    out = stats.moved_bytes("to host", Reason.PAGE_OUT)
    # Remainder 2, moments 1 and 1, and two scales of 4 bytes for each 128 elements.
    assert 3 * 4 * num_elements <= out <= 3 * (4.2 * num_elements + 5 * 512 * len(list(model.parameters())))
    # The first step has nothing to bring; the next two bring ahead what they use.
    assert stats.moved_bytes("to device", Reason.PAGE_IN) == out
    pinned = next(row for row in stats.tiers if row.tier == "pinned")
    assert pinned.peak_bytes >= 4 * num_elements


def test_visiting_state_needs_our_kernels() -> None:
    model = network(torch.bfloat16)
    with pytest.raises(ConfigError, match="'paged'"):
        lowtide.manage(model, adamw(model), lowtide.make_plan(model, update="paged"), device="cpu")


def test_a_norm_is_that_of_the_whole_sum_however_late_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def norm(*, is_late: bool) -> float:
        model = network(torch.float32)
        optimizer = adamw(model)
        plan = lowtide.make_plan(model, staging_memory="64MiB")
        with lowtide.manage(model, optimizer, plan, device="cpu", precision="fp32", max_grad_norm=1.0) as session:
            gate = threading.Event()
            if is_late:
                plan_run = session._plan_run
                assert plan_run is not None
                plan_run._worker.submit(lambda: (gate.wait(), None)[1])
            for step in range(3):
                model(batch(step, torch.float32)).square().mean().backward()
            threading.Timer(0.2, gate.set).start()
            optimizer.step()
            assert session.last_grad_norm is not None
            return float(session.last_grad_norm)

    assert norm(is_late=True) == norm(is_late=False)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place['weights']} {place['update']}")
def test_what_is_written_to_fp16_weights_is_the_new_master(place: dict[str, Any]) -> None:
    model = network(torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    halves = {name: torch.full_like(value, 0.5) for name, value in model.state_dict().items()}
    with lowtide.manage(model, optimizer, lowtide.make_plan(model, **place), device="cpu", precision="fp16 exact"):
        for _ in range(2):
            model.load_state_dict(halves)
            one_step(model, optimizer, 0)
    for parameter in model.parameters():
        torch.testing.assert_close(parameter.float(), torch.full_like(parameter.float(), 0.5), rtol=0, atol=1e-2)


def test_clipping_of_gradients_that_the_kernel_unscales() -> None:
    norms = []
    for scale in (1.0, 1024.0):
        model = network(torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        plan = lowtide.make_plan(model)
        with lowtide.manage(model, optimizer, plan, device="cpu", precision="fp32", max_grad_norm=0.1) as session:
            scaler.scale(model(batch(0, torch.float32)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            assert session.last_grad_norm is not None
            norms.append(float(session.last_grad_norm))
        norms.append(float(sum(parameter.detach().double().sum() for parameter in model.parameters())))
    assert norms[0] == pytest.approx(norms[2], rel=1e-5)
    assert norms[1] == pytest.approx(norms[3], rel=1e-6)


@pytest.mark.parametrize("dampening", [0.0, 0.5])
@pytest.mark.parametrize("update", ["host", "device"])
def test_a_momentum_that_is_switched_on_later(update: str, dampening: float) -> None:
    """torch takes the first gradient itself for the momentum, without dampening, whenever that first step is."""
    plain, model = network(torch.float32), network(torch.float32)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, dampening=dampening) for each in (plain, model)]
    with lowtide.manage(model, optimizers[1], lowtide.make_plan(model, update=update), device="cpu", precision="fp32"):
        for step in range(6):
            for each, optimizer in zip((plain, model), optimizers, strict=True):
                optimizer.param_groups[0]["momentum"] = 0.0 if step < 3 else 0.9
                one_step(each, optimizer, step)
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
