"""On a GPU: loops beyond the plain one, where streams, devices and threads meet."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import cast

import pytest
import torch
from torch import nn

import lowtide
from lowtide import Session
from lowtide.errors import NonFiniteGradientError, SessionError
from lowtide.memory import cuda_mover
from lowtide.memory.chunk import lay_out
from lowtide.memory.groups import find_groups

pytestmark = pytest.mark.gpu

WIDTH = 256
LARGE = 64


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, x + self.down(torch.relu(self.up(x))))


def network(num_blocks: int = 6) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Block() for _ in range(num_blocks)))


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(LARGE, WIDTH, generator=torch.Generator().manual_seed(seed)).cuda()


def managed(model: nn.Module, optimizer: torch.optim.Optimizer | None, **plan: object) -> Session:
    layout = lay_out(find_groups(model), chunk_bytes=1 << 19)
    return lowtide.manage(model, optimizer, lowtide.make_plan(layout, **plan), poison=True)  # type: ignore[arg-type]


def assert_equal_models(one: nn.Module, other: nn.Module) -> None:
    for (name, expected), found in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(expected.detach().cpu(), found.detach().cpu()), name


@pytest.mark.parametrize("update", ["device", "host"])
def test_gradients_by_autograd_grad(update: str) -> None:
    plain = network().cuda()
    expected = torch.autograd.grad(plain(batch()).square().mean(), list(plain.parameters()))
    model = network()
    with managed(model, torch.optim.SGD(model.parameters(), lr=0.1), update=update):
        found = torch.autograd.grad(model(batch()).square().mean(), list(model.parameters()))
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one, other)
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("update", ["device", "host"])
def test_backward_of_some_parameters(update: str) -> None:
    plain, model = network().cuda(), network()
    plain(batch()).square().mean().backward(inputs=list(plain[2].parameters()))
    with managed(model, torch.optim.SGD(model.parameters(), lr=0.1), update=update):
        model(batch()).square().mean().backward(inputs=list(model[2].parameters()))
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            assert one.grad is None or torch.equal(one.grad.cpu(), other.grad.cpu())  # type: ignore[union-attr]


@pytest.mark.parametrize("schedule", ["deferred", "in_backward"])
def test_a_loss_with_a_part_on_the_host(schedule: str) -> None:
    """Its nodes run in the loop's thread, beside those of the device in autograd's."""

    def loss_of(model: nn.Sequential, step: int) -> torch.Tensor:
        hidden = model[:3](batch(step))
        # Two gradients meet at `hidden`, in whichever order the threads bring them: the sum of two is the same. Without the
        # copy there would be three, since a block uses its input twice.
        on_host = hidden.cpu().square().mean().tanh()
        return cast(torch.Tensor, model[3:](hidden.clone()).square().mean() + on_host.cuda())

    plain, model = network().cuda(), network()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with managed(model, optimizer, update="device", schedule=schedule):
        for step in range(20):
            for each, its in ((plain, reference), (model, optimizer)):
                loss_of(each, step).backward()
                its.step()
                its.zero_grad()
    assert_equal_models(plain, model)


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.SGD,
        lambda p, lr: torch.optim.AdamW(p, lr, foreach=False),
        lambda p, lr: torch.optim.AdamW(p, lr, fused=True),
    ],
)
def test_grad_scaler_with_gradients_on_the_host(make: Callable[..., torch.optim.Optimizer]) -> None:
    """A planted overflow every fifth step: the flag and the scale must have arrived when the host's kernel reads them."""
    on_host, model = network(), network()
    reference, optimizer = make(on_host.parameters(), lr=1e-3), make(model.parameters(), lr=1e-3)
    compute = copy.deepcopy(on_host).cuda()
    scalers = [torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=4) for _ in range(2)]
    scales: set[float] = set()
    # All of the reference's scaler is on the host, so that nothing is left to wait for.
    scalers[0]._lazy_init_scale_growth_tracker(torch.device("cpu"))
    with managed(model, optimizer, update="host"):
        for step in range(25):
            factor = float("inf") if step % 5 == 4 else 1.0
            scalers[0].scale(compute(batch(step)).square().mean() * factor).backward()
            for ours, theirs in zip(on_host.parameters(), compute.parameters(), strict=True):
                assert theirs.grad is not None
                ours.grad = theirs.grad.cpu()
                theirs.grad = None
            scalers[0].step(reference)
            scalers[0].update()
            with torch.no_grad():
                for ours, theirs in zip(on_host.parameters(), compute.parameters(), strict=True):
                    theirs.copy_(ours)
            scalers[1].scale(model(batch(step)).square().mean() * factor).backward()
            scalers[1].step(optimizer)
            scalers[1].update()
            optimizer.zero_grad()
            assert scalers[0].get_scale() == scalers[1].get_scale(), step
            scales.add(scalers[1].get_scale())
    assert scales == {1024.0, 2048.0}
    assert_equal_models(on_host, model)


def test_what_a_forward_writes_to_its_weights_is_kept() -> None:
    class Clamping(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.up.weight.clamp_(-0.01, 0.01)
            return super().forward(x)

    torch.manual_seed(1)
    plain = nn.Sequential(*(Clamping() for _ in range(4)))
    model = copy.deepcopy(plain)
    plain.cuda()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with managed(model, optimizer, update="device"):
        for step in range(6):
            for each, its in ((plain, reference), (model, optimizer)):
                each(batch(step)).square().mean().backward()
                its.step()
                its.zero_grad()
    assert_equal_models(plain, model)


def test_weights_that_leave_their_window_are_refused() -> None:
    class Leaking(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            super().forward(x)
            return self.up.weight[:4]

    model = nn.Sequential(*(Leaking() for _ in range(2)))
    with managed(model, None), pytest.raises(SessionError, match="returns its own weights"):
        model(batch())


def test_forgotten_sessions_give_back_what_they_locked() -> None:
    for _ in range(3):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = managed(model, optimizer, device_memory="2GiB")
        model(batch()).square().mean().backward()
        optimizer.step()
        torch.cuda.synchronize()
        del model, optimizer, session
    # What is set aside is not collected: the next session finds those that were forgotten.
    managed(network(), None).close()
    gc.collect()
    torch.cuda.synchronize()
    assert gc.get_freeze_count() < 10_000
    assert torch.cuda.get_per_process_memory_fraction() == 1.0


def test_two_sessions_share_the_limit() -> None:
    one, other = network(2), network(2)
    whole = torch.cuda.get_device_properties(0).total_memory
    first = managed(one, None, device_memory="2GiB")
    second = managed(other, None, device_memory="3GiB")
    assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(5 * 2**30 / whole)
    first.close()
    assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(3 * 2**30 / whole)
    second.close()
    assert torch.cuda.get_per_process_memory_fraction() == 1.0


def test_a_limit_of_the_users_own_comes_back() -> None:
    torch.cuda.set_per_process_memory_fraction(0.5)
    try:
        managed(network(2), None).close()
        assert torch.cuda.get_per_process_memory_fraction() == 0.5
        session = managed(network(2), None, device_memory="2GiB")
        assert torch.cuda.get_per_process_memory_fraction() < 0.1
        session.close()
        assert torch.cuda.get_per_process_memory_fraction() == 0.5
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_times_go_on_over_a_new_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_mover, "ORIGIN_LASTS_S", 0.0)
    mover = cuda_mover.CudaMover(torch.device("cuda", 0))
    tickets = [mover.now()]
    for _ in range(5):
        batch().square().sum()
        tickets.append(mover.now())
    times = [ticket.time_s() for ticket in tickets]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] < 60


def test_mixed_sites_keep_torchs_foreach() -> None:
    """Pending parameters would make torch take its loop, whose sums are the same but which takes longer."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    weights = {"*": "resident", "0": "streamed"}
    with managed(model, optimizer, weights=weights, update={"*": "device", "0": "host"}):
        for step in range(2):
            model(batch(step)).square().mean().backward()
            if step == 1:
                with torch.profiler.profile() as profile:
                    optimizer.step()
                assert any("_foreach" in event.key for event in profile.key_averages())
            else:
                optimizer.step()
            optimizer.zero_grad()


class Spoil(torch.autograd.Function):
    """Leaves the forward as it is, and gives back a gradient of NaN."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return torch.full_like(gradient, float("nan"))


@pytest.mark.parametrize("precision", [None, "fp32"])
@pytest.mark.parametrize("update", ["device", "host"])
@pytest.mark.parametrize("schedule", ["deferred", "in_backward"])
def test_gradients_that_are_not_finite_where_the_loss_is(update: str, schedule: str, precision: str | None) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = copy.deepcopy(model.state_dict())
    layout = lay_out(find_groups(model), chunk_bytes=1 << 19)
    plan = lowtide.make_plan(layout, update=update, schedule=schedule)
    with lowtide.manage(model, optimizer, plan, precision=precision, poison=True) as session:
        hook = model[2].register_forward_hook(
            lambda module, args, out: Spoil.apply(out)  # type: ignore[no-untyped-call]  # torch's
        )

        def step_and_settle() -> None:
            model(batch()).square().mean().backward()
            optimizer.step()
            session.settle()

        with pytest.raises(NonFiniteGradientError):
            step_and_settle()
        hook.remove()
    is_kept = {name: torch.equal(value, before[name]) for name, value in model.cpu().state_dict().items()}
    is_lost = {name: not value.isfinite().all() for name, value in model.state_dict().items()}
    spoilt = {name for name in before if int(name.split(".")[0]) <= 2}
    if schedule == "deferred":
        assert all(is_kept.values())
    else:
        # Layers behind the spoilt one took the step. All others were left alone, but for torch's own step.
        is_left_out = update == "host" or precision is not None
        assert {name for name, is_same in is_kept.items() if is_same} == (spoilt if is_left_out else set())
        assert {name for name, was_hit in is_lost.items() if was_hit} == (set() if is_left_out else spoilt)


# What the user holds, exchanges and hooks


PLACES = {
    "streamed, host": {"weights": "streamed", "update": "host"},
    "streamed, device": {"weights": "streamed", "update": "device"},
    "resident, host": {"weights": "resident", "update": "host"},
}


def both_ways(
    place: str, schedule: str, loop: Callable[[nn.Module, torch.optim.Optimizer], list[torch.Tensor]]
) -> None:
    """The loop on a plain model and on a managed one shows the same tensors and leaves the same weights. No update of SGD
    in which the CPU and the device would round otherwise: rates and momentum are powers of two.
    """
    plain, model = network().cuda(), network()
    expected = loop(plain, torch.optim.SGD(plain.parameters(), lr=0.125))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    with managed(model, optimizer, schedule=schedule, **PLACES[place]):
        found = loop(model, optimizer)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one.cpu(), other.cpu(), rtol=0, atol=1e-6)
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.detach().cpu(), other.detach().cpu(), rtol=0, atol=1e-6)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    model(batch(step)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("schedule", ["deferred", "in_backward"])
def test_held_tensors_show_each_step_whole(place: str, schedule: str) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        shown: list[torch.Tensor] = []
        train(model, optimizer, 0)
        held = [parameter.detach() for parameter in model.parameters()]
        for step in range(1, 5):
            train(model, optimizer, step)
            shown += [tensor.clone() for tensor in held]
            with torch.no_grad():
                held[step].mul_(0.5)
        return shown

    both_ways(place, schedule, loop)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("schedule", ["deferred", "in_backward"])
def test_an_average_is_swapped_in_and_out(place: str, schedule: str) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        shown: list[torch.Tensor] = []
        train(model, optimizer, 0)
        average = [parameter.detach().clone() for parameter in model.parameters()]
        for step in range(1, 4):
            train(model, optimizer, step)
            kept = [parameter.data for parameter in model.parameters()]
            for parameter, other in zip(model.parameters(), average, strict=True):
                parameter.data = other
            with torch.no_grad():
                shown.append(model(batch(step)))
            for parameter, own in zip(model.parameters(), kept, strict=True):
                parameter.data = own
        return shown

    both_ways(place, schedule, loop)


@pytest.mark.parametrize("weights", ["streamed", "resident"])
def test_updates_in_hooks_of_the_users(weights: str) -> None:
    def update(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.data.add_(parameter.grad, alpha=-0.125)
        parameter.grad = None

    plain, model = network().cuda(), network()
    for each in (plain, model):
        for parameter in each.parameters():
            parameter.register_post_accumulate_grad_hook(update)
    with managed(model, None, weights=weights):
        for step in range(6):
            for each in (plain, model):
                each(batch(step)).square().mean().backward()
    assert_equal_models(plain, model)


def test_a_functional_call_with_tensors_of_the_users() -> None:
    plain, model = network().cuda(), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {name: 0.5 * parameter.detach() for name, parameter in plain.named_parameters()}
    expected = torch.func.functional_call(plain, given, batch())
    with managed(model, optimizer, weights="streamed", update="host"):
        assert torch.equal(torch.func.functional_call(model, given, batch()), expected)
        assert torch.equal(model(batch()), plain(batch()))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("schedule", ["deferred", "in_backward"])
def test_training_goes_on_after_an_exception_in_a_backward(place: str, schedule: str) -> None:
    """Deferred the step is as if it had not been; in backward the message says which groups moved, and closing works."""
    plain, model = network().cuda(), network()
    reference = torch.optim.SGD(plain.parameters(), lr=0.125)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)

    def fail(gradient: torch.Tensor) -> None:
        raise KeyError("of the user's")

    with managed(model, optimizer, schedule=schedule, **PLACES[place]):
        train(model, optimizer, 0)
        output = model[:3](batch(1))
        output.register_hook(fail)
        with pytest.raises(KeyError):
            model[3:](output).square().mean().backward()
        with pytest.raises(SessionError):
            optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, 2)
    if schedule == "deferred":
        for step in (0, 2):
            train(plain, reference, step)
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(one.detach().cpu(), other.detach().cpu(), rtol=0, atol=1e-6)
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
