"""What is spread over ranks: how a chunk's parts come together for a window, and how its gradients go apart.

Note [The gradients of a chunk that is spread]
A bucket has a row for each rank's part: the gradients of its pieces, where the pieces lie in the part, and behind them a number
for each parameter of the chunk that says whether a rank has a gradient for it. The rows are added up over the ranks, each to the
rank whose part it is. One to all there is one row, which goes to the owner; who has a gradient for what is then added up apart,
because all ranks must know it. Parts are updated by their ranks alone, and every rank decides alike which chunks are updated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from lowtide import compat
from lowtide.distributed.ranks import Ranks, Spread, UnderWay
from lowtide.errors import RanksDifferError
from lowtide.memory.chunk import ChunkSpec, Span
from lowtide.memory.mover import Copied, GradientCarrier
from lowtide.memory.parts import Part
from lowtide.planning.plan import Collective
from lowtide.runtime.passes.exchange import Averaged, refuse_sparse

ROW_ALIGNMENT = 64
"""Bytes of which each row of a bucket is a multiple."""


class ChunkParts:
    """The parts of one chunk on the ranks that share it."""

    def __init__(
        self, chunk: ChunkSpec, parts: Sequence[Part], spread: Spread, mover: GradientCarrier, collective: Collective
    ) -> None:
        self.parts = tuple(parts)
        self.spread = spread
        self.collective = collective
        self.name = chunk.name
        self._mover = mover
        self.mine = self.parts[spread.sharing.rank]
        self.begin, self.end = self.mine.begin, self.mine.end
        self.spans: tuple[Span, ...] = tuple(piece.span for piece in self.mine.pieces)

    @property
    def owner(self) -> int:
        """The rank that has all of it, one to all."""
        return next(part.rank for part in self.parts if part.nbytes)

    def add_up(self, flag: torch.Tensor) -> None:
        """See `PartExchange.add_up`."""
        total = flag.to(self._mover.device, copy=True)
        self.spread.sharing.begin_sum(total).wait()
        flag.copy_(total)

    def wait_for_device(self) -> None:
        """See `PartExchange.wait_for_device`."""
        self._mover.now().wait()

    def require_alike(self, device: torch.Tensor) -> None:
        """See `PartExchange.require_alike`.

        Raises:
            RanksDifferError: On all ranks alike.
        """
        totals = self.spread.sharing.exchange(int(device.view(torch.int64).sum()))
        if len(set(totals)) > 1:
            other = next(rank for rank, total in enumerate(totals) if total != totals[0])
            raise RanksDifferError(
                f"the weights of chunk {self.name} were written to, and rank {other} of those that share them has other values "
                "than rank 0: each keeps a part, so the whole would be a mixture. Write the same on all ranks, such as an average "
                "of what each has seen, or make the group resident"
            )

    def gather(self, device: torch.Tensor, mine: Copied) -> Copied:
        """See `PartExchange.gather`."""
        sharing = self.spread.sharing
        if self.collective is Collective.GATHER:
            return self._mover.exchange(
                lambda: sharing.begin_gather(
                    device, device[self.begin : self.end], f"the weights of chunk {self.name}"
                ),
                [mine.ended],
            )
        return self._mover.exchange(
            lambda: sharing.begin_send(device, self.owner, f"the weights of chunk {self.name}"), [mine.ended]
        )


class PartBucket:
    """The gradients of a chunk that is spread, which are sent as one tensor.

    See Note [The gradients of a chunk that is spread]. It does what `exchange.Bucket` does.
    """

    def __init__(self, parts: ChunkParts, members: Sequence[Averaged]) -> None:
        self.members = tuple(members)
        self._parts = parts
        self.ready: set[int] = set()
        self.is_sent = False
        self._is_held: list[bool] = []
        self._rows: torch.Tensor | None = None
        self._mine: torch.Tensor | None = None
        self._under_way: list[UnderWay] = []
        self._held: torch.Tensor | None = None
        is_gathered = parts.collective is Collective.GATHER
        itemsize = self.members[0].parameter.element_size()
        sent = parts.parts if is_gathered else [part for part in parts.parts if part.nbytes]
        self._part_size = sent[0].nbytes // itemsize
        unit = max(1, ROW_ALIGNMENT // itemsize)
        size = self._part_size + (len(self.members) if is_gathered else 0)
        self._shape = (len(sent), -(-size // unit) * unit)
        number_of = {member.name: number for number, member in enumerate(self.members)}
        self._places = [
            (row, piece.span.offset_bytes // itemsize, number_of[piece.whole.name], piece)
            for row, part in enumerate(sent)
            for piece in part.pieces
        ]
        self._own = {piece.whole.name: piece for piece in parts.mine.pieces}

    def forget(self) -> None:
        """Another backward begins, or this one has broken off."""
        self.ready.clear()
        self.is_sent, self._rows, self._mine, self._held, self._is_held = False, None, None, None, []
        self._under_way = []

    @property
    def is_ready(self) -> bool:
        """Whether all gradients are there."""
        return len(self.ready) == len(self.members)

    def send(self, ranks: Ranks, device: torch.device) -> None:
        """Take the gradients from the parameters, and begin to add them up."""
        self.is_sent = True
        sharing, what = self._parts.spread.sharing, f"the gradients of chunk {self._parts.name}"
        with compat.without_torch_function(), torch.no_grad():
            first = self.members[0].parameter
            # What lies between the pieces is padding, which is sent and never read.
            self._rows = rows = torch.zeros(self._shape, dtype=first.dtype, device=device)
            flat: list[torch.Tensor | None] = []
            for member in self.members:
                gradient, member.parameter.grad = member.parameter.grad, None
                flat.append(None if gradient is None else in_memory_order(gradient, member))
            self._is_held = [gradient is not None for gradient in flat]
            for row, offset, number, piece in self._places:
                gradient = flat[number]
                if gradient is not None:
                    rows[row, offset : offset + piece.end - piece.begin].copy_(gradient[piece.begin : piece.end])
            del flat, gradient
            # Before the sum, which could overflow where the average does not.
            rows.div_(ranks.size)
            numbers = [float(is_there) for is_there in self._is_held]
            held = torch.tensor(numbers, dtype=first.dtype, device="cpu").to(device, non_blocking=True)
            if self._parts.collective is Collective.GATHER:
                rows[:, self._part_size : self._part_size + len(self.members)] = held
                self._mine = torch.empty(self._shape[1], dtype=first.dtype, device=device)
                self._under_way = [sharing.begin_scatter(_real(self._mine), _real(rows.view(-1)), what)]
            else:
                self._mine, self._held = rows[0], held
                owner = self._parts.owner
                self._under_way = [
                    sharing.begin_sum_at(_real(self._mine), owner, what),
                    ranks.begin_sum(_real(held), what),
                ]

    def arrived(self) -> Iterator[tuple[Averaged, torch.Tensor]]:
        """Wait for the sums. Returns each parameter that has a gradient on some rank, with this rank's piece of the average."""
        assert self._mine is not None
        for under_way in self._under_way:
            under_way.wait()
        self._rows = None
        mine = self._mine
        is_owner = self._parts.collective is Collective.GATHER or self._parts.mine.nbytes > 0
        if self._parts.spread.same_part is not None and is_owner:
            self._parts.spread.same_part.begin_sum(_real(mine)).wait()
        is_held = self._is_held
        if not all(is_held):
            # Only where it matters: on CUDA the host waits for the sum here.
            counted = mine[self._part_size : self._part_size + len(self.members)] if self._held is None else self._held
            is_held = counted.ne(0).tolist()
        itemsize = mine.element_size()
        self._mine, self._held, self._under_way = None, None, []
        for member, is_there in zip(self.members, is_held, strict=True):
            if not is_there:
                continue
            piece = self._own.get(member.name)
            if piece is None:
                yield member, mine.new_empty(0)  # not a view, which would keep all of it
                continue
            spec = piece.span.parameter
            yield member, mine.as_strided(spec.shape, spec.stride, piece.span.offset_bytes // itemsize)


def in_memory_order(gradient: torch.Tensor, member: Averaged) -> torch.Tensor:
    """The gradient's elements, one after the other as those of its parameter lie in memory."""
    refuse_sparse(gradient, member.name)
    parameter = member.parameter
    if gradient.stride() != parameter.stride():
        gradient = torch.empty_strided(
            parameter.shape, parameter.stride(), dtype=gradient.dtype, device=gradient.device
        ).copy_(gradient)
    return gradient.as_strided((gradient.numel(),), (1,))


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
