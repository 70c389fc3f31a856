"""Chains of holders for storages that nothing reaches: garbage in cycles, and what native code holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch.autograd.graph import Node

from lowtide.compat import autograd_references
from lowtide.tracing.leak_cycles import Anchor, find_anchor
from lowtide.tracing.leak_holders import ObjectPath, shortest_paths
from lowtide.tracing.leak_names import describe
from lowtide.tracing.leak_report import CYCLE, UNSEEN, Chain, Holder
from lowtide.tracing.storage_births import Born, Site, living_tensors, storage_of

_NATIVE: Chain = (Holder(kind=UNSEEN, where="which Python cannot see into"),)


def chains_of_unreachable(unreached: dict[int, Born]) -> dict[Site, Chain]:
    """The holders of storages that no search from a starting point has reached, by the site of their birth."""
    # One for each site, of the youngest: a search backwards is slow, and what comes from one site shares its fate.
    samples = {born.site: key for key, born in sorted(unreached.items(), key=lambda entry: entry[1].step)}
    # They may have no Python object of their own, only a graph that hangs on one.
    owners = [tensor for tensor in living_tensors() if _may_own(tensor, unreached)]
    outer = _not_saved_by_others(owners)
    paths = shortest_paths([outer, owners], set(samples.values()))
    chains: dict[Site, Chain] = dict.fromkeys(samples, _NATIVE)
    anchors: dict[int, Anchor] = {}
    for site, key in samples.items():
        if key in paths:
            owner = paths[key][0]
            assert isinstance(owner, torch.Tensor)
            if id(owner) not in anchors:
                anchors[id(owner)] = find_anchor(owner, ignored=_containers(owners, outer, paths, anchors))
            chains[site] = _anchored_chain(paths[key], anchors[id(owner)])
    return chains


def _not_saved_by_others(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those that are not themselves held by a graph, unless by the very node that made them."""
    nodes = list({id(tensor.grad_fn): tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}.values())
    seen = {id(node) for node in nodes}
    savers: dict[int, set[int]] = defaultdict(set)
    for node in nodes:  # grows while it is read
        for reference in autograd_references(node):
            if isinstance(reference, torch.Tensor):
                savers[id(storage_of(reference))].add(id(node))
            elif isinstance(reference, Node) and id(reference) not in seen:
                seen.add(id(reference))
                nodes.append(reference)
    return [tensor for tensor in tensors if savers[id(storage_of(tensor))] <= {id(tensor.grad_fn)}]


def _containers(
    owners: list[torch.Tensor], outer: list[torch.Tensor], paths: dict[int, ObjectPath], anchors: dict[int, Anchor]
) -> set[int]:
    """The `id`s of what holds the owners on our behalf."""
    anchored = [part for anchor in anchors.values() for part in (anchor, anchor.cycle, anchor.path)]
    return {id(container) for container in (owners, outer, paths, *paths.values(), *anchored)}


def _may_own(tensor: torch.Tensor, unreached: dict[int, Born]) -> bool:
    return tensor.grad_fn is not None or id(storage_of(tensor)) in unreached


def _anchored_chain(path: ObjectPath, anchor: Anchor) -> Chain:
    chain = describe((*anchor.path[:-1], *path))
    if not anchor.cycle:
        return _NATIVE + chain
    around = " -> ".join(str(holder) for holder in describe(anchor.cycle))
    # The chain starts with the object that the cycle ends with.
    return (Holder(kind=CYCLE, detail=f"({around})"), *chain[1:])
