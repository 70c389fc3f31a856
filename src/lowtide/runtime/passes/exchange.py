"""What the ranks of a run exchange in a step: gradients are averaged while the backward goes on, buffers come from rank 0.

Note [Buckets]
The gradients of a chunk that have one type are a bucket, which is sent as one tensor. A collective has no name: the ranks must
send the same buckets in the same order. So the order is fixed, a bucket waits for those before it, and each backward sends all of
them, also where this rank has no gradient for some of a bucket's parameters: it sends zeros for these. Behind the gradients
there is a number for each parameter that says whether this rank has one, and parameters for which no rank has a gradient stay
without. The first backward sends in the reverse order of the model; those after it as gradients came by on rank 0.

Note [Sums over several backwards]
A gradient may be there already: an average, or what this rank alone has, from a backward under `no_sync` or from a use outside of
a module's call. A rank cannot know which of the two another one has. So each sends the sum of what is there and the new one: an
average of averages is the same again. On the host it comes back to the device for that, as it does for hooks of the user's
(`HostGradient.set_aside`).

Note [Two sessions in one backward]
A backward may go through two managed models whose sessions send over one group. How far each has come when the other sends differs
from rank to rank. So the session that the backward reaches second sends all of its buckets at the end, after those of the first.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from lowtide import compat
from lowtide.distributed.ranks import Ranks, UnderWay
from lowtide.errors import SessionError
from lowtide.memory.groups import is_dense
from lowtide.runtime.parameters.group import ManagedGroup, ManagedParameter

ALIGNMENT = 64
"""Bytes of which each gradient's place in a bucket is a multiple: updates then read it in full vectors."""
UNDER_WAY = 2
"""Buckets that may be under way at a time: they are sent while the next gradients are computed."""


@dataclass(frozen=True, slots=True, eq=False)
class Averaged:
    """A parameter whose gradients are averaged."""

    parameter: nn.Parameter
    name: str
    owner: tuple[ManagedGroup, ManagedParameter] | None
    """None where no chunk has it: the gradient stays at the parameter then."""


class Bucket(Protocol):
    """Gradients that are sent as one tensor."""

    members: tuple[Averaged, ...]
    ready: set[int]
    """`id`s of the parameters whose gradients this backward has completed here."""
    is_sent: bool

    def forget(self) -> None:
        """Another backward begins, or this one has broken off."""

    @property
    def is_ready(self) -> bool:
        """Whether all gradients are there."""

    def send(self, ranks: Ranks, device: torch.device) -> None:
        """Take the gradients from the parameters, and begin to add them up."""

    def arrived(self) -> Iterator[tuple[Averaged, torch.Tensor]]:
        """Wait for the sum. Returns each parameter that has a gradient on some rank, with what this rank has of the average."""


class WholeBucket:
    """Gradients of which every rank gets the whole average."""

    def __init__(self, members: Sequence[Averaged]) -> None:
        self.members = tuple(members)
        self._offsets: list[int] = []
        self._num_elements = 0
        """Before the numbers that say which gradients a rank has."""
        for member in self.members:
            self._offsets.append(self._num_elements)
            unit = max(1, ALIGNMENT // member.parameter.element_size())
            self._num_elements += -(-member.parameter.numel() // unit) * unit
        self.ready: set[int] = set()
        """`id`s of the parameters whose gradients this backward has completed here."""
        self.is_sent = False
        self.flat: torch.Tensor | None = None
        self.sum: UnderWay | None = None
        self._is_held: list[bool] = []

    def forget(self) -> None:
        """Another backward begins, or this one has broken off."""
        self.ready.clear()
        self.is_sent, self.flat, self.sum, self._is_held = False, None, None, []

    @property
    def is_ready(self) -> bool:
        """Whether all gradients are there."""
        return len(self.ready) == len(self.members)

    def send(self, ranks: Ranks, device: torch.device) -> None:
        """Take the gradients from the parameters, and begin to add them up."""
        self.is_sent = True
        with compat.without_torch_function(), torch.no_grad():
            gradients = [member.parameter.grad for member in self.members]
            first = self.members[0].parameter
            self.flat = torch.empty(self._num_elements + len(self.members), dtype=first.dtype, device=device)
            self._is_held = [gradient is not None for gradient in gradients]
            for number, (member, view) in enumerate(zip(self.members, self._views(), strict=True)):
                gradient = gradients[number]
                if gradient is None:
                    view.zero_()
                else:
                    refuse_sparse(gradient, member.name)
                    view.copy_(gradient)
                    member.parameter.grad = gradients[number] = gradient = None
            held = self.flat[self._num_elements :]
            held.fill_(1)
            for number, is_held in enumerate(self._is_held):
                if not is_held:
                    held[number] = 0
            # Before the sum, which could overflow where the average does not.
            self.flat.div_(ranks.size)
            payload = torch.view_as_real(self.flat) if self.flat.is_complex() else self.flat
            self.sum = ranks.begin_sum(payload)

    def arrived(self) -> Iterator[tuple[Averaged, torch.Tensor]]:
        """Wait for the sum. Returns each parameter that has a gradient on some rank, with the average."""
        assert self.sum is not None
        assert self.flat is not None
        self.sum.wait()
        is_held = self._is_held
        if not all(is_held):
            # Only where it matters: on CUDA the host waits for the sum here.
            is_held = self.flat[self._num_elements :].ne(0).tolist()
        with compat.without_torch_function():
            views = list(self._views())
        self.flat = self.sum = None
        for member, view, is_there in zip(self.members, views, is_held, strict=True):
            if is_there:
                yield member, view

    def _views(self) -> Iterator[torch.Tensor]:
        assert self.flat is not None
        for member, offset in zip(self.members, self._offsets, strict=True):
            shape, stride = tuple(member.parameter.shape), member.parameter.stride()
            if is_dense(shape, stride):
                yield self.flat.as_strided(shape, stride, offset)
            else:
                yield self.flat[offset : offset + member.parameter.numel()].view(shape)


class GradientAverage:
    """Averages the gradients of each backward over the ranks. The backward pass tells what came, and places what arrives.

    Args:
        members: All parameters that are trained, in the order of the model.
        device: Where gradients are made.
        make_bucket: Makes one of the parameters of one type in a chunk.
    """

    def __init__(
        self,
        ranks: Ranks,
        members: Iterable[Averaged],
        device: torch.device,
        make_bucket: Callable[[Sequence[Averaged]], Bucket] = WholeBucket,
    ) -> None:
        self._ranks = ranks
        self._device = device
        self.members = tuple(members)
        by_kind: dict[tuple[str, torch.dtype], list[Averaged]] = {}
        for member in self.members:
            chunk = "" if member.owner is None else member.owner[1].chunk.spec.name
            by_kind.setdefault((chunk, member.parameter.dtype), []).append(member)
        self._buckets: list[Bucket] = [make_bucket(found) for found in by_kind.values()]
        self._bucket_of = {id(member.parameter): bucket for bucket in self._buckets for member in bucket.members}
        self._order = [*reversed(range(len(self._buckets)))]
        self._seen: dict[int, None] | None = {}
        """The order in which the first backward completes buckets; None afterwards."""
        self._num_sent = 0
        self._under_way: deque[Bucket] = deque()
        self._is_skipped = False
        self._sends_at_end = False
        """See Note [Two sessions in one backward]."""
        _AVERAGES.add(self)
        self.is_in_backward = False
        """Whether a backward has begun that the other ranks wait in as well."""
        self.has_local_sums = False
        """Whether gradients may be there that this rank alone has."""

    @property
    def is_on(self) -> bool:
        """Whether this backward's gradients are averaged."""
        return not self._is_skipped

    @contextlib.contextmanager
    def skipped(self) -> Iterator[None]:
        """Backwards in here keep their gradients to this rank."""
        before, self._is_skipped = self._is_skipped, True
        try:
            yield
        finally:
            self._is_skipped = before

    def begin(self) -> None:
        """A backward begins."""
        if self._is_skipped:
            self.has_local_sums = True
            return
        for bucket in self._buckets:
            bucket.forget()
        self._under_way.clear()
        self._num_sent = 0
        self._sends_at_end = any(
            other.is_in_backward and other._ranks.shares_with(self._ranks)
            for other in tuple(_AVERAGES)
            if other is not self
        )
        self.is_in_backward = True

    def take(self, parameter: torch.Tensor) -> Iterator[tuple[Averaged, torch.Tensor]]:
        """The parameter's gradient is complete here. Returns averages that have arrived meanwhile, as a rule of others."""
        bucket = self._bucket_of[id(parameter)]
        if bucket.is_sent:
            member = next(each for each in bucket.members if each.parameter is parameter)
            raise SessionError(
                f"the gradient of {member.name} came a second time in one backward, after it was sent to the other ranks; a "
                "checkpoint with use_reentrant=True does this: use use_reentrant=False, or an activation policy of the plan"
            )
        bucket.ready.add(id(parameter))
        if self._seen is not None and bucket.is_ready:
            self._seen[self._buckets.index(bucket)] = None
        while not self._sends_at_end and self._num_sent < len(self._order) and self._next.is_ready:
            self._send_next()
            while len(self._under_way) > UNDER_WAY:
                yield from self._under_way.popleft().arrived()

    def missing(self) -> list[Averaged]:
        """Parameters whose gradients this rank has not sent."""
        return [member for bucket in self._buckets if not bucket.is_sent for member in bucket.members]

    def finish(self) -> Iterator[tuple[Averaged, torch.Tensor]]:
        """The backward is over: send what is left. Returns the averages that arrive."""
        while self._num_sent < len(self._order) or self._under_way:
            if self._num_sent < len(self._order):
                self._send_next()
            if len(self._under_way) > UNDER_WAY or self._num_sent == len(self._order):
                yield from self._under_way.popleft().arrived()
        if self._seen is not None:
            seen, self._seen = self._seen, None
            mine = [*seen, *(number for number in self._order if number not in seen)]
            self._order = self._ranks.exchange(mine)[0]
        self.is_in_backward = False
        self.has_local_sums = False

    def break_off(self, reason: str) -> None:
        """A backward has broken off in the middle: see Note [A rank that breaks off] in `distributed.ranks`."""
        if self.is_in_backward:
            self._under_way.clear()
            for bucket in self._buckets:
                bucket.forget()
            self.is_in_backward = False
            self._ranks.leave(reason)

    def leave(self, reason: str) -> None:
        """This rank has not taken the step that the others have, or only a part of it: their weights are others from now on."""
        self._ranks.leave(reason)

    def refuse_local_sums(self, optimizer: torch.optim.Optimizer, *, is_own: bool) -> None:
        """Refuse a step with gradients that were not averaged: the ranks' weights would part.

        Args:
            optimizer: Is about to step.
            is_own: Whether it is the session's. Another one may hold what is nobody's concern here.

        Raises:
            SessionError: The last backward was under `no_sync`, or the optimizer has got parameters since.
        """
        held = [each for group in optimizer.param_groups for each in group["params"]]
        with compat.without_torch_function():
            numbers = [number for number, parameter in enumerate(held) if parameter.grad is not None]
        strange = [number for number in numbers if id(held[number]) not in self._bucket_of]
        if is_own and strange:
            raise SessionError(
                f"parameter {strange[0]} of the optimizer has a gradient that was not averaged over the ranks: it was not trained "
                "when the model was managed. Call session.close(), and manage it again. Nothing was updated"
            )
        if self.has_local_sums and len(numbers) > len(strange):
            raise SessionError(
                "step() was called after a backward under no_sync(): its gradients are those of this rank alone. Run the last "
                "backward before step() outside of no_sync(), or clear the gradients with zero_grad(). Nothing was updated"
            )

    def forget_local_sums(self) -> None:
        """The gradients were cleared."""
        self.has_local_sums = False

    @property
    def _next(self) -> Bucket:
        return self._buckets[self._order[self._num_sent]]

    def _send_next(self) -> None:
        bucket = self._next
        bucket.send(self._ranks, self._device)
        self._under_way.append(bucket)
        self._num_sent += 1


def refuse_sparse(gradient: torch.Tensor, name: str) -> None:
    """Refuse a gradient that is not dense.

    Raises:
        SessionError: The message says what to do.
    """
    if gradient.layout is not torch.strided:
        layout = str(gradient.layout).removeprefix("torch.")
        raise SessionError(
            f"the gradient of {name} is {layout}, and gradients are averaged over the ranks as dense tensors; make the embedding "
            "with sparse=False"
        )


_AVERAGES: weakref.WeakSet[GradientAverage] = weakref.WeakSet()
"""Those of all sessions in the process."""


class SharedBuffers:
    """Copies rank 0's persistent buffers to the other ranks before each training forward, as DistributedDataParallel does.

    So the statistics of batch normalisation are rank 0's, everywhere.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, average: GradientAverage) -> None:
        self._ranks = ranks
        self._average = average
        self._model = model
        self._handle = model.register_forward_pre_hook(self._before_forward)

    def remove(self) -> None:
        """The session ends. May be repeated."""
        self._handle.remove()

    def _before_forward(self, module: nn.Module, inputs: object) -> None:
        del inputs
        if not (module.training and torch.is_grad_enabled() and self._average.is_on):
            return
        # The backward of an earlier call has these among what it saved, and does not read them.
        statistics = {
            id(buffer)
            for each in self._model.modules()
            if isinstance(each, nn.modules.batchnorm._NormBase)
            for buffer in each.buffers(recurse=False)
        }
        by_type: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in persistent_buffers(self._model):
            by_type.setdefault(buffer.dtype, []).append(buffer)
        with torch.no_grad():
            for buffers in by_type.values():
                flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
                self._ranks.send_from_first(flat)
                if self._ranks.rank:
                    for buffer, values in zip(buffers, flat.split([each.numel() for each in buffers]), strict=True):
                        is_read = id(buffer) not in statistics
                        with contextlib.nullcontext() if is_read else compat.keep_version(buffer):
                            buffer.copy_(values.view(buffer.shape))


def persistent_buffers(model: nn.Module) -> list[torch.Tensor]:
    """Buffers that a state dictionary has: others are made by the model from its settings."""
    found: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found[id(buffer)] = buffer
    return [*found.values()]
