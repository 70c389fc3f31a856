"""One row of a peer: the same Llama, batch and loop under DeepSpeed, FSDP2 or torchao, in a process of its own.

python -m benchmarks.optim.peers '{"name": "...", "peer": "fsdp2", "model": "3.14b", "batch": "8x2048", ...}'

Settings are each peer's best for one GPU with all optimizer state on the host, and are in the record: bf16, locked memory,
no accumulation, the model's own checkpointing, clipping as the row says.
"""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.session.row import SIZES, build, host_rss_bytes, load
from benchmarks.suite import Row, answer

Step = Callable[[torch.Tensor], torch.Tensor]


def _one_rank() -> None:
    for key, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(key, value)
    os.environ.setdefault("MASTER_PORT", "29571")


def deepspeed_zero3(row: Row) -> Step:
    """ZeRO-3 with parameters and optimizer on the host; with a `ratio`, that share of the optimizer alone."""
    import deepspeed

    _one_rank()
    deepspeed.init_distributed("nccl")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": int(row["batch"].split("x")[0]),
        "bf16": {"enabled": True},
        "gradient_clipping": row["max_grad_norm"] or 0.0,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": row.get("sub_group_size", 2e8),
            "offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": row.get("ratio", 1.0)},
            **({} if "ratio" in row else {"offload_param": {"device": "cpu", "pin_memory": True}}),
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = build(row["model"], on="cuda")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def fsdp2(row: Row) -> Step:
    """FSDP2 with its CPU offload policy, fp32 masters and torch's fused AdamW on the host."""
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    _one_rank()
    dist.init_process_group("cpu:gloo,cuda:nccl")
    model = build(row["model"], on="cuda").float().to("cpu")
    settings: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=True),
    }
    for layer in model.model.layers:
        fully_shard(layer, **settings)
    fully_shard(model, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if row["max_grad_norm"]:
            torch.nn.utils.clip_grad_norm_(model.parameters(), row["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def torchao_offload(row: Row) -> Step:
    """Weights on the device, AdamW's state in bf16 on the host; it has no clipping and rounds to nearest."""
    from torchao.optim import CPUOffloadOptimizer

    model = build(row["model"], on="cuda")
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def no_peer(row: Row) -> Step:
    """Plain torch, forward and backward: what the peers' updates come on top of."""
    model = build(row["model"], on="cuda")

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()
        model.zero_grad()
        return loss.detach()

    return step


PEERS: dict[str, Callable[[Row], Step]] = {
    "none": no_peer,
    "deepspeed zero-3": deepspeed_zero3,
    "fsdp2": fsdp2,
    "torchao": torchao_offload,
}


def run(row: Row) -> Row:
    """Train the row's steps and report."""
    row = {"max_grad_norm": None, "steps": 5, "warm_up": 2, **row}
    started = time.perf_counter()
    step = PEERS[row["peer"]](row)
    built_s = time.perf_counter() - started
    rows, length = (int(part) for part in row["batch"].split("x"))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, SIZES[row["model"]]["v"], (rows, length), generator=generator).to("cuda")
    times, losses = [], []
    for number in range(row["warm_up"] + row["steps"]):
        if number == row["warm_up"]:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        losses.append(step(ids).item())
        torch.cuda.synchronize()
        if number >= row["warm_up"]:
            times.append(time.perf_counter() - begun)
    return {
        **row,
        "built_s": built_s,
        "step_s": times,
        "median_s": statistics.median(times),
        "losses": losses,
        "max_allocated_bytes": torch.cuda.max_memory_allocated(),
        "max_reserved_bytes": torch.cuda.max_memory_reserved(),
        "host_rss_bytes": host_rss_bytes(),
        "host_peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


if __name__ == "__main__":
    answer(run, load)
