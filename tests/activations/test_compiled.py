"""Compiled groups: policies around them, and the compiler's own budget."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lowtide.activations import CompileBudget, Policy, Recompute, apply
from lowtide.errors import ActivationError
from tests.activations.measured import ROWS, WIDTH, assert_equal, gradients, stack
from tests.activations.test_policies_identity import POLICIES

pytestmark = [
    # The compiler looks at gradients of tensors that have none, and says of every check that it does not follow it.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["recompute", "segments", "offload", "offload-all"])
def test_policies_around_compiled_groups(name: str) -> None:
    model, x = stack(4), torch.randn(ROWS, WIDTH)
    for block in model.blocks:
        block.drop.p = 0.0
        # Without fusion the bits are those of the plain code, and so are the random numbers.
        block.compile(backend="aot_eager")
    expected = gradients(model, x)
    with apply(model, POLICIES[name], poison=True) as applied:
        assert_equal(expected, gradients(model, x))
        stats = applied.stats()
        assert stats.num_recomputed == (0 if name == "offload-all" else 4)
        assert (stats.num_offloaded > 0) == name.startswith("offload")
    assert_equal(expected, gradients(model, x))


def test_compiling_around_a_policy_is_refused() -> None:
    model = stack(2)
    with (
        apply(model, Recompute()),
        pytest.raises(ActivationError, match="compile the blocks before you apply policies"),
    ):
        torch.compile(model, backend="eager")(torch.randn(ROWS, WIDTH))


class Pointwise(nn.Module):
    """Much that is cheap to compute again."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.two(self.one(x).sin().exp().cos()).tanh()
        return x


def saved_bytes(policy: Policy) -> tuple[int, list[Tensor]]:
    """Of what autograd saves in a forward of two blocks, weights left out."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Sequential(Pointwise(), Pointwise())), torch.randn(128, 64)
    sizes: dict[int, int] = {}
    weights = {parameter.data_ptr() for parameter in model.parameters()} | {x.data_ptr()}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            sizes[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with apply(model, policy):
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(x).square().mean()
        loss.backward()
    return sum(sizes.values()), [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.slow
def test_a_smaller_budget_saves_less_in_one_process() -> None:
    all_bytes, expected = saved_bytes(CompileBudget(share=1.0))
    half_bytes, half = saved_bytes(CompileBudget(share=0.5))
    none_bytes, found = saved_bytes(CompileBudget(share=0.0))
    assert none_bytes < half_bytes < all_bytes
    for one, other in ((expected, half), (expected, found)):
        for left, right in zip(one, other, strict=True):
            torch.testing.assert_close(left, right)
    _, plain = saved_bytes(POLICIES["keep"])
    for left, right in zip(plain, expected, strict=True):
        torch.testing.assert_close(left, right)
