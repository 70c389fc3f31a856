"""Team: the ranks of a run that torchrun has started, and what they decide together. A run of one process is a team of one.

Each rank trains on its rows of each batch. Rank 0 alone writes into the run's folder, shows how the run goes on, and says when
a save is due; whoever is asked to stop, all of them stop after the same step.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from lowtide.distributed.ranks import Ranks
from lowtide.errors import ConfigError
from lowtide.lab.training import Batch


def launched_rank() -> int:
    """This process's number, where torchrun has started several; else 0."""
    return int(os.environ["RANK"]) if dist.is_torchelastic_launched() else 0


def num_restarts() -> int:
    """How often torchrun has started this command again, because a rank had ended: the run is then to go on."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) if dist.is_torchelastic_launched() else 0


@contextlib.contextmanager
def team_on(device: str | None) -> Iterator[Team]:
    """The ranks that torchrun has started, connected until the end.

    Args:
        device: Where the recipe trains; None for CUDA where there is one.
    """
    if not dist.is_torchelastic_launched():
        yield Team(None, None)
        return
    is_on_cuda = torch.cuda.is_available() if device is None else torch.device(device).type == "cuda"
    if is_on_cuda:
        local, num_devices = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= num_devices:
            raise ConfigError(
                f"torchrun has started {os.environ['LOCAL_WORLD_SIZE']} processes on this machine, which has {num_devices} GPUs; "
                f"give --nproc-per-node {num_devices}",
                key="device",
            )
        torch.cuda.set_device(local)
    store, rank, size = next(rendezvous("env://"))
    # torchrun keeps its store when it starts the ranks again, with the addresses of those that have ended.
    own = PrefixStore(f"start {num_restarts()}", store)
    dist.init_process_group("cpu:gloo,cuda:nccl" if is_on_cuda else "gloo", store=own, rank=rank, world_size=size)
    try:
        group = dist.group.WORLD
        assert group is not None
        ranks = Ranks(group, torch.device("cpu"))
        yield Team(group, ranks)
        ranks.close()
    finally:
        dist.destroy_process_group()


class Team:
    """The ranks of a run.

    Args:
        group: Of all of them; None for one process.
        ranks: The same, for what is decided between steps.
    """

    def __init__(self, group: dist.ProcessGroup | None, ranks: Ranks | None) -> None:
        self.group = group
        self._ranks = ranks
        self.rank = 0 if ranks is None else ranks.rank
        self.size = 1 if ranks is None else ranks.size

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes and shows."""
        return self.rank == 0

    def together(self, what: str) -> contextlib.AbstractContextManager[dict[str, Mapping[str, object]]]:
        """All ranks come to the end of the body, or all of them fail."""
        return contextlib.nullcontext({}) if self._ranks is None else self._ranks.agreeing(what)

    def require_rows(self, rows: int) -> int:
        """Rows of each rank.

        Raises:
            ConfigError: The batch cannot be divided.
        """
        if rows % self.size:
            raise ConfigError(
                f"batch has {rows} rows, which {self.size} ranks cannot divide evenly; give a multiple of {self.size}, such as "
                f"{math.ceil(rows / self.size) * self.size}",
                key="batch",
            )
        return rows // self.size

    def require_several(self, sharding: str | None) -> None:
        """Refuse to spread the weights of one process.

        Raises:
            ConfigError: It is asked for.
        """
        if sharding is not None and self._ranks is None:
            raise ConfigError(
                f"sharding is {sharding!r}, which spreads weights over several processes, and this is one; start it with torchrun "
                "--nproc-per-node 2 -m lowtide train ..., or leave sharding out",
                key="sharding",
            )

    def part(self, batch: Batch) -> Batch:
        """This rank's rows."""
        if self.size == 1:
            return batch
        return {key: value.chunk(self.size)[self.rank] for key, value in batch.items()}

    def mean(self, value: float) -> float:
        """Over the ranks; NaN where one of them has it."""
        return value if self._ranks is None else math.fsum(self._ranks.exchange(value)) / self.size

    def sums(self, *values: float) -> tuple[float, ...]:
        """The sum of each value over the ranks."""
        if self._ranks is None:
            return values
        return tuple(math.fsum(column) for column in zip(*self._ranks.exchange(values), strict=True))

    def any(self, is_asked: bool) -> bool:
        """Whether one of them is."""
        return is_asked if self._ranks is None else any(self._ranks.exchange(is_asked))

    def as_first(self, answer: bool) -> bool:
        """Rank 0's answer."""
        return answer if self._ranks is None else bool(self._ranks.exchange(answer)[0])
