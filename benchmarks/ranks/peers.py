"""How each peer, and Lowtide, makes one step of the job out of a model: what a user of it would write.

All have torch's AdamW, the same learning rate, and the model as it was drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.suite import Row

LEARNING_RATE = 1e-3
PRECISIONS = ("fp32", "bf16")
"""`bf16` computes in it, and has AdamW on weights and moments in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """One way to train the job's model on this rank."""

    step: Callable[[Tensor], Tensor]
    """Trains on the rank's rows; returns their loss."""
    facts: Callable[[], dict[str, Any]] = field(default=dict)
    """What the peer itself says of its memory."""
    close: Callable[[], None] = field(default=lambda: None)


def loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, autocast: torch.dtype | None = None
) -> Callable[[Tensor], Tensor]:
    """The step of a loop that knows nothing of ranks."""

    def step(ids: Tensor) -> Tensor:
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            loss: Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Made last: fully_shard replaces the parameters."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def ddp(model: nn.Module, row: Row) -> Trainer:
    """DistributedDataParallel, whose gradients lie in its buckets; torch's autocast where weights are to have masters."""
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Trainer(step=loop(model, adamw(model), torch.bfloat16 if row["precision"] == "bf16" else None))


def fsdp2(model: nn.Module, row: Row) -> Trainer:
    """fully_shard on each layer and on the rest, and with `offload` its policy for weights on the host."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    settings: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
        # On a CPU there is no device whose copies would need locked memory.
        "offload_policy": CPUOffloadPolicy(pin_memory=False) if row.get("offload") else OffloadPolicy(),
    }
    if row["precision"] == "bf16":
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, **settings)
    fully_shard(model, **settings)
    return Trainer(step=loop(model, adamw(model)))


def zero3(model: nn.Module, row: Row) -> Trainer:
    """DeepSpeed ZeRO-3 with torch's AdamW, whose buckets are made for a layer, as the windows and gathers of the others are.

    By default they hold 500 million elements, and weights that come again within a billion are kept.
    """
    import deepspeed

    layer = max(sum(weight.numel() for weight in part.parameters()) for part in model.layers)  # type: ignore[union-attr]
    on_host = {"device": "cpu", "pin_memory": False}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": row["rows"] // dist.get_world_size(),
        "bf16": {"enabled": row["precision"] == "bf16"},
        "gradient_clipping": 0.0,  # by default it clips to a norm of 1
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": False,  # it is done on another CUDA stream
            "contiguous_gradients": True,
            "reduce_bucket_size": layer,
            "stage3_prefetch_bucket_size": layer,
            "stage3_max_live_parameters": 2 * layer,
            "stage3_max_reuse_distance": layer,
            "stage3_param_persistence_threshold": 0,
            **({"offload_optimizer": on_host, "offload_param": on_host} if row.get("offload") else {}),
        },
    }
    # Its own hook, which comes after this one, takes no output with slots.
    model.register_forward_hook(lambda module, args, output: {"loss": output.loss})
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config, dist_init_required=False)

    def step(ids: Tensor) -> Tensor:
        loss: Tensor = engine(input_ids=ids, labels=ids)["loss"]
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Trainer(step=step, facts=lambda: {"deepspeed": deepspeed.__version__})


def managed(model: nn.Module, row: Row) -> Trainer:
    """Lowtide, on an emulated device: data parallel, and with `collective` spread over the ranks."""
    import lowtide
    from lowtide.planning.plan import Collective

    words: dict[str, Any] = {"weights": row["weights"], "update": row["update"]}
    if "collective" in row:
        shards = dist.get_world_size()
        words["sharding"] = lowtide.Sharding(shards=shards, collective=Collective(row["collective"]))
    if row["precision"] == "bf16":
        model = model.to(torch.bfloat16)  # its masters begin with these rounded weights
    optimizer = adamw(model)
    session = lowtide.manage(
        model,
        optimizer,
        lowtide.make_plan(model, schedule=row.get("schedule", "deferred"), **words),
        device="cpu",
        precision="bf16 exact" if row["precision"] == "bf16" else None,
        poison=False,  # no NaN is written into memory that is not used: a test's precaution, which takes time
        ranks=dist.group.WORLD,
    )

    def facts() -> dict[str, Any]:
        stats = session.stats()
        assert stats.ranks is not None
        peaks = {f"{tier.tier}_peak_bytes": tier.peak_bytes for tier in stats.tiers}
        return {**peaks, "sent_step_bytes": stats.ranks.sent_bytes // stats.num_steps}

    return Trainer(step=loop(model, optimizer), facts=facts, close=session.close)


PEERS: dict[str, Callable[[nn.Module, Row], Trainer]] = {
    "ddp": ddp,
    "fsdp2": fsdp2,
    "zero-3": zero3,
    "lowtide": managed,
}
