"""What torch 2.8, with which the experiment was made, lacks of what Lowtide is written for.

Of that torch only the partitioner and the compiler are asked, so that two things are enough. To be imported before Lowtide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

IS_OLDER = not hasattr(torch.optim, "Muon")
if IS_OLDER:
    # Never made: Lowtide's rules name the class.
    torch.optim.Muon = type("Muon", (torch.optim.SGD,), {})  # type: ignore[assignment,misc]  # there is none in this torch


def trace_joint_graph(
    function: Callable[..., tuple[Tensor, ...]], weights: Sequence[Tensor], inputs: Sequence[Tensor]
) -> Any:
    """What `compat.trace_joint_graph` does, where inductor has no place for a partitioner of one's own."""
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._inductor import compile_fx
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode

    from lowtide.compat import compiler

    def catch(module: fx.GraphModule, joint_inputs: Any, **arguments: Any) -> Any:
        compile_fx._recursive_joint_graph_passes(module)
        raise compiler._Caught(module, {"_joint_inputs": joint_inputs, **arguments})

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, V.set_fake_mode(mode):
        fakes = [torch.empty_like(tensor, device="cpu") for tensor in (*weights, *inputs)]
        for fake, tensor in zip(fakes, (*weights, *inputs), strict=True):
            fake.requires_grad_(tensor.requires_grad)
        try:
            aot_module_simplified(
                compiler._AsModule(function),  # type: ignore[arg-type]  # annotated for dynamo's graphs
                fakes,
                fw_compiler=compiler._no_backward,
                partition_fn=catch,
                decompositions=select_decomp_table(),
                keep_inference_input_mutations=True,
            )
        except compiler._Caught as caught:
            arguments = {**caught.arguments, "static_lifetime_input_indices": list(range(len(weights)))}
            return compiler.JointGraph(module=caught.module, arguments=arguments)
    raise AssertionError("either the joint graph is caught or there is no backward, and both end the trace")
