"""What stands in a trace for our kernels, on the host, where its tensors are counted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from lowtide.optim.device.table import MATRIX_COLUMNS, MATRIX_FLOATS, WORKSPACE_BYTES, num_partials
from lowtide.optim.optimizers import Adafactor
from lowtide.optim.update_types import numerics_of
from lowtide.runtime.emulation.memory import TrackedMemory
from lowtide.runtime.prediction.without_memory import KernelFootprint
from lowtide.runtime.updates.chunk_optimizer import Update


@pytest.fixture
def memory() -> Iterator[TrackedMemory]:
    memory = TrackedMemory(None)
    memory.start()
    yield memory
    memory.stop()


def weights(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    found = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for weight in found:
        weight.grad = torch.zeros_like(weight)
    return found


def step(kernels: KernelFootprint, parameters: list[nn.Parameter]) -> None:
    kernels.run([Update(parameter, parameter) for parameter in parameters], kernels.settings())


def test_state_stays_and_sums_are_for_a_moment(memory: TrackedMemory) -> None:
    parameters = weights((64, 512), (128, 256))
    kernels = KernelFootprint(Adafactor(parameters, lr=0.1), numerics_of("fp32", "fp32")[1])
    before = memory.current_bytes
    step(kernels, parameters)
    state = 4 * (64 + 512 + 128 + 256)
    assert memory.current_bytes - before == state
    memory.reset_peak()
    step(kernels, parameters)
    sums = 2 + num_partials((64, 512)) + num_partials((128, 256))
    tables = 2 * (8 * len(MATRIX_COLUMNS) + 4 * len(MATRIX_FLOATS))
    assert memory.peak_bytes - before - state == 4 * sums + tables
    assert memory.current_bytes - before == state


def test_matrices_share_a_workspace_as_far_as_it_goes(memory: TrackedMemory) -> None:
    # Each has partial sums of more than half of it, so that two do not share; the second is taken beside the first.
    rows = WORKSPACE_BYTES // 4 // 2
    parameters = weights((rows, 8), (rows, 8))
    one = 4 * (1 + num_partials((rows, 8)))
    assert WORKSPACE_BYTES < 2 * one < 2 * WORKSPACE_BYTES
    kernels = KernelFootprint(Adafactor(parameters, lr=0.1), numerics_of("fp32", "fp32")[1])
    step(kernels, parameters)
    before = memory.reset_peak() and memory.current_bytes
    step(kernels, parameters)
    tables = 2 * (8 * len(MATRIX_COLUMNS) + 4 * len(MATRIX_FLOATS))
    assert memory.peak_bytes - before == 2 * one + tables


def test_elementwise_updates_need_tables_alone(memory: TrackedMemory) -> None:
    parameters = weights((64, 512))
    kernels = KernelFootprint(torch.optim.AdamW(parameters), numerics_of("fp32", "fp32")[1])
    step(kernels, parameters)
    before = memory.reset_peak() and memory.current_bytes
    step(kernels, parameters)
    assert 0 < memory.peak_bytes - before < 512
