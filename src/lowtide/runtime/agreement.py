"""What the ranks of a run must have in common: compared when the model is managed, so that they cannot part in silence."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from lowtide import compat
from lowtide.distributed.ranks import Ranks
from lowtide.errors import ConfigError, RanksDifferError
from lowtide.hardware.machine import lowtide_version
from lowtide.memory.chunk import lay_out
from lowtide.memory.groups import SPARSE_GRADIENT, find_groups, is_dense, unmanaged_parameters
from lowtide.planning.budget_plans import WarmUp
from lowtide.planning.plan import Collective, Plan, Sharding, plan_from_json, plan_to_json
from lowtide.runtime.passes.exchange import UNDER_WAY
from lowtide.runtime.rank_ways import RankSettings, Way, fastest_plan, spread_ways
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from lowtide.planning.search import Limits
    from lowtide.runtime.plan_problem import PlanProblem
    from lowtide.runtime.session import Session

AUTO = "auto"
"""The word for the fastest of all ways."""
_INTEGER_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of an element, the type as which it is added up."""


def manage_alike(
    group: dist.ProcessGroup,
    device: torch.device,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    plan: object,
    settings: Mapping[str, object],
    make: Callable[[Ranks], Session],
) -> Session:
    """Manage the model on all ranks, or on none.

    Args:
        group: Of the ranks.
        device: Of this rank's session.
        model: This rank's.
        optimizer: This rank's.
        plan: As `manage` was given it.
        settings: The same on all ranks.
        make: Manages it on this rank.

    Raises:
        RanksDifferError: The message names the rank, and what is different there.
    """
    ranks = Ranks(group, device)
    session: Session | None = None
    try:
        # Before anything can fail on one rank alone: whoever shares weights agrees on all that follows.
        shardings = ranks.exchange(plan.sharding if isinstance(plan, Plan) else None)
        _require_alike(shardings)
        if shardings[0] is not None:
            ranks.spread(shardings[0].shards)
        with ranks.agreeing("manage the model") as facts:
            _refuse(model, plan)
            facts["versions"] = {
                "torch": torch.__version__.partition("+")[0],
                "Lowtide": lowtide_version(),
            }
            facts["settings"] = settings
            facts["parameters"] = {
                name: f"{str(each.dtype).removeprefix('torch.')}{tuple(each.shape)}{'' if each.requires_grad else ', frozen'}"
                for name, each in model.named_parameters()
            }
            if optimizer is not None:
                facts["optimizer"] = _optimizer_facts(optimizer)
                facts["optimizer state"] = _checksums(_state_of(model, optimizer))
            # Here, if no rank has them as a whole afterwards.
            is_spread = isinstance(plan, Plan) and plan.sharding is not None
            weights = _checksums(dict(model.named_parameters())) if is_spread else {}
            session = make(ranks)
            facts["plan"] = {"plan": session.plan.summary, "groups": _digest(session.plan)}
            facts["weights"] = {
                **(weights if is_spread else _checksums(session._values())),
                **_checksums(_beside(model, optimizer)),
            }
    except BaseException:
        if session is not None:
            session.close()
        ranks.close()
        raise
    session._forget_originals()
    return session


def _require_alike(shardings: Sequence[Sharding | None]) -> None:
    for rank, each in enumerate(shardings):
        if each != shardings[0]:
            raise RanksDifferError(
                f"rank {rank} differs from rank 0 in plan: sharding is {each} there, and {shardings[0]} on rank 0. All ranks "
                "must manage the model alike; give the same on each"
            )


def plan_alike(
    group: dist.ProcessGroup,
    device: torch.device,
    model: nn.Module,
    pose: Callable[..., tuple[PlanProblem, Limits]],
    device_bytes: int,
    host_bytes: int,
    ways: Callable[[int], Sequence[Way] | None] | None,
) -> Plan:
    """The plan that rank 0 finds, for all ranks. It leaves room for gradients that are on their way to the other ranks.

    Args:
        group: Of the ranks.
        device: Of this rank.
        model: This rank's.
        pose: Makes the problem for `device_memory` and `host_memory`; called on rank 0.
        device_bytes: What this rank may take of its device. The least of all counts.
        host_bytes: What the ranks of this machine may take of its memory together.
        ways: By the number of ranks, those to choose from, as for `rank_ways.fastest_plan`; None for the whole model on each.
    """
    ranks = Ranks(group, device)
    try:
        with ranks.agreeing("plan"):
            hosts = ranks.exchange((device_bytes, host_bytes, socket.gethostname()))
            found = ""
            if ranks.rank == 0:
                least = min(share // _num_on(name, hosts) for _, share, name in hosts)
                budget = min(each for each, _, _ in hosts)
                if ways is None:
                    problem, limits = pose(device_memory=budget - _room(model, budget), host_memory=least)
                    plan = problem.fastest(limits).plan
                    plan = replace(plan, budgets=replace(plan.budgets, device_bytes=budget))
                else:
                    chosen = ways(ranks.size)
                    per_node = _per_node([name for _, _, name in hosts], chosen or ())
                    problem, limits = pose(device_memory=budget, host_memory=least)
                    limits = replace(
                        limits, host_bytes=per_node * limits.host_bytes, pinned_bytes=per_node * limits.pinned_bytes
                    )
                    plan = fastest_plan(problem, limits, RankSettings(count=ranks.size, per_node=per_node), chosen)
                found = plan_to_json(plan)
        return plan_from_json(ranks.exchange(found)[0])
    finally:
        ranks.close()


def ways_asked(sharding: Sharding | str, ranks: object) -> Callable[[int], Sequence[Way] | None]:
    """By the number of ranks, the ways that `sharding=` of `prepare` means; None for all there are.

    Args:
        sharding: As the user gave it: how, or a word.
        ranks: Likewise. A mesh of two dimensions says how many share the weights.

    Raises:
        ConfigError: The word is none of them.
    """
    shares = _shares_of_mesh(ranks)
    if isinstance(sharding, Sharding):
        given = sharding
        return lambda num_ranks: tuple(spread_ways(given, num_ranks))
    collectives = tuple(Collective) if sharding == AUTO else tuple(each for each in Collective if each == sharding)
    if not collectives:
        raise ConfigError(
            f"sharding is {sharding!r}; give 'gather', 'one to all', 'auto' or a lowtide.Sharding, or None for the whole model on "
            "each rank",
            key="sharding",
        )

    def ways(num_ranks: int) -> Sequence[Way] | None:
        if sharding == AUTO and (shares is None or num_ranks == 1):
            return None
        if num_ranks == 1:
            raise ConfigError(
                f"sharding={str(sharding)!r} spreads weights over ranks, and there is 1; start the script with torchrun "
                "--nproc-per-node 2 or more, or leave sharding out",
                key="sharding",
            )
        found = [Way(name="data parallel")] if sharding == AUTO else []
        for collective in collectives:
            found += spread_ways(Sharding(shards=shares or num_ranks, collective=collective), num_ranks)
        return tuple(found)

    return ways


def _shares_of_mesh(ranks: object) -> int | None:
    """How many ranks share the weights by a mesh of two dimensions; None where that is not said."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    from torch.distributed.device_mesh import DeviceMesh  # slow to load, and few give one

    is_said = isinstance(ranks, DeviceMesh) and ranks.ndim == 2 and ranks.shape[1] > 1
    return ranks.shape[1] if is_said else None  # type: ignore[attr-defined]  # a mesh has it


def _per_node(hosts: Sequence[str], ways: Sequence[Way]) -> int:
    """Ranks of each machine; 1, the slowest links, where machines have different numbers or sets of ranks lie across some."""
    counts = {hosts.count(name) for name in hosts}
    per_node = counts.pop() if len(counts) == 1 else 1
    sets = [way.sharding.shards for way in ways if way.sharding is not None]
    return per_node if all(shards % per_node == 0 or per_node % shards == 0 for shards in sets) else 1


def _room(model: nn.Module, budget: int) -> int:
    """Device bytes of gradients on their way to the other ranks, at most."""
    largest = max((chunk.nbytes for chunk in lay_out(find_groups(model)).chunks), default=0)
    under_way = (UNDER_WAY + 1) * largest
    if under_way >= budget:
        raise ConfigError(
            f"device_memory is {format_bytes(budget)} on a rank, and gradients on their way to the other ranks take up to "
            f"{format_bytes(under_way)}; give more than that",
            key="device_memory",
        )
    return under_way


def _num_on(host: str, hosts: list[tuple[int, int, str]]) -> int:
    return sum(name == host for _, _, name in hosts)


def _refuse(model: nn.Module, plan: object) -> None:
    if isinstance(plan, WarmUp):
        raise ConfigError(
            "a WarmUp makes its plan from what one process observes, and all ranks need the same plan; give one of "
            "lowtide.plan() or make_plan()",
            key="plan",
        )
    sparse = [name for name, reason in unmanaged_parameters(model) if reason == SPARSE_GRADIENT]
    if sparse:
        raise ConfigError(
            f"the gradient of {sparse[0]} will be sparse, and gradients are averaged over the ranks as dense tensors; make the "
            "embedding with sparse=False",
            key="ranks",
        )


def _optimizer_facts(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    found: dict[str, object] = {"class": type(optimizer).__name__}
    for number, group in enumerate(optimizer.param_groups):
        found[f"parameters of group {number}"] = len(group["params"])
        for name, value in group.items():
            if name != "params":
                found[f"{name} of group {number}"] = value.tolist() if isinstance(value, torch.Tensor) else repr(value)
    return found


def _state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{key} of {names.get(id(parameter), 'a parameter beside the model')}": value
        for parameter, state in optimizer.state.items()
        for key, value in (state.items() if isinstance(state, dict) else ())
        if isinstance(value, torch.Tensor)
    }


def _beside(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    """What the optimizer trains beside the model."""
    own = {id(parameter) for parameter in model.parameters()}
    held = [] if optimizer is None else [each for group in optimizer.param_groups for each in group["params"]]
    return {f"parameter {number} of the optimizer": each for number, each in enumerate(held) if id(each) not in own}


def _digest(plan: Plan) -> str:
    """The plan in one number, where its summary says too little."""
    return f"{zlib.crc32(plan_to_json(plan).encode()):08x}"


def _checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, object]:
    """A sum of each tensor's bytes, read as integers: no second copy is made, and the device is waited for once."""
    found: dict[str, object] = {}
    on_device: dict[str, torch.Tensor] = {}
    with torch.no_grad(), compat.without_torch_function():
        for name, tensor in tensors.items():
            kind = _INTEGER_OF.get(tensor.element_size())
            is_plain = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta
            if kind is None or not is_plain or not is_dense(tuple(tensor.shape), tensor.stride()):
                continue
            total = tensor.as_strided((tensor.numel(),), (1,)).view(kind).sum(dtype=torch.int64)
            if total.device.type == "cpu":
                found[name] = f"checksum {int(total)}"
            else:
                on_device[name] = total
        if on_device:
            totals = torch.stack([*on_device.values()]).tolist()
            found |= {name: f"checksum {total}" for name, total in zip(on_device, totals, strict=True)}
    return found
