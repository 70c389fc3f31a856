"""manage: put a model under management, so that it trains inside the memory there is, under an unchanged loop."""

from __future__ import annotations

import contextlib
import numbers
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from lowtide import compat
from lowtide.errors import ConfigError, HardwareError, SessionError, UnsupportedOptimizerError
from lowtide.memory.chunk import Layout, lay_out
from lowtide.memory.cuda_mover import CudaMover
from lowtide.memory.emulated_mover import EmulatedMover
from lowtide.memory.groups import find_named_groups, unmanaged_parameters
from lowtide.memory.mover import GradientCarrier
from lowtide.memory.tier import DeviceLimit
from lowtide.optim.optimizers import Adafactor
from lowtide.optim.rules import reason_without_rule
from lowtide.optim.update_types import Moments, Numerics, numerics_of
from lowtide.planning.budget_plans import StaticPartition, WarmUp
from lowtide.planning.placement import check_plan, is_trained
from lowtide.planning.plan import Plan, Schedule, Site
from lowtide.runtime.assembly import SessionSetup
from lowtide.runtime.emulation.memory import TrackedMemory
from lowtide.runtime.host_memory import state_bytes_per_parameter_byte
from lowtide.runtime.parameters.binding import copy_values
from lowtide.runtime.parameters.deferred_weights import DeferredWeights
from lowtide.runtime.parameters.gradients import refuse_sparse_tables
from lowtide.runtime.parameters.weight_file import WeightFile
from lowtide.runtime.passes.devices import DeviceSet, make_devices
from lowtide.runtime.passes.lock import refuse_parallel
from lowtide.runtime.plan_run import PlanRun
from lowtide.runtime.session import Management, ObjectsAside, Session, refuse_managed
from lowtide.runtime.statistics.observer import CudaGauge, StepObserver, TrackedGauge
from lowtide.runtime.updates.chunk_optimizer import unwrapped
from lowtide.runtime.warm_up import WarmUpPlans, partition_plan
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from lowtide.distributed.ranks import Ranks

_FAST_WORDS = {torch.bfloat16: "bf16 exact", torch.float16: "fp16 exact"}


def manage(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    plan: Plan | StaticPartition | WarmUp,
    *,
    device: torch.device | str | None = None,
    weights: str | Path | DeferredWeights | None = None,
    max_grad_norm: float | None = None,
    precision: str | None = None,
    moments: str = "fp32",
    seed: int = 0,
    poison: bool | None = None,
    ranks: ProcessGroup | DeviceMesh | None = None,
    replicas: int | Sequence[torch.device | str] | None = None,
) -> Session:
    """Carry out a plan: spread the model's weights, gradients and optimizer state over device and host.

    The training loop stays as it is. Parameters are the same objects as before; between their uses they have the true
    value, on the device for a resident group and on the host for a streamed one. `Session.close` undoes everything.

    Args:
        model: On the CPU, on the device, or on meta with `weights`.
        optimizer: Made from the model's parameters; None to run the model without training it. Where a wrapper is given
            (accelerate's, Lookahead, SAM), the one inside is managed, which the wrapper goes on calling.
        plan: Made for this model, for example by `make_plan`; or how one is to be made: a `StaticPartition` at once, a
            `WarmUp` after one observed training step.
        device: A CUDA device; "cpu" emulates one in host memory. By default the current CUDA device, if there is one.
        weights: To fill a model on meta from, group by group: a safetensors file, a folder of them, or the `deferred_weights` under
            which it was built.
        max_grad_norm: Clip the gradients by their global norm in each `optimizer.step()`.
        precision: "fp32", "bf16 exact", "bf16 stochastic", "bf16 nearest" or "fp16 exact": how updates are rounded to the weights,
            in Lowtide's own kernels. None leaves all arithmetic to the optimizer's own.
        moments: With a precision, how optimizer state is stored: "fp32", "bf16" or "8bit". The vectors of
            `lowtide.optim.Adafactor` are fp32 whatever this is.
        seed: The seed of stochastic rounding.
        poison: Fill unused memory with NaN, so that a fault shows. By default on an emulated device only.
        ranks: The process group of several processes that call this alike, such as `torch.distributed.group.WORLD`; or a
            DeviceMesh, whose last dimension is the ranks that share the weights. Gradients are averaged over all of them before
            they are used. Each has the whole model, unless the plan has `sharding`.
        replicas: Split each batch over several devices of this process: their number, or CUDA devices of which the first is
            `device`. Each has the budget that the plan gives the device.

    Raises:
        PlanError: The plan is for another model, or its budgets cannot hold the largest group. A `WarmUp` also
            raises it in the second training step.
        ConfigError: A `StaticPartition` or a `WarmUp` lacks what it needs: the size of an emulated device, or an
            optimizer.
        BudgetError: A tier does not have the bytes that the plan needs.
        SessionError: The model is managed already by a session that is alive, it is spread over several processes or cards
            (DistributedDataParallel, FSDP), or its parameters have no values.
        UnsupportedOptimizerError: The optimizer cannot be run chunk by chunk.
        RanksDifferError: With `ranks`, the model, the plan or a setting is not the same on all of them.
    """
    _check_arguments(model, optimizer)
    make = partial(
        _manage,
        model,
        optimizer,
        plan,
        device=device,
        weights=weights,
        max_grad_norm=max_grad_norm,
        precision=precision,
        moments=moments,
        seed=seed,
        poison=poison,
        replicas=None if replicas == 1 else replicas,
    )
    if ranks is None:
        return make(ranks=None)
    if replicas is not None:
        raise ConfigError(
            f"replicas={replicas!r} is for one process, and ranks= for several, each with a device of its own; give one of them",
            key="replicas",
        )
    # Here: one process does without it.
    from lowtide.distributed.ranks import group_of
    from lowtide.runtime.agreement import manage_alike

    shards = plan.sharding.shards if isinstance(plan, Plan) and plan.sharding is not None else 1
    settings = {"precision": precision, "moments": moments, "max_grad_norm": max_grad_norm, "seed": seed}
    group = group_of(ranks, shards)
    return manage_alike(group, _device(device), model, optimizer, plan, settings, lambda joined: make(ranks=joined))


def _manage(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    plan: Plan | StaticPartition | WarmUp,
    *,
    device: torch.device | str | None,
    weights: str | Path | DeferredWeights | None,
    max_grad_norm: float | None,
    precision: str | None,
    moments: str,
    seed: int,
    poison: bool | None,
    ranks: Ranks | None,
    replicas: int | Sequence[torch.device | str] | None,
) -> Session:
    if optimizer is not None:
        optimizer = unwrapped(optimizer, getattr(plan, "schedule", None))
    _check_norm(max_grad_norm, optimizer)
    refuse_managed(model, optimizer)
    refuse_parallel(model)
    if max_grad_norm is not None and getattr(plan, "schedule", None) is Schedule.IN_BACKWARD:
        raise SessionError(
            f"max_grad_norm={max_grad_norm} needs all gradients before the first update, and the schedule 'in_backward' "
            "updates each chunk as soon as its own is there; use the schedule 'deferred'"
        )
    # A plan may name modules as groups that would not be found automatically.
    groups = find_named_groups(model, [group.name for group in plan.groups] if isinstance(plan, Plan) else ())
    sharding = plan.sharding if isinstance(plan, Plan) else None
    layout = lay_out(
        groups,
        chunk_bytes=plan.chunk_bytes if isinstance(plan, Plan) else None,
        shards=1 if sharding is None else sharding.shards,
    )
    if sharding is not None and optimizer is not None and optimizer.state:
        raise SessionError(
            f"the {type(optimizer).__name__} has state of {len(optimizer.state)} parameters, and the plan spreads state over "
            f"{sharding.shards} ranks; manage a new optimizer, and load the state from a checkpoint with lowtide.load"
        )
    target = _device(replicas[0] if device is None and isinstance(replicas, Sequence) and replicas else device)
    if replicas is not None and isinstance(plan, WarmUp):
        raise ConfigError(
            f"replicas={replicas!r} with a WarmUp: its observed step would be that of one device; give a plan of make_plan, or a "
            "StaticPartition",
            key="replicas",
        )
    _require_own_parameters(model, optimizer)
    _warn_of_unmanaged(model, optimizer)
    numerics = _numerics(model, optimizer, precision, moments, seed)
    if optimizer is not None:
        asked = {f"precision={precision!r}": precision, f"max_grad_norm={max_grad_norm}": max_grad_norm}
        refuse_sparse_tables(model, optimizer, [text for text, value in asked.items() if value is not None])
    plans = WarmUpPlans.on(layout, plan, optimizer, numerics, target) if isinstance(plan, WarmUp) else None
    if isinstance(plan, StaticPartition):
        plan = partition_plan(layout, plan, optimizer, numerics, target)
    elif plans is not None:
        plan = plans.first()
    if not isinstance(plan, Plan):
        raise SessionError(
            f"the plan is a {type(plan).__name__}; give one from lowtide.make_plan(model, ...), a StaticPartition or a "
            "WarmUp"
        )
    if numerics is None and any(site is Site.PAGED for group in plan.groups for site in group.sites):
        raise ConfigError(
            "the plan updates chunks on the device with state that visits it ('paged'), which is for updates through "
            "Lowtide's own kernels; give precision=, such as 'bf16 exact', or update on the device or the host",
            key="precision",
        )
    # Only our own kernels have paged state, whose size follows from its formats.
    ratio = 0.0 if numerics is None else state_bytes_per_parameter_byte(optimizer, numerics)
    check_plan(plan, layout, state_bytes_per_parameter_byte=ratio)
    if numerics is None and optimizer is not None:
        _refuse_fused_sgd(layout, plan, optimizer)
        if target.type == "cuda" and plans is None:
            _warn_of_slow_updates(layout, plan, optimizer)
    _require_values(model, weights)
    owner = f"the session of a {type(model).__name__}"
    # Gradients of one group may wait on the device for their copies while the next group computes.
    kept_bytes = max((group.nbytes for group in layout.groups), default=0)
    devices: DeviceSet | None = None
    mover: GradientCarrier
    if replicas is not None:
        devices = make_devices(replicas, target, plan, owner=owner, poison=bool(poison), kept_bytes=kept_bytes)
        mover, tracked = devices.mover, devices.devices[0].tracked
    elif target.type == "cuda":
        mover, tracked = CudaMover(target, max_kept_bytes=kept_bytes, poison=bool(poison)), None
    else:
        mover, tracked = EmulatedMover(max_kept_bytes=kept_bytes), TrackedMemory(plan.budgets.device_bytes, owner=owner)
    # Before the session's own objects are made, which must remain collectable.
    aside = ObjectsAside() if target.type == "cuda" else None
    source = weights if weights is None or isinstance(weights, DeferredWeights) else WeightFile(weights)
    if source is not None:
        source.check(model)
    observer = None
    if plans is not None:
        observer = StepObserver(CudaGauge(target) if tracked is None else TrackedGauge(tracked), plans.config.monitor)
    setup = SessionSetup(
        model=model,
        optimizer=optimizer,
        layout=layout,
        mover=mover,
        tracked=tracked,
        max_grad_norm=max_grad_norm,
        numerics=numerics,
        poison=poison if poison is not None else tracked is not None,
        ranks=ranks,
        devices=devices,
    )
    # If anything below fails, these go back to meta.
    empty = [*_empty_tensors(model)]
    management: Management | None = None
    with contextlib.ExitStack() as undo:
        if aside is not None:
            undo.callback(aside.bring_back)
        undo.callback(_empty_again, empty)
        plan_run = PlanRun(setup, plan, fill=copy_values if source is None else source.fill, observer=observer)
        undo.callback(lambda: (plan_run if management is None else management).close())
        _warn_of_caches(plan_run)  # raises, if the user has made warnings errors
        _place_the_rest(model, target, source, plan_run.moved_along)
        if tracked is not None:
            for tensor in (*model.buffers(), *_parameters_in(plan_run.moved_along)):
                tracked.include(tensor)
            tracked.start()
        if target.type == "cuda":
            torch.cuda.synchronize(target)
            # Only now: a model that was on the device has left it by this line.
            torch.cuda.empty_cache()
            _warn_of_held_segments(target, plan.budgets.device_bytes)
            plan_run.limit_device(DeviceLimit(target, plan.budgets.device_bytes))
        management = Management(plan_run, observer, None if plans is None else plans.after, aside)
        session = Session(management)
        plan_run.keep()
        undo.pop_all()
    return session


def _empty_tensors(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Parameters and buffers on the meta device, which a weight file will fill."""
    for module in model.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor.is_meta:
                yield module, name, tensor


def _empty_again(tensors: Iterable[tuple[nn.Module, str, torch.Tensor]]) -> None:
    """Put tensors back on meta; each parameter stays the same object."""
    for module, name, tensor in tensors:
        if isinstance(tensor, nn.Parameter):
            if not tensor.is_meta:
                empty = nn.Parameter(torch.empty_like(tensor, device="meta"), requires_grad=tensor.requires_grad)
                compat.exchange_contents(tensor, empty)
        else:
            module._buffers[name] = tensor


def _numerics(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, precision: str | None, moments: str, seed: int
) -> Numerics | None:
    """The formats that the words `precision` and `moments` ask for; the model's weights must be of that type already."""
    if precision is None:
        if moments != "fp32" and numerics_of("fp32", moments)[1].moments is not Moments.FP32:
            raise ConfigError(
                f"moments={moments!r} is for updates through Lowtide's own kernels; give precision= as well, such as "
                "'bf16 exact' or 'fp32'",
                key="moments",
            )
        return None
    wanted, numerics = numerics_of(precision, moments, seed=seed)
    if optimizer is None:
        raise ConfigError(f"precision={precision!r} is about updates, and there is no optimizer", key="precision")
    if isinstance(optimizer, Adafactor) and numerics.moments is not Moments.FP32:
        warnings.warn(
            f"moments={moments!r} has no effect with Adafactor: its second moments are sums of rows and columns, a thousandth "
            "of the weights, and stay in fp32; leave moments out",
            stacklevel=4,
        )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    others = {parameter.dtype for parameter in trained} - {wanted.dtype, torch.float32}
    if others or (trained and not any(parameter.dtype is wanted.dtype for parameter in trained)):
        found = ", ".join(sorted(str(parameter.dtype) for parameter in {p.dtype: p for p in trained}.values()))
        raise ConfigError(
            f"precision={precision!r} is for weights in {wanted.dtype} (some may be in float32), and the model's are in {found}; "
            f"convert it before the optimizer is made: model.to({wanted.dtype})",
            key="precision",
        )
    return numerics


def _check_arguments(model: object, optimizer: object) -> None:
    """Refuse a model and an optimizer of the wrong types, such as swapped ones, which would fail somewhere inside."""
    if not isinstance(model, nn.Module):
        swapped = " (model and optimizer are swapped)" if isinstance(optimizer, nn.Module) else ""
        raise ConfigError(f"model is a {type(model).__name__}, not a torch.nn.Module{swapped}", key="model")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        hint = "; make it first: optimizer(model.parameters())" if isinstance(optimizer, type) else ""
        raise ConfigError(
            f"optimizer is {optimizer!r:.80}, not a torch.optim.Optimizer{hint}; None runs the model without training it",
            key="optimizer",
        )


def _check_norm(max_grad_norm: object, optimizer: torch.optim.Optimizer | None) -> None:
    """Refuse a norm that is not a number above 0: a negative one would flip every gradient, and NaN would spoil the weights."""
    if max_grad_norm is None:
        return
    if isinstance(max_grad_norm, bool) or not isinstance(max_grad_norm, numbers.Real) or not float(max_grad_norm) > 0:
        raise ConfigError(
            f"max_grad_norm is {max_grad_norm!r}; give a number above 0, or None to leave the gradients as they are",
            key="max_grad_norm",
        )
    if optimizer is None:
        raise ConfigError(
            f"max_grad_norm={max_grad_norm} is about updates, and there is no optimizer", key="max_grad_norm"
        )


def _require_own_parameters(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Refuse an optimizer that holds none of the model's parameters: made before the model was copied, it would train nothing."""
    if optimizer is None:
        return
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if trained and held and not any(id(parameter) in trained for parameter in held):
        raise SessionError(
            f"the optimizer holds none of the model's {len(trained)} trained parameters; its {len(held)} belong to "
            "something else, such as a copy of the model. Make it from model.parameters()"
        )


def _warn_of_unmanaged(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Warn of an optimizer that was made before a part of the model was replaced: it trains the old part."""
    if optimizer is None:
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    own = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    left_out = [name for key, name in own.items() if key not in held]
    foreign = len(held - own.keys() - {id(parameter) for parameter in model.parameters()})
    if left_out and foreign:
        warnings.warn(
            f"the optimizer holds {foreign} parameters that are not the model's, and not {len(left_out)} that are trained "
            f"({', '.join(left_out[:3])}{', ...' if len(left_out) > 3 else ''}): these will not be updated. If a part of the "
            "model was replaced (tile, a new head) after the optimizer was made, make the optimizer again",
            stacklevel=4,
        )


def _warn_of_slow_updates(layout: Layout, plan: Plan, optimizer: torch.optim.Optimizer) -> None:
    """Warn of torch's own step on the host for 16-bit weights: Lowtide's kernel is faster, and keeps fp32 masters."""
    if any(reason_without_rule(optimizer, group) is not None for group in optimizer.param_groups):
        return
    updated = _bytes_updated_on_host(layout, plan)
    dtype = max(_FAST_WORDS, key=lambda each: updated[each])
    if updated[dtype]:
        warnings.warn(
            f"the host updates {format_bytes(updated[dtype])} of weights in {str(dtype).removeprefix('torch.')} by torch's own "
            f"{type(optimizer).__name__}, which is slow; precision={_FAST_WORDS[dtype]!r} updates them by Lowtide's kernel, with "
            "fp32 masters",
            stacklevel=4,
        )


def _refuse_fused_sgd(layout: Layout, plan: Plan, optimizer: torch.optim.Optimizer) -> None:
    """Refuse torch's fused SGD for 16-bit weights on the CPU, if it leaves them unchanged."""
    is_fused = isinstance(optimizer, torch.optim.SGD) and any(group.get("fused") for group in optimizer.param_groups)
    for dtype in _FAST_WORDS if is_fused else ():
        if not _bytes_updated_on_host(layout, plan)[dtype]:
            continue
        weight = torch.ones(64, dtype=dtype)
        weight.grad = torch.ones_like(weight)
        torch.optim.SGD([weight], lr=0.5, fused=True).step()
        if weight.eq(1).any():
            raise UnsupportedOptimizerError(
                f"{type(optimizer).__name__} with fused=True would leave weights in {str(dtype).removeprefix('torch.')} that are "
                f"updated on the host as they are, by a fault of torch {torch.__version__}; leave fused out, update on the "
                f"device, or give precision={_FAST_WORDS[dtype]!r}. Nothing was changed"
            )


def _bytes_updated_on_host(layout: Layout, plan: Plan) -> Counter[torch.dtype]:
    """Bytes of weights that the host updates, by their dtype."""
    found: Counter[torch.dtype] = Counter()
    sites = {group.name: iter(group.sites) for group in plan.groups}
    for chunk in layout.chunks:
        if next(sites[chunk.group]) is Site.HOST and is_trained(chunk):
            for span in chunk.spans:
                found[span.parameter.dtype] += span.parameter.nbytes
    return found


def _warn_of_caches(plan_run: PlanRun) -> None:
    """Warn that a key-value cache is off while blocks are recomputed: for some models the last bits differ."""
    names = () if plan_run.calls.applied is None else plan_run.calls.applied.caches_off
    if names:
        warnings.warn(
            f"the plan runs blocks of {', '.join(names)} again in the backward, so the key-value cache is off while the model "
            "is managed (config.use_cache was True): the run equals plain torch with use_cache=False to the bit, from which "
            "the default differs in the last bits for some models. Set config.use_cache = False before manage to have it so",
            stacklevel=4,
        )


def _warn_of_held_segments(device: torch.device, budget_bytes: int | None) -> None:
    """Warn of memory that torch cannot release to the budget: what is free beside tensors from before the session."""
    if budget_bytes is None:
        return
    compute = torch.cuda.current_stream(device).cuda_stream  # chunks are in the pool of another one
    segments = [
        segment
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == device.index and segment["stream"] == compute
    ]
    used_bytes = sum(segment["allocated_size"] for segment in segments)
    held_bytes = sum(segment["total_size"] for segment in segments) - used_bytes
    if held_bytes > _MOST_HELD * budget_bytes:
        warnings.warn(
            f"{format_bytes(held_bytes)} of the device budget of {format_bytes(budget_bytes)} is free, but only in pieces: tensors "
            f"from before the session, {format_bytes(used_bytes)}, lie in between, so torch cannot release it. A step may run "
            "out of memory that the plan counts on. Make those tensors after the session, or start in a new process",
            stacklevel=4,
        )


_MOST_HELD = 0.1
"""Of the budget. Less is usual: cuBLAS's workspace and a batch leave some of theirs."""


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(
            f"device {device!r} is none that torch knows; give 'cuda', 'cuda:1' or 'cpu'", key="device"
        ) from error
    if target.type not in ("cuda", "cpu") or (target.type == "cpu" and target.index):
        raise ConfigError(
            f"device {str(target)!r} cannot be managed; give a CUDA device, or 'cpu' for one emulated in host memory",
            key="device",
        )
    if target.type == "cuda" and not torch.cuda.is_available():
        raise HardwareError(
            f"device {str(target)!r}: torch sees no CUDA device here; give device='cpu' to emulate one in host memory"
        )
    is_any_cuda = target.type == "cuda" and "cuda:" not in str(target)
    return torch.device("cuda", torch.cuda.current_device()) if is_any_cuda else target


def _require_values(model: nn.Module, weights: str | Path | DeferredWeights | None) -> None:
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty and weights is None:
        raise SessionError(
            f"{len(empty)} parameters are on the meta device and have no values, the first is {empty[0]}; give "
            "weights=FILE_OR_FOLDER of safetensors or the deferred_weights() that it was built under, or build the model on the CPU"
        )


def _parameters_in(moved: list[tuple[nn.Module, str, torch.device]]) -> list[nn.Parameter]:
    """The parameters among them, which went to the device as a whole, if they have memory."""
    found = [module._parameters.get(name) for module, name, _ in moved]
    return [each for each in found if each is not None and not isinstance(each, nn.UninitializedParameter)]


def _place_the_rest(
    model: nn.Module,
    target: torch.device,
    source: WeightFile | DeferredWeights | None,
    moved: list[tuple[nn.Module, str, torch.device]],
) -> None:
    """Move buffers and unmanaged parameters to the device as a whole; `moved` collects where they were before."""
    named = dict(model.named_parameters())
    for name, _ in unmanaged_parameters(model):
        if name in named:
            if named[name].is_meta and isinstance(source, DeferredWeights):
                source.materialize_one(name, named[name])
            path, _, last = name.rpartition(".")
            moved.append((model.get_submodule(path), last, named[name].device))
            named[name].data = named[name].data.to(target)
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            full_name = f"{path}.{name}" if path else name
            if buffer.is_meta:
                if not isinstance(source, WeightFile) or full_name not in source:
                    raise SessionError(
                        f"buffer {full_name} is on the meta device and no weight file has it; build the model so that "
                        "only parameters are on meta, or set the buffer before you manage the model"
                    )
                module._buffers[name] = source.tensor(full_name).to(target)
            else:
                moved.append((module, name, buffer.device))
                module._buffers[name] = buffer.to(target)
