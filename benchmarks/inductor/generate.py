"""The code that inductor generates for the backward of a recipe's model under an activation budget, without a GPU.

The joint graph is traced on the host, with the attention of a GPU (see `lowtide.lab.budget`), and cut by torch's partitioner.
The backward is then said to be on a GPU and given to inductor, which is stopped when its code is written. In a run inductor may
also write over saved tensors in place (`donated_buffer`), which it is not told of here: with it, the peaks of 2.8 and 2.11 at 0.6
and 1.0 in fp32 are the same.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import fx

from benchmarks.inductor import older_torch  # before Lowtide, whose rules name classes that an older torch lacks
from benchmarks.inductor.stand_in_gpu import stand_in_gpu
from lowtide import compat
from lowtide.compat import compiler as partitioning
from lowtide.lab.budget import trace_recipe
from lowtide.lab.recipe import Recipe

GPU = torch.device("cuda", 0)


class _WrittenError(Exception):
    """Carries the code out of the compiler."""


def generate_backward(recipe: Recipe, budget: float) -> str:
    """Compile up to the code, of the model and its loss as one graph."""
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    trace = older_torch.trace_joint_graph if older_torch.IS_OLDER else compat.trace_joint_graph
    with mock.patch.object(compat, "trace_joint_graph", trace):
        joint, _ = trace_recipe(recipe)
    with config.patch(activation_memory_budget=budget):
        _, backward = min_cut_rematerialization_partition(partitioning._copy(joint.module), **joint.arguments)
    with stand_in_gpu():
        return _code(_on_card(backward))


def _on_card(module: fx.GraphModule) -> fx.GraphModule:
    for node in module.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = _moved(node.meta["val"])
        node.meta.pop("tensor_meta", None)  # says the device as well, and is made again where it is asked for
        node.args = fx.node.map_aggregate(node.args, _elsewhere)
        node.kwargs = fx.node.map_aggregate(node.kwargs, _elsewhere)
    module.recompile()
    return module


def _moved(value: Any) -> Any:
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(value, FakeTensor):
        with value.fake_mode:
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=GPU)
    return type(value)(map(_moved, value)) if isinstance(value, tuple | list) else value


def _elsewhere(argument: Any) -> Any:
    return GPU if isinstance(argument, torch.device) else argument


def _code(module: fx.GraphModule) -> str:
    from torch._guards import TracingContext, tracing
    from torch._inductor import compile_fx, config
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    def write(lowering: Any, *words: object, **named: object) -> None:
        made = lowering.codegen()[0]
        raise _WrittenError(getattr(made, "value", made))

    arguments = [node for node in module.graph.nodes if node.op == "placeholder"]
    inputs = [node.meta["val"] for node in arguments]
    mode = next(value.fake_mode for value in inputs if hasattr(value, "fake_mode"))
    # Weights: they do not move from step to step, and are not counted as the step's.
    static = [number for number, node in enumerate(arguments) if node.name.startswith("primals")]
    caches = config.patch(fx_graph_cache=False, force_disable_caches=True)
    with (
        tracing(TracingContext(mode)),
        V.set_fake_mode(mode),
        caches,
        mock.patch.object(GraphLowering, "compile_to_module", write),
    ):
        try:
            compile_fx.compile_fx_inner(module, inputs, static_input_idxs=static, is_backward=True, graph_id=0)
        except Exception as error:  # inductor wraps what is raised in it; anything else goes on from there
            return _written(error)
    raise AssertionError("the compiler did not come to its code")


def _written(error: BaseException) -> str:
    """Inductor wraps what is raised in it."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, _WrittenError):
        cause = getattr(cause, "inner_exception", None) or cause.__cause__ or cause.__context__
    if cause is None:
        raise error
    return str(cause.args[0])
