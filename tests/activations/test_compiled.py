"""Compiled groups: policies around them, and the compiler's own budget."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lowtide import compat
from lowtide.activations import CompileBudget, Policy, Recompute, apply, tile_sequence
from lowtide.activations.policy_call import PolicyCall
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


class Nested(nn.Module):
    """A container of blocks inside of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Sequential(nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.inner(x))
        return out


BLOCKS = ("inner.0.0", "inner.0.1")


def compile_in_place(model: Nested) -> None:
    model.inner.compile(backend="eager")


def compile_wrapped(model: Nested) -> None:
    model.inner = torch.compile(model.inner, backend="eager")  # type: ignore[assignment]


def compile_all(model: Nested) -> None:
    model.compile(backend="eager")


HOW = [compile_in_place, compile_wrapped, compile_all]


@pytest.mark.parametrize("how", HOW)
def test_what_holds_a_block_must_not_be_compiled_before(how: Callable[[Nested], None]) -> None:
    model = Nested()
    how(model)
    path = "inner._orig_mod.0.0" if how is compile_wrapped else BLOCKS[0]
    with pytest.raises(ActivationError, match=rf"is compiled, and holds {path}: .*compile the blocks before"):
        apply(model, {path: "recompute"})
    assert all(not isinstance(getattr(compat.call_of(m), "__self__", None), PolicyCall) for m in model.modules())
    with apply(model, {path: "keep"}):
        model(torch.randn(2, 8))


@pytest.mark.parametrize("policy", [POLICIES["recompute"], POLICIES["offload-all"], CompileBudget(share=0.5)], ids=str)
@pytest.mark.parametrize("how", HOW)
def test_what_holds_a_block_must_not_be_compiled_after(how: Callable[[Nested], None], policy: Policy) -> None:
    model = Nested()
    with apply(model, dict.fromkeys(BLOCKS, policy)):
        how(model)
        with pytest.raises(ActivationError, match="compile the blocks before you apply policies"):
            model(torch.randn(2, 8))


def test_a_compiled_step_around_a_model_with_policies() -> None:
    model, x = Nested(), torch.randn(2, 8)

    @torch.compile(backend="eager")
    def step(given: Tensor) -> Tensor:
        return model(given).square().sum()

    with apply(model, dict.fromkeys(BLOCKS, Recompute())) as applied:
        with pytest.raises(ActivationError, match="torch.compile around Linear at inner.0.0 would go past"):
            step(x)
        model(x).sum().backward()
        assert applied.stats().num_recomputed == 2
    step(x).backward()


def test_a_step_compiled_as_one_graph_is_not_silent_either() -> None:
    model = Nested()

    @torch.compile(backend="eager", fullgraph=True)
    def step(given: Tensor) -> Tensor:
        return model(given).square().sum()

    with apply(model, dict.fromkeys(BLOCKS, Recompute())), pytest.raises(Exception, match="step"):
        step(torch.randn(2, 8))


def test_a_block_that_is_compiled_after_its_policy() -> None:
    model, x = Nested(), torch.randn(2, 8)
    with apply(model, dict.fromkeys(BLOCKS, Recompute())):
        for path in BLOCKS:
            model.get_submodule(path).compile(backend="eager")
        with pytest.raises(ActivationError, match="Linear at inner.0.0 was compiled after it was given"):
            model(x)
    model(x).sum().backward()


def test_copies_can_be_compiled() -> None:
    model, x = Nested(), torch.randn(2, 8)
    expected = model(x)
    with apply(model, dict.fromkeys(BLOCKS, Recompute())):
        other = copy.deepcopy(model)
    for network in (other, model):
        assert torch.equal(torch.compile(network, backend="eager", fullgraph=True)(x), expected)


def test_a_budget_does_not_compile_past_what_is_there() -> None:
    model = Nested()
    handle = tile_sequence(model, ["inner"], num_slices=2)
    with pytest.raises(ActivationError, match="Sequential at inner go through something else already"):
        apply(model, {"inner": CompileBudget(share=0.5)})
    handle.remove()
    model.inner.compile(backend="eager")
    with apply(model, {"inner": CompileBudget(share=0.5)}):
        pass


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
    """Bytes of what autograd saves in a forward of two blocks, weights left out."""
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


class TestAPolicyOfTheWholeModel:
    def test_compiling_it_in_place_afterwards_is_refused(self) -> None:
        model, x = Nested(), torch.randn(2, 8)
        with apply(model, {"": "recompute"}) as applied:
            with pytest.raises(ActivationError, match="Nested has an activation policy as a whole.* first, and apply"):
                model.compile(backend="eager")
            Nested().compile(backend="eager")  # another model is another matter
            model(x).sum().backward()
            assert applied.stats().num_recomputed == 1
        model.compile(backend="eager")
        model(x).sum().backward()
        assert applied.stats().num_recomputed == 1

    def test_compiled_before_it_stays_compiled_inside_of_the_policy(self) -> None:
        model, x = stack(2), torch.randn(ROWS, WIDTH)
        expected = gradients(model, x)
        model.compile(backend="eager")
        with apply(model, {"": "recompute"}) as applied:
            assert_equal(expected, gradients(model, x))
            assert applied.stats().num_recomputed == 1

    @pytest.mark.parametrize("is_before", [True, False])
    def test_a_wrapper_around_it_is_refused(self, is_before: bool) -> None:
        model = Nested()
        wrapper = torch.compile(model, backend="eager") if is_before else None
        with apply(model, {"": "recompute"}):
            wrapper = torch.compile(model, backend="eager") if wrapper is None else wrapper
            with pytest.raises(ActivationError, match="torch.compile around Nested at the top would go past its"):
                wrapper(torch.randn(2, 8))

    def test_one_that_keeps_everything_may_be_compiled(self) -> None:
        model = Nested()
        with apply(model, {"": "keep"}):
            model.compile(backend="eager")
            model(torch.randn(2, 8)).sum().backward()

    def test_copies_may_be_compiled_and_torch_is_as_before(self) -> None:
        model, before = Nested(), nn.Module.compile
        with apply(model, {"": "recompute"}):
            copied = copy.deepcopy(model)
            copied.compile(backend="eager")
            copied(torch.randn(2, 8)).sum().backward()
            assert nn.Module.compile is not before
        assert nn.Module.compile is before

    def test_a_forgotten_one_is_freed(self) -> None:
        model = Nested()
        applied = apply(model, {"": "recompute"})
        forgotten = weakref.ref(model)
        del model, applied
        gc.collect()
        assert forgotten() is None


def test_everything_that_compiled_groups_save_is_offloaded_over_steps() -> None:
    def model() -> nn.Sequential:
        torch.manual_seed(3)
        blocks = (nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 16)) for _ in range(5))
        return nn.Sequential(*blocks)

    def step(network: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
        torch.manual_seed(5)
        loss: Tensor = network(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    x, plain, offloaded = torch.randn(6, 16), model(), model()
    for block in (*plain, *offloaded):
        block.compile(backend="aot_eager")
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.1) for network in (plain, offloaded)]
    # Beside a plain one: the compiler meets the hooks in code that it knows, and would compile them as well. Weights are
    # held, not sent, with a note of their version, which moves with each step.
    with apply(offloaded, POLICIES["offload-all"], poison=True):
        for _ in range(4):
            assert torch.equal(step(plain, optimizers[0]), step(offloaded, optimizers[1]))
