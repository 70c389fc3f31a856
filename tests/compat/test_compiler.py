"""Beside torch's compiler, and its partitioner."""

from __future__ import annotations

import threading

import pytest
import torch
import torch._dynamo.convert_frame
from torch import Tensor, fx

from lowtide import compat
from lowtide.runtime.updates.worker import HostWorker

LOCK = torch._dynamo.convert_frame.compile_lock


def test_work_waits_until_nobody_compiles() -> None:
    done = threading.Event()

    def work() -> None:
        with compat.outside_compilation():
            done.set()

    with LOCK:
        thread = threading.Thread(target=work)
        thread.start()
        assert not done.wait(0.2)
    thread.join(10)
    assert done.is_set()


def test_a_compiler_that_waits_for_the_work_is_not_waited_for() -> None:
    worker = HostWorker()

    def work() -> None:
        with compat.outside_compilation():
            pass

    with LOCK:  # this thread compiles, and reads a weight whose update is not made yet
        job = worker.submit(work)
        waiter = threading.Timer(20, LOCK.release)  # would end a deadlock, and fail below
        waiter.start()
        job.wait()
        waiter.cancel()
        assert job.is_done()
    worker.close()


def test_nested_and_free_again() -> None:
    with compat.outside_compilation(), compat.outside_compilation():
        assert LOCK._is_owned()
    assert not LOCK._is_owned()


def test_what_was_given_to_the_compiler_runs_as_it_is() -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("compiled")

    doubled = torch.compile(lambda x: 2 * x, backend=refuse)
    with compat.without_compilation():
        assert torch.equal(doubled(torch.ones(2)), torch.full((2,), 2.0))


ROWS, WIDTH, HIDDEN = 8, 16, 64

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def two_layers(first: Tensor, second: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    out = torch.relu(x @ first) @ second
    return out.square().mean(), out


def shapes(*, device: str = "meta") -> tuple[list[Tensor], list[Tensor]]:
    weights = [torch.empty(WIDTH, HIDDEN, device=device), torch.empty(HIDDEN, WIDTH, device=device)]
    for weight in weights:
        weight.requires_grad_()
    return weights, [torch.empty(ROWS, WIDTH, device=device)]


def returned(graph: fx.Graph) -> list[fx.Node]:
    (output,) = (node for node in graph.nodes if node.op == "output")
    (values,) = output.args
    return list(values)  # type: ignore[arg-type]


def inputs(graph: fx.Graph) -> list[str]:
    return [node.name for node in graph.nodes if node.op == "placeholder"]


def test_a_graph_of_meta_tensors_is_cut_into_forward_and_backward() -> None:
    halves = compat.partition(compat.trace_joint_graph(two_layers, *shapes()), 1.0)
    assert halves.num_outputs == 2
    outputs = returned(halves.forward)
    assert [tuple(node.meta["val"].shape) for node in outputs[:2]] == [(), (ROWS, WIDTH)]
    gradients = [tuple(node.meta["val"].shape) for node in returned(halves.backward) if node is not None]
    assert gradients == [(WIDTH, HIDDEN), (HIDDEN, WIDTH)]


def test_saved_values_have_one_name_on_both_sides() -> None:
    halves = compat.partition(compat.trace_joint_graph(two_layers, *shapes()), 1.0)
    saved = {node.name for node in returned(halves.forward)[halves.num_outputs :]}
    others = set(inputs(halves.backward)) - saved
    assert saved <= set(inputs(halves.backward))
    assert all(name.startswith("tangents") for name in others)
    assert len(others) == 2


def test_what_is_computed_again_keeps_its_name() -> None:
    joint = compat.trace_joint_graph(two_layers, *shapes())
    halves = compat.partition(joint, 0.0)
    products = [node.name for node in halves.forward.nodes if "mm" in str(node.target)]
    again = {node.name for node in halves.backward.nodes if node.op == "call_function"}
    assert products[0] in again


def test_a_cut_leaves_the_joint_graph_as_it_is() -> None:
    joint = compat.trace_joint_graph(two_layers, *shapes())
    before = str(joint.module.graph)
    first = [str(half) for half in (compat.partition(joint, 0.0).forward, compat.partition(joint, 1.0).forward)]
    assert first[0] != first[1]
    assert str(joint.module.graph) == before
    assert [str(compat.partition(joint, budget).forward) for budget in (0.0, 1.0)] == first


def test_the_budget_is_put_back() -> None:
    from torch._functorch import config

    before = config.activation_memory_budget
    assert before == 1.0, "a budget of 1 is what torch does by itself"
    compat.partition(compat.trace_joint_graph(two_layers, *shapes()), 0.25)
    assert config.activation_memory_budget == before


def test_weights_are_said_to_be_static() -> None:
    joint = compat.trace_joint_graph(two_layers, *shapes())
    assert joint.arguments["static_lifetime_input_indices"] == [0, 1]
    assert [node.meta["val"].shape for node in joint.module.graph.nodes if node.op == "placeholder"][:2] == [
        (WIDTH, HIDDEN),
        (HIDDEN, WIDTH),
    ]


def test_without_anything_to_train_there_is_no_backward() -> None:
    weights, x = shapes()
    with pytest.raises(ValueError, match="nothing that the function returns needs a gradient"):
        compat.trace_joint_graph(two_layers, [weight.detach() for weight in weights], x)


def test_operators_are_told_apart() -> None:
    aten = torch.ops.aten
    assert compat.is_view(aten.view.default)
    assert compat.is_view(aten.split.Tensor)
    assert not compat.is_view(aten.clone.default)
    assert not compat.is_view(aten.copy_.default)
    assert compat.writes_argument(aten.copy_.default)
    assert not compat.writes_argument(aten.view.default)
    assert not compat.is_view(len)
    fusible = compat.fusible_operators()
    assert {aten.mul, aten.relu, aten.sum} <= fusible
    assert aten.mm not in fusible
