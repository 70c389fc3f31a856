"""Offload: saved tensors leave the device and come back, host memory is given back, and a missing wait is seen."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from lowtide.activations import Offload, Policies, apply
from lowtide.activations.stash import Stash
from lowtide.errors import SavedTensorChangedError
from lowtide.memory.emulated_mover import EmulatedMover
from lowtide.memory.mover import Mover, Ticket
from tests.activations.measured import (
    INPUT_BYTES,
    ROWS,
    WIDTH,
    LiveBytes,
    OutsideMover,
    Stack,
    assert_equal,
    gradients,
    stack,
)

NUM_BLOCKS = 8
INPUTS = Offload(min_bytes=0)
ALL = Offload(recompute=False, min_bytes=0)


def measured(policies: Policies, mover: Mover | None = None) -> tuple[int, int, list[Tensor]]:
    """Bytes that live on the device after the forward, the most at once, and the gradients."""
    model, x = stack(NUM_BLOCKS), torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    with apply(model, policies, mover=mover or OutsideMover(), poison=True):
        gradients(model, x)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        torch.manual_seed(5)
        with LiveBytes() as live:
            loss = model(x)
            kept_bytes = live.live_bytes
            loss.backward()
    return (
        kept_bytes,
        live.peak_bytes,
        [parameter.grad for parameter in model.parameters() if parameter.grad is not None],
    )


def test_inputs_leave_the_device_but_for_two() -> None:
    recompute_kept, recompute_peak, expected = measured("recompute")
    kept, peak, found = measured(INPUTS)
    assert_equal(expected, found)
    assert recompute_kept - kept == (NUM_BLOCKS - 2) * INPUT_BYTES
    # The first backward has two of the last, the next one ahead, and none of the others.
    assert peak <= recompute_peak - (NUM_BLOCKS - 4) * INPUT_BYTES


def test_all_saved_tensors_leave_the_device() -> None:
    plain_kept, plain_peak, expected = measured("keep")
    kept, peak, found = measured(ALL)
    assert_equal(expected, found)
    # Two of the largest, and the output of the last block that the loss reads.
    assert kept <= 2 * 4 * INPUT_BYTES + 2 * INPUT_BYTES
    assert kept < plain_kept / 8
    assert peak < plain_peak / 2


@pytest.mark.parametrize("eagerness", [0.0, 0.5])
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("recompute", [True, False])
def test_depth_changes_no_bits(recompute: bool, depth: int, eagerness: float) -> None:
    model, x = stack(NUM_BLOCKS), torch.randn(ROWS, WIDTH)
    expected = gradients(model, x)
    policy = Offload(recompute=recompute, min_bytes=0, depth=depth)
    with apply(model, policy, mover=EmulatedMover(eagerness=eagerness), poison=True) as applied:
        for _ in range(2):
            assert_equal(expected, gradients(model, x))
        assert applied.stats().brought_bytes > 0


class Heedless(EmulatedMover):
    """The computation waits for nothing."""

    def compute_after(self, ticket: Ticket) -> None:
        del ticket


@pytest.mark.parametrize("policy", [INPUTS, ALL])
def test_a_missing_wait_shows(policy: Offload) -> None:
    model, x = stack(NUM_BLOCKS), torch.randn(ROWS, WIDTH)
    with apply(model, policy, mover=Heedless(), poison=True):
        assert any(gradient.isnan().any() for gradient in gradients(model, x))


def test_a_tensor_that_is_saved_twice_goes_once_and_weights_never() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(32, 32))

        def forward(self, x: Tensor) -> Tensor:
            query, key, value = (x @ self.weight.view(32, 32)).chunk(3, dim=0)
            return (query * key * value + query.exp() @ self.weight.t()).sum() + (x.t() * x[:, :1].t()).sum()

    model, x = Twice(), torch.randn(96, 32)
    expected = gradients(model, x)
    x_bytes = x.nbytes
    with apply(model, {"": ALL}) as applied:
        assert_equal(expected, gradients(model, x))
        # The input, the product with its three views, the exponential, and the three products of two: no weight.
        third = x_bytes // 3
        assert applied.stats().offloaded_bytes == 2 * x_bytes + 2 * third


def test_small_and_marked_tensors_stay() -> None:
    model, x = stack(4), torch.randn(ROWS, WIDTH)
    expected = gradients(model, x)
    with apply(model, Offload(min_bytes=INPUT_BYTES + 1)) as applied:
        assert_equal(expected, gradients(model, x))
        assert applied.stats().num_offloaded == 0
    with apply(model, INPUTS, is_weight=lambda tensor: tensor.shape[-1] == WIDTH) as applied:
        assert_equal(expected, gradients(model, x))
        assert applied.stats().num_offloaded == 0
    with apply(model, INPUTS) as applied:
        gradients(model, x)
        assert applied.stats().num_offloaded == 4


@pytest.mark.parametrize("policy", [INPUTS, ALL])
def test_a_graph_that_is_dropped_gives_its_host_memory_back(policy: Offload) -> None:
    model, x = stack(NUM_BLOCKS), torch.randn(ROWS, WIDTH)
    with apply(model, policy) as applied:
        loss = model(x)
        held_bytes = applied.stats().host_bytes
        assert held_bytes >= NUM_BLOCKS * INPUT_BYTES
        del loss
        gc.collect()
        assert applied.stats().host_bytes == 0


@pytest.mark.parametrize("policy", [INPUTS, ALL])
def test_second_backwards_two_graphs_and_removal_in_between(policy: Offload) -> None:
    def steps(model: Stack) -> list[Tensor]:
        torch.manual_seed(5)
        one, two = model(first), model(second)
        two.backward(retain_graph=True)
        one.backward()
        two.backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    first, second = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    model = stack(NUM_BLOCKS)
    expected = steps(model)
    model.zero_grad()
    with apply(model, policy, poison=True):
        assert_equal(expected, steps(model))
        model.zero_grad()
        torch.manual_seed(5)
        one, two = model(first), model(second)
    two.backward(retain_graph=True)
    one.backward()
    two.backward()
    assert_equal(expected, [parameter.grad for parameter in model.parameters() if parameter.grad is not None])


def test_a_tensor_that_is_written_to_while_it_leaves_is_refused() -> None:
    class Writing(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            y = self.blocks[0](x)
            x.mul_(2)
            return self.blocks[1](y).mean() + x.sum()

    model = Writing(2)
    with apply(model, INPUTS):
        loss = model(torch.randn(ROWS, WIDTH))
        with pytest.raises(SavedTensorChangedError, match="written to in place"):
            loss.backward()


def test_a_small_view_of_a_large_storage_goes_alone() -> None:
    stash = Stash(EmulatedMover(), poison=True)
    parcel = stash.open_parcel(1)
    large = torch.randn(64, 64)
    views = [large[:, 3:7], large[5:6].expand(8, 64), large.t()[::9, 2:4]]
    packed = [stash.put(parcel, view) for view in views]
    assert stash.put_bytes == sum(len({*range(view.numel())}) * 4 for view in (views[0], large[5:6], views[2]))
    others = [stash.put(stash.open_parcel(1), torch.randn(4)) for _ in range(2)]
    for view, saved in zip(views, packed, strict=True):
        brought = saved.take()
        assert torch.equal(brought, view)
        assert [stride == 0 for stride in brought.stride()] == [stride == 0 for stride in view.stride()]
        assert brought.data_ptr() != view.data_ptr()
    assert others
