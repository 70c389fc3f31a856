"""The update in C++ on the host: one pass over the memory, on several cores, without Python's lock.

Agrees with `reference.update` within fp32 rounding; its own results do not depend on the number of threads, on how
parameters are cut into pieces, nor on the processor's instruction set.

Note [Tiny numbers]
On x86 numbers below 1.2e-38, fp32's smallest normal one, count as zero. torch keeps them: a moment without gradients stays
at 1e-45 for ever, and each operation on it takes a hundred times as long. An `eps` of 0 divides zero by zero sooner so.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Sequence

import torch

from lowtide.errors import BadPieceError, ConfigError
from lowtide.optim import host_library
from lowtide.optim.cpu_topology import WorkerCpus, worker_cpus
from lowtide.optim.host_pieces import PIECE_BYTES, pack
from lowtide.optim.update_types import (
    Moments,
    Piece,
    Rounding,
    is_left_out,
)


def update(
    pieces: Sequence[Piece],
    *,
    rounding: Rounding,
    moments: Moments,
    gradient_factor: float = 1.0,
    num_threads: int | None = None,
    isa: str | None = None,
) -> None:
    """Take one step of each piece's rule, in place; all pieces or, where one is refused, none.

    Other Python threads run meanwhile. Two updates at a time take turns. The threads are made at the first call, sleep
    between calls, and end with the process; a process that forks afterwards makes its own.

    Args:
        pieces: Parameters or slices of them, in host memory. No two may overlap.
        rounding: How results land in weights of 16 bits; an fp32 weight is not rounded.
        moments: How state is stored.
        gradient_factor: What gradients are multiplied by in fp32: one over the loss scale, times the clipping. Where it is a
            NaN nothing is changed.
        num_threads: None for one on each physical core but one.
        isa: One of `available_isas()`, for tests; None for the best.

    Raises:
        BadPieceError: Tensors do not fit together.
        HostKernelError: The library cannot be built or loaded.
    """
    library = host_library.load()
    assert library.piece_bytes == PIECE_BYTES, "abi.h and host_pieces.py disagree"
    cpus = _pinned_cpus(library, os.getpid())
    wanted = cpus.num_threads if num_threads is None else num_threads
    if wanted < 1:
        raise ConfigError(f"num_threads is {wanted}; an update needs at least one", key="num_threads")
    if isa is not None and isa not in library.isas:
        raise ConfigError(
            f"there is no instruction set {isa!r} here; choose one of {', '.join(library.isas)}", key="isa"
        )
    if not pieces or is_left_out(gradient_factor):
        return
    packed = pack(pieces, rounding=rounding, moments=moments, gradient_factor=float(gradient_factor))
    library.update(packed, len(pieces), wanted, isa)
    # As for any operation in place: a backward through the old values is caught.
    torch.autograd.graph.increment_version([piece.weight for piece in pieces])


def available_isas() -> tuple[str, ...]:
    """The instruction sets of this processor that the kernel can use, the best last."""
    return host_library.load().isas


def default_num_threads() -> int:
    """How many threads an update takes by default."""
    return _cpus().num_threads


def is_available() -> bool:
    """Whether the kernel can be used; where not, warns once with the reason and what it costs."""
    reason = host_library.why_missing()
    if reason is not None:
        _warn_once(reason)
    return reason is None


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(
        "host updates run through torch's operators, about 10 to 30 times slower than the C++ kernel, which is not there: "
        f"{reason}",
        RuntimeWarning,
        stacklevel=3,
    )


@functools.cache
def _cpus() -> WorkerCpus:
    return worker_cpus()


@functools.cache
def _pinned_cpus(library: host_library.HostLibrary, process: int) -> WorkerCpus:
    """Pin the threads once for each process: after a fork they are others."""
    cpus = _cpus()
    library.pin_threads(cpus.pinned)
    return cpus


__all__ = ["BadPieceError", "available_isas", "default_num_threads", "is_available", "update"]
