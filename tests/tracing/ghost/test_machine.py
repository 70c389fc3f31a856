"""The ghost machine: a process in which torch believes in a CUDA card."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.tracing.ghost.ghost_process import GhostProcess, Lab


def test_a_ghost_looks_like_a_card(ghosts: GhostProcess) -> None:
    def step(lab: Lab) -> tuple[object, ...]:
        x = lab.ghost(2, 3)
        return str(x.device), x.is_cuda, torch.autocast("cuda").device, tuple(x.shape), "Ghost" in repr(x)

    assert ghosts(step) == ("ghost:0", True, "ghost", (2, 3), True)


def test_there_is_one_machine_a_process(ghosts: GhostProcess) -> None:
    assert ghosts(lambda lab: type(lab.machine).get() is lab.machine)


def test_tensors_made_from_numbers_know_their_values(ghosts: GhostProcess) -> None:
    """`torch.tensor` and indexing with a list make their tensors below any dispatch mode."""

    def step(lab: Lab) -> tuple[object, ...]:
        x = lab.ghost(5, 2)
        made = torch.tensor([3, 1, 2], device=x.device)
        rows = x[[0, 2, 4]]
        scalar = torch.tensor(2.5, device=x.device)
        return made.tolist(), tuple(rows.shape), float(scalar * 2), int(made.max())

    assert ghosts(step) == ([3, 1, 2], (3, 2), 5.0, 3)


def test_tensors_made_on_the_card_cost_their_bytes(ghosts: GhostProcess) -> None:
    def step(lab: Lab) -> list[int]:
        device = lab.ghost(1).device
        lab.mark()
        keep = [torch.tensor([1, 2, 3], device=device), torch.zeros(4, device=device), torch.arange(6, device=device)]
        return [nbytes for _, nbytes in lab.births] if keep else []

    assert ghosts(step) == [24, 16, 48]


def test_moving_to_the_card_and_back(ghosts: GhostProcess) -> None:
    def step(lab: Lab) -> tuple[object, ...]:
        lab.mark()
        there = torch.arange(4).to("ghost")
        births = list(lab.births)
        back = there.cpu()
        return births, str(back.device), back.tolist()

    births, device, values = ghosts(step)
    assert [nbytes for _, nbytes in births] == [32]
    assert (device, values) == ("cpu", [0, 1, 2, 3])


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad])
def test_optimizers_take_their_foreach_form_as_on_cuda(ghosts: GhostProcess, kind: type[torch.optim.Optimizer]) -> None:
    def step(lab: Lab) -> bool:
        parameter = lab.ghost(4, 4, needs_grad=True)
        optimizer = kind([parameter])  # type: ignore[call-arg]
        parameter.grad = lab.ghost(4, 4)
        lab.recorder.begin_phase(lab.phase.UPDATE)
        optimizer.step()
        return any(name.startswith("aten._foreach") for name in lab.calls)

    assert ghosts(step)


def test_a_checkpoint_runs_its_forward_again(ghosts: GhostProcess) -> None:
    def step(lab: Lab) -> tuple[int, int]:
        x = lab.ghost(8, 8, needs_grad=True)
        start = lab.live_bytes
        out = checkpoint(lambda y: y.exp().exp().exp(), x, use_reentrant=False)
        held = lab.live_bytes - start
        lab.recorder.begin_phase(lab.phase.BACKWARD)
        out.sum().backward()
        return held, sum(name == "aten.exp" for name in lab.calls)

    held, count = ghosts(step)
    assert held == 4 * 64  # the output; its inputs are recomputed
    assert count in (5, 6)  # three, and again up to the last that is needed


def test_small_tensors_on_the_host_stay_real(ghosts: GhostProcess) -> None:
    assert ghosts(lambda lab: (torch.ones(3) + 1).sum().item()) == 6.0


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Linear(8, 4), (2, 8)), (nn.Conv2d(3, 4, 3), (1, 3, 8, 8)), (nn.LayerNorm(8), (2, 8)), (nn.BatchNorm2d(3), (2, 3, 4, 4)),
     (nn.MultiheadAttention(8, 2, batch_first=True), (2, 5, 8)), (nn.GELU(), (4,)), (nn.MaxPool2d(2), (1, 3, 8, 8)),
     (nn.GroupNorm(2, 4), (2, 4, 3, 3)), (nn.ConvTranspose2d(3, 4, 2, 2), (1, 3, 4, 4)), (nn.Embedding(5, 3), None)],
)  # fmt: skip
def test_layers_give_shapes_types_and_strides_as_on_the_cpu(
    ghosts: GhostProcess, layer: nn.Module, shape: tuple[int, ...] | None
) -> None:
    inputs = torch.zeros(2, 3, dtype=torch.int64) if shape is None else torch.randn(shape)
    state = {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}

    def call(network: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return network(x, x, x, need_weights=False)[0] if isinstance(network, nn.MultiheadAttention) else network(x)

    def step(lab: Lab) -> tuple[object, ...]:
        moved = layer.to("meta")
        for module in moved.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = lab.ghost(*parameter.shape, needs_grad=True)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = lab.ghost(*buffer.shape, dtype=buffer.dtype)
        out = call(moved, lab.known(inputs))
        return tuple(out.shape), out.dtype, out.stride()

    real = call(layer, inputs)
    assert state == {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
    assert ghosts(step) == (tuple(real.shape), real.dtype, real.stride())
