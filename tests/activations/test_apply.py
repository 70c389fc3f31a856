"""Applying and removing: the model stays the user's, copies are plain, others may stand around the same calls."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide import compat
from lowtide.activations import Policy, apply
from lowtide.errors import ActivationError
from tests.activations.measured import ROWS, WIDTH, Block, assert_equal, gradients, stack
from tests.activations.test_policies_identity import POLICIES
from tests.zoo import ZOO


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_copies_and_pickles_are_plain_models(policy: Policy) -> None:
    model, x = stack(3), torch.randn(ROWS, WIDTH)
    expected = gradients(model, x)
    with apply(model, policy):
        gradients(model, x)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert all(compat.call_of(module) is None for module in other.modules())
            assert_equal(expected, gradients(other, x))
    assert all(compat.call_of(module) is None for module in model.modules())
    assert_equal(expected, gradients(model, x))


class Around:
    """Takes a module's calls as a session's window does."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.num_calls = module, 0
        self.inner = compat.replace_call(module, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        return (self.inner or compat.plain_call(self.module))(*args, **kwargs)

    def remove(self) -> None:
        compat.replace_call(self.module, self.inner)


def test_what_stands_around_sees_runs_for_other_groups() -> None:
    model, x = stack(4), torch.randn(ROWS, WIDTH)
    expected = gradients(model, x)
    applied = apply(model, POLICIES["segments"])
    windows = [Around(block) for block in model.blocks]
    assert_equal(expected, gradients(model, x))
    # The segments are 0-2 and 3: 0 and 1 run again for others from outside, as a session has to bring their weights.
    assert [window.num_calls for window in windows] == [2, 2, 1, 1]
    assert applied.stats().num_remade == 2
    for window in windows:
        window.remove()
    applied.remove()
    assert all(compat.call_of(module) is None for module in model.modules())


def test_removal_in_the_other_order_leaves_a_passage() -> None:
    model, x = stack(2), torch.randn(ROWS, WIDTH)
    expected = gradients(model, x)
    applied = apply(model, "recompute")
    windows = [Around(block) for block in model.blocks]
    applied.remove()
    applied.remove()
    assert_equal(expected, gradients(model, x))
    assert applied.stats().num_recomputed == 0
    assert [window.num_calls for window in windows] == [1, 1]


def test_two_policies_on_one_module_are_refused() -> None:
    model = stack(2)
    with apply(model, "recompute"), pytest.raises(ActivationError, match="Block at blocks.0 has an activation policy"):
        apply(model, "offload")
    with apply(model, {"blocks.0": "recompute"}), apply(model, {"blocks.1": "offload"}):
        gradients(model, torch.randn(ROWS, WIDTH))


def test_key_value_caches_are_off_where_blocks_run_again() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(Block() for _ in range(2))
    config = SimpleNamespace(use_cache=True)
    model.config = config  # type: ignore[assignment]
    for policy, expected in (("keep", True), ("recompute", False), ("selective", False), ("offload", False)):
        with apply(model, policy):
            assert config.use_cache is expected, policy
        assert config.use_cache is True


def test_caches_come_back_with_the_last_of_two() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(Block() for _ in range(2))
    config = SimpleNamespace(use_cache=True)
    model.config = config  # type: ignore[assignment]
    for first_goes_first in (True, False):
        both = [apply(model, {f"layers.{index}": "recompute"}) for index in range(2)]
        first, second = both if first_goes_first else reversed(both)
        first.remove()
        first.remove()
        assert config.use_cache is False
        second.remove()
        assert config.use_cache is True
        assert all(compat.call_of(module) is None for module in model.modules())


def test_a_real_cache_is_not_filled_twice() -> None:
    model = ZOO["llama"].build(False, torch.float32)
    model.config.use_cache = True  # type: ignore[union-attr]
    batch = ZOO["llama"].make_batch(0)
    loss = model(**batch).loss
    loss.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    with apply(model, "recompute"):
        model(**batch).loss.backward()
    assert_equal(expected, [parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert model.config.use_cache is True  # type: ignore[union-attr]


def test_hooks_of_the_users_are_inside() -> None:
    model, x = stack(2), torch.randn(ROWS, WIDTH)
    model.blocks[0].register_forward_hook(lambda module, args, output: output * 2)
    model.blocks[1].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 3,))
    expected = gradients(model, x)
    for policy in POLICIES.values():
        with apply(model, policy, poison=True):
            assert_equal(expected, gradients(model, x))


def test_models_that_checkpoint_themselves_keep_working() -> None:
    from torch.utils.checkpoint import checkpoint

    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(super().forward, x, use_reentrant=False)
            return out

    torch.manual_seed(0)
    model = stack(0)
    model.blocks = nn.ModuleList(Own() for _ in range(4))
    x = torch.randn(ROWS, WIDTH)
    expected = gradients(model, x)
    for policy in POLICIES.values():
        with apply(model, policy, poison=True):
            assert_equal(expected, gradients(model, x))
