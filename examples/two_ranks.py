"""Data parallel training inside a memory budget: torchrun --nproc-per-node 2 examples/two_ranks.py

On GPUs each rank has one of its own; elsewhere a device is emulated in host memory.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn

import lowtide

is_on_cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if is_on_cuda else "gloo")
rank, size = dist.get_rank(), dist.get_world_size()
if is_on_cuda:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

torch.manual_seed(0)  # the same weights on each rank
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.randn(10, 32, 64, generator=torch.Generator().manual_seed(1))

session = lowtide.prepare(
    model,
    optimizer,
    data[0].chunk(size)[rank].to("cuda" if is_on_cuda else "cpu"),
    loss=lambda net, x: net(x).square().mean(),
    device_memory="1GiB" if is_on_cuda else "512KiB",
    ranks=dist.group.WORLD,
)
for batch in data:
    rows = batch.chunk(size)[rank]
    loss = model(rows.to("cuda" if is_on_cuda else "cpu")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"loss of rank 0: {float(loss.detach()):.4f}")
session.close()
dist.destroy_process_group()
