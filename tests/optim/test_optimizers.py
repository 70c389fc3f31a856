"""Lion and Adafactor as plain torch optimizers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from lowtide.errors import ConfigError
from lowtide.models.deep_one import DeepOne
from lowtide.optim import Lion
from lowtide.optim.optimizers import Adafactor
from tests.models.live_bytes import LiveBytes
from tests.models.test_deep_one import FULL, TINY
from tests.models.training import train_losses


@pytest.mark.parametrize("maximize", [False, True])
def test_steps_equal_the_paper(maximize: bool) -> None:
    torch.manual_seed(0)
    lr, beta1, beta2, decay = 0.01, 0.9, 0.99, 0.1
    parameter = torch.nn.Parameter(torch.randn(50, dtype=torch.float64))
    weight, momentum = parameter.detach().clone(), torch.zeros(50, dtype=torch.float64)
    optimizer = Lion([parameter], lr=lr, betas=(beta1, beta2), weight_decay=decay, maximize=maximize)
    for _ in range(100):
        gradient = torch.randn(50, dtype=torch.float64)
        parameter.grad = gradient.clone()
        optimizer.step()
        if maximize:
            gradient = -gradient
        # Algorithm 2: theta <- theta - lr * (sign(c) + decay * theta), with the momentum from before the step in c.
        weight = weight - lr * (torch.sign(beta1 * momentum + (1 - beta1) * gradient) + decay * weight)
        momentum = beta2 * momentum + (1 - beta2) * gradient
    torch.testing.assert_close(parameter.detach(), weight, rtol=1e-12, atol=1e-12)


def test_state_is_one_tensor_of_the_parameter_and_resumes() -> None:
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(4, 3).bfloat16())
    optimizer = Lion([parameter], lr=torch.tensor(0.5))
    parameter.grad = torch.randn(4, 3).bfloat16()
    optimizer.step()
    assert {name: value.dtype for name, value in optimizer.state[parameter].items()} == {"exp_avg": torch.bfloat16}
    twin = torch.nn.Parameter(parameter.detach().clone())
    other = Lion([twin], lr=0.5)
    other.load_state_dict(optimizer.state_dict())
    twin.grad = parameter.grad.clone()
    optimizer.step()
    other.step()
    assert torch.equal(twin, parameter)


def test_parameters_without_gradient_stay_and_a_closure_is_called() -> None:
    still, moved = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = Lion([still, moved], lr=0.5)

    def closure() -> float:
        loss = moved.sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 2.0
    assert still.tolist() == [1.0, 1.0]
    assert moved.tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("settings", "key"),
    [({"lr": -1.0}, "lr"), ({"betas": (0.9, 1.0)}, "betas"), ({"weight_decay": -0.1}, "weight_decay")],
)
def test_bad_settings(settings: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} (is|are) .*; give") as caught:
        Lion([torch.zeros(1)], **settings)  # type: ignore[arg-type]
    assert caught.value.key == key


def test_sparse_gradients_are_refused() -> None:
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="sparse=False"):
        Lion(embedding.parameters()).step()


def _reference(weight: Tensor, gradients: list[Tensor], *, lr: float, decay: float) -> Tensor:
    """The paper's algorithm 4 and 5 in fp64, loops and all."""
    weight = weight.double()
    rows, cols, full = 0.0, 0.0, 0.0
    for t, gradient in enumerate(gradients, start=1):
        g = gradient.double()
        beta2 = min(1 - t**-0.8, 0.999)
        squares = g * g + 1e-30
        if g.dim() == 2:
            rows = beta2 * rows + (1 - beta2) * squares.sum(1)
            cols = beta2 * cols + (1 - beta2) * squares.sum(0)
            second_moment = rows[:, None] * cols[None, :] / rows.sum()
        else:
            full = beta2 * full + (1 - beta2) * squares
            second_moment = full
        update = g / second_moment.sqrt()
        update = update / max(1.0, math.sqrt((update * update).mean().item()))
        weight = weight - lr * decay * weight - lr * update
    return weight


@pytest.mark.parametrize("shape", [(6, 10), (7,)])
def test_adafactor_steps_equal_the_paper(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(shape))
    start = parameter.detach().clone()
    gradients = [torch.randn(shape) * 10.0**-i for i in range(5)]
    optimizer = Adafactor([parameter], lr=0.03, weight_decay=0.1)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    expected = _reference(start, gradients, lr=0.03, decay=0.1)
    torch.testing.assert_close(parameter.detach(), expected.float(), rtol=1e-5, atol=1e-6)


def test_convolution_is_treated_as_a_matrix() -> None:
    kernel = nn.Parameter(torch.randn(4, 3, 2, 5))
    flat = nn.Parameter(kernel.detach().reshape(24, 5).clone())
    kernel.grad = torch.randn(4, 3, 2, 5)
    flat.grad = kernel.grad.reshape(24, 5).clone()
    optimizer = Adafactor([kernel, flat])
    optimizer.step()
    assert torch.equal(kernel.detach().reshape(24, 5), flat.detach())


def test_state_is_row_and_column_in_the_parameters_dtype() -> None:
    with torch.device("meta"):
        model = DeepOne(FULL)
    expected = sum(p.shape[0] + p.shape[1] if p.dim() == 2 else p.numel() for p in model.parameters()) * 4
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    optimizer = Adafactor(model.parameters())
    optimizer.step()
    tensors = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    assert sum(t.nbytes for t in tensors) == expected
    assert expected / 2**20 == pytest.approx(5.4, abs=0.1)
    half = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    half.grad = torch.ones_like(half)
    optimizer = Adafactor([half])
    optimizer.step()
    assert {optimizer.state[half][name].dtype for name in ("row", "col")} == {torch.bfloat16}


@pytest.mark.parametrize(("dtype", "copies"), [(torch.float32, 3), (torch.bfloat16, 5)])
def test_temporaries_are_those_of_the_experiment(dtype: torch.dtype, copies: int) -> None:
    parameter = nn.Parameter(torch.randn(64, 96).to(dtype))
    parameter.grad = torch.randn(64, 96).to(dtype)
    optimizer = Adafactor([parameter])
    with LiveBytes(ignore_bytes=96 * 8) as live:
        optimizer.step()
    assert live.peak_bytes == copies * 64 * 96 * 4
    assert live.peak_bytes > 0


def test_parameters_without_a_gradient_stay() -> None:
    parameter = nn.Parameter(torch.ones(3, 3))
    Adafactor([parameter]).step()
    assert torch.equal(parameter.detach(), torch.ones(3, 3))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_parameters_without_elements_are_passed_over(shape: tuple[int, ...]) -> None:
    empty, parameter = nn.Parameter(torch.zeros(shape)), nn.Parameter(torch.ones(3, 3))
    (empty.sum() + parameter.sum()).backward()
    Adafactor([empty, parameter]).step()
    assert (parameter < 1).all()


def test_trains_deep_one() -> None:
    torch.manual_seed(0)
    model = DeepOne(TINY)
    ids = torch.randint(2, TINY.vocab_size, (2, 16))
    optimizer = Adafactor(model.parameters(), lr=0.01)
    losses = train_losses(model, {"input_ids": ids, "labels": ids}, steps=15, optimizer=optimizer)
    assert losses[-1] < 0.7 * losses[0]


def test_closure_is_called_with_gradients_on() -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    optimizer = Adafactor([parameter], lr=0.1)

    def closure() -> float:
        loss = parameter.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 4.0
    assert (parameter < 1.0).all()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr", -1.0),
        ("lr", math.nan),
        ("weight_decay", -0.1),
        ("eps", -1e-30),
        ("decay_rate", 0.8),
        ("max_beta2", 1.0),
        ("clip_threshold", 0.0),
    ],
)
def test_bad_adafactor_settings(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{key} is .*; give") as caught:
        Adafactor([torch.zeros(1)], **{key: value})
    assert caught.value.key == key
