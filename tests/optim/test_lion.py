from __future__ import annotations

import pytest
import torch

from lowtide.errors import ConfigError
from lowtide.optim import Lion


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
