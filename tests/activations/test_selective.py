"""Selective: matmuls and attention do not run again, the rest does, random numbers stay in step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide import compat
from lowtide.activations import Selective, apply
from lowtide.activations.selective import is_expensive
from lowtide.errors import ActivationError
from tests.activations.measured import ROWS, WIDTH, assert_equal, gradients, stack


class Operators(compat.WatchingMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[compat.operator_name(func)] += 1
        return func(*args, **(kwargs or {}))


def counted(model: nn.Module, x: Tensor) -> tuple[list[Tensor], Counter[str]]:
    with Operators() as operators:
        found = gradients(model, x)
    return found, operators.counts


def test_matmuls_run_once_and_the_rest_twice() -> None:
    model, x = stack(4), torch.randn(ROWS, WIDTH)
    expected, plain = counted(model, x)
    with apply(model, Selective()):
        found, selective = counted(model, x)
    with apply(model, "recompute"):
        _, recomputed = counted(model, x)
    assert_equal(expected, found)
    assert selective["addmm"] == plain["addmm"] == 9
    # Each block's second product is not needed for the backward: recomputation stops before it.
    assert recomputed["addmm"] > plain["addmm"]
    assert selective["gelu"] == 2 * plain["gelu"] == 8


def test_a_rule_of_the_users() -> None:
    model, x = stack(4), torch.randn(ROWS, WIDTH)
    expected, plain = counted(model, x)
    with apply(model, Selective(rule=lambda operator: operator is torch.ops.aten.gelu.default)):
        found, selective = counted(model, x)
    assert_equal(expected, found)
    assert selective["gelu"] == plain["gelu"]
    assert selective["addmm"] > plain["addmm"]


def test_random_operators_run_again_whatever_the_rule_says() -> None:
    model, x = stack(4), torch.randn(ROWS, WIDTH)
    expected = gradients(model, x)
    kept = ("gelu", "bernoulli_", "native_dropout")
    with apply(model, Selective(rule=lambda operator: compat.operator_name(operator) in kept)):
        assert_equal(expected, gradients(model, x))


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_attention_is_kept_and_dropout_stays_in_step(dropout: float) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            query, key, value = self.project(x).view(2, 8, 3, 2, 8).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
            return x + F.dropout(self.out(mixed.transpose(1, 2).reshape(2, 8, 16)), 0.3)

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Sequential(*(Attention() for _ in range(3))), nn.Linear(16, 1), nn.Flatten(0)), None
    x = torch.randn(2, 8, 16)
    model.append(Mean())
    expected, plain = counted(model, x)
    with apply(model, Selective()):
        found, selective = counted(model, x)
    assert_equal(expected, found)
    if not dropout:
        name = "_scaled_dot_product_flash_attention_for_cpu"
        assert selective[name] == plain[name] == 3


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def test_the_default_rule() -> None:
    kept = [
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.baddbmm.default,
        torch.ops.aten.linear.default,
        torch.ops.aten.convolution.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._flash_attention_forward.default,
        torch.ops.higher_order.flex_attention,
    ]
    assert all(is_expensive(operator) for operator in kept)
    again = [torch.ops.aten.gelu.default, torch.ops.aten.add.Tensor, torch.ops.aten.native_layer_norm.default]
    assert not any(is_expensive(operator) for operator in again)


def test_faults_are_explained() -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu_(self.layer(x)).sigmoid()

    model = nn.Sequential(nn.Sequential(Writing(), Writing()), Mean())
    with apply(model, Selective()):
        loss = model(torch.randn(4, 8))
        with pytest.raises(ActivationError, match=r"Writing at 0.1 writes in place .* give the group Recompute"):
            loss.backward()
    other, x = nn.Sequential(stack(2)), torch.randn(ROWS, WIDTH)
    with apply(other, Selective()):
        loss = other(x)
        loss.backward(retain_graph=True)
        with pytest.raises(ActivationError, match="a second backward through Block"):
            loss.backward()


def test_a_compiled_group_is_refused() -> None:
    model = stack(2)
    model.blocks[1].up.compile(backend="eager")
    with pytest.raises(ActivationError, match=r"Block at blocks.1 is compiled.*CompileBudget"):
        apply(model, "selective")


@torch.library.custom_op("lowtide_test::_flash_attn_forward", mutates_args=())
def untagged_attention(query: Tensor, dropout_p: float = 0.3) -> Tensor:
    """As a package brings it: it draws random numbers, and has no tag that says so."""
    return query * (torch.rand_like(query) > dropout_p) if dropout_p else query.clone()


untagged_attention.register_autograd(lambda context, gradient: (gradient, None))


@pytest.mark.parametrize("given", [(), (0.3,), (0.0,)])
def test_attention_of_other_packages_with_dropout_runs_again(given: tuple[float, ...]) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            mixed = untagged_attention(self.one(x), *given).sin()
            return self.two(F.dropout(mixed, 0.5).cos())

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Sequential(Attention(), Attention()), Mean()), torch.randn(4, 8)
    expected, plain = counted(model, x)
    with apply(model, Selective()):
        found, selective = counted(model, x)
    assert_equal(expected, found)
    name = "_flash_attn_forward"
    assert (selective[name] == plain[name]) == (given == (0.0,))


@pytest.mark.parametrize("form", ["called twice", "tied", "two forwards"])
def test_casts_that_autocast_has_in_its_cache(form: str) -> None:
    def step(policy: Selective | None) -> list[Tensor]:
        model, x = stack(2), torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
        if form == "tied":
            model.blocks[1].up.weight = model.blocks[0].up.weight
        blocks = [*model.blocks, *model.blocks] if form == "called twice" else [*model.blocks]
        torch.manual_seed(5)
        with apply(model, policy or "keep"):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                outputs = []
                for shift in range(2 if form == "two forwards" else 1):
                    y = model.first(x + shift)
                    for block in blocks:
                        y = block(y)
                    outputs.append(y)
            # After the context: its cache is empty when the groups run again.
            torch.stack(outputs).float().square().mean().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    assert_equal(step(None), step(Selective()))


def test_an_operator_that_writes_in_place_runs_again_whatever_the_rule_says() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x).relu_()
            return x + torch.sin(self.down(y))

    model, x = nn.Sequential(Writes(), Writes()), torch.randn(ROWS, WIDTH)
    model(x).square().mean().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    with apply(model, Selective(rule=lambda operator: "relu_" in str(operator))):
        model(x).square().mean().backward()
    assert_equal(expected, [parameter.grad for parameter in model.parameters() if parameter.grad is not None])


def test_the_fault_of_a_rule_is_told_as_that() -> None:
    model, x = stack(2), torch.randn(ROWS, WIDTH)
    with (
        apply(model, Selective(rule=lambda operator: True)),
        pytest.raises(ActivationError, match="that the rule names"),
    ):
        gradients(model, x)


def test_a_rule_is_asked_once_for_each_operator() -> None:
    asked: list[object] = []

    def rule(operator: object) -> bool:
        asked.append(operator)
        return is_expensive(operator)

    model, x = stack(4), torch.randn(ROWS, WIDTH)
    expected = gradients(model, x)
    with apply(model, Selective(rule=rule)):
        assert_equal(expected, gradients(model, x))
        first = len(asked)
        assert_equal(expected, gradients(model, x))
    # Four blocks, which know nothing of each other.
    assert len(asked) == first == 4 * len(set(asked))


def test_a_group_that_computes_more_the_second_time_is_refused() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.again = nn.Linear(8, 8), False

        def forward(self, x: Tensor) -> Tensor:
            if self.again:
                with torch.no_grad():
                    self.layer(x)
            self.again = True
            return self.layer(x).sin()

    model = nn.Sequential(nn.Sequential(Twice(), Twice()), Mean())
    with apply(model, Selective()):
        loss = model(torch.randn(4, 8))
        with pytest.raises(RuntimeError, match=r"ran 1 time\(s\) in the forward of a selective group and more often"):
            loss.backward()
