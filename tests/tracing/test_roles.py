from __future__ import annotations

import torch
from torch import Tensor, nn

from lowtide.tracing.roles import GradientWatch, ModulePaths, Role, state_roles, weight_roles
from lowtide.tracing.step_trace import Category


class Heard:
    """A listener that writes down what it hears."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def enter_module(self, path: str) -> None:
        self.said.append(f"enter {path!r}")

    def leave_module(self, *, has_weights: bool) -> None:
        self.said.append(f"leave {has_weights}")


def test_weights_have_the_path_of_their_module() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False), nn.Linear(2, 2, bias=False))
    model[2].weight = model[0].weight
    roles = [(role.module, role.op) for _, role in weight_roles(model, "Net")]
    assert roles == [
        ("0", "parameter weight"),
        ("0", "parameter bias"),
        ("1", "buffer running_mean"),
        ("1", "buffer running_var"),
        ("1", "buffer num_batches_tracked"),
        ("2", "parameter weight"),
    ]
    assert next(weight_roles(nn.Linear(1, 1), "Net"))[1] == Role(Category.WEIGHTS, "Net", "parameter weight")


def test_state_has_the_path_of_its_parameter() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert list(state_roles(model, optimizer)) == list(state_roles(model, None)) == []
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    [(tensor, role)] = state_roles(model, optimizer)
    assert tensor.shape == (2, 2)
    assert role == Role(Category.OPTIMIZER, "0", "state momentum_buffer")


def test_gradients_are_seen_before_the_users_hooks_free_them() -> None:
    layer = nn.Linear(2, 2, bias=False)

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    layer.weight.register_post_accumulate_grad_hook(drop)
    seen: list[tuple[int, ...]] = []
    with GradientWatch(layer, lambda gradient: seen.append(tuple(gradient.shape))):
        layer(torch.ones(1, 2)).sum().backward()
    assert seen == [(2, 2)]
    layer(torch.ones(1, 2)).sum().backward()
    assert seen == [(2, 2)]  # the watch has ended
    assert layer.weight.grad is None  # the user's hook has not


def test_modules_are_heard_in_order_and_only_inside() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    heard = Heard()
    with ModulePaths(model, heard):
        model(torch.ones(1, 2))
        nn.ReLU()(torch.ones(1))  # not of the model
    model(torch.ones(1, 2))
    assert heard.said == [
        "enter ''",
        "enter '0'",
        "leave True",
        "enter '1'",
        "leave False",
        "leave True",
        "enter 'ReLU'",
        "leave False",
    ]
