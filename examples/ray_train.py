"""Data parallel training inside a memory budget, under Ray Train: python examples/ray_train.py

Two workers, on one machine or on several. With GPUs each has one of its own; elsewhere a device is emulated in host memory.
Install Ray first: pip install 'ray[train]'
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchConfig, TorchTrainer, get_device

import lowtide
from lowtide.models.gpt import GPT, GPTConfig

NUM_WORKERS = 2
BATCH = 8  # rows of all workers together
LENGTH = 32
WORDS = 64


def build() -> tuple[GPT, torch.optim.AdamW]:
    """The same weights on each worker."""
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=WORDS, context_length=LENGTH, num_layers=4, hidden_size=64, num_heads=4, dropout=0.0)
    model = GPT(config)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def batch_of(step: int) -> torch.Tensor:
    """All rows of a step's batch, [BATCH, LENGTH]: words that count on from a first one."""
    first = torch.randint(WORDS, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    return (first + torch.arange(LENGTH)) % WORDS


def train(settings: dict[str, Any]) -> list[float]:
    """What each worker does; Ray Train has made the process group. Returns the losses of the whole batches."""
    device = get_device()
    rank, size = dist.get_rank(), dist.get_world_size()
    model, optimizer = build()

    def rows_of(step: int) -> dict[str, torch.Tensor]:
        ids = batch_of(step).chunk(size)[rank].to(device)
        return {"input_ids": ids, "labels": ids}

    memory = "1GiB" if device.type == "cuda" else "2MiB"
    session = lowtide.prepare(model, optimizer, rows_of(0), device_memory=memory, ranks=dist.group.WORLD)
    # After a failure Ray Train starts all workers again, and they go on from the last checkpoint.
    if lowtide.newest_checkpoint(settings["folder"]):
        lowtide.load(settings["folder"], session)
    losses = []
    while session.num_steps < settings["num_steps"]:
        loss = model(**rows_of(session.num_steps)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        of_all = loss.detach() / size
        dist.all_reduce(of_all)
        losses.append(of_all.item())
        if session.num_steps % 10 == 0:
            session.save(settings["folder"])
            # Not at each step: Ray Train fetches reports every two seconds, and the next one waits for that.
            ray.train.report({"step": session.num_steps, "loss": losses[-1]})
    session.close()
    return losses


def trainer(work: Callable[[dict[str, Any]], Any], folder: str) -> TorchTrainer:
    """Two workers, whose checkpoints lie in a folder; where they are on several machines, one that all of them see."""
    is_on_cuda = torch.cuda.is_available()
    return TorchTrainer(
        work,
        train_loop_config={"folder": f"{folder}/checkpoints", "num_steps": 20},
        torch_config=TorchConfig(backend="nccl" if is_on_cuda else "gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=NUM_WORKERS, use_gpu=is_on_cuda),
        run_config=ray.train.RunConfig(
            name="lowtide", storage_path=folder, failure_config=ray.train.FailureConfig(max_failures=1)
        ),
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        result = trainer(train, folder).fit()
    for step, loss in enumerate(result.return_value, start=1):
        print(f"step {step}: loss {loss:.7f}")
