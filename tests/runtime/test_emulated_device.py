from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lowtide import compat
from lowtide.runtime.emulation.device import EmulatedDevice
from lowtide.runtime.emulation.memory import TrackedMemory

FLOAT_BYTES = 4


class Counting(compat.TorchDispatchMode):
    """A mode of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.num_operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_operators += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def memory() -> Iterator[TrackedMemory]:
    memory = TrackedMemory(None)
    yield memory
    memory.stop()
    assert not is_watched()


def is_watched() -> bool:
    return compat.has_mode(EmulatedDevice.of_this_thread())


def counted_floats(memory: TrackedMemory) -> float:
    """How much a tensor of ten floats adds."""
    before = memory.current_bytes
    made = torch.ones(10)
    after = memory.current_bytes
    del made
    return (after - before) / FLOAT_BYTES


class TestStack:
    @pytest.mark.parametrize("is_in_order", [True, False])
    def test_trackers_stop_in_any_order(self, is_in_order: bool) -> None:
        first, second = TrackedMemory(None), TrackedMemory(None)
        first.start()
        second.start()
        assert counted_floats(first) == counted_floats(second) == 10
        one, other = (second, first) if is_in_order else (first, second)
        one.stop()
        assert (counted_floats(one), counted_floats(other)) == (0, 10)
        other.stop()
        assert counted_floats(other) == 0
        assert not is_watched()

    def test_a_mode_inside_sees_and_ends_as_ever(self, memory: TrackedMemory) -> None:
        memory.start()
        with Counting() as counting:
            assert counted_floats(memory) == 10
        assert counting.num_operators == 1
        assert counted_floats(memory) == 10
        assert counting.num_operators == 1

    def test_start_inside_another_mode_outlives_it(self, memory: TrackedMemory) -> None:
        with Counting() as outer:
            memory.start()
            assert counted_floats(memory) == 10
            num_seen = outer.num_operators
        assert counted_floats(memory) == 10
        assert outer.num_operators == num_seen

    def test_stop_inside_another_mode_leaves_it_alone(self, memory: TrackedMemory) -> None:
        memory.start()
        with Counting() as outer, Counting() as inner:
            memory.stop()
            assert counted_floats(memory) == 0
            assert (outer.num_operators, inner.num_operators) == (1, 1)
        assert not is_watched()

    def test_start_and_stop_where_modes_are_disabled(self, memory: TrackedMemory) -> None:
        memory.start()
        with compat.without_modes():
            memory.stop()  # it is not on the stack, and comes back
        assert is_watched()
        assert counted_floats(memory) == 0
        memory.start()
        assert counted_floats(memory) == 10

    def test_stop_in_a_hook_of_backward(self, memory: TrackedMemory) -> None:
        memory.start()
        leaf = torch.ones(3, requires_grad=True)
        leaf.register_hook(lambda gradient: memory.stop())
        (leaf * 2).sum().backward()
        assert counted_floats(memory) == 0
        memory.start()
        assert counted_floats(memory) == 10

    def test_stop_from_another_thread_leaves_it_inert(self, memory: TrackedMemory) -> None:
        memory.start()
        thread = threading.Thread(target=memory.stop)
        thread.start()
        thread.join()
        assert counted_floats(memory) == 0
        memory.start()
        assert counted_floats(memory) == 10

    def test_a_lost_tracker_is_forgotten(self, memory: TrackedMemory) -> None:
        lost = TrackedMemory(8)
        lost.start()
        del lost
        gc.collect()
        torch.ones(10)
        memory.start()
        assert counted_floats(memory) == 10

    def test_each_thread_has_its_own(self, memory: TrackedMemory) -> None:
        memory.start()
        found: list[float] = []

        def work() -> None:
            other = TrackedMemory(None)
            other.start()
            found.append(counted_floats(other))
            other.stop()

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert found == [10]
        assert memory.peak_bytes == 0


class TestSumsOfGradients:
    """Unwatched, autograd adds the second gradient to the first; watched, it makes a third tensor."""

    def test_a_sum_takes_the_place_of_its_first_term(self, memory: TrackedMemory) -> None:
        memory.start()
        leaf = torch.ones(100, requires_grad=True)
        loss = (leaf * 2 + leaf * 3).sum()
        memory.reset_peak()
        loss.backward()
        scalars = 2  # the loss and its gradient
        assert memory.peak_bytes == FLOAT_BYTES * (100 + 2 * 100 + scalars)
        assert memory.current_bytes == FLOAT_BYTES * (100 + 100 + 1)
        leaf.grad = None
        assert memory.current_bytes == FLOAT_BYTES * (100 + 1)

    def test_not_where_somebody_else_holds_the_term(self, memory: TrackedMemory) -> None:
        memory.start()
        leaf = torch.ones(100, requires_grad=True)
        double, triple = leaf * 2, leaf * 3
        held: list[Tensor] = []
        for term in (double, triple):
            term.grad_fn.register_hook(lambda gradients, _: held.append(gradients[0]))  # type: ignore[union-attr]
        loss = (double + triple).sum()
        del double, triple, term
        memory.reset_peak()
        loss.backward()
        assert len(held) == 2
        assert memory.current_bytes == FLOAT_BYTES * (100 + 3 * 100 + 1)
        assert memory.peak_bytes == FLOAT_BYTES * (100 + 3 * 100 + 2)

    def test_an_addition_of_the_users_is_one(self, memory: TrackedMemory) -> None:
        memory.start()
        total = torch.ones(100) + torch.ones(100)
        assert memory.peak_bytes == FLOAT_BYTES * 300
        assert memory.current_bytes == FLOAT_BYTES * 100
        del total


class Rows(Dataset[Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((100,), float(index)) + torch.zeros(100)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_workers_have_no_budget(memory: TrackedMemory) -> None:
    # In a worker the rows of a batch, one temporary and the collated batch would be over it.
    memory.budget_bytes = 510 * FLOAT_BYTES
    memory.start()
    weight = torch.ones(100)
    sums = []
    for batch in DataLoader(Rows(), batch_size=4, num_workers=1, multiprocessing_context="fork"):
        sums.append((batch @ weight).sum().item())
        assert memory.current_bytes == (100 + 400) * FLOAT_BYTES
        del batch
    assert sums == [600.0, 2200.0]


@pytest.mark.filterwarnings("ignore:.*\\.grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_code_stays_compiled_and_right(memory: TrackedMemory) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    def step(x: Tensor, weight: Tensor) -> Tensor:
        hidden = torch.tanh(x @ weight)
        torch._dynamo.graph_break()
        return (hidden * 2).sum()

    memory.start()
    x, weight = torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)
    compiled = torch.compile(step, backend=backend)
    for _ in range(3):
        loss = compiled(x, weight)
        (found,) = torch.autograd.grad(loss, weight)
    (expected,) = torch.autograd.grad(step(x, weight), weight)
    assert len(graphs) == 2
    assert torch.equal(found, expected)
    assert memory.current_bytes == FLOAT_BYTES * (32 + 3 * 64 + 1)
    torch._dynamo.reset()
