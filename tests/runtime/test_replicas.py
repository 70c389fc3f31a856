"""One process trains over several emulated devices as over one: the same losses and weights, each device inside its own budget."""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.errors import (
    ConfigError,
    EmulatedOutOfMemoryError,
    HigherOrderError,
    SessionError,
    StaleBackwardError,
)
from lowtide.memory.emulated_mover import EmulatedMover
from lowtide.memory.mover import Copied
from lowtide.planning.plan import Collective, Sharding
from lowtide.runtime.emulation.memory import TrackedMemory
from lowtide.runtime.passes.devices import Device, DeviceSet, make_devices
from lowtide.runtime.session import Session
from tests.runtime import stack
from tests.runtime.rank_jobs import Job, Trained, batches, make, scaled, serial, step_with, values_of
from tests.runtime.twins import TrippedError, make_batch, make_net

STREAMED: dict[str, Any] = {"weights": "streamed", "update": "host"}
ON_DEVICE: dict[str, Any] = {"weights": "streamed", "update": "device"}
RESIDENT: dict[str, Any] = {"weights": "resident", "update": "device"}
RESIDENT_ON_HOST: dict[str, Any] = {"weights": "resident", "update": "host"}
IN_BACKWARD = {"schedule": "in_backward"}
EXACT = {
    "all resident": Job(plan=RESIDENT),
    "streamed, updated on the host": Job(plan=STREAMED),
    "streamed, updated on the device": Job(plan=ON_DEVICE),
    "resident, updated on the host": Job(plan=RESIDENT_ON_HOST),
    "in backward, resident": Job(plan={**RESIDENT, **IN_BACKWARD}),
    "in backward, on the host": Job(plan={**STREAMED, **IN_BACKWARD}),
    "in backward, on the device": Job(plan={**ON_DEVICE, **IN_BACKWARD}),
    "in backward, resident, on the host": Job(plan={**RESIDENT_ON_HOST, **IN_BACKWARD}),
    "in backward, recomputed": Job(plan={**STREAMED, **IN_BACKWARD, "activations": "recompute"}),
    "in backward, a block beside": Job(plan={**STREAMED, **IN_BACKWARD}, uses_extra="everybody"),
    "recomputed, clipped": Job(plan={**STREAMED, "activations": "recompute"}, manage={"max_grad_norm": 0.5}),
    "recomputed by segments": Job(plan={**STREAMED, "activations": "recompute/2"}),
    "recomputed, resident": Job(plan={**RESIDENT, "activations": "recompute"}),
    "selective, clipped by the loop": Job(plan={**STREAMED, "activations": "selective"}, clips=0.5),
    "clipped by the loop, resident": Job(plan=RESIDENT, clips=0.5),
    "accumulated": Job(plan=STREAMED, micro_batches=3),
    "accumulated, clipped": Job(plan=STREAMED, micro_batches=2, manage={"max_grad_norm": 0.5}),
    "accumulated, resident": Job(plan=RESIDENT, micro_batches=3),
    "accumulated, updated on the device": Job(plan=ON_DEVICE, micro_batches=3),
    "prefetched far": Job(plan={**STREAMED, "prefetch_depth": 3}),
}
ROUNDED = {
    "fp32": Job(dtype=torch.float32, plan=STREAMED),
    "fp32, resident": Job(dtype=torch.float32, plan=RESIDENT),
    "fp32, an overflow": Job(dtype=torch.float32, plan=STREAMED, overflows_at=4),
    "fp32, own kernels": Job(dtype=torch.float32, plan=STREAMED, manage={"precision": "fp32"}),
    "fp32, paged": Job(
        dtype=torch.float32, plan={**STREAMED, **IN_BACKWARD, "update": "paged"}, manage={"precision": "fp32"}
    ),
}


def replicated(job: Job, num_devices: int) -> Trained:
    """The loop of `rank_jobs.serial`, on a managed model over emulated devices."""
    model, optimizer = make(job)
    scaler = job.scaler()
    losses, scales = [], []
    plan = lowtide.make_plan(model, **job.plan)
    with lowtide.manage(model, optimizer, plan, device="cpu", replicas=num_devices, **job.manage) as session:
        for step, ids in enumerate(batches(job.num_steps)):
            total = 0.0
            parts = ids.chunk(job.micro_batches)
            for number, part in enumerate(parts):
                loss = model(part, with_extra=job.uses_extra == "everybody")
                scaled(loss / len(parts), scaler, job, step, number == 0).backward()
                total += float(loss.detach()) / len(parts)
            if job.clips is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), job.clips)
            scales.append(step_with(optimizer, scaler))
            losses.append(total)
        assert [row.device for row in session.stats().replicas] == [f"emulated {k}" for k in range(num_devices)]
    return Trained(losses=losses, weights=values_of(model), scales=scales)


def assert_same(found: Trained, plain: Trained, tolerance: float) -> None:
    assert found.losses == pytest.approx(plain.losses, rel=tolerance)
    assert found.scales == plain.scales
    for key, value in found.weights.items():
        torch.testing.assert_close(value, plain.weights[key], rtol=100 * tolerance, atol=10 * tolerance, msg=key)


@pytest.mark.parametrize("name", EXACT)
def test_two_devices_train_as_one(name: str) -> None:
    assert_same(replicated(EXACT[name], 2), serial(EXACT[name], 1), 1e-10)


@pytest.mark.parametrize("name", ["all resident", "in backward, on the host", "accumulated, updated on the device"])
def test_three_devices_train_as_one(name: str) -> None:
    assert_same(replicated(EXACT[name], 3), serial(EXACT[name], 1), 1e-10)


@pytest.mark.parametrize("name", ROUNDED)
def test_two_devices_train_as_one_in_fp32(name: str) -> None:
    found, plain = replicated(ROUNDED[name], 2), serial(ROUNDED[name], 1)
    assert_same(found, plain, 1e-5)
    if ROUNDED[name].overflows_at is not None:
        assert found.scales[5] == found.scales[4] / 2


@pytest.mark.parametrize("place", [STREAMED, RESIDENT], ids=["streamed", "resident"])
def test_fp16_skips_the_same_steps(place: dict[str, Any]) -> None:
    """Autocast to fp16 under a scale so high that gradients overflow in the first steps. Plain torch runs the same two parts: what
    overflows in fp16 depends on how many rows are added up in one product.
    """

    def train(num_parts: int) -> tuple[list[float], list[float]]:
        model, optimizer = make(Job(dtype=torch.float32))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=6)
        losses, scales = [], []
        plan = lowtide.make_plan(model, **place)
        is_plain = num_parts > 1
        session = None if is_plain else lowtide.manage(model, optimizer, plan, device="cpu", replicas=2)
        with session or contextlib.nullcontext():
            for ids in batches(20):
                total = 0.0
                for part in ids.chunk(num_parts):
                    with torch.autocast("cpu", torch.float16):
                        loss = model(part)
                    scaler.scale(loss / num_parts).backward()
                    total += float(loss.detach()) / num_parts
                scales.append(step_with(optimizer, scaler))
                losses.append(total)
        return losses, scales

    (losses, scales), (plain_losses, plain_scales) = train(1), train(2)
    assert scales == plain_scales
    assert sum(later < earlier for earlier, later in itertools.pairwise(scales)) >= 2
    assert losses == pytest.approx(plain_losses, rel=1e-5)


# -- the batch and its parts ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def managed(model: nn.Module, num_devices: int = 2, **plan: Any) -> Iterator[tuple[Session, torch.optim.Optimizer]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    made = lowtide.make_plan(model, **(plan or STREAMED))
    with lowtide.manage(model, optimizer, made, device="cpu", replicas=num_devices) as session:
        yield session, optimizer


def double_net() -> nn.Module:
    return make_net().double()


def double_batch(seed: int, size: int) -> tuple[Tensor, Tensor]:
    x, classes = make_batch(seed, size)
    return x.double(), classes


@pytest.mark.parametrize(("size", "sizes"), [(8, [4, 4]), (5, [3, 2]), (2, [1, 1]), (1, [1])])
@pytest.mark.parametrize("place", [STREAMED, RESIDENT], ids=["streamed", "resident"])
def test_a_batch_of_any_size_gives_the_loss_of_the_whole(place: dict[str, Any], size: int, sizes: list[int]) -> None:
    plain, model, seen = double_net(), double_net(), []
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=False)
    losses: dict[str, list[float]] = {"plain": [], "replicated": []}
    with managed(model, **place) as (_, optimizer):
        model.head.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
        for name, net, stepper in (("plain", plain, plain_optimizer), ("replicated", model, optimizer)):
            for step in range(4):
                loss = net(*double_batch(step, size))
                loss.backward()
                stepper.step()
                stepper.zero_grad()
                losses[name].append(loss.item())
    assert seen == sizes * 4
    assert losses["replicated"] == pytest.approx(losses["plain"], rel=1e-12)


@pytest.mark.parametrize("place", [STREAMED, ON_DEVICE, RESIDENT], ids=["streamed", "on device", "resident"])
def test_a_loss_of_the_loop_takes_the_joined_rows(place: dict[str, Any]) -> None:
    plain, model = double_net(), double_net()
    with managed(model, **place):
        x, classes = double_batch(3, 7)
        logits = model(x)
        assert logits.shape == (7, 4)
        F.cross_entropy(logits, classes, reduction="sum").backward()
        F.cross_entropy(plain(x), classes, reduction="sum").backward()
        torch.testing.assert_close(logits.detach(), plain(x).detach(), rtol=1e-12, atol=1e-12)
        for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-10, atol=1e-12, msg=name)


class ManyOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4).double()

    def forward(self, inputs: Tensor, *, scale: Tensor, word: str) -> dict[str, Any]:
        hidden = self.inner(inputs) * scale
        return {"loss": hidden.square().mean(), "hidden": [hidden, None], "word": word, "best": hidden.argmax(1)}


def test_outputs_in_containers_are_joined() -> None:
    torch.manual_seed(0)
    model = ManyOutputs()
    x, scale = torch.randn(5, 4, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64)
    expected = model(x, scale=scale, word="same")
    expected["loss"].backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with managed(model):
        found = model(x, scale=scale, word="same")
        torch.testing.assert_close(found["loss"], expected["loss"])
        torch.testing.assert_close(found["hidden"][0], expected["hidden"][0])
        assert found["hidden"][1] is None
        assert found["word"] == "same"
        assert torch.equal(found["best"], expected["best"])
        found["loss"].backward()
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)


def test_a_hugging_face_model_gives_its_loss() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=8, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).double()
    ids = torch.randint(0, 32, (5, 8))
    batch = {"input_ids": ids, "labels": ids}
    expected = model(**batch)
    expected.loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    with managed(model, **STREAMED, activations="recompute"):
        found = model(**batch)
        assert type(found) is type(expected)
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0)  # computed in fp32
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-10, atol=1e-12)
        found.loss.backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("place", [STREAMED, RESIDENT], ids=["streamed", "resident"])
def test_an_evaluation_is_split_too(place: dict[str, Any]) -> None:
    plain, model, seen = double_net(), double_net(), []
    with managed(model, **place) as (session, _), torch.no_grad():
        model.head.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
        x, _ = double_batch(1, 6)
        torch.testing.assert_close(model(x), plain(x), rtol=1e-12, atol=1e-12)
        assert seen == [3, 3]
        assert all(row.peak_bytes for row in session.stats().replicas)


@pytest.mark.parametrize("place", [STREAMED, RESIDENT], ids=["streamed", "resident"])
def test_batch_norm_has_the_statistics_of_the_first_part(place: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    alone = nn.BatchNorm1d(8)
    with managed(model, **place) as (_, optimizer):
        for step in range(3):
            x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
            with torch.no_grad():
                alone(F.linear(x[:3], model[0].weight, model[0].bias))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        own = {id(buffer) for buffer in model.buffers()}
    torch.testing.assert_close(model[1].running_mean, alone.running_mean)
    torch.testing.assert_close(model[1].running_var, alone.running_var)
    assert int(model[1].num_batches_tracked) == 3
    assert own == {id(buffer) for buffer in model.buffers()}


def test_weights_that_the_loop_changes_reach_all_devices() -> None:
    plain, model = double_net(), double_net()
    x, _ = double_batch(1, 6)
    with managed(model, **RESIDENT), torch.no_grad():
        model(x)
        for net in (plain, model):
            net.stem.weight.mul_(0.5)
            net.head.weight.data.add_(1.0)  # past autograd, which counts no version
        torch.testing.assert_close(model(x), plain(x), rtol=1e-12, atol=1e-12)


# -- memory --------------------------------------------------------------------------------------------------------------

ROW_BYTES = stack.WIDTH * 4
SAVED_BYTES_PER_ROW = 3 * ROW_BYTES
"""What a block keeps for its backward: its input, and twice as wide the result of tanh."""
SLACK_BYTES = 2 * stack.KB
"""The rest of the model's chunk with its gradient, losses, and counters."""


def train_stack(num_devices: int, num_rows: int, **plan: Any) -> tuple[Session, list[float]]:
    model = stack.Stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    made = lowtide.make_plan(model, **plan)
    session = lowtide.manage(model, optimizer, made, device="cpu", replicas=num_devices)
    losses = []
    try:
        for step in range(4):
            loss = model(stack.batch(step, num_rows))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    finally:
        session.close()
    return session, losses


def peaks(num_devices: int, num_rows: int, **plan: Any) -> list[int]:
    model = stack.Stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with lowtide.manage(
        model, optimizer, lowtide.make_plan(model, **plan), device="cpu", replicas=num_devices
    ) as session:
        for step in range(3):
            model(stack.batch(step, num_rows)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [row.peak_bytes for row in session.stats().replicas]


@pytest.mark.parametrize("num_devices", [2, 4])
def test_each_device_holds_its_window_and_its_part_of_the_activations(num_devices: int) -> None:
    """The peak is in the backward of the last block: two blocks in the window, the gradients of one and those on their way to
    the host, what all blocks saved, the rows that came, and inside of a block at most four times its width in temporaries.
    """
    num_rows = 512
    mine = num_rows // num_devices * ROW_BYTES
    window = 2 * stack.BLOCK_BYTES
    gradients = 2 * stack.BLOCK_BYTES
    activations = stack.NUM_BLOCKS * (num_rows // num_devices) * SAVED_BYTES_PER_ROW + mine
    temporaries = 6 * mine
    for peak in peaks(num_devices, num_rows, **STREAMED):
        assert activations <= peak <= window + gradients + activations + temporaries + SLACK_BYTES


def test_resident_weights_are_on_every_device_and_state_on_the_first() -> None:
    num_rows = 64
    weights = stack.NUM_BLOCKS * stack.BLOCK_BYTES + stack.REST_BYTES
    mine = num_rows // 2 * ROW_BYTES
    activations = stack.NUM_BLOCKS * 3 * mine + mine
    first, second = peaks(2, num_rows, **RESIDENT)
    # The second holds its gradients until its part is over; the first has Adam's two moments as well.
    assert 2 * weights <= second <= 2 * weights + activations + 6 * mine + SLACK_BYTES
    assert 4 * weights <= first <= 4 * weights + activations + stack.BLOCK_BYTES + 6 * mine + SLACK_BYTES


def test_a_batch_that_one_device_cannot_hold_fits_on_two() -> None:
    num_rows = 512
    budget = int(1.1 * max(peaks(2, num_rows, **STREAMED)))
    with pytest.raises(EmulatedOutOfMemoryError):
        train_stack(1, num_rows, **STREAMED, device_memory=budget)
    session, losses = train_stack(2, num_rows, **STREAMED, device_memory=budget)
    plain = stack.Stack()
    assert losses == pytest.approx(stack_losses(plain, num_rows), rel=1e-5)
    assert not session.is_open


def stack_losses(model: nn.Module, num_rows: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        loss = model(stack.batch(step, num_rows))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_the_budget_of_the_second_device_is_named() -> None:
    model = stack.Stack()
    # Its rows are as many as the first's, and the first is not full then: the second has the copy of what nobody saved.
    small = max(peaks(2, 64, **STREAMED))
    with (
        managed(model, **STREAMED, device_memory=small) as (session, _),
        pytest.raises(EmulatedOutOfMemoryError, match=r"the session of a Stack on emulated device [01]"),
    ):
        model(stack.batch(0, 4096)).backward()
    assert not session.is_open


@pytest.mark.parametrize("depth", [1, 3])
def test_each_device_fetches_streamed_weights_for_its_own_forward_and_backward(depth: int) -> None:
    """No group goes over a link more often than it is used there, and none through the first device."""
    model = stack.Stack()
    with managed(model, **STREAMED, prefetch_depth=depth) as (session, optimizer):
        for step in range(3):
            model(stack.batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        stats = session.stats()
    streamed = stack.NUM_BLOCKS * stack.BLOCK_BYTES
    num_uses = 2 * 2 * 3  # devices, forward and backward, steps
    # What is in the window at the end of one forward or backward may serve the next.
    least = num_uses * (streamed - (1 + depth) * stack.BLOCK_BYTES)
    assert least <= stats.moved_bytes("to device") <= num_uses * (streamed + stack.REST_BYTES)
    rows = stack.NUM_ROWS // 2 * ROW_BYTES
    first, second = stats.replicas
    # The second gets its rows, the small resident rest and the loss's gradient; it gives its loss and the rest's gradient.
    assert 3 * rows <= second.copied_bytes <= 3 * (rows + 2 * stack.REST_BYTES + 64)
    assert first.copied_bytes <= 3 * 64
    assert "replica on emulated 1: peak" in str(stats)


def test_a_tracker_sees_nothing_while_it_is_paused() -> None:
    memory = TrackedMemory(None)
    memory.start()
    try:
        memory.pause()
        unseen = torch.ones(100)
        memory.resume()
        seen = torch.ones(10)
        assert memory.current_bytes == 40
        memory.pause()
        del seen
        assert memory.current_bytes == 0
        assert unseen.numel() == 100
    finally:
        memory.stop()


# -- what goes wrong -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    "place", [STREAMED, ON_DEVICE, RESIDENT, RESIDENT_ON_HOST], ids=lambda place: "-".join(place.values())
)
def test_a_part_that_raises_leaves_the_session_on_the_first_device(place: dict[str, Any], where: str) -> None:
    """Each part in turn; the step is lost as without replicas, and training goes on as if it had not been."""
    plain, model = double_net(), double_net()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=False)
    with managed(model, **place) as (session, optimizer):
        for failing in range(2):
            calls = iter(range(2))

            def fail(
                module: nn.Module, inputs: tuple[Tensor], output: Tensor, failing: int = failing, calls: Any = calls
            ) -> None:
                if next(calls) == failing:
                    if where == "forward":
                        raise TrippedError("tripped")
                    output.register_hook(_raise)

            handle = model.layers[1].inner.register_forward_hook(fail)
            with pytest.raises(TrippedError):
                model(*double_batch(50, 6)).backward()
            handle.remove()
            optimizer.zero_grad()
            assert session._plan_run is not None
            devices = session._plan_run.setup.devices
            assert devices is not None
            for seed in range(2):
                found = model(*double_batch(seed, 6))
                found.backward()
                assert devices.index == 0
                optimizer.step()
                optimizer.zero_grad()
                loss = plain(*double_batch(seed, 6))
                loss.backward()
                plain_optimizer.step()
                plain_optimizer.zero_grad()
                assert found.item() == pytest.approx(loss.item(), rel=1e-12)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-10, atol=1e-12, msg=name)


def _raise(gradient: Tensor) -> None:
    raise TrippedError("tripped")


def test_a_part_that_raises_and_a_close_at_once() -> None:
    model = double_net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with managed(model):
        model.layers[1].inner.register_forward_hook(lambda *inputs: inputs[2].register_hook(_raise) and None)
        loss = model(*double_batch(0, 6))
        with pytest.raises(TrippedError):
            loss.backward()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_backward_keeps_its_graphs_when_asked() -> None:
    plain, model = double_net(), double_net()
    with managed(model):
        for net in (plain, model):
            loss = net(*double_batch(0, 6))
            loss.backward(retain_graph=True)
            loss.backward()
        for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-10, atol=1e-12)
        with pytest.raises((SessionError, RuntimeError), match="second (backward|time)"):
            loss.backward()


def test_what_a_replicated_model_refuses_in_a_backward() -> None:
    model = double_net()
    with managed(model, **RESIDENT) as (session, optimizer):
        loss = model(*double_batch(0, 6))
        with pytest.raises(
            HigherOrderError, match="replicated over several devices, whose parts have backwards of their own"
        ):
            torch.autograd.backward(loss, create_graph=True)
        session.close()
    with managed(model) as (session, optimizer):
        loss = model(*double_batch(0, 6))
        model(*double_batch(0, 6)).backward()
        optimizer.step()
        with pytest.raises(StaleBackwardError, match="as they were 1 update"):
            loss.backward()
        optimizer.zero_grad()
        loss = model(*double_batch(0, 6))
        session.close()
        with pytest.raises(SessionError, match="in a session that was closed since"):
            loss.backward()


@pytest.mark.parametrize("place", [STREAMED, RESIDENT], ids=["streamed", "resident"])
def test_gradients_of_weights_are_at_the_parameters_alone(place: dict[str, Any]) -> None:
    model = double_net()
    engine = torch.autograd._engine_run_backward
    with managed(model, **place):
        loss = model(*double_batch(0, 6)) * 2
        with pytest.raises(
            SessionError, match=r"asks for gradients of weights of SmallNet, which is replicated over 2 devices"
        ):
            torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)
        with pytest.raises(SessionError, match="asks for gradients of weights of SmallNet"):
            loss.backward(inputs=[model.head.weight])
        # What does not go through the parts is torch's own.
        x = torch.ones(3, requires_grad=True)
        assert torch.autograd.grad(x.sum(), x)[0].tolist() == [1.0] * 3
        loss.backward()
        assert model.head.weight.grad is not None
    assert torch.autograd._engine_run_backward is engine


class Odd(nn.Module):
    """Returns what it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.what = ""

    def forward(self, x: Tensor, **others: Any) -> Any:
        y = self.inner(x)
        return {
            "columns": y.t(),
            "object": (y, object()),
            "structure": [y] * len(x),
            "count": (y, torch.tensor(len(x))),
            "number": (y, len(x)),
        }[self.what]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("columns", r"tensors of shapes \(4, 3\), \(4, 2\) \(torch.float32\) from 3, 2 rows"),
        ("object", "a object that is another one on each device"),
        ("structure", "outputs of one structure on one device and of another on the next"),
        ("count", r"tensors of shapes \(\), \(\) \(torch.int64\)"),
        ("number", "a int that is another one on each device"),
    ],
)
def test_outputs_that_cannot_be_put_together(what: str, message: str) -> None:
    model = Odd()
    model.what = what
    with managed(model), pytest.raises(SessionError, match=message):
        model(torch.ones(5, 4))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"x": torch.ones(4, 4), "mask": torch.ones(3, 3)},
            r"called with \(4, 4\), \(3, 3\)\. Give it tensors with one row",
        ),
        ({"x": 3}, "called with no tensors"),
        ({"x": torch.ones(4, 4, requires_grad=True)}, "requires a gradient: gradients of inputs do not go through"),
    ],
    ids=["rows", "no tensors", "input gradients"],
)
def test_batches_that_cannot_be_split(batch: dict[str, Any], message: str) -> None:
    with managed(model := Odd()), pytest.raises(SessionError, match=message):
        model(**batch)


def test_functional_calls_are_refused() -> None:
    model = Odd()
    with managed(model, **RESIDENT), pytest.raises(SessionError, match="torch.func calls it with other weights"):
        torch.func.functional_call(model, {"inner.weight": torch.ones(4, 4)}, (torch.ones(4, 4),))


def test_what_manage_refuses() -> None:
    model, optimizer = make(Job())
    words: dict[str, Any] = {"device": "cpu", "replicas": 2}
    plan = lowtide.make_plan(model)
    with pytest.raises(ConfigError, match="replicas=2 with a WarmUp: its observed step would be that of one device"):
        lowtide.manage(model, optimizer, lowtide.WarmUp(device_memory="1MiB"), **words)
    with pytest.raises(ConfigError, match=r"group table.* stays on the host"):
        lowtide.manage(*_embedding("host"), **words)
    with pytest.raises(ConfigError, match="offloads activations, which come back ahead of their use"):
        lowtide.manage(model, optimizer, lowtide.make_plan(model, activations="offload"), **words)
    with pytest.raises(ConfigError, match="replicas is 0; give the number of devices"):
        lowtide.manage(model, optimizer, plan, device="cpu", replicas=0)
    with pytest.raises(ConfigError, match=r"is not a list of different CUDA devices"):
        lowtide.manage(model, optimizer, plan, device="cpu", replicas=["cpu", "cpu"])
    with pytest.raises(ConfigError, match="replicas=2 is for one process, and ranks= for several"):
        lowtide.manage(model, optimizer, plan, ranks=object(), **words)  # type: ignore[arg-type]
    assert not any(parameter.is_meta for parameter in model.parameters())
    lowtide.manage(model, optimizer, plan, device="cpu").close()


def _embedding(weights: str) -> tuple[nn.Module, torch.optim.Optimizer, lowtide.Plan]:
    model = nn.ModuleDict({"table": nn.Embedding(8, 4), "head": nn.Linear(4, 8)})
    plan = lowtide.make_plan(model, weights={"*": "streamed", "table": weights})
    return model, torch.optim.SGD(model.parameters(), lr=0.1), plan


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    model, _ = make(Job())
    plan = lowtide.make_plan(model)
    first = torch.device("cuda", 0)
    words: dict[str, Any] = {"owner": "a test", "poison": False, "kept_bytes": 0}
    with pytest.raises(ConfigError, match="replicas=3, and torch sees 2 CUDA devices here"):
        make_devices(3, first, plan, **words)
    with pytest.raises(ConfigError, match=r"replicas begins with cuda:1, and the model is managed on cuda:0"):
        make_devices(["cuda:1", "cuda:0"], first, plan, **words)
    with pytest.raises(ConfigError, match=r"and torch sees 2 CUDA devices here"):
        make_devices(["cuda:0", "cuda:7"], first, plan, **words)
    sharded = lowtide.make_plan(model, sharding=Sharding(shards=2, collective=Collective.GATHER))
    with pytest.raises(
        ConfigError, match=r"spreads weights over several processes \(sharding\), and replicas= is for one process"
    ):
        make_devices(2, torch.device("cpu"), sharded, **words)


# -- beside the loop -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_goes_on_with_any_number_of_devices(tmp_path: Path) -> None:
    job = replace(EXACT["streamed, updated on the host"], num_steps=6)
    plain = serial(job, 1)
    losses = []
    for num_devices, steps in ((2, slice(0, 3)), (3, slice(3, 6))):
        model, optimizer = make(job)
        with lowtide.manage(
            model, optimizer, lowtide.make_plan(model, **STREAMED), device="cpu", replicas=num_devices
        ) as session:
            if losses:
                lowtide.load(tmp_path, session)
            for ids in batches(6)[steps]:
                loss = model(ids)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            session.save(tmp_path)
    assert losses == pytest.approx(plain.losses, rel=1e-10)


def test_a_session_goes_on_under_another_plan() -> None:
    job = replace(EXACT["all resident"], num_steps=6)
    model, optimizer = make(job)
    losses = []
    plans = [lowtide.make_plan(model, **words) for words in (STREAMED, RESIDENT, RESIDENT_ON_HOST)]
    with lowtide.manage(model, optimizer, plans[0], device="cpu", replicas=2) as session:
        for step, ids in enumerate(batches(6)):
            if step in (2, 4):
                session._switch(plans[step // 2])
            loss = model(ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            del loss
        assert all(row.peak_bytes for row in session.stats().replicas)
    assert losses == pytest.approx(serial(job, 1).losses, rel=1e-10)


@pytest.mark.parametrize("place", [STREAMED, RESIDENT], ids=["streamed", "resident"])
def test_a_forgotten_session_is_collected(place: dict[str, Any]) -> None:
    model = double_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = lowtide.manage(model, optimizer, lowtide.make_plan(model, **place), device="cpu", replicas=2)
    model(*double_batch(0, 4)).backward()
    optimizer.step()
    session.settle()  # the worker has what it updates
    left = weakref.ref(session._management)
    del model, optimizer, session
    gc.collect()
    assert left() is None


def test_movers_and_books_lead_to_the_current_device() -> None:
    devices = DeviceSet(
        [Device(name=str(k), mover=EmulatedMover(), tracked=TrackedMemory(None), budget_bytes=None) for k in range(2)]
    )
    first, second = (device.tracked for device in devices.devices)
    assert first is not None
    assert second is not None
    books = devices.books(first)
    host, target = devices.mover.host_buffer(8), torch.zeros(8, dtype=torch.uint8)
    with devices.on(1):
        books.charge(512, "a chunk")
        copied = devices.mover.to_device(target, host.fill_(7))
    assert isinstance(copied, Copied)
    assert (first.current_bytes, second.current_bytes) == (0, 512)
    devices.mover.compute_after(copied.ended)  # from the first device
    assert target.tolist() == [7] * 8
    with devices.on(1):
        books.credit(512, "a chunk")
    assert second.current_bytes == 0
