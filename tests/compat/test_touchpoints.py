"""Every private torch touchpoint still does what the rest relies on, under the torch that is installed."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lowtide import compat


class TestNodeNumbers:
    def test_a_node_gets_the_number_that_was_announced(self) -> None:
        x = torch.randn(2, requires_grad=True)
        announced = compat.next_node_number()
        y = x.sin()
        assert compat.next_node_number() == announced + 1
        assert y.grad_fn is not None
        assert y.grad_fn._sequence_nr() == announced

    def test_the_running_node_is_known_inside_it_and_nowhere_else(self) -> None:
        seen: list[int | None] = []

        class Watched(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Tensor:
                seen.append(compat.current_node_number())
                return gradient

        out = Watched.apply(torch.randn(2, requires_grad=True))
        expected = out.grad_fn._sequence_nr()
        out.sum().backward()
        assert seen == [expected]
        assert compat.current_node_number() is None


class TestCounts:
    def test_owners_of_a_storage(self) -> None:
        tensor = torch.empty(4)
        assert compat.num_storage_owners(tensor) == 1
        view = tensor[1:]
        assert compat.num_storage_owners(tensor) == compat.num_storage_owners(view) == 2
        del view
        assert compat.num_storage_owners(tensor) == 1

    def test_owners_of_a_tensor_grow_with_each_holder_in_cpp(self) -> None:
        tensor = torch.randn(3, requires_grad=True).exp()
        before = compat.reference_count(tensor)
        product = tensor * tensor  # saves it for the backward
        assert compat.reference_count(tensor) > before
        del product
        assert compat.reference_count(tensor) == before


class TestOperators:
    @pytest.mark.parametrize("name", ["mm", "sum.dim_IntList", "add.Tensor", "native_layer_norm"])
    def test_overloads_by_name(self, name: str) -> None:
        overload = compat.find_overload(name)
        assert isinstance(overload, torch._ops.OpOverload)
        full = name if "." in name else f"{name}.default"
        assert str(overload) == f"aten.{full}"

    @pytest.mark.parametrize("name", ["no_such_operator", "sum.no_such_overload"])
    def test_what_this_torch_has_not(self, name: str) -> None:
        assert compat.find_overload(name) is None

    def test_operators_that_other_devices_take_apart(self) -> None:
        names = compat.operators_with_fallback()
        assert len(names) == len(set(names))
        # On a card these are one kernel each; a device without one of its own would see the parts.
        assert "silu_backward" in {name.partition(".")[0] for name in names}
        assert all(torch._C._dispatch_has_kernel(f"aten::{name}") for name in names)

    def test_operators_that_autocast_gives_other_types_on_the_host(self) -> None:
        names = set(compat.operators_cast_on_host())
        assert {"linear", "cat", "cross_entropy_loss"} <= names
        assert not {"layer_norm", "softmax.int"} & names  # CUDA's does

    def test_kernels_are_forgotten(self) -> None:
        library = torch.library.Library("aten", "IMPL")
        library.impl("dropout", lambda tensor, p, train: tensor.new_full((), 7), "CPU")
        with torch.no_grad():
            assert torch.dropout(torch.ones(3), 0.0, True).item() == 7
            compat.unregister_kernels(library)
            assert torch.dropout(torch.ones(3), 0.0, True).shape == (3,)

    @pytest.mark.parametrize("value", [torch.ops, torch.ops.aten, torch.ops.aten.add, torch.ops.aten.add.Tensor])
    def test_there_and_back_by_name(self, value: object) -> None:
        path = compat.operator_path(value)
        assert path is not None
        assert compat.operator_at(path) is value

    def test_other_objects_are_no_operators(self) -> None:
        assert compat.operator_path(torch.nn) is None
        assert compat.operator_path(torch.add) is None


class TestGradientHooks:
    def test_the_late_hook_runs_first(self) -> None:
        parameter, order = nn.Parameter(torch.ones(2)), []
        parameter.register_post_accumulate_grad_hook(lambda p: order.append("user's"))
        parameter.register_post_accumulate_grad_hook(lambda p: order.append("user's second"))
        handle = compat.register_first_gradient_hook(parameter, lambda p: order.append("ours"))
        parameter.sum().backward()
        assert order == ["ours", "user's", "user's second"]
        handle.remove()
        parameter.sum().backward()
        assert order[3:] == ["user's", "user's second"]

    def test_handles_of_earlier_hooks_still_remove_them(self) -> None:
        parameter, order = nn.Parameter(torch.ones(2)), []
        first = parameter.register_post_accumulate_grad_hook(lambda p: order.append("first"))
        compat.register_first_gradient_hook(parameter, lambda p: order.append("ours"))
        first.remove()
        parameter.sum().backward()
        assert order == ["ours"]

    def test_the_dictionary_of_hooks(self) -> None:
        parameter = nn.Parameter(torch.ones(2))
        assert not compat.post_accumulate_hooks(parameter)
        handle = parameter.register_post_accumulate_grad_hook(print)
        assert list(compat.post_accumulate_hooks(parameter)) == [handle.id]


class TestAutogradReferences:
    def test_saved_tensors_are_found_from_the_node(self) -> None:
        x = torch.randn(3, requires_grad=True)
        y = x.exp()
        found = compat.autograd_references(y.grad_fn)
        assert any(isinstance(item, Tensor) and item.data_ptr() == y.data_ptr() for item in found)

    def test_a_tensor_refers_to_node_base_and_gradient(self) -> None:
        x = torch.randn(3, requires_grad=True)
        x.sum().backward()
        assert any(item is x.grad for item in compat.autograd_references(x))
        y = x * 2
        assert any(item is y.grad_fn for item in compat.autograd_references(y))
        view = y[1:]
        assert any(item is y for item in compat.autograd_references(view))

    def test_a_freed_graph_has_nothing_left(self) -> None:
        y = torch.randn(3, requires_grad=True).exp()
        y.sum().backward()
        assert not any(isinstance(item, Tensor) for item in compat.autograd_references(y.grad_fn))

    def test_which_types_have_any(self) -> None:
        node = (torch.ones(1, requires_grad=True) * 2).grad_fn
        assert compat.has_autograd_references(Tensor)
        assert compat.has_autograd_references(nn.Parameter)
        assert compat.has_autograd_references(type(node))
        assert not compat.has_autograd_references(nn.Module)


class TestStorages:
    def test_one_python_object_for_as_long_as_the_storage_lives(self) -> None:
        tensor = torch.empty(5)
        storage = compat.plain_storage(tensor)
        assert storage is compat.plain_storage(tensor[2:])
        died: list[int] = []
        reference = weakref.ref(storage, lambda _: died.append(1))
        del storage
        gc.collect()
        assert reference() is not None
        del tensor
        assert died == [1]

    @pytest.mark.parametrize("tensor", [torch.empty(3, device="meta"), torch.eye(3).to_sparse()])
    def test_none_where_there_are_no_bytes_of_its_own(self, tensor: Tensor) -> None:
        assert compat.plain_storage(tensor) is None


def test_watching_changes_no_result() -> None:
    class Watch(compat.WatchingMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.randn(4, requires_grad=True)
    with Watch() as watch:
        y = (x * 2).sum()
        y.backward()
    assert watch.names[:2] == ["aten.mul.Tensor", "aten.sum.default"]
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((4,), 2.0))


@pytest.mark.parametrize("is_on", [True, False])
def test_profiling_is_noticed(is_on: bool) -> None:
    if is_on:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            assert compat.is_profiling()
    assert not compat.is_profiling()


def test_the_module_inside_a_compiled_one() -> None:
    plain = nn.Linear(2, 2)
    assert compat.compiled_original(torch.compile(plain)) is plain
    assert compat.compiled_original(plain) is None


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_views_share_the_key_of_their_storage(device: str) -> None:
    whole, other = torch.zeros(4, device=device), torch.zeros(4, device=device)
    assert compat.storage_key(whole[2:]) == compat.storage_key(whole) != compat.storage_key(other)


class TestGradientHooksOfASession:
    def test_one_made_last_runs_last_and_knows_of_others(self) -> None:
        order: list[str] = []
        parameter = nn.Parameter(torch.ones(2))
        ours = parameter.register_post_accumulate_grad_hook(lambda _: order.append("ours"))
        assert not compat.make_last_gradient_hook(parameter, ours)
        for name in ("one", "two"):
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
        assert compat.make_last_gradient_hook(parameter, ours)
        parameter.sum().backward()
        assert order == ["one", "two", "ours"]
        ours.remove()
        assert not compat.make_last_gradient_hook(parameter, ours)
        parameter.sum().backward()
        assert order[3:] == ["one", "two"]


class TestSteps:
    def test_hooks_of_one_optimizer_and_of_all_in_torch_s_order(self) -> None:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        calls: list[str] = []

        def note(name: str) -> Any:
            return lambda *_: calls.append(name)

        handles = [
            optimizer.register_step_pre_hook(note("before")),
            optimizer.register_step_post_hook(note("after")),
            register_optimizer_step_pre_hook(note("all before")),
            register_optimizer_step_post_hook(note("all after")),
        ]
        try:
            compat.step_without_hooks(optimizer)
            assert calls == []
            optimizer.step()
            by_torch = calls.copy()
            calls.clear()
            before, after = compat.step_hooks(optimizer)
            for hook in [*before, *after]:
                hook(optimizer, (optimizer,), {})
        finally:
            for handle in handles:
                handle.remove()
        assert calls == by_torch == ["all before", "before", "after", "all after"]

    def test_a_step_without_hooks_is_the_step(self) -> None:
        one, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        one.grad, other.grad = torch.full((3,), 0.5), torch.full((3,), 0.5)
        torch.optim.AdamW([one], lr=0.1).step()
        compat.step_without_hooks(torch.optim.AdamW([other], lr=0.1))
        assert torch.equal(one, other)
        assert not torch.equal(one, torch.ones(3))

    def test_a_scheduler_finds_its_mark_on_the_step_in_place_of_its_own(self) -> None:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)

        def step() -> None:
            compat.mark_stepped(optimizer)

        compat.copy_scheduler_mark(optimizer.step, step)
        assert not vars(step)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        compat.copy_scheduler_mark(optimizer.step, step)
        optimizer.step = step  # type: ignore[method-assign]
        optimizer.step()
        scheduler.step()  # would warn, which is an error here

    def test_what_a_scaler_puts_on_a_fused_optimizer(self) -> None:
        parameter = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=True)
        seen: list[dict[str, Any]] = []
        optimizer.register_step_pre_hook(lambda *_: seen.append(compat.scaler_values(optimizer)))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        assert compat.scaler_values(optimizer) == {}
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        assert compat.scaler_values(optimizer) == {}
        assert seen == [{"grad_scale": torch.tensor(8.0), "found_inf": torch.tensor(0.0)}]


class TestCalls:
    def test_what_a_module_runs_instead_of_its_own_way(self) -> None:
        module = nn.Linear(2, 2)
        assert compat.call_of(module) is None
        module.compile(backend="eager")
        compiled = compat.call_of(module)
        assert compat.uncompiled(compiled) is not None

        def ours(x: Tensor) -> str:
            return "ours"

        assert compat.replace_call(module, ours) is compiled
        assert compat.call_of(module) is ours
        assert module(torch.ones(2)) == "ours"
        assert compat.uncompiled(ours) is None

    # The compiler says that it cannot look into the question itself.
    @pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
    def test_a_compilation_around_the_caller_is_noticed(self) -> None:
        answers: list[bool] = []

        def ask(x: Tensor) -> Tensor:
            answers.append(compat.is_compiled_around())
            return x + 1

        ask(torch.ones(2))
        torch.compile(ask, backend="eager")(torch.ones(2))
        ask(torch.ones(2))
        assert answers == [False, True, False]


class TestStorageOver:
    def test_exactly_those_bytes_and_alive_by_itself(self) -> None:
        whole = torch.arange(10, dtype=torch.uint8)
        part = whole[3:7]
        storage = compat.storage_over(part)
        assert storage.nbytes() == 4
        view = torch.empty(0, dtype=torch.uint8).set_(storage)
        part.fill_(9)
        assert view.tolist() == [9] * 4
        del whole, part
        gc.collect()
        assert view.tolist() == [9] * 4
        assert compat.num_storage_owners(view) == 1


@pytest.mark.gpu
def test_streams_are_those_of_torch() -> None:
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    assert compat.current_stream(0) == torch.cuda.current_stream()
    with compat.OnStream(side):
        assert compat.current_stream(0) == torch.cuda.current_stream() == side
        with torch.cuda.stream(other):
            assert compat.current_stream(0) == other
            with compat.OnStream(side):
                assert torch.cuda.current_stream() == side
            assert torch.cuda.current_stream() == other
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


@pytest.mark.gpu
def test_a_stream_is_left_when_what_runs_on_it_raises() -> None:
    with pytest.raises(KeyError), compat.OnStream(torch.cuda.Stream()):
        raise KeyError
    assert compat.current_stream(0) == torch.cuda.default_stream()


class TestExchange:
    def test_two_objects_exchange_what_they_hold(self) -> None:
        empty = nn.Parameter(torch.empty(2, 3, device="meta"), requires_grad=False)
        values = nn.Parameter(torch.ones(4))
        watched = weakref.ref(empty)  # torch.utils.swap_tensors refuses these
        empty.label = "mine"
        compat.exchange_contents(empty, values)
        assert torch.equal(empty, torch.ones(4))
        assert (empty.requires_grad, values.requires_grad) == (True, False)
        assert values.is_meta
        assert values.shape == (2, 3)
        assert watched() is empty
        assert empty.label == "mine"
        empty.sum().backward()
        assert torch.equal(empty.grad, torch.ones(4))

    def test_recurrent_layers_find_their_weights(self) -> None:
        layer = nn.LSTM(3, 3)
        for parameter in layer.parameters():
            compat.exchange_contents(parameter, nn.Parameter(torch.zeros_like(parameter)))
        out, _ = layer(torch.ones(1, 3))
        assert torch.equal(out, torch.zeros(1, 3))


def test_function_modes_are_left_out() -> None:
    with torch.device("meta"):
        assert torch.ones(2).is_meta
        with compat.without_function_modes():
            assert not torch.ones(2).is_meta
        assert torch.ones(2).is_meta


class TestFunctionalCalls:
    def test_a_functional_call_is_found_among_the_callers(self) -> None:
        seen = []

        class Asking(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                seen.append(compat.is_functional_call())
                return super().forward(x)

        module = Asking(2, 2)
        module(torch.ones(2))
        torch.func.functional_call(module, {"bias": torch.ones(2)}, (torch.ones(2),))
        torch.func.grad(lambda x: module(x).sum())(torch.ones(2))
        assert seen == [False, True, False]

    def test_what_transforms_wrap_and_how_to_leave_them(self) -> None:
        given = torch.ones(3, 2)
        values = []

        def inside(row: torch.Tensor) -> torch.Tensor:
            assert compat.is_in_transform()
            assert compat.unwrapped(row).data_ptr() == given.data_ptr()
            with compat.outside_transforms():
                assert not compat.is_in_transform()
                values.append(given.sum().item())
            assert compat.is_in_transform()
            return row.sum()

        torch.func.vmap(torch.func.grad(inside))(given)
        assert values == [6.0]
        assert not compat.is_in_transform()
        with compat.outside_transforms():
            assert compat.unwrapped(given) is given
