"""What recomputation costs: the floating point operations of the forward that a backward does again."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from lowtide import compat


def recomputed_share(halves: compat.ForwardBackward) -> float:
    """Operations that the backward repeats, over all of the forward: 0 where nothing of weight is repeated, 1 for all.

    Those of products, convolutions and attention are counted, by torch's own formulas; others are bound by memory.
    """
    forward = {node.name: num_flops(node) for node in halves.forward.nodes}
    total = sum(forward.values())
    if not total:
        return 0.0
    # What is computed again has the name that it had in the forward.
    again = sum(forward.get(node.name, 0) for node in halves.backward.nodes if node.op == "call_function")
    return again / total


def num_flops(node: fx.Node) -> int:
    """Operations of one node; 0 for those that have no formula."""
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if node.op != "call_function" or formula is None:
        return 0
    args, kwargs = map_arg((node.args, node.kwargs), _value)
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


def _value(node: fx.Node) -> Any:  # a tensor without values, a number or a tuple of them
    return node.meta["val"]
