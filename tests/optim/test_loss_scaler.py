"""LossScaler beside torch's own scaler, step by step, and where torch's cannot go: fp16 weights, floors, ranks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.errors import ConfigError, LossScaleError
from lowtide.optim import DynamicScale, LossScaler, Replenish, StaticScale
from tests.zoo import assert_same_tensors

PLANTED = (2, 3, 9)
"""Steps whose batch makes the gradients infinite."""
SETTINGS: dict[str, Any] = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 4}


def small_net(dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(5, 6, generator=generator)
    if step in PLANTED:
        x[0, 0] = torch.inf
    return x.to(dtype), torch.randint(3, (5,), generator=generator)


def loss_of(model: nn.Module, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x, classes = batch(step, dtype)
    return F.cross_entropy(model(x).float(), classes)


def adamw(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **settings)


def ours(**settings: Any) -> LossScaler:
    return LossScaler(DynamicScale(**{"initial_scale": 1024.0, **SETTINGS, **settings}))


def torchs(**settings: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0, **{**SETTINGS, **settings})


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = {
        f"{index}.{key}": value
        for index, entries in optimizer.state_dict()["state"].items()
        for key, value in entries.items()
    }
    return {key: value.clone() for key, value in {**model.state_dict(), **state}.items()}


def train(scaler: Any, *, clip: bool, accumulation: int, fused: bool = False) -> list[Any]:
    """A usual loop; what it went through."""
    model = small_net()
    optimizer = adamw(model, fused=fused)
    seen: list[Any] = []
    for step in range(16):
        for part in range(accumulation):
            loss = loss_of(model, step if part == 0 else 100 + step)
            scaler.scale(loss / accumulation).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append((scaler.get_scale(), snapshot(model, optimizer)))
    return seen


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("clip", [False, True])
def test_every_step_is_torchs(clip: bool, accumulation: int, fused: bool) -> None:
    scaler = ours()
    found = train(scaler, clip=clip, accumulation=accumulation, fused=fused)
    expected = train(torchs(), clip=clip, accumulation=accumulation, fused=fused)
    assert [scale for scale, _ in found] == [scale for scale, _ in expected]
    assert len({scale for scale, _ in expected}) > 2, "the scale never moved"
    for (_, mine), (_, theirs) in zip(found, expected, strict=True):
        # A fused optimizer that skips inside its kernel has made its empty state; ours was not called.
        common = {key: value for key, value in theirs.items() if key in mine}
        assert_same_tensors(common, mine)
    assert scaler.skipped_steps == len(PLANTED)


def test_a_skipped_step_changes_nothing() -> None:
    model = small_net()
    optimizer = adamw(model)
    scaler = ours()
    for step in range(4):
        before = snapshot(model, optimizer)
        scaler.scale(loss_of(model, step)).backward()
        assert scaler.step(optimizer) is None
        assert scaler.last_step_skipped is (step in PLANTED)
        after = snapshot(model, optimizer)
        if step in PLANTED:
            assert_same_tensors(before, after)
        else:
            assert any(not torch.equal(value, after[key]) for key, value in before.items())
        scaler.update()
        optimizer.zero_grad()


@pytest.mark.parametrize("planted", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_unscaling_is_division_in_fp32(dtype: torch.dtype, planted: float) -> None:
    values = torch.tensor([3.0, 1e-3, 6.0e4, -2.5]).to(dtype)
    parameter = nn.Parameter(torch.zeros(4, dtype=dtype))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = LossScaler(StaticScale(scale=3.0))
    scaler.scale(torch.zeros(()))
    parameter.grad = values.clone()
    scaler.unscale_(optimizer)
    third = torch.tensor(1 / 3, dtype=torch.float32)
    wide = values if dtype is torch.float64 else values.float()
    assert torch.equal(parameter.grad, (wide * third).to(dtype))
    scaler.step(optimizer)
    assert scaler.skipped_steps == 0
    scaler.update()
    parameter.grad = values.clone()
    parameter.grad[2] = planted
    before = parameter.detach().clone()
    scaler.step(optimizer)
    assert scaler.skipped_steps == 1
    assert torch.equal(parameter, before)


def test_fp16_weights_train() -> None:
    """In fp16 the gradients of a small loss vanish; scaled they do not, and the run follows that in fp32."""

    def run(dtype: torch.dtype, scaler: LossScaler) -> list[float]:
        model = small_net(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=2e4)
        losses = []
        for step in range(60):
            loss = 1e-5 * loss_of(model, 1000 + step % 4, dtype)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item() * 1e5)
        return losses

    wide = run(torch.float32, LossScaler(enabled=False))
    plain = run(torch.float16, LossScaler(enabled=False))
    scaled = run(torch.float16, ours(initial_scale=2.0**30, growth_interval=1000))
    assert wide[-1] < 0.6 * wide[0], "the reference learns nothing"
    assert abs(scaled[-1] - wide[-1]) < 0.02
    assert abs(plain[-1] - wide[-1]) > 5 * abs(scaled[-1] - wide[-1])


def test_a_scale_that_is_too_large_comes_down_and_training_goes_on() -> None:
    model = small_net(torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ours(initial_scale=2.0**30, growth_interval=1000)
    for step in range(40):
        scaler.scale(loss_of(model, 1000 + step, torch.float16)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 2.0**30 / 2**scaler.skipped_steps
    assert 5 < scaler.skipped_steps < 25
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_fp16_loss_does_not_overflow_by_being_scaled() -> None:
    loss = torch.tensor(3.0, dtype=torch.float16, requires_grad=True)
    assert LossScaler().scale(loss).item() == 3.0 * 2**16


def test_scale_takes_what_torch_takes() -> None:
    scaler = ours(initial_scale=8.0)
    one, two = torch.ones(()), torch.full((2,), 2.0)
    assert scaler.scale((one, [two]))[1][0].tolist() == [16.0, 16.0]
    assert [value.sum().item() for value in scaler.scale(iter((one, two)))] == [8.0, 32.0]
    with pytest.raises(ConfigError, match="scale\\(\\) was given a float"):
        scaler.scale(3.0)  # type: ignore[type-var]


@pytest.mark.parametrize("make", [ours, torchs])
def test_several_optimizers_skip_each_by_its_own_gradients(make: Callable[[], Any]) -> None:
    one, other = small_net(), small_net()
    optimizers = adamw(one), adamw(other)
    scaler = make()
    starts = copy.deepcopy(one.state_dict())
    for model, step in ((one, 2), (other, 0)):
        scaler.scale(loss_of(model, step)).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert_same_tensors(starts, one.state_dict())
    assert not torch.equal(starts["0.weight"], other.state_dict()["0.weight"])


def test_sparse_gradients_are_summed_first() -> None:
    def run(scaler: Any) -> Tensor:
        table = nn.Embedding(5, 2, sparse=True, dtype=torch.float32)
        nn.init.ones_(table.weight)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        for _ in range(2):
            scaler.scale(table(torch.tensor([1, 1, 3])).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return table.weight.detach()

    assert torch.equal(run(ours()), run(torchs()))


class FlagOverRanks:
    """Stands for an all-reduce: another rank's flag, and what it was called with."""

    def __init__(self, other: list[float]) -> None:
        self.other = other
        self.seen: list[float] = []

    def __call__(self, flag: Tensor) -> None:
        self.seen.append(flag.item())
        flag.clamp_(min=self.other.pop(0))


def test_another_ranks_overflow_skips_the_step_here() -> None:
    model = small_net()
    optimizer = adamw(model)
    reduce = FlagOverRanks([0.0, 1.0, 0.0])
    scaler = LossScaler(DynamicScale(initial_scale=1024.0), reduce=reduce)
    for step in range(3):
        scaler.scale(loss_of(model, step)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert reduce.seen == [0.0, 0.0, 1.0]
    assert scaler.skipped_steps == 2
    assert scaler.get_scale() == 256.0


def test_a_rank_without_gradients_takes_part() -> None:
    model = small_net()
    optimizer = adamw(model)
    reduce = FlagOverRanks([1.0])
    scaler = LossScaler(reduce=reduce)
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    assert reduce.seen == [0.0]
    assert scaler.skipped_steps == 1


def test_flags_are_read_once_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_net()
    optimizer = adamw(model)
    scaler = ours()
    num_read = 0
    item = Tensor.item

    def counted(tensor: Tensor) -> Any:
        nonlocal num_read
        num_read += tensor.numel() == 1 and tensor.dtype is torch.float32 and tensor.dim() == 0
        return item(tensor)

    scaler.scale(loss_of(model, 0)).backward()
    monkeypatch.setattr(Tensor, "item", counted)
    scaler.unscale_(optimizer)
    assert num_read == 0
    monkeypatch.setattr(optimizer, "step", lambda: None)
    scaler.step(optimizer)
    scaler.update()
    scaler.get_scale()
    assert num_read == 1


def test_floor_and_patience() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = ours(initial_scale=8.0, min_scale=2.0, patience=3)
    scales = []
    for _ in range(5):
        scales.append(scaler.get_scale())
        scaler.scale(torch.zeros(()))
        parameter.grad = torch.full((2,), torch.nan)
        scaler.step(optimizer)
        if len(scales) < 5:
            scaler.update()
    assert scales == [8.0, 4.0, 2.0, 2.0, 2.0]
    with pytest.raises(LossScaleError, match="in 3 steps in a row at the lowest scale, 2 .5 steps skipped in all"):
        scaler.update()
    # A good step, and the count begins anew.
    parameter.grad = torch.ones(2)
    scaler.step(optimizer)
    scaler.update()
    assert parameter.tolist() == [-0.5, -0.5]


def test_a_static_scale_that_always_overflows_is_an_error() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = LossScaler(StaticScale(scale=4.0, patience=1))
    scaler.scale(torch.zeros(()))
    parameter.grad = torch.full((2,), torch.inf)
    scaler.step(optimizer)
    with pytest.raises(LossScaleError, match="at the lowest scale, 4 .*use a DynamicScale"):
        scaler.update()


@pytest.mark.parametrize("hysteresis", [1, 3])
def test_saved_and_loaded_it_goes_on_the_same_way(hysteresis: int) -> None:
    def go(scaler: LossScaler, steps: range) -> list[float]:
        parameter = nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        scales = []
        for step in steps:
            scaler.scale(torch.zeros(()))
            parameter.grad = torch.full((2,), torch.inf if step % 5 in (1, 2) else 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    whole = ours(hysteresis=hysteresis, growth_interval=2, replenish=Replenish.AFTER_GOOD_STEP)
    expected = go(whole, range(20))
    first = ours(hysteresis=hysteresis, growth_interval=2, replenish=Replenish.AFTER_GOOD_STEP)
    begun = go(first, range(7))
    second = LossScaler()
    second.load_state_dict(first.state_dict())
    assert begun + go(second, range(7, 20)) == expected
    assert second.state_dict() == whole.state_dict()


def test_torchs_scaler_and_ours_load_each_others_state() -> None:
    theirs, mine = torchs(), ours()
    for scaler in (theirs, mine):
        train(scaler, clip=False, accumulation=1)
    assert theirs.state_dict().items() <= mine.state_dict().items()
    fresh = LossScaler()
    fresh.load_state_dict(theirs.state_dict())
    assert theirs.state_dict().items() <= fresh.state_dict().items()
    again = torch.amp.GradScaler("cpu")
    again.load_state_dict(mine.state_dict())
    assert again.state_dict() == theirs.state_dict()


def test_states_of_another_kind_are_refused() -> None:
    with pytest.raises(ConfigError, match="not that of a dynamic scale"):
        LossScaler().load_state_dict(LossScaler(StaticScale()).state_dict())
    with pytest.raises(ConfigError, match="not that of a static scale"):
        LossScaler(StaticScale()).load_state_dict(LossScaler().state_dict())
    with pytest.raises(ConfigError, match="was not enabled"):
        LossScaler().load_state_dict({})


def test_the_scale_can_be_set() -> None:
    scaler = ours()
    scaler.update(256.0)
    assert scaler.get_scale() == 256.0
    scaler.update(torch.tensor(64.0))
    assert scaler.get_scale() == 64.0
    with pytest.raises(ConfigError, match="scale is 0.0"):
        scaler.update(0.0)


def test_disabled_it_is_not_there() -> None:
    model = small_net()
    optimizer = torch.optim.LBFGS(model.parameters())
    scaler = LossScaler(enabled=False)
    loss = loss_of(model, 0)
    assert scaler.scale(loss) is loss
    assert not scaler.is_enabled()
    assert scaler.get_scale() == 1.0
    assert scaler.state_dict() == {}
    scaler.load_state_dict({})
    scaler.unscale_(optimizer)
    assert scaler.step(optimizer, lambda: loss_of(model, 0)) is not None
    scaler.update()


def test_calls_out_of_order_are_refused() -> None:
    model = small_net()
    optimizer = adamw(model)
    scaler = ours()
    loss_of(model, 0).backward()
    with pytest.raises(LossScaleError, match="unscale_ would divide gradients by 1024, and no loss was ever scaled"):
        scaler.step(optimizer)
    with pytest.raises(LossScaleError, match="no optimizer was stepped or unscaled"):
        scaler.update()
    scaler.scale(loss_of(model, 0)).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(LossScaleError, match="were unscaled already since the last update"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(LossScaleError, match="were stepped already since the last update"):
        scaler.unscale_(optimizer)
    with pytest.raises(LossScaleError, match="AdamW was stepped already since the last update.., at scale 1024"):
        scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    with pytest.raises(LossScaleError, match="none of the parameters of AdamW has a gradient"):
        scaler.step(optimizer)


def test_closures_and_complex_gradients_are_refused() -> None:
    model = small_net()
    scaler = ours()
    scaler.scale(loss_of(model, 0)).backward()
    for optimizer, args, kwargs in (
        (torch.optim.LBFGS(model.parameters()), (), {}),
        (adamw(model), (lambda: 0.0,), {}),
        (adamw(model), (), {"closure": lambda: 0.0}),
    ):
        with pytest.raises(LossScaleError, match="to be stepped with a closure"):
            scaler.step(optimizer, *args, **kwargs)
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(LossScaleError, match="is complex, .2,. torch.complex64"):
        scaler.step(torch.optim.SGD([parameter], lr=1.0))


@pytest.mark.parametrize("update", ["host", "device"])
def test_in_a_session(update: str) -> None:
    def run(managed: bool) -> list[Any]:
        model = small_net()
        optimizer = adamw(model)
        scaler = ours() if managed else torchs()
        seen: list[Any] = []
        plan = lowtide.make_plan(model, weights={"*": "streamed"}, update=update)
        session = lowtide.manage(model, optimizer, plan, device="cpu") if managed else None
        for step in range(12):
            scaler.scale(loss_of(model, step)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen.append((scaler.get_scale(), snapshot(model, optimizer)))
        if session is not None:
            session.close()
        return seen

    for (scale, values), (expected_scale, expected) in zip(run(True), run(False), strict=True):
        assert scale == expected_scale
        assert_same_tensors(expected, values)


@pytest.mark.gpu
def test_gradients_on_host_and_device() -> None:
    weights = [nn.Parameter(torch.ones(3, device=device)) for device in ("cuda", "cpu")]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    scaler = ours(initial_scale=4.0)
    for step, planted in enumerate((None, 0, 1)):
        scaler.scale(torch.zeros((), device="cuda"))
        for index, weight in enumerate(weights):
            weight.grad = torch.full_like(weight, torch.inf if index == planted else 2.0)
        scaler.step(optimizer)
        assert scaler.skipped_steps == step
        scaler.update()
    assert [weight.tolist() for weight in weights] == [[0.5] * 3] * 2
    assert scaler.get_scale() == 1.0


def test_a_number_is_no_settings() -> None:
    with pytest.raises(ConfigError, match=r"settings is 1024.0; give StaticScale\(scale=...\) or DynamicScale"):
        LossScaler(1024.0)  # type: ignore[arg-type]  # on purpose
