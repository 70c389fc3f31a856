"""Updates through our own kernels inside a session: as a plain loop over the reference, wherever chunks are updated."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import ConfigError, OptimizerStateError, UnknownNameError, UnsupportedOptimizerError
from lowtide.memory.groups import find_groups
from lowtide.memory.layout import lay_out
from lowtide.optim import host_kernel, reference
from lowtide.optim.formats import update_key
from lowtide.optim.parameter_state import new_state
from lowtide.optim.precision import numerics_of, rounding_for
from lowtide.optim.rules import require_rule
from lowtide.optim.update_types import Piece
from lowtide.runtime.timeline import Reason
from tests.zoo import bf16_safe


@pytest.fixture(autouse=True)
def safe() -> Iterator[None]:
    with bf16_safe():
        yield


WIDTH = 64
PLACES: list[dict[str, Any]] = [
    {"weights": "resident", "update": "device"},
    {"weights": "streamed", "update": "device"},
    {"weights": "streamed", "update": "host"},
    {"weights": "resident", "update": "host"},
    {"weights": "streamed", "update": 0.5},
    {"weights": "streamed", "update": "paged"},
    {"weights": "resident", "update": "paged"},
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]  # a module's call has no type


def network(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3))).to(dtype)


def batch(step: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


class PlainKernels:
    """The reference loop: gradients of plain autograd, and the same kernel on each parameter by itself."""

    def __init__(self, optimizer: torch.optim.Optimizer, precision: str, moments: str, seed: int) -> None:
        self.optimizer = optimizer
        self.numerics = numerics_of(precision, moments, seed=seed)[1]
        self.states: dict[int, Any] = {}

    def step(self, max_norm: float | None = None) -> None:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        factor = 1.0
        if max_norm is not None:
            norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float32) for p in parameters]
            factor = float(torch.clamp(max_norm / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-6), max=1.0))
        number = 0
        for group in self.optimizer.param_groups:
            rule = require_rule(self.optimizer, group)
            for p in group["params"]:
                state = self.states.setdefault(id(p), new_state(p, rule, self.numerics))
                state.step += 1
                piece = Piece(
                    weight=p.detach().flatten(),
                    gradient=p.grad.flatten(),
                    state=state.tensors,
                    rule=rule,
                    step=state.step,
                    remainder=state.remainder,
                    master=state.master,
                    key=update_key(self.numerics.seed, number, state.step),
                )
                kernel = host_kernel.update if host_kernel.is_available() else reference.update
                kernel(
                    [piece],
                    rounding=rounding_for(p, self.numerics),
                    moments=self.numerics.moments,
                    gradient_factor=factor,
                )
                number += 1

    def zero_grad(self) -> None:
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.grad = None


def train(
    model: nn.Module, optimizer: Any, scheduler: Any, *, accumulate: int = 1, clip: float | None = None
) -> list[float]:
    losses = []
    for step in range(6):
        for part in range(accumulate):
            dtype = next(model.parameters()).dtype
            loss = model(batch(10 * step + part, dtype)).float().square().mean()
            loss.backward()
            losses.append(loss.item())
        if clip is None:
            optimizer.step()
        else:
            optimizer.step(clip)
        scheduler.step()
        optimizer.zero_grad()
    return losses


def run(
    place: dict[str, Any] | None,
    precision: str,
    moments: str = "fp32",
    *,
    clip: float | None = None,
    accumulate: int = 1,
    schedule: str = "deferred",
) -> tuple[nn.Module, list[float]]:
    dtype = numerics_of(precision)[0].dtype
    model = network(dtype)
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    if place is None:
        plain = PlainKernels(optimizer, precision, moments, 5)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # the scheduler asks
        return model, train(model, plain, scheduler, accumulate=accumulate, clip=clip)
    layout = lay_out(find_groups(model), chunk_bytes=1 << 14)
    plan = lowtide.make_plan(layout, schedule=schedule, **place)
    with lowtide.manage(
        model, optimizer, plan, device="cpu", precision=precision, moments=moments, seed=5, max_grad_norm=clip
    ):
        losses = train(model, optimizer, scheduler, accumulate=accumulate)
    return model, losses


def assert_same(one: tuple[nn.Module, list[float]], other: tuple[nn.Module, list[float]]) -> None:
    assert one[1] == other[1]
    for (name, expected), found in zip(one[0].named_parameters(), other[0].parameters(), strict=True):
        assert torch.equal(expected, found), name


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
    assert_same(run(None, precision, moments), run(place, precision, moments, schedule=schedule))


@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place['weights']} {place['update']}")
@pytest.mark.parametrize("accumulate", [1, 3])
def test_clipping_by_a_factor(place: dict[str, Any], accumulate: int) -> None:
    plain = run(None, "bf16 exact", clip=0.01, accumulate=accumulate)
    assert_same(plain, run(place, "bf16 exact", clip=0.01, accumulate=accumulate))
    assert plain[1] != run(None, "bf16 exact", accumulate=accumulate)[1]


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


@pytest.mark.parametrize("update", [0.5, "paged"])
@pytest.mark.parametrize("moments", ["fp32", "8bit"])
@pytest.mark.parametrize("precision", ["bf16 exact", "bf16 stochastic"])
def test_resume_is_exact(precision: str, moments: str, update: Any) -> None:
    def part(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            model(batch(step, torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def manage(model: nn.Module, optimizer: torch.optim.Optimizer) -> lowtide.Session:
        plan = lowtide.make_plan(model, update=update)
        return lowtide.manage(model, optimizer, plan, device="cpu", precision=precision, moments=moments, seed=7)

    whole = network(torch.bfloat16)
    optimizer = adamw(whole)
    with manage(whole, optimizer):
        part(whole, optimizer, range(8))
    first = network(torch.bfloat16)
    optimizer = adamw(first)
    with manage(first, optimizer):
        part(first, optimizer, range(4))
        saved = copy.deepcopy((first.state_dict(), optimizer.state_dict()))
    entries = saved[1]["state"][0]
    assert {"step", "exp_avg", "exp_avg_sq", *(["master"] if precision == "bf16 exact" else [])} == set(entries)
    assert entries["exp_avg"].dtype is torch.float32
    second = network(torch.bfloat16)
    second.load_state_dict(saved[0])
    optimizer = adamw(second)
    with manage(second, optimizer):
        optimizer.load_state_dict(saved[1])
        part(second, optimizer, range(4, 8))
    for (name, one), other in zip(whole.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_a_closed_session_leaves_an_optimizer_that_steps() -> None:
    model = network(torch.bfloat16)
    optimizer = adamw(model)
    with lowtide.manage(model, optimizer, lowtide.make_plan(model), device="cpu", precision="bf16 exact"):
        model(batch(0, torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(batch(1, torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
    state = optimizer.state[next(model.parameters())]
    assert int(state["step"]) == 2
    assert state["exp_avg"].dtype is torch.bfloat16


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
        lowtide.manage(model, optimizer, plan, device="cpu", precision="fp32", seed=1.5)  # type: ignore[arg-type]
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


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    dtype = next(model.parameters()).dtype
    model(batch(step, dtype)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_state_from_before_goes_on() -> None:
    """Three plain steps, three managed ones, three plain ones: as nine of torch's own, to rounding."""
    plain, model = network(torch.float32), network(torch.float32)
    optimizers = adamw(plain), adamw(model)
    for step in range(9):
        one_step(plain, optimizers[0], step)
    for step in range(3):
        one_step(model, optimizers[1], step)
    with lowtide.manage(model, optimizers[1], lowtide.make_plan(model), device="cpu", precision="fp32"):
        for step in range(3, 6):
            one_step(model, optimizers[1], step)
    for step in range(6, 9):
        one_step(model, optimizers[1], step)
    assert int(optimizers[1].state[model[0].up.weight]["step"]) == 9  # type: ignore[union-attr]  # a block
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_refused_session_gives_the_state_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network(torch.float32)
    optimizer = adamw(model)
    one_step(model, optimizer, 0)
    before = copy.deepcopy(optimizer.state_dict()["state"])

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr("lowtide.runtime.model_calls.apply", refuse)
    plan = lowtide.make_plan(model, activations="recompute")
    with pytest.raises(RuntimeError, match="no"):
        lowtide.manage(model, optimizer, plan, device="cpu", precision="fp32")
    after = optimizer.state_dict()["state"]
    assert before.keys() == after.keys()
    for key, entries in before.items():
        for name, value in entries.items():
            assert torch.equal(value, after[key][name]), (key, name)


def test_close_gives_the_model_back_whatever_the_optimizer_says() -> None:
    model = network(torch.float32)
    optimizer = adamw(model)
    session = lowtide.manage(model, optimizer, lowtide.make_plan(model), device="cpu", precision="fp32")
    one_step(model, optimizer, 0)
    optimizer.param_groups[0]["lr"] = float("nan")
    session.close()
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert len(optimizer.state) == len(list(model.parameters()))
    assert model(batch(0, torch.float32)).isfinite().all()


def test_expanded_state_does_not_pass_through_the_device() -> None:
    model = network(torch.bfloat16)
    optimizer = adamw(model)
    plan = lowtide.make_plan(model, weights="resident", update="device")
    with lowtide.manage(model, optimizer, plan, device="cpu", precision="bf16 exact", moments="8bit") as session:
        for step in range(2):
            one_step(model, optimizer, step)

        def peak() -> int:
            return next(row.peak_bytes for row in session.stats().tiers if row.tier == "device")

        before = peak()
        optimizer.load_state_dict(optimizer.state_dict())
        assert peak() == before


def test_a_norm_is_that_of_the_whole_sum_however_late_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def norm(*, is_late: bool) -> float:
        model = network(torch.float32)
        optimizer = adamw(model)
        plan = lowtide.make_plan(model, staging_memory="64MiB")
        with lowtide.manage(model, optimizer, plan, device="cpu", precision="fp32", max_grad_norm=1.0) as session:
            gate = threading.Event()
            if is_late:
                machinery = session._machinery
                assert machinery is not None
                machinery._worker.submit(lambda: (gate.wait(), None)[1])
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


@pytest.mark.parametrize("moments", ["fp32", "8bit"])
@pytest.mark.parametrize("update", ["host", "paged"])
def test_a_momentum_that_is_switched_on_with_a_loaded_state(update: str, moments: str) -> None:
    model = network(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, dampening=0.5)
    plan = lowtide.make_plan(model, update=update)
    with lowtide.manage(model, optimizer, plan, device="cpu", precision="fp32", moments=moments):
        one_step(model, optimizer, 0)
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][0]["momentum"] = 0.9
        optimizer.load_state_dict(saved)
        model(batch(1, torch.float32)).square().mean().backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
        for gradient, entries in zip(gradients, optimizer.state_dict()["state"].values(), strict=True):
            # In 8 bits within a hundredth of the block's largest; without dampening it would be half of it.
            tolerance = float(gradient.abs().max()) / 50 if moments == "8bit" else 0.0
            torch.testing.assert_close(entries["momentum_buffer"], gradient, rtol=0, atol=tolerance)


def test_host_state_is_not_the_devices() -> None:
    peaks = []
    for precision in (None, "fp32"):
        model = network(torch.float32)
        optimizer = adamw(model)
        with lowtide.manage(model, optimizer, lowtide.make_plan(model), device="cpu", precision=precision) as session:
            one_step(model, optimizer, 0)
            peaks.append(next(row.peak_bytes for row in session.stats().tiers if row.tier == "device"))
    assert peaks[1] <= peaks[0]


def test_loading_again_frees_what_was_locked() -> None:
    model = network(torch.bfloat16)
    optimizer = adamw(model)
    plan = lowtide.make_plan(model, update="paged")
    with lowtide.manage(model, optimizer, plan, device="cpu", precision="bf16 exact") as session:
        one_step(model, optimizer, 0)
        managed = session._machinery._managed  # type: ignore[union-attr]  # open
        assert managed is not None
        pages = managed.runner.pages  # type: ignore[attr-defined]  # of kernels
        sizes = set()
        for _ in range(3):
            optimizer.load_state_dict(optimizer.state_dict())
            sizes.add(len(pages._memory))
        assert sizes == {len(list(model.parameters()))}
