"""Leaks of every kind are planted and must be found with their holder; loops that do not grow must stay unreported."""

from __future__ import annotations

import functools
import gc
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint

from lowtide.errors import ConfigError, ObserveError
from lowtide.tracing.leaks.find import find_leaks, in_every_third, keeps_growing
from lowtide.tracing.leaks.names import CYCLE, GRAPH, Leak, LeakKind

pytestmark = pytest.mark.slow

BATCH, WIDTH = 8, 32
ROW_BYTES = WIDTH * 4
OUTPUT_BYTES = BATCH * ROW_BYTES

GLOBAL_CACHE: dict[int, torch.Tensor] = {}


def small_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def the_leak(step: Callable[[], object], **settings: int) -> Leak:
    report = find_leaks(step, **settings)
    assert len(report.leaks) == 1, report.summary()
    (leak,) = report.leaks
    assert leak.chain in report.summary()
    assert ("garbage in a cycle" in report.summary()) == (leak.kind is LeakKind.GARBAGE)
    return leak


def holder_text(leak: Leak) -> str:
    return " -> ".join(map(str, leak.holders))


class TestHeld:
    def test_list_of_losses_with_their_graph(self) -> None:
        model, history = small_model(), []

        def step() -> None:
            history.append(model(torch.randn(BATCH, WIDTH)).square().mean())

        leak = the_leak(step)
        # Saved: the input, the hidden layer after the ReLU (in its own storage: the Linear's output is not saved), and
        # the output for square; and the loss itself, which the list holds directly.
        assert leak.bytes_per_step == 3 * OUTPUT_BYTES + 4
        assert leak.saved_bytes == 12 * 3 * OUTPUT_BYTES
        assert leak.count == 12 * 4
        assert leak.kind is LeakKind.HELD
        first, loss, graph = leak.holders
        assert (first.kind, first.name) == ("list", "history")
        assert first.where.startswith("in function TestHeld.test_list_of_losses_with_their_graph (test_find.py:")
        assert (loss.kind, loss.detail) == ("Tensor", "[] float32 with grad_fn")
        assert graph.kind == GRAPH
        assert leak.chain.endswith("-> Tensor [] float32 with grad_fn -> keeps 36.0 KiB of saved activations alive")
        assert {birth.op for birth in leak.births} == {"aten.randn", "aten.relu", "aten.addmm", "aten.mean"}
        assert {birth.module for birth in leak.births} == {"", "Sequential.1", "Sequential.2"}
        assert all(birth.source.startswith("test_find.py:") for birth in leak.births)

    def test_variable_line_is_the_assignment(self) -> None:
        kept = []

        leak = the_leak(lambda: kept.append(torch.ones(WIDTH)))
        code = TestHeld.test_variable_line_is_the_assignment.__code__
        assert leak.holders[0].where.endswith(f"(test_find.py:{code.co_firstlineno + 1})")
        assert (leak.op, leak.module) == ("aten.ones", "")
        assert leak.bytes_per_step == ROW_BYTES

    def test_list_of_detached_outputs(self) -> None:
        model, outputs = small_model(), []

        def step() -> None:
            outputs.append(model(torch.randn(BATCH, WIDTH)).detach())

        leak = the_leak(step)
        assert leak.bytes_per_step == OUTPUT_BYTES
        assert leak.saved_bytes == 0
        assert leak.holders[0].name == "outputs"
        assert leak.chain.endswith("keeps 12.0 KiB alive")

    def test_views_count_their_storage_once(self) -> None:
        rows = []

        def step() -> None:
            rows.extend(torch.randn(BATCH, WIDTH).unbind())

        leak = the_leak(step)
        assert leak.bytes_per_step == OUTPUT_BYTES
        assert leak.count == 12

    def test_view_made_without_grad_keeps_the_graph_of_its_base(self) -> None:
        model, views = small_model(), []

        def step() -> None:
            loss = model(torch.randn(BATCH, WIDTH)).square().mean()
            with torch.no_grad():
                views.append(loss.view(1))

        leak = the_leak(step)
        assert leak.bytes_per_step == 3 * OUTPUT_BYTES + 4
        assert leak.holders[0].name == "views"

    def test_state_carried_on_without_detach(self) -> None:
        cell, state = nn.RNNCell(WIDTH, WIDTH), {"hidden": torch.zeros(BATCH, WIDTH)}

        def step() -> None:
            state["hidden"] = cell(torch.randn(BATCH, WIDTH), state["hidden"])

        leak = the_leak(step)
        assert leak.holders[0].name == "state"
        assert leak.holders[1].name == "['hidden']"
        assert leak.holders[2].kind == GRAPH
        assert leak.bytes_per_step >= 2 * OUTPUT_BYTES  # at least the input and the old state

    def test_forward_hook_that_closes_over_self(self) -> None:
        class Recorder:
            def __init__(self, layer: nn.Module) -> None:
                self.seen: list[torch.Tensor] = []
                layer.register_forward_hook(lambda module, args, output: self.seen.append(output.detach()))

        model = small_model()
        Recorder(model[2])  # nobody but the hook holds it

        leak = the_leak(lambda: model(torch.randn(BATCH, WIDTH)))
        assert leak.bytes_per_step == OUTPUT_BYTES
        kinds = [holder.kind for holder in leak.holders]
        assert kinds == ["Linear", "forward hook", "Recorder", "list", "Tensor"]
        layer, hook, recorder, seen, _ = leak.holders
        assert layer.name == "model.2"
        assert "Recorder.__init__.<locals>.<lambda> (test_find.py:" in hook.detail
        assert (recorder.name, recorder.where) == ("self", "closed over by it")
        assert (seen.name, seen.where) == ("seen", "of Recorder")

    def test_callback_object(self) -> None:
        class LossLogger:
            def __init__(self) -> None:
                self.losses: list[torch.Tensor] = []

            def __call__(self, loss: torch.Tensor) -> None:
                self.losses.append(loss)

        model, callbacks = small_model(), [lambda loss: None, LossLogger()]

        def step() -> None:
            loss = model(torch.randn(BATCH, WIDTH)).square().mean()
            for callback in callbacks:
                callback(loss)

        leak = the_leak(step)
        names = [(holder.kind, holder.name) for holder in leak.holders[:3]]
        assert names == [("list", "callbacks"), ("LossLogger", "[1]"), ("list", "losses")]
        assert leak.saved_bytes > 0

    def test_module_attribute(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.ModuleDict({"block": nn.Linear(WIDTH, WIDTH)})
                self.inner["block"].history = []

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                block = self.inner["block"]
                y = block(x)
                block.history.append(y.detach())
                return y

        net = Net()
        leak = the_leak(lambda: net(torch.randn(BATCH, WIDTH)))
        assert [str(holder.kind) for holder in leak.holders] == ["Linear", "list", "Tensor"]
        assert leak.holders[0].name == "net.inner.block"
        assert leak.holders[1].name == "history"
        assert leak.module == "Net.inner.block"

    def test_global_dict_keyed_by_step(self) -> None:
        def step() -> None:
            GLOBAL_CACHE[len(GLOBAL_CACHE)] = torch.randn(BATCH, WIDTH)

        try:
            leak = the_leak(step)
        finally:
            GLOBAL_CACHE.clear()
        cache, tensor = leak.holders
        assert (cache.kind, cache.name) == ("dict", "GLOBAL_CACHE")
        assert cache.where.startswith("in module ")
        assert cache.where.endswith("(test_find.py)")
        assert tensor.name == "[...]"

    def test_closure_cell(self) -> None:
        def make_step() -> Callable[[], None]:
            seen: list[torch.Tensor] = []

            def step() -> None:
                seen.append(torch.randn(BATCH, WIDTH))

            return step

        leak = the_leak(make_step())
        function, seen, _ = leak.holders
        assert function.kind == "function"
        assert "make_step.<locals>.step (test_find.py:" in function.detail
        assert (seen.kind, seen.name, seen.where) == ("list", "seen", "closed over by it")

    def test_default_argument(self) -> None:
        def step(seen: list[torch.Tensor] = []) -> None:  # noqa: B006
            seen.append(torch.randn(BATCH, WIDTH))

        leak = the_leak(step)
        assert (leak.holders[1].name, leak.holders[1].where) == ("seen", "as a default argument")

    def test_exception_whose_traceback_holds_a_frame(self) -> None:
        errors: list[Exception] = []

        def fail() -> None:
            activations = torch.randn(BATCH, WIDTH)
            raise ValueError(len(activations))

        def step() -> None:
            try:
                fail()
            except ValueError as error:
                errors.append(error)

        leak = the_leak(step)
        assert leak.bytes_per_step == OUTPUT_BYTES
        stored, error, tensor = leak.holders
        assert stored.name == "errors"
        assert error.kind == "ValueError"
        assert tensor.name == "activations"
        assert "fail (test_find.py:" in tensor.where
        assert tensor.where.endswith("kept by a traceback")

    def test_hook_handle_that_is_never_removed(self) -> None:
        model = small_model()

        def step() -> None:
            activations: list[torch.Tensor] = []
            model[0].register_forward_hook(lambda module, args, output: activations.append(output.detach()))
            model(torch.randn(BATCH, WIDTH))

        report = find_leaks(step, steps=6, warmup=1)
        (leak,) = report.leaks
        layer, hook, activations, _ = leak.holders
        assert layer.name == "model.0"
        assert hook.kind == "forward hook"
        assert (activations.kind, activations.name) == ("list", "activations")

    def test_partial_and_slots(self) -> None:
        class Slotted:
            __slots__ = ("kept",)

        def collect(into: Slotted) -> None:
            into.kept.append(torch.randn(BATCH, WIDTH))

        slotted = Slotted()
        slotted.kept = []
        step = functools.partial(collect, slotted)
        del slotted
        leak = the_leak(step)
        text = holder_text(leak)
        assert "partial 'step' in function" in text
        assert "list 'kept' of Slotted" in text

    def test_variable_of_a_generator(self) -> None:
        def epochs() -> Iterator[None]:
            seen = []
            while True:
                seen.append(torch.randn(BATCH, WIDTH))
                yield

        running = epochs()
        leak = the_leak(lambda: next(running))
        generator, seen, _ = leak.holders
        assert (generator.kind, generator.name) == ("generator", "running")
        assert seen.name == "seen"
        assert "epochs (test_find.py:" in seen.where
        assert seen.where.endswith("a generator")

    def test_hook_of_a_tensor(self) -> None:
        def watch(weight: torch.Tensor) -> None:
            grads: list[torch.Tensor] = []
            weight.register_hook(grads.append)
            weight.register_hook(lambda grad: grads.append(grad.clone()))

        model = small_model()
        watch(model[2].weight)

        def step() -> None:
            model(torch.randn(BATCH, WIDTH)).square().mean().backward()
            model.zero_grad()

        leak = the_leak(step)
        assert leak.bytes_per_step == 2 * WIDTH * WIDTH * 4
        text = holder_text(leak)
        assert "Parameter 'weight'" in text
        assert "tensor hook" in text

    def test_tensor_that_no_operator_made(self) -> None:
        numpy = pytest.importorskip("numpy")
        model, losses = small_model(), []

        def step() -> None:
            batch = torch.from_numpy(numpy.ones((BATCH, WIDTH), dtype=numpy.float32))
            losses.append(model(batch).mean())

        leak = the_leak(step)
        assert leak.bytes_per_step == 2 * OUTPUT_BYTES + 4  # batch, hidden, loss; mean saves nothing

    def test_graph_behind_a_checkpoint(self) -> None:
        model, losses = small_model(), []

        def step() -> None:
            losses.append(checkpoint(model, torch.randn(BATCH, WIDTH), use_reentrant=False).sum())

        leak = the_leak(step)
        # Only the input is kept, and the state of the random numbers; nothing was recomputed to see it.
        assert leak.bytes_per_step == OUTPUT_BYTES + torch.get_rng_state().nbytes + 4
        assert leak.holders[0].name == "losses"

    def test_saved_by_a_custom_function(self) -> None:
        class Double(torch.autograd.Function):
            @staticmethod
            def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(x.exp())
                ctx.extra = x.sin()
                return x * 2

            @staticmethod
            def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
                return grad * 2

        weight, losses = nn.Parameter(torch.ones(BATCH, WIDTH)), []
        leak = the_leak(lambda: losses.append(Double.apply(weight).sum()))
        assert leak.bytes_per_step == 2 * OUTPUT_BYTES + 4
        assert leak.holders[0].name == "losses"

    def test_cycle_that_the_collector_cannot_free(self) -> None:
        class KeepsItsOutput(torch.autograd.Function):
            @staticmethod
            def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
                return x * 2

            @staticmethod
            def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
                return grad * 2

        weight = nn.Parameter(torch.ones(BATCH, WIDTH))

        def step() -> None:
            # The way back to the node leads through another node, in C++, where the collector is blind.
            output = KeepsItsOutput.apply(weight)
            output.grad_fn.negative = output.neg()

        leak = the_leak(step)
        assert leak.kind is LeakKind.HELD
        assert leak.holders[0].kind == CYCLE
        assert "KeepsItsOutputBackward" in leak.chain
        assert leak.bytes_per_step == OUTPUT_BYTES

    def test_leak_every_third_step(self) -> None:
        kept: list[torch.Tensor] = []
        calls = iter(range(1000))

        def step() -> None:
            output = torch.randn(BATCH, WIDTH)
            if next(calls) % 3 == 0:
                kept.append(output)

        leak = the_leak(step)
        assert leak.bytes_per_step == round(OUTPUT_BYTES * 4 / 12)

    def test_shapes_that_vary(self) -> None:
        kept: list[torch.Tensor] = []
        leak = the_leak(lambda: kept.append(torch.ones(16 + len(kept) % 5)))
        assert leak.count == 12
        assert leak.holders[0].name == "kept"

    def test_two_leaks_are_two(self) -> None:
        small, large = [], []

        def step() -> None:
            small.append(torch.ones(100))
            large.append(torch.ones(1000))

        report = find_leaks(step)
        assert [leak.holders[0].name for leak in report.leaks] == ["large", "small"]
        assert [leak.bytes_per_step for leak in report.leaks] == [4000, 400]
        assert report.bytes_per_step == 4400

    @pytest.mark.gpu
    def test_cuda_losses_with_their_graph(self) -> None:
        model, history = small_model().cuda(), []
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            loss = model(torch.randn(BATCH, WIDTH, device="cuda")).square().mean()
            loss.backward(retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
            history.append(loss)

        before = torch.cuda.memory_allocated()
        leak = the_leak(step)
        assert leak.holders[0].name == "history"
        assert {birth.device for birth in leak.births} == {"cuda:0"}
        assert leak.bytes_per_step == 3 * OUTPUT_BYTES + 4
        assert torch.cuda.memory_allocated() - before >= leak.total_bytes


class TestGarbage:
    def test_cycle_through_self(self) -> None:
        class Trainer:
            def __init__(self, model: nn.Module) -> None:
                self.model = model
                self.on_end = self.log

            def log(self) -> None: ...

            def run(self) -> None:
                self.output = self.model(torch.randn(BATCH, WIDTH)).detach()

        model = small_model()
        leak = the_leak(lambda: Trainer(model).run())
        assert leak.kind is LeakKind.GARBAGE
        assert leak.bytes_per_step == OUTPUT_BYTES
        cycle, tensor = leak.holders
        assert cycle.kind == CYCLE
        assert "Trainer -> method 'on_end'" in cycle.detail
        assert (tensor.name, tensor.where) == ("output", "of Trainer")

    def test_graph_that_hangs_on_a_cycle(self) -> None:
        class Box: ...

        model = small_model()

        def step() -> None:
            box = Box()
            box.me = box
            box.loss = model(torch.randn(BATCH, WIDTH)).square().mean()

        leak = the_leak(step)
        assert leak.kind is LeakKind.GARBAGE
        assert leak.bytes_per_step == 3 * OUTPUT_BYTES + 4
        assert leak.holders[0].kind == CYCLE
        assert leak.chain.endswith("of saved activations alive")

    def test_collected_now_and_then(self) -> None:
        class Box: ...

        calls = iter(range(1000))

        def step() -> None:
            if next(calls) % 4 == 0:
                gc.collect()
            box = Box()
            box.me, box.tensor = box, torch.randn(BATCH, WIDTH)

        leak = the_leak(step)
        assert leak.kind is LeakKind.GARBAGE
        assert leak.holders[0].kind == CYCLE
        assert "Box" in leak.chain

    def test_cycle_freed_inside_its_own_step_is_no_leak(self) -> None:
        class Box: ...

        def step() -> None:
            box = Box()
            box.me, box.tensor = box, torch.randn(BATCH, WIDTH)
            del box
            gc.collect()

        assert find_leaks(step, steps=6).leaks == ()


def clean_sgd() -> Callable[[], object]:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.randn(BATCH, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def clean_adamw_late_state() -> Callable[[], object]:
    """State that appears inside the measured window, because the second half of the model wakes up late."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    calls = iter(range(1000))

    def step() -> None:
        model[2].requires_grad_(next(calls) > 8)
        model(torch.randn(BATCH, WIDTH, requires_grad=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def clean_checkpoint() -> Callable[[], object]:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        for reentrant in (False, True):
            x = torch.randn(BATCH, WIDTH, requires_grad=True)
            checkpoint(model, x, use_reentrant=reentrant).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def clean_accumulation() -> Callable[[], object]:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    calls = iter(range(1, 1000))
    window: list[torch.Tensor] = []

    def step() -> None:
        loss = model(torch.randn(BATCH, WIDTH)).square().mean()
        loss.backward()
        window.append(loss)
        if next(calls) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
            window.clear()

    return step


def clean_kept_grads() -> Callable[[], object]:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    last: dict[str, torch.Tensor] = {}

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        last["output"] = model(torch.randn(BATCH, WIDTH))
        last["loss"] = last["output"].square().mean()
        last["loss"].backward()
        optimizer.step()

    return step


def clean_caches() -> Callable[[], object]:
    """A table filled in its first steps, a window of five, and batches that lie in memory since before."""
    model, table = small_model(), {}
    window: deque[torch.Tensor] = deque(maxlen=5)
    dataset = [torch.randn(BATCH, WIDTH) for _ in range(64)]
    batches = iter(dataset)

    def step() -> None:
        if len(table) < 9:
            table[len(table)] = torch.randn(WIDTH)
        output = model(next(batches))
        window.append(output)

    step.dataset = dataset  # type: ignore[attr-defined]
    return step


CLEAN = [clean_sgd, clean_adamw_late_state, clean_checkpoint, clean_accumulation, clean_kept_grads, clean_caches]


class TestClean:
    @pytest.mark.parametrize("make", CLEAN, ids=lambda make: make.__name__)
    def test_fifty_steps_report_none(self, make: Callable[[], Callable[[], object]]) -> None:
        report = find_leaks(make(), steps=50)
        assert report.leaks == (), report.summary()
        assert report.bytes_per_step == 0
        assert report.summary() == "No leak: nothing that 50 steps after 3 of warm-up allocated kept growing."

    def test_one_detached_scalar_a_step_is_allowed_but_can_be_asked_for(self) -> None:
        curve: list[torch.Tensor] = []

        def step() -> None:
            curve.append(torch.ones(()))

        assert find_leaks(step).leaks == ()
        assert the_leak(step, min_bytes_per_step=1).bytes_per_step == 4


class TestUnobtrusive:
    @pytest.fixture
    def without_collector(self) -> Iterator[None]:
        gc.disable()
        yield
        gc.enable()

    @pytest.mark.parametrize("leaky", [False, True])
    def test_the_model_dies_when_it_is_dropped(self, *, leaky: bool, without_collector: None) -> None:
        parts = {"model": small_model(), "history": []}

        def step() -> None:
            loss = parts["model"](torch.randn(BATCH, WIDTH)).square().mean()
            loss.backward(retain_graph=True)
            if leaky:
                parts["history"].append(loss)

        report = find_leaks(step, steps=6, warmup=1)
        model = parts["model"]
        refs = [weakref.ref(thing) for thing in (model, model[0].weight.untyped_storage(), step)]
        del model, step
        parts.clear()
        assert [ref() for ref in refs] == [None, None, None]
        assert bool(report.leaks) == leaky

    def test_a_variable_can_be_dropped_while_its_function_runs_on(self, without_collector: None) -> None:
        # The search for holders reads the variables of running functions; up to Python 3.12 that makes a copy.
        model, kept = small_model(), []
        find_leaks(lambda: kept.append(torch.ones(WIDTH)), steps=6, warmup=1)
        ref = weakref.ref(model)
        del model
        assert ref() is None

    def test_leaves_no_callback_hook_or_filter_behind(self) -> None:
        clean = clean_sgd()
        clean()  # torch imports more at first use, and that sets filters of its own
        before = (list(gc.callbacks), list(warnings.filters), gc.isenabled())

        def step() -> None:
            raise KeyError("from the user")

        with pytest.raises(KeyError, match="from the user"):
            find_leaks(step, warmup=0)
        find_leaks(clean, steps=6, warmup=0)
        assert (list(gc.callbacks), list(warnings.filters), gc.isenabled()) == before
        assert not torch_module._global_forward_hooks
        assert not torch_module._global_forward_pre_hooks

    def test_calls_the_step_as_often_as_it_says(self) -> None:
        calls: list[int] = []
        find_leaks(lambda: calls.append(1), steps=7, warmup=2)
        assert len(calls) == 9

    def test_losses_are_the_same_with_and_without(self) -> None:
        def losses(watched: bool) -> list[float]:
            torch.manual_seed(0)
            seen: list[float] = []
            plain = clean_sgd()

            def step() -> None:
                loss = plain()
                assert isinstance(loss, torch.Tensor)
                seen.append(loss.item())

            if watched:
                find_leaks(step, steps=6, warmup=2)
            else:
                for _ in range(8):
                    step()
            return seen

        assert losses(True) == losses(False)


class TestBadInput:
    def test_too_few_steps(self) -> None:
        with pytest.raises(ConfigError, match="steps is 5, but growth shows only over 6 or more"):
            find_leaks(lambda: None, steps=5)

    @pytest.mark.parametrize("key", ["warmup", "min_bytes_per_step"])
    def test_negative(self, key: str) -> None:
        with pytest.raises(ConfigError, match=f"{key} is -1; it cannot be negative"):
            find_leaks(lambda: None, **{key: -1})

    def test_data_that_ends(self) -> None:
        batches = iter(range(5))
        with pytest.raises(ObserveError, match="ran out of data at call 6 of 15"):
            find_leaks(lambda: next(batches))


class TestRule:
    """Note [What counts as a leak], on numbers alone."""

    @pytest.mark.parametrize("steps", [6, 7, 12, 50])
    def test_linear_growth(self, steps: int) -> None:
        assert keeps_growing(range(1, steps + 1))

    @pytest.mark.parametrize("steps", [9, 12, 50])
    @pytest.mark.parametrize("depth", [0, 1, 2, 3])
    def test_bounded_windows(self, steps: int, depth: int) -> None:
        assert not keeps_growing([min(step, depth) for step in range(1, steps + 1)])

    @pytest.mark.parametrize("period", [2, 3, 5, 7])
    def test_sawtooth(self, period: int) -> None:
        assert not keeps_growing([step % period for step in range(1, 51)])

    def test_every_third(self) -> None:
        assert in_every_third([1, 5, 12], 12)
        assert not in_every_third([1, 2, 3, 4, 9], 12)
        assert not in_every_third([], 12)
