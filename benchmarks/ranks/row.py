"""One row: the job on all ranks, one process each, and what each of them has of the machine's memory.

python -m benchmarks.ranks.row '{"name": "...", "peer": "ddp", "precision": "fp32", "model": "36m", "rows": 8, ...}'

Note [Bytes of a rank]
The device and the host of each rank are one memory here, the process's. What it has before the model is made is taken off:
torch, the package that is measured, a process group that has sent something, and what else two steps of a tiny model load. Two
figures are read. Tensors are the storages of all live tensors between two steps. The resident size has besides what only C++
knows of, such as buffers of gloo. Linux keeps the highest resident size, and forgets it on demand: once before the model is
made, and once before the steps that count.

The C library keeps most of what is freed, up to 32 MiB at a time, and finds place in it for some requests and not for others. So
bytes come from a run in which each block of 1 MiB or more goes back at once. That takes time, so times and losses come from
another run, as users have it.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.ranks.peers import PEERS
from benchmarks.suite import Row, answer
from lowtide.distributed.launch import run_on_ranks
from lowtide.models.llama import Llama, LlamaConfig

SIZES: dict[str, LlamaConfig] = {
    "36m": LlamaConfig(
        vocab_size=4096,
        context_length=128,
        num_layers=10,
        hidden_size=512,
        intermediate_size=1408,
        num_heads=8,
        num_kv_heads=8,
    ),
    "tiny": LlamaConfig(
        vocab_size=64,
        context_length=16,
        num_layers=3,
        hidden_size=32,
        intermediate_size=64,
        num_heads=2,
        num_kv_heads=2,
    ),
}
_C = ctypes.CDLL(None)
_MMAP_THRESHOLD = -3
"""What malloc.h calls M_MMAP_THRESHOLD."""
WARM_UP = 2
"""Steps before those that count: the first one makes the optimizer's state."""


def rows_of(row: Row, step: int, rank: int, size: int) -> Tensor:
    """The rank's part of a step's batch, which all peers have alike: words that count on from a first one."""
    config = SIZES[row["model"]]
    first = torch.randint(config.vocab_size, (row["rows"], 1), generator=torch.Generator().manual_seed(step))
    return ((first + torch.arange(config.context_length)) % config.vocab_size).chunk(size)[rank]


def train(rank: int, row: Row, *, for_bytes: bool) -> Row:
    """One rank's part of the job."""
    if for_bytes:
        _C.mallopt(_MMAP_THRESHOLD, 1 << 20)
    # One thread a rank, and oneDNN, without which bf16 products take a hundred times as long.
    torch.set_num_threads(1)
    _warm_up(rank, row)
    _free()
    forget_highest()
    before, tensors_before = resident_bytes(), tensor_bytes()
    torch.manual_seed(0)
    trainer = PEERS[row["peer"]](Llama(SIZES[row["model"]]), row)
    losses, step_s, cpu_s = [], [], []
    for number in range(WARM_UP + row["steps"]):
        if number == WARM_UP:
            _free()
            making_bytes = highest_resident_bytes() - before
            forget_highest()
        ids = rows_of(row, number, rank, dist.get_world_size())
        dist.barrier()
        begun, begun_cpu = time.perf_counter(), time.process_time()
        losses.append(trainer.step(ids).item())
        dist.barrier()  # the slowest rank's step, and updates on the host that still run are the next step's
        step_s.append(time.perf_counter() - begun)
        cpu_s.append(time.process_time() - begun_cpu)
    peak_bytes = highest_resident_bytes() - before
    _free()
    result = {
        "losses": losses,
        "step_s": step_s[WARM_UP:],
        "cpu_s": cpu_s[WARM_UP:],
        "making_peak_bytes": making_bytes,
        "peak_bytes": peak_bytes,
        "between_bytes": resident_bytes() - before,
        "tensor_bytes": tensor_bytes() - tensors_before,
        **trainer.facts(),
    }
    trainer.close()
    if "collective" in row and for_bytes:
        _require_spread(row, result["tensor_bytes"])
    return result


def _require_spread(row: Row, num_bytes: int) -> None:
    """A plan that spreads weights, and a session that does not, would be measured under a wrong name."""
    whole_bytes = 12 * num_parameters(row)
    if row["model"] != "tiny" and num_bytes >= whole_bytes:
        raise RuntimeError(
            f"a rank has {num_bytes:,} bytes of tensors between two steps, and weights and moments of the whole model take "
            f"{whole_bytes:,}: they are not spread over the ranks"
        )


def num_parameters(row: Row) -> int:
    """Of the row's model."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Llama(SIZES[row["model"]]).parameters())


def run(row: Row) -> Row:
    """All ranks, in processes of their own."""
    row = {"steps": 5, "rows": 8, "ranks": 2, **row}
    measured = together(run_on_ranks(partial(train, for_bytes=True), row["ranks"], {**row, "steps": 1}))
    timed = together(run_on_ranks(partial(train, for_bytes=False), row["ranks"], row))
    sizes = {key: value for key, value in measured.items() if key.endswith("_bytes")}
    return {**row, "parameters": num_parameters(row), **timed, **sizes}


def together(ranks: list[Row]) -> Row:
    """One result of all ranks': means of the losses, and of each number of bytes the largest."""
    first = ranks[0]
    sizes = {key: max(rank[key] for rank in ranks) for key in first if key.endswith("_bytes")}
    others = {key: first[key] for key in first if key not in sizes and key not in ("losses", "step_s", "cpu_s")}
    step_s = [max(times) for times in zip(*(rank["step_s"] for rank in ranks), strict=True)]
    cpu_s = [statistics.mean(times) for times in zip(*(rank["cpu_s"] for rank in ranks), strict=True)]
    return {
        **others,
        **sizes,
        "losses": [statistics.mean(losses) for losses in zip(*(rank["losses"] for rank in ranks), strict=True)],
        "step_s": step_s,
        "median_s": statistics.median(step_s),
        "cpu_s": cpu_s,
        "median_cpu_s": statistics.median(cpu_s),
    }


def tensor_bytes() -> int:
    """What the storages of all live tensors of this process take together."""
    with torch._C.DisableTorchFunctionSubclass():  # nothing waits for an update, or for other ranks, to be looked at
        storages = [tensor.untyped_storage() for tensor in _tensors()]
        return covered_bytes((storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages)


def _tensors() -> Iterator[Tensor]:
    for item in gc.get_objects():
        # By type, because some packages have objects that do something when they are asked for their class.
        if issubclass(type(item), Tensor):
            tensor = item.to_local() if isinstance(item, DTensor) else item
            if tensor.device.type == "cpu" and tensor.layout is torch.strided:
                yield tensor


def covered_bytes(ranges: Iterable[tuple[int, int]]) -> int:
    """How many bytes lie in any of the ranges, from a first one to behind a last one: storages may lie in others.

    Example:
        >>> covered_bytes([(0, 10), (4, 6), (8, 12), (20, 21)])
        13
    """
    covered, reached = 0, 0
    for begin, end in sorted(ranges):
        covered += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


def _warm_up(rank: int, row: Row) -> None:
    """Two steps of a tiny model: what they load counts as torch's and the peer's own."""
    row = {**row, "model": "tiny"}
    trainer = PEERS[row["peer"]](Llama(SIZES[row["model"]]), row)
    for number in range(2):
        trainer.step(rows_of(row, number, rank, dist.get_world_size()))
    trainer.close()


def _free() -> None:
    """Give back what is free already."""
    gc.collect()
    _C.malloc_trim(0)


def forget_highest() -> None:
    """The highest resident size counts from here."""
    Path("/proc/self/clear_refs").write_text("5")


def resident_bytes() -> int:
    """What the process has of the machine's memory now."""
    return _status("VmRSS")


def highest_resident_bytes() -> int:
    """The most that it had, since that was forgotten."""
    return _status("VmHWM")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}: this is measured on Linux only")


if __name__ == "__main__":
    answer(run)
