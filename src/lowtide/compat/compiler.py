"""The compiler's partitioner of a joint graph.

It is called as inductor calls it, without the compiler behind it. Checked in 2.11.0 and 2.13.0, on builds for
CUDA and for the CPU, on a machine without a GPU:

- `aot_module_simplified` traces forward and backward as one graph and hands it to its `partition_fn`.
- `compile_fx.partition_fn`, which inductor gives there, runs inductor's passes over that graph and then calls
  `torch._inductor.config.custom_partitioner_fn` in place of torch's partitioner, which takes the same arguments.
- `min_cut_rematerialization_partition` reads `activation_memory_budget` when it is called, and works on any copy of the graph.
- The compiler marks parameters and buffers as static, so that keeping them costs nothing; untraced by it, we say so ourselves.
- Saved values have one name as outputs of the forward and as inputs of the backward, and a value that is computed again
  in the backward has the name it had in the forward.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn


def import_compiler() -> None:
    """Import the compiler's Python now. The first of many of torch's functions would, for a second, which hide from it."""
    importlib.import_module("torch._dynamo")


class BudgetedCompiler:
    """A backend for `torch.compile`: a given one, which keeps a share of what it would save for the backward.

    Code is shared between equal modules compiled by the same backend object, and by that object only: one object for
    each share keeps a module from running code that was made for another share.
    """

    def __init__(self, share: float, backend: str = "inductor") -> None:
        self.share = share
        self.backend = backend

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        """Compile one graph. The budget counts now, when forward and backward are parted."""
        from torch._dynamo.backends.registry import lookup_backend
        from torch._functorch import config

        with config.patch(activation_memory_budget=self.share):
            compiled: Any = lookup_backend(self.backend)(graph, inputs)
        return compiled  # type: ignore[no-any-return]  # of two kinds, by settings that are not made here


@dataclass(frozen=True, slots=True, kw_only=True)
class JointGraph:
    """One graph of a forward and its backward, after inductor's passes over it."""

    module: fx.GraphModule
    arguments: dict[str, Any]
    """For the partitioner, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackward:
    """A joint graph cut into the forward's and the backward's."""

    forward: fx.Graph
    backward: fx.Graph
    num_outputs: int
    """The first outputs of the forward, which its caller gets; the others are saved for the backward."""


def trace_joint_graph(
    function: Callable[..., tuple[Tensor, ...]], weights: Sequence[Tensor], inputs: Sequence[Tensor]
) -> JointGraph:
    """The joint graph of `function(*weights, *inputs)`, traced on tensors without values on the host's device.

    Args:
        function: Returns tensors; the first of those that need a gradient starts the backward, as all others do.
        weights: Parameters and buffers: what outlives the step. Only their form counts; they may be on the meta device.
        inputs: What changes from step to step.

    Raises:
        ValueError: Nothing that the function returns needs a gradient.
    """
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._inductor import compile_fx, config
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode

    catcher = _make_catcher()
    # Models hold small tensors of their own that are no buffers; those are taken as they are.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # Inductor's passes over random operators look for the mode there.
    with mode, V.set_fake_mode(mode), config.patch(custom_partitioner_fn=catcher):
        fakes = [torch.empty_like(tensor, device="cpu") for tensor in (*weights, *inputs)]
        for fake, tensor in zip(fakes, (*weights, *inputs), strict=True):
            fake.requires_grad_(tensor.requires_grad)
        try:
            aot_module_simplified(
                _AsModule(function),  # type: ignore[arg-type]  # annotated for dynamo's graphs, made for any module
                fakes,
                fw_compiler=_no_backward,
                partition_fn=compile_fx.partition_fn,
                decompositions=select_decomp_table(),
                keep_inference_input_mutations=True,
            )
        except _Caught as caught:
            arguments = {**caught.arguments, "static_lifetime_input_indices": list(range(len(weights)))}
            return JointGraph(module=caught.module, arguments=arguments)
    raise AssertionError("either the joint graph is caught or there is no backward, and both end the trace")


def partition(joint: JointGraph, budget: float) -> ForwardBackward:
    """Cut a joint graph as torch does under an activation memory budget; the graph itself stays as it is."""
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    with config.patch(activation_memory_budget=budget):
        forward, backward = min_cut_rematerialization_partition(_copy(joint.module), **joint.arguments)
    num_outputs = joint.arguments["num_fwd_outputs"]
    return ForwardBackward(forward=forward.graph, backward=backward.graph, num_outputs=num_outputs)


def fusible_operators() -> frozenset[object]:
    """The operators that the partitioner takes to be computed within the kernel of a neighbour, with any overload."""
    from torch._functorch.partitioners import get_default_op_list

    return frozenset(get_default_op_list().fusible_ops)


def is_view(operator: object) -> bool:
    """Whether an operator returns its first argument seen differently, so that nothing is allocated."""
    return isinstance(operator, torch._ops.OpOverload) and operator.is_view


def writes_argument(operator: object) -> bool:
    """Whether an operator writes over an argument, and returns that."""
    return isinstance(operator, torch._ops.OpOverload) and operator._schema.is_mutable


class _AsModule(nn.Module):
    """A function where a module is asked for."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        return self._function(*args)


class _Caught(Exception):  # noqa: N818  # carries the graph out of the tracer; nothing is wrong
    def __init__(self, module: fx.GraphModule, arguments: dict[str, Any]) -> None:
        super().__init__("a joint graph was caught")
        self.module = module
        self.arguments = arguments


def _make_catcher() -> Any:
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Catcher(CustomPartitionerFn):
        """Stands in for the partitioner, and ends the trace."""

        def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **arguments: Any) -> Any:
            raise _Caught(gm, {"_joint_inputs": joint_inputs, **arguments})

        def uuid(self) -> None:
            """No cached code is of this partitioner."""

    return Catcher()


def _no_backward(gm: fx.GraphModule, example_inputs: Any) -> Any:
    # A joint graph is caught before anything is compiled: only a forward by itself comes here.
    raise ValueError("nothing that the function returns needs a gradient, so that there is no backward")


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    outputs = graph.graph_copy(module.graph, {})
    (old,) = (node for node in module.graph.nodes if node.op == "output")
    graph.output(outputs).meta.update(old.meta)
    return fx.GraphModule(module, graph)
