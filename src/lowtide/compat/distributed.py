"""What torch spreads over several processes or cards: the modules that do it, and how their parameters are known."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def parallel_wrappers() -> tuple[type[nn.Module], ...]:
    """Classes of modules that run another module on several processes or cards.

    Those of FSDP only where somebody has imported it: no module can be one before, and the import takes a second.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    sharded = () if fsdp is None else (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)
    return (DistributedDataParallel, nn.DataParallel, *sharded)


def sharding_of(parameter: torch.Tensor) -> str | None:
    """What has made the parameter a part of one that lies on several processes; None for a whole one."""
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    if tensors is not None and isinstance(parameter, tensors.DTensor):
        return "DTensor (fully_shard or tensor parallelism)"
    if getattr(parameter, "_is_flat_param", False) or getattr(parameter, "_fsdp_flattened", False):
        return "FullyShardedDataParallel"
    return None


def running_data_parallel() -> nn.Module | None:
    """The DistributedDataParallel whose forward is running; None outside of one."""
    return DistributedDataParallel._active_ddp_module
