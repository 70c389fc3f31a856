"""Ranks: the processes that train one model together, and what they send each other over torch.distributed.

Each call is collective: all ranks make the same calls in the same order. A rank that ends makes the others' calls fail with a
`RankLostError`, as soon as the backend notices. gloo notices at once, because the connections close. NCCL waits for its
timeout; torchrun ends the other ranks before that.

Note [A rank that breaks off]
A rank that raises in the middle of a backward has not made the calls that the others wait in. If it went on, its next calls
would meet theirs: sums of different gradients, and no error. So it leaves: its connections close, all later calls here raise,
and the others get a `RankLostError`. Training goes on from the last checkpoint, with all ranks started anew.

Note [All ranks do the same]
A collective has no name, so a rank that gathers one chunk would be given another one's bytes by a rank that gathers that. Those
that share weights therefore agree on each exchange, by its name, over connections of the host. gloo ends the process where
sizes differ, so there it is known before; on CUDA it is known before the next one, and the host does not wait for the device.
"""

from __future__ import annotations

import contextlib
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lowtide.errors import ConfigError, RankLostError, RanksDifferError, RanksError

# Their names up to torch 2.12, which warns of the old ones from 2.13 on.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_LONGEST = 160
"""Bytes of the name of an exchange: its end, if it is longer."""
MOST_SHOWN = 200
"""Characters of a value in a message."""


@dataclass(frozen=True, slots=True)
class _Failed:
    """Sent in place of what others wait for."""

    what: str
    why: str


class Ranks:
    """The processes of one group, each with a number from 0.

    Args:
        group: Of this process; `torch.distributed.group.WORLD` for all.
        device: Where the tensors are that are sent.
        members: Numbers of those in the group that belong to it; None for all.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, members: Sequence[int] | None = None) -> None:
        self._check(group, device)
        self._given, self._device = group, device
        self._is_own = device.type == "cpu" and dist.get_backend(group) == "gloo"
        """Whether the group is ours to close. Another NCCL group would take device memory of its own."""
        self._why_left: str | None = None
        self.sent_bytes = 0
        """Bytes of the tensors that were added up, gathered or sent so far, each at its whole size."""
        self.waited_s = 0.0
        """For them, on the host. On CUDA the device waits instead, which is not in it."""
        self._spreads: dict[int, Spread] = {}
        self._side: dist.ProcessGroup | None = None
        """Connections of the host, over which those that share weights agree on what they exchange next."""
        self._asked: tuple[torch.Tensor, dist.Work] | None = None
        self._group: dist.ProcessGroup | None = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self._is_own or members is not None:
            everybody = dist.get_process_group_ranks(group)
            with self._told():
                backend = "gloo" if self._is_own else "nccl"
                chosen = everybody if members is None else [everybody[each] for each in members]
                self._group = _own_group(group, chosen, backend)
            self.rank, self.size = dist.get_rank(self._group), dist.get_world_size(self._group)

    @staticmethod
    def _check(group: object, device: torch.device) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError(
                "ranks= was given, and torch.distributed has no process group; start the script with torchrun, and call "
                "torch.distributed.init_process_group() first",
                key="ranks",
            )
        if not isinstance(group, dist.ProcessGroup):
            raise ConfigError(
                f"ranks is a {type(group).__name__}; give a process group, such as torch.distributed.group.WORLD",
                key="ranks",
            )
        backends = dist.get_backend_config(group)
        if f"{device.type}:" not in backends:
            wanted = "nccl" if device.type == "cuda" else "gloo"
            raise ConfigError(
                f"ranks is a process group with the backends {backends}, none of which sends tensors of a {device.type} device; "
                f"make it with backend={wanted!r}",
                key="ranks",
            )

    def exchange(self, mine: Any) -> list[Any]:
        """What each rank gives, by rank.

        Raises:
            RanksDifferError: A rank has failed meanwhile, under `agreeing`.
        """
        found: list[Any] = [None] * self.size
        self._agree_on("an agreement", waits=True)
        with self._told():
            dist.all_gather_object(found, mine, group=self._group)
        for rank, theirs in enumerate(found):
            if isinstance(theirs, _Failed):
                raise RanksDifferError(
                    f"rank {rank} could not {theirs.what}, and so rank {self.rank} does not either: {theirs.why}"
                )
        return found

    def collect(self, mine: Any) -> list[Any] | None:
        """What each rank gives, by rank, for rank 0; None for the others."""
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        self._agree_on("values for rank 0", waits=True)
        with self._told():
            dist.gather_object(mine, found, group=self._group, group_dst=0)
        return found

    def begin_sum(self, tensor: torch.Tensor, what: str = "a sum") -> UnderWay:
        """Begin to add the tensors of all ranks up; each finds the sum in its own when `UnderWay.wait` has returned."""
        return self._begin(tensor.nbytes, what, lambda: dist.all_reduce(tensor, group=self._group, async_op=True))

    def begin_gather(self, whole: torch.Tensor, mine: torch.Tensor, what: str) -> UnderWay:
        """Begin to fill the tensor with equal parts of all ranks, by rank; `mine` may be this rank's part of it."""
        return self._begin(whole.nbytes, what, lambda: _ALL_GATHER(whole, mine, group=self._group, async_op=True))

    def begin_scatter(self, mine: torch.Tensor, whole: torch.Tensor, what: str) -> UnderWay:
        """Begin to add the tensors of all ranks up, of which each gets an equal part, by rank."""
        return self._begin(whole.nbytes, what, lambda: _REDUCE_SCATTER(mine, whole, group=self._group, async_op=True))

    def begin_send(self, tensor: torch.Tensor, rank: int, what: str) -> UnderWay:
        """Begin to copy one rank's values to the tensors of all others."""
        return self._begin(
            tensor.nbytes, what, lambda: dist.broadcast(tensor, group=self._group, group_src=rank, async_op=True)
        )

    def begin_sum_at(self, tensor: torch.Tensor, rank: int, what: str) -> UnderWay:
        """Begin to add the tensors of all ranks up; one of them finds the sum in its own, and the others find anything."""
        return self._begin(
            tensor.nbytes, what, lambda: dist.reduce(tensor, group=self._group, group_dst=rank, async_op=True)
        )

    def _begin(self, num_bytes: int, what: str, begin: Callable[[], dist.Work | None]) -> UnderWay:
        """Begin it, if all ranks are about to do the same.

        Raises:
            RanksDifferError: They are not, in a set that shares weights; see Note [All ranks do the same].
        """
        # gloo ends the process where sizes differ, so there nothing is begun before it is known.
        self._agree_on(what, waits=self._is_own)
        self.sent_bytes += num_bytes
        with self._told():
            work = begin()
        assert work is not None
        return UnderWay(self, work)

    def _agree_on(self, what: str, *, waits: bool) -> None:
        """See Note [All ranks do the same]; nothing outside of a set that shares weights."""
        if self._side is None:
            return
        # The words themselves: a second exchange, to name what differs, might not come about.
        words = what.encode()[-_LONGEST:].ljust(_LONGEST)
        mine = torch.frombuffer(bytearray(words), dtype=torch.uint8)
        all_of_them = torch.empty(self.size * _LONGEST, dtype=torch.uint8, device="cpu")
        with self._told():
            work = _ALL_GATHER(all_of_them, mine, group=self._side, async_op=True)
        before, self._asked = self._asked, (all_of_them, work)
        if before is not None:
            self._compare(*before)
        if waits:
            self._asked = None
            self._compare(all_of_them, work)

    def _compare(self, all_of_them: torch.Tensor, work: dist.Work) -> None:
        with self._told():
            work.wait()
        rows = all_of_them.view(self.size, _LONGEST)
        if bool((rows == rows[0]).all()):
            return
        found = [bytes(row.tolist()).decode(errors="replace").strip() for row in rows]
        other = next(rank for rank, theirs in enumerate(found) if theirs != found[0])
        self.leave("the ranks have done different things")
        raise RanksDifferError(
            f"rank {other} of those that share the weights is about to exchange {found[other]}, and rank 0 {found[0]}: all ranks "
            "must call the same modules in the same order, also where one of them has nothing to compute, and have gradients for "
            "the same parameters. Make what only some of them use resident; then start all of them again from the last checkpoint"
        )

    def spread(self, shards: int) -> Spread:
        """How so many neighbours share the weights, and ranks at the same place of each set hold the same part.

        Raises:
            ConfigError: The number of ranks is no multiple of it.
        """
        if self.size % shards:
            raise ConfigError(
                f"the plan spreads weights over {shards} ranks, and there are {self.size}: give as many, or a multiple of it, or "
                f"make the plan with Sharding(shards={self.size})",
                key="shards",
            )
        if shards not in self._spreads and shards == self.size:
            self._spreads[shards] = Spread(all=self, sharing=self, same_part=None)
        elif shards not in self._spreads:
            first, number = self.rank - self.rank % shards, self.rank % shards
            sharing = Ranks(self._given, self._device, range(first, first + shards))
            same_part = Ranks(self._given, self._device, range(number, self.size, shards))
            self._spreads[shards] = Spread(all=self, sharing=sharing, same_part=same_part)
        sharing = self._spreads[shards].sharing
        if sharing._side is None:
            members = dist.get_process_group_ranks(sharing._group)
            with self._told():
                sharing._side = _own_group(self._given, members, "to agree")
        return self._spreads[shards]

    @property
    def connections(self) -> list[Ranks]:
        """This and the sets that `spread` has made of it, each once."""
        found = [each for spread in self._spreads.values() for each in (spread.sharing, spread.same_part)]
        return [self, *(each for each in found if each is not None and each is not self)]

    def send_from_first(self, tensor: torch.Tensor) -> None:
        """Copy rank 0's values to the tensors of all others."""
        self._agree_on("the buffers of the model", waits=self._is_own)
        with self._told():
            dist.broadcast(tensor, group=self._group, group_src=0)

    def shares_with(self, other: Ranks) -> bool:
        """Whether both send over the same connections, where the order of all that is sent counts."""
        return self._group is not None and self._group is other._group

    def leave(self, reason: str) -> None:
        """This rank has broken off: see Note [A rank that breaks off]. May be repeated."""
        if self._why_left is None:
            self._why_left = reason
        for part in self.connections[1:]:
            part.leave(reason)
        # gloo closes its connections with the last reference to the group.
        groups = [(self._group, self._is_own), (self._side, True)]
        self._group, self._side, self._asked = None, None, None
        _OWN_GROUPS.clear()
        while groups:
            group, is_own = groups.pop()
            with contextlib.suppress(Exception):  # it is of no use any more, whatever it says
                if group is not None and is_own:
                    dist.destroy_process_group(group)
                elif group is not None:
                    group.abort()
            del group

    def close(self) -> None:
        """The session ends; the next one uses the same connections. May be repeated."""
        for part in self.connections[1:]:
            part.close()
        self._why_left = self._why_left or "the session was closed"
        self._group, self._side, self._asked = None, None, None

    @property
    def has_left(self) -> bool:
        """Whether this rank exchanges nothing any more."""
        return self._why_left is not None

    @contextlib.contextmanager
    def agreeing(self, what: str) -> Iterator[dict[str, Mapping[str, object]]]:
        """All ranks do the same here, or all of them fail.

        The body fills the dictionary: by a word, what must be the same everywhere, by name.

        Raises:
            RanksDifferError: A rank has other facts than rank 0, or its body raised; then the others raise this.
        """
        facts: dict[str, Mapping[str, object]] = {}
        try:
            yield facts
        except RanksError:
            raise  # the others have the same
        except Exception as error:
            with contextlib.suppress(RanksError):
                self.exchange(_Failed(what, f"{type(error).__name__}: {error}"))
            raise
        found = self.exchange(facts)
        for rank, theirs in enumerate(found):
            difference = first_difference(found[0], theirs)
            if difference is not None:
                word, name, first, other = difference
                raise RanksDifferError(
                    f"rank {rank} differs from rank 0 in {word}: {name} is {other} there, and {first} on rank 0. All ranks must "
                    f"{what} alike; {_REMEDIES.get(word, 'give the same on each')}"
                )

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        if self._why_left is not None:
            raise RankLostError(
                f"rank {self.rank} has left the other ranks ({self._why_left}), which fail now as well; start all of them again "
                "from the last checkpoint"
            )
        try:
            yield
        except (RuntimeError, ValueError) as error:  # DistError and its kinds are RuntimeErrors
            message = str(error)
            if "Duplicate GPU" in message:
                raise ConfigError(
                    f"rank {self.rank} and another rank use the same GPU, which NCCL refuses; give each rank a device of its own "
                    "(torch.cuda.set_device(local_rank)), or use the backend gloo with device='cpu'",
                    key="ranks",
                ) from error
            self._why_left = f"a rank was lost: {first_line(message)}"
            raise RankLostError(
                f"rank {self.rank} of {self.size} on {socket.gethostname()} cannot reach the others any more "
                f"({first_line(message)}): one of them has ended, stands still, or made another call. Look at their output, and "
                "start all of them again from the last checkpoint"
            ) from error


def group_of(ranks: Any, shards: int) -> Any:
    """The process group that `ranks=` means: itself, or that of a DeviceMesh. What is neither is refused by `Ranks`.

    Args:
        ranks: As the user gave it.
        shards: Over how many ranks the plan spreads weights; 1 for none.

    Raises:
        ConfigError: A mesh whose last dimension is not the ranks that share the weights.
    """
    if not dist.is_available() or not dist.is_initialized():
        return ranks
    from torch.distributed.device_mesh import DeviceMesh  # slow to load, and few give one

    if not isinstance(ranks, DeviceMesh):
        return ranks
    if ranks.ndim == 1:
        return ranks.get_group()
    shape, members = tuple(ranks.shape), ranks.mesh.reshape(-1).tolist()
    everybody = list(range(dist.get_world_size()))
    if ranks.ndim != 2 or members != everybody or (shards > 1 and shape[1] != shards):
        raise ConfigError(
            f"ranks is a mesh of shape {shape} over the ranks {members}, and the plan spreads weights over {shards}; give one of "
            f"shape (replicas, shards), such as ({len(everybody) // max(1, shards)}, {shards}), with all {len(everybody)} ranks in "
            "order, so that those that share weights are neighbours",
            key="ranks",
        )
    return dist.group.WORLD


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spread:
    """How the weights of a model are spread over ranks."""

    all: Ranks
    sharing: Ranks
    """Those that have all parts together; the rank among them is the number of its part."""
    same_part: Ranks | None
    """Those that have the same part as this one, in other sets; None if there is one set."""


_OWN_GROUPS: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[object, dist.ProcessGroup]] = weakref.WeakKeyDictionary()
"""By the group that was given, members of it and what for: one of ours, with connections of its own."""


def _own_group(group: dist.ProcessGroup, members: Sequence[int], purpose: str) -> dist.ProcessGroup:
    """Made once: a second one of the same processes would have the name of the first, and find its addresses."""
    made = _OWN_GROUPS.setdefault(group, {})
    key = (*members, purpose)
    if key not in made:
        made[key] = dist.new_group(
            [*members],
            backend="nccl" if purpose == "nccl" else "gloo",
            use_local_synchronization=True,
            group_desc=f"lowtide {purpose}",
        )
    return made[key]


class UnderWay:
    """An exchange under way."""

    def __init__(self, ranks: Ranks, work: dist.Work) -> None:
        self._ranks = ranks
        self._work: dist.Work | None = work
        """None afterwards: it keeps the tensors."""

    def is_done(self) -> bool:
        """Whether it is over."""
        work = self._work  # another thread may be waiting for it
        return work is None or work.is_completed()

    def wait(self) -> None:
        """Computation from here on finds the result. On CUDA the device waits, and not the host. May be repeated."""
        work = self._work
        if work is None:
            return
        began_s = time.perf_counter()
        with self._ranks._told():
            work.wait()
        self._work = None
        self._ranks.waited_s += time.perf_counter() - began_s


_REMEDIES = {
    "weights": "call torch.manual_seed with one number on all of them before the model is made, or load the same weights",
    "optimizer state": "load the same checkpoint on all of them",
    "the folder of the run": "give a folder that all machines share",
    "versions": "install the same version on all of them",
}


def first_difference(first: Mapping[str, object], other: Mapping[str, object]) -> tuple[str, str, str, str] | None:
    """Where two ranks' facts differ first: the word, the name, and both values, as text."""
    for word in {**first, **other}:
        mine, theirs = dict(first.get(word, {})), dict(other.get(word, {}))  # type: ignore[call-overload]
        for name in {**mine, **theirs}:
            if mine.get(name) != theirs.get(name):
                return word, name, _shown(mine.get(name)), _shown(theirs.get(name))
    return None


def _shown(value: object) -> str:
    if value is None:
        return "missing"
    text = str(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def first_line(message: str) -> str:
    """The first line of an error of torch's, which may append a stack of C++."""
    return message.strip().partition("\n")[0][:MOST_SHOWN]
