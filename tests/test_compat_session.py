"""The private torch touchpoints of a session: hooks, steps, calls and storages, under the torch that is installed."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lowtide import compat


class TestGradientHooks:
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
