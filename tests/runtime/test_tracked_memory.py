from __future__ import annotations

import copy
import gc
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from lowtide import compat
from lowtide.errors import BudgetError, EmulatedOutOfMemoryError, OwnershipError
from lowtide.runtime.emulation.memory import TrackedMemory
from tests.zoo import bf16_safe

FLOAT_BYTES = 4


@pytest.fixture
def memory() -> Iterator[TrackedMemory]:
    memory = TrackedMemory(None)
    memory.start()
    yield memory
    memory.stop()


@pytest.fixture
def limited() -> Iterator[TrackedMemory]:
    memory = TrackedMemory(1000 * FLOAT_BYTES)
    memory.start()
    yield memory
    memory.stop()


def floats(memory: TrackedMemory) -> float:
    return memory.current_bytes / FLOAT_BYTES


class TestBirthAndDeath:
    def test_a_storage_counts_from_birth_to_death(self, memory: TrackedMemory) -> None:
        first = torch.ones(100)
        second = first + first
        assert floats(memory) == 200
        del first
        assert floats(memory) == 100
        del second
        assert floats(memory) == 0
        assert memory.peak_bytes == 200 * FLOAT_BYTES

    def test_temporaries_show_in_the_peak_alone(self, memory: TrackedMemory) -> None:
        x = torch.ones(100)
        y = (x + 1) * 2 - 3
        assert floats(memory) == 200
        assert memory.peak_bytes == 300 * FLOAT_BYTES
        del y

    def test_reset_peak_begins_at_the_current_bytes(self, memory: TrackedMemory) -> None:
        x = torch.ones(100)
        (x + 1).sum()
        assert memory.reset_peak() == 201 * FLOAT_BYTES
        assert memory.peak_bytes == 100 * FLOAT_BYTES

    def test_views_and_in_place_operators_cost_nothing(self, memory: TrackedMemory) -> None:
        x = torch.ones(10, 10)
        view = x.t()[2:].unsqueeze(0)
        x.mul_(2).add_(1)
        assert floats(memory) == 100
        del x
        assert floats(memory) == 100  # the view holds it
        del view
        assert floats(memory) == 0

    def test_what_takes_the_place_of_another_has_its_bytes_at_once(self, memory: TrackedMemory) -> None:
        old = torch.ones(100)
        with compat.without_modes():
            new = torch.ones(100)
        memory.hand_over(old.untyped_storage(), new.untyped_storage())
        assert floats(memory) == 100  # before any operator reads the new one
        del old
        assert floats(memory) == 100
        del new
        assert floats(memory) == 0

    def test_several_results_count_each(self, memory: TrackedMemory) -> None:
        terms = [torch.ones(10), torch.ones(20)]
        values, indices = torch.ones(30).sort()
        norms = torch._foreach_mul(terms, 2.0)
        assert memory.current_bytes == 2 * 30 * FLOAT_BYTES + 30 * (FLOAT_BYTES + 8)
        del norms, values, indices

    def test_out_and_resize(self, memory: TrackedMemory) -> None:
        x = torch.ones(100)
        out = torch.empty(0)
        assert floats(memory) == 100
        torch.add(x, 1, out=out)
        assert floats(memory) == 200
        out.resize_(500)
        assert floats(memory) == 600
        out.resize_(10)  # torch keeps the memory
        assert floats(memory) == 600
        out.untyped_storage().resize_(40)
        out.add_(1)  # seen when an operator reads it
        assert floats(memory) == 110

    def test_a_cycle_counts_until_it_is_collected(self, memory: TrackedMemory) -> None:
        gc.disable()
        try:
            cycle: list[object] = [torch.ones(100)]
            cycle.append(cycle)
            del cycle
            assert floats(memory) == 100
            gc.collect()
            assert floats(memory) == 0
        finally:
            gc.enable()

    def test_it_keeps_no_tensor_alive(self, memory: TrackedMemory) -> None:
        x = torch.ones(100)
        bell = weakref.ref(x.untyped_storage())
        y = x + 1
        del x
        assert bell() is None
        assert floats(memory) == 100
        del y

    def test_what_fails_leaves_nothing_behind(self, memory: TrackedMemory) -> None:
        def forward(x: Tensor) -> Tensor:
            hidden = x + 1
            raise KeyError(str(hidden.shape))

        x = torch.ones(100)
        with pytest.raises(KeyError):
            forward(x)
        with pytest.raises(RuntimeError, match="must match"):
            torch.add(x, torch.ones(3))
        gc.collect()
        assert floats(memory) == 100

    def test_memory_without_bytes_of_its_own_is_let_pass(self, memory: TrackedMemory) -> None:
        torch.ones(5, device="meta").add(1)
        torch.eye(3).to_sparse().coalesce()
        assert floats(memory) == 0

    def test_a_wrapper_counts_by_its_inner_tensors(self, memory: TrackedMemory) -> None:
        wrapper = TwoTensor(torch.ones(10), torch.ones(10))
        doubled = wrapper * 2
        assert floats(memory) == 40
        memory.exclude(doubled)
        assert floats(memory) == 20

    def test_stop_ends_births_and_not_deaths(self, memory: TrackedMemory) -> None:
        x = torch.ones(100)
        memory.stop()
        memory.stop()
        y = torch.ones(50)
        assert floats(memory) == 100
        del x, y
        assert floats(memory) == 0
        memory.start()
        z = torch.ones(10)
        assert floats(memory) == 10
        del z

    @given(st.lists(st.tuples(st.sampled_from("nvioxrd"), st.integers(0, 9), st.integers(1, 50)), max_size=40))
    def test_bytes_are_those_of_the_living_storages(self, program: list[tuple[str, int, int]]) -> None:
        memory = TrackedMemory(None)
        memory.start()
        tensors: list[Tensor] = []
        host: set[int] = set()
        most = 0
        for verb, index, size in program:
            picked = tensors[index % len(tensors)] if tensors else None
            if verb == "n" or picked is None:
                tensors.append(torch.zeros(size))
            elif verb == "v":
                tensors.append(picked[: size % (len(picked) + 1)])
            elif verb == "i":
                picked.add_(1)
            elif verb == "o":
                made = picked + 1
                if id(picked.untyped_storage()) in host:
                    host.add(id(made.untyped_storage()))
                tensors.append(made)
                del made
            elif verb == "x":
                memory.exclude(picked)
                host.add(id(picked.untyped_storage()))
            elif verb == "r":
                picked.resize_(size)
            elif verb == "d":
                del tensors[index % len(tensors)]
            del picked
            living = {id(storage): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
            host &= living.keys()
            expected = sum(storage.nbytes() for key, storage in living.items() if key not in host)
            most = max(most, expected)
            del living
            assert memory.current_bytes == expected
        memory.stop()
        assert memory.peak_bytes >= most


class TestHostMemory:
    def test_excluded_memory_never_counts(self, memory: TrackedMemory) -> None:
        arena = torch.ones(100)
        memory.exclude(arena)
        assert floats(memory) == 0
        row = arena[10:20]
        row.add_(1)
        x = torch.ones(10)
        x.add_(row)
        assert floats(memory) == 10

    def test_exclusion_holds_for_every_tracker(self, memory: TrackedMemory) -> None:
        other = TrackedMemory(None)
        other.start()
        arena = torch.ones(100)
        assert floats(memory) == floats(other) == 100
        other.exclude(arena)
        assert floats(memory) == floats(other) == 0
        other.stop()

    def test_a_storage_may_be_excluded_before_it_is_seen(self, memory: TrackedMemory) -> None:
        memory.stop()
        arena = torch.ones(100)
        memory.exclude(arena.untyped_storage())
        memory.start()
        x = torch.ones(100)
        y = x + arena
        assert floats(memory) == 200
        del y

    def test_what_comes_from_host_memory_alone_is_of_the_host(self, memory: TrackedMemory) -> None:
        master = torch.ones(100)
        memory.exclude(master)
        state = torch.zeros_like(master)
        state.mul_(0.9).add_(master)
        update = state.sqrt() + 1
        assert memory.current_bytes == 0
        on_device = torch.ones(100)
        mixed = on_device + update
        assert floats(memory) == 200
        del mixed

    def test_on_host_takes_births_off_the_books(self, limited: TrackedMemory) -> None:
        with limited.on_host():
            arena = torch.zeros(5000)
        assert limited.current_bytes == 0
        copied = arena.clone()
        assert limited.peak_bytes == 0
        x = torch.ones(10)
        assert floats(limited) == 10
        del copied, x

    def test_charged_memory_counts_once_and_begets_device_memory(self, memory: TrackedMemory) -> None:
        buffer = torch.empty(0)
        memory.exclude_charged(buffer)
        memory.charge(400, "chunk a/0")
        buffer.untyped_storage().resize_(400)
        weight = torch.empty(0).set_(buffer.untyped_storage(), 0, (100,))
        weight.fill_(1)
        assert memory.current_bytes == memory.charged_bytes == 400
        cast = weight.bfloat16()
        assert memory.current_bytes == 600
        buffer.untyped_storage().resize_(0)
        memory.credit(400, "chunk a/0")
        assert memory.current_bytes == 200
        assert memory.charged_bytes == 0
        del cast

    def test_more_than_was_charged_cannot_be_credited(self, memory: TrackedMemory) -> None:
        memory.charge(400, "chunk a/0")
        memory.credit(100, "chunk a/0")
        with pytest.raises(OwnershipError, match="400 B of 'chunk a/0' are given back, and only 300 B are charged"):
            memory.credit(400, "chunk a/0")
        with pytest.raises(OwnershipError, match="only 0 B"):
            memory.credit(1, "chunk b/0")
        assert memory.current_bytes == 300

    def test_a_copied_model_is_where_its_original_is(self, memory: TrackedMemory) -> None:
        model = nn.Linear(10, 10)
        num_floats = 110
        assert floats(memory) == num_floats
        host_target = copy.deepcopy(model)
        assert floats(memory) == 2 * num_floats
        for parameter in model.parameters():
            memory.exclude(parameter)
        average = copy.deepcopy(model)
        assert floats(memory) == num_floats
        del host_target, average
        assert floats(memory) == 0

    def test_other_threads_are_not_seen(self, memory: TrackedMemory) -> None:
        made: list[Tensor] = []
        kept = [torch.ones(100)]

        def work() -> None:
            made.append(torch.ones(1000) + 1)
            kept.clear()

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert floats(memory) == 0  # what another thread frees is gone, though
        assert memory.peak_bytes == 100 * FLOAT_BYTES


class TestMadeElsewhere:
    def test_what_exists_counts_when_included(self, memory: TrackedMemory) -> None:
        memory.stop()
        weight = torch.ones(100)
        memory.start()
        assert floats(memory) == 0
        memory.include(weight, "weight")
        memory.include(weight[:3], "weight again")
        assert floats(memory) == 100
        assert memory.peak_bytes == 100 * FLOAT_BYTES
        del weight
        assert floats(memory) == 0

    def test_inclusion_overrules_exclusion(self, memory: TrackedMemory) -> None:
        x = torch.ones(100)
        memory.exclude(x)
        memory.include(x)
        assert floats(memory) == 100
        y = x + 1
        assert floats(memory) == 200
        del y

    def test_a_batch_counts_when_it_meets_the_weights(self, memory: TrackedMemory) -> None:
        memory.stop()
        batch = torch.ones(4, 10)
        memory.start()
        model = nn.Linear(10, 3)
        inputs = batch.view(2, 2, 10)
        assert floats(memory) == 33
        with torch.no_grad():
            out = model(inputs)
        assert floats(memory) == 33 + 40 + 12
        del batch, inputs, out
        assert floats(memory) == 33

    def test_a_data_set_is_not_the_devices(self, memory: TrackedMemory) -> None:
        memory.stop()
        data = torch.ones(1000, 10)
        memory.start()
        model = nn.Linear(10, 3)
        indexed = data[torch.tensor([3, 4])]
        collated = torch.stack([data[1], data[2]])
        model.weight.data.copy_(data[:3])
        shuffled = data[torch.randperm(1000)[:2]]
        assert floats(memory) == 33 + 3 * 20
        del indexed, collated, shuffled
        for start in range(0, 1000, 100):
            model(data[start : start + 100])
        data.mean()
        assert floats(memory) == 33 + 1000  # one batch, though all lie in one storage


class TestTraining:
    def test_peak_of_a_two_layer_network_is_arithmetic(self, memory: TrackedMemory) -> None:
        num_rows, num_in, num_hidden, num_out = 64, 8, 16, 4
        memory.stop()
        model = nn.Sequential(nn.Linear(num_in, num_hidden), nn.ReLU(), nn.Linear(num_hidden, num_out))
        batch = torch.randn(num_rows, num_in)
        memory.start()
        for parameter in model.parameters():
            memory.include(parameter)
        first, second = num_in * num_hidden + num_hidden, num_hidden * num_out + num_out
        hidden = num_rows * num_hidden
        weights = first + second
        assert floats(memory) == weights

        loss = model(batch).sum()
        assert floats(memory) == weights + batch.numel() + hidden + 1  # what relu saved, and the loss
        assert memory.reset_peak() == FLOAT_BYTES * (weights + batch.numel() + 2 * hidden)  # both sides of relu

        loss.backward()
        scalars = 2  # the loss and its gradient
        assert memory.peak_bytes == FLOAT_BYTES * (
            # In relu's backward: what it saved, the gradient that comes and the one that goes.
            weights + batch.numel() + 3 * hidden + second + scalars
        )
        assert floats(memory) == 2 * weights + batch.numel() + 1
        model.zero_grad()
        del loss, batch
        assert floats(memory) == weights

    @bf16_safe()
    def test_nothing_changes_for_the_model(self) -> None:
        def losses(memory: TrackedMemory | None) -> list[float]:
            torch.manual_seed(0)
            model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.3, batch_first=True)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            if memory is not None:
                memory.start()
            found = []
            for _ in range(3):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    out = checkpoint(model, torch.randn(2, 5, 16), use_reentrant=False)
                    loss = out.float().pow(2).mean()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
            if memory is not None:
                memory.stop()
            return found

        assert losses(TrackedMemory(None)) == losses(None)

    def test_checkpointing_saves_what_it_should(self, memory: TrackedMemory) -> None:
        layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)))
        x = torch.randn(64, 32)
        weights, row = 4 * (32 * 32 + 32), 64 * 32
        kept = layers(x)
        assert floats(memory) == weights + row + 4 * row  # each tanh keeps its result
        del kept
        out = x
        for layer in layers:
            out = checkpoint(layer, out, use_reentrant=False)
        assert floats(memory) == weights + row + 4 * row  # the same: each layer's input and the last output
        del out
        half = checkpoint(layers[2:], checkpoint(layers[:2], x, use_reentrant=False), use_reentrant=False)
        assert floats(memory) == weights + row + 2 * row
        half.sum().backward()
        del half
        assert floats(memory) == 2 * weights + row

    @bf16_safe()
    def test_autocast_casts_count_while_they_are_cached(self, memory: TrackedMemory) -> None:
        model = nn.Linear(32, 32)
        x = torch.randn(8, 32)
        held = FLOAT_BYTES * (32 * 32 + 32 + 8 * 32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
            casts = 2 * (32 * 32 + 32 + 8 * 32)
            assert memory.current_bytes == held + casts + 2 * out.numel()
            del out
            assert memory.current_bytes == held + 2 * (32 * 32 + 32)
        assert memory.current_bytes == held


class TestBudget:
    def test_the_operator_that_goes_over_raises(self, limited: TrackedMemory) -> None:
        kept = [torch.ones(400), torch.ones(20, 10), torch.ones(100), torch.ones(7)]
        with pytest.raises(EmulatedOutOfMemoryError) as caught:
            torch.zeros(50, 10)
        assert str(caught.value) == (
            "the emulated device is out of memory: aten.zeros asked for 2.0 KiB with 2.8 KiB of 3.9 KiB in use. Largest "
            "on the device: aten.ones [400] 1.6 KiB; aten.ones [20, 10] 800 B; aten.ones [100] 400 B. Raise the device's "
            "budget, use a smaller batch, or let the plan stream or recompute more"
        )
        error = caught.value
        assert isinstance(error, BudgetError)
        assert (error.tier, error.owner, error.budget_bytes) == ("device", "aten.zeros", 4000)
        assert (error.needed_bytes, error.free_bytes) == (2000, 4000 - 707 * FLOAT_BYTES)
        assert floats(limited) == 707
        assert limited.peak_bytes == 707 * FLOAT_BYTES
        kept.append(torch.zeros(293))
        assert limited.current_bytes == limited.budget_bytes

    def test_the_result_is_freed_while_the_error_is_held(self, limited: TrackedMemory) -> None:
        witness = TrackedMemory(None)
        witness.start()
        x = torch.ones(600)
        with pytest.raises(EmulatedOutOfMemoryError) as caught:
            x.add(1)
        assert caught.value.__traceback__ is not None
        assert floats(witness) == 600
        bell = weakref.ref(x.untyped_storage())
        del x
        assert bell() is None  # nor does the traceback hold the argument
        witness.stop()

    def test_a_step_that_fails_in_backward_can_be_repeated(self) -> None:
        memory = TrackedMemory(None)
        model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
        batch = torch.randn(64, 32)
        memory.start()
        for parameter in model.parameters():
            memory.include(parameter)

        def step() -> None:
            model(batch).pow(2).sum().backward()

        step()
        before, memory.budget_bytes = floats(memory), memory.peak_bytes - 1
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        del gradients
        model.zero_grad()
        with pytest.raises(EmulatedOutOfMemoryError):
            step()
        model.zero_grad()
        gc.collect()
        assert floats(memory) == before - sum(parameter.numel() for parameter in model.parameters())
        memory.budget_bytes += 1
        step()
        assert floats(memory) == before
        assert memory.peak_bytes <= memory.budget_bytes
        memory.stop()

    @pytest.mark.parametrize("take", [lambda m, x: m.charge(4004, "chunk"), lambda m, x: m.include(x, "chunk")])
    def test_what_is_asked_for_by_name_is_refused_whole(
        self, limited: TrackedMemory, take: Callable[[TrackedMemory, Tensor], None]
    ) -> None:
        with limited.on_host():
            x = torch.ones(1001)
        with pytest.raises(EmulatedOutOfMemoryError, match="chunk asked for 3.9 KiB with 0 B of 3.9 KiB in use. Lar"):
            take(limited, x)
        assert limited.current_bytes == limited.peak_bytes == 0

    def test_charges_are_named_among_the_largest(self, limited: TrackedMemory) -> None:
        limited.charge(3000, "chunk layers.3/0")
        with pytest.raises(EmulatedOutOfMemoryError, match="device: chunk layers.3/0 2.9 KiB. Raise"):
            torch.ones(500)

    def test_an_argument_that_grew_stays_on_the_books(self, limited: TrackedMemory) -> None:
        x = torch.ones(10)
        with pytest.raises(EmulatedOutOfMemoryError, match="aten.resize_ asked for"):
            x.resize_(2000)
        assert floats(limited) == 2000
        x.add_(1)  # asks for nothing
        del x
        assert floats(limited) == 0

    def test_a_batch_that_is_too_large_is_named(self, limited: TrackedMemory) -> None:
        limited.stop()
        batch = torch.ones(200, 10)
        limited.start()
        weight = torch.ones(10, 1)
        with pytest.raises(EmulatedOutOfMemoryError, match=r"read by aten.mm \[200, 10\] 7.8 KiB"):
            batch @ weight
        # It was not brought.
        assert floats(limited) == 10
        assert limited.peak_bytes == 10 * FLOAT_BYTES


def test_an_operator_costs_microseconds(memory: TrackedMemory) -> None:
    def seconds_per_operator() -> float:
        x = torch.ones(8)
        best = math.inf
        for _ in range(5):
            started = time.perf_counter()
            for _ in range(400):
                F.relu(x)
            best = min(best, (time.perf_counter() - started) / 400)
        return best

    watched = seconds_per_operator()
    memory.stop()
    assert watched - seconds_per_operator() < 60e-6
