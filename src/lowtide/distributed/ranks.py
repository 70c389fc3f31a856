"""Ranks: the processes that train one model together, and what they send each other over torch.distributed.

Each call is collective: all ranks make the same calls in the same order. A rank that ends makes the others' calls fail with a
`RankLostError`, as soon as the backend notices. gloo notices at once, because the connections close. NCCL waits for its
timeout; torchrun ends the other ranks before that.

Note [A rank that breaks off]
A rank that raises in the middle of a backward has not made the calls that the others wait in. If it went on, its next calls
would meet theirs: sums of different gradients, and no error. So it leaves: its connections close, all later calls here raise,
and the others get a `RankLostError`. Training goes on from the last checkpoint, with all ranks started anew.
"""

from __future__ import annotations

import contextlib
import socket
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lowtide.errors import ConfigError, RankLostError, RanksDifferError, RanksError

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
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._check(group, device)
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._is_own = device.type == "cpu" and dist.get_backend(group) == "gloo"
        """Whether the group is ours to close. Another NCCL group would take device memory of its own."""
        self._why_left: str | None = None
        self.sent_bytes = 0
        """Bytes of the tensors that were added up so far."""
        self.waited_s = 0.0
        """For their sums, on the host. On CUDA the device waits instead, which is not in it."""
        self._group: dist.ProcessGroup | None = group
        if self._is_own:
            with self._told():
                self._group = _own_group(group)

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
        with self._told():
            dist.all_gather_object(found, mine, group=self._group)
        for rank, theirs in enumerate(found):
            if isinstance(theirs, _Failed):
                raise RanksDifferError(
                    f"rank {rank} could not {theirs.what}, and so rank {self.rank} does not either: {theirs.why}"
                )
        return found

    def begin_sum(self, tensor: torch.Tensor) -> Sum:
        """Begin to add the tensors of all ranks up; each finds the sum in its own when `Sum.wait` has returned."""
        self.sent_bytes += tensor.nbytes
        with self._told():
            work = dist.all_reduce(tensor, group=self._group, async_op=True)
        assert work is not None
        return Sum(self, work)

    def send_from_first(self, tensor: torch.Tensor) -> None:
        """Copy rank 0's values to the tensors of all others."""
        with self._told():
            dist.broadcast(tensor, group=self._group, group_src=0)

    def shares_with(self, other: Ranks) -> bool:
        """Whether both send over the same connections, where the order of all that is sent counts."""
        return self._group is not None and self._group is other._group

    def leave(self, reason: str) -> None:
        """This rank has broken off: see Note [A rank that breaks off]. May be repeated."""
        if self._why_left is None:
            self._why_left = reason
        # gloo closes its connections with the last reference to the group.
        group, self._group = self._group, None
        _OWN_GROUPS.clear()
        if group is not None:
            with contextlib.suppress(Exception):  # it is of no use any more, whatever it says
                if self._is_own:
                    dist.destroy_process_group(group)
                else:
                    group.abort()

    def close(self) -> None:
        """The session ends; the next one uses the same connections. May be repeated."""
        self._why_left = self._why_left or "the session was closed"
        self._group = None

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


_OWN_GROUPS: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()
"""By the group that was given: one of ours, with connections of its own."""


def _own_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Made once: a second one of the same processes would have the name of the first, and find its addresses."""
    if group not in _OWN_GROUPS:
        _OWN_GROUPS[group] = dist.new_group(
            dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True
        )
    return _OWN_GROUPS[group]


class Sum:
    """A sum under way."""

    def __init__(self, ranks: Ranks, work: dist.Work) -> None:
        self._ranks = ranks
        self._work = work

    def wait(self) -> None:
        """Computation from here on finds the sum. On CUDA the device waits, and not the host."""
        began_s = time.perf_counter()
        with self._ranks._told():
            self._work.wait()
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
