"""The update in C++ on the host: one pass over the memory, on several cores, without Python's lock.

Agrees with `reference.update` within fp32 rounding; its own results do not depend on the number of threads, on how
parameters are cut into pieces, nor on the processor's instruction set.

The threads are pinned to one logical processor of each physical core that this process may use: two threads on one core
share its load and store units, and an update does little else. There is one thread fewer than cores, which leaves room for
the thread that launches the device's work: while that waits for a core, the device waits. No thread is pinned to a single
core: when the launching thread, or the one that asks for updates, takes its core, it moves to another.

Note [Tiny numbers]
On x86 numbers below 1.2e-38, fp32's smallest normal one, count as zero. torch keeps them: a moment without gradients stays
at 1e-45 for ever, and each operation on it takes a hundred times as long. So with `eps=0` a division of zero by zero comes
earlier.
"""

from __future__ import annotations

import functools
import math
import os
import struct
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowtide.errors import BadPieceError, ConfigError
from lowtide.optim.host import library as host_library
from lowtide.optim.rules import Adam, ElementwiseRule, Lion, Sgd, state_names
from lowtide.optim.update_types import (
    BLOCK,
    MASK,
    Moments,
    Piece,
    Rounding,
    Turn,
    addresses_of,
    check_pieces,
    is_left_out,
)

_ROOT = Path("/")
_HEAD = struct.Struct("=9Qq2I6i")
_CONSTANTS = struct.Struct("=10f")
PIECE_BYTES = _HEAD.size + _CONSTANTS.size
"""Size of one packed piece, as abi.h has it."""
_TABLE = np.dtype(
    [("addresses", "u8", 9), ("num_elements", "i8"), ("ids", "u4", 2), ("formats", "i4", 6), ("constants", "f4", 10)]
)
_Rows = np.ndarray[tuple[int], np.dtype[np.void]]
_Places = np.ndarray[Any, np.dtype[Any]]
_TENSOR_NAMES = ("weight", "gradient", "remainder or master", *[f"state {i}" for i in range(3)], *["scale"] * 3)

_GRADIENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_WEIGHTS = {
    (torch.bfloat16, Rounding.NEAREST): 1,
    (torch.float16, Rounding.NEAREST): 2,
    (torch.bfloat16, Rounding.STOCHASTIC): 3,
    (torch.bfloat16, Rounding.EXACT): 4,
    (torch.bfloat16, Rounding.MASTER): 5,
    (torch.float16, Rounding.MASTER): 6,
}
_WEIGHT_BYTES = np.array([4, 2, 2, 2, 2, 2, 2])
_EXTRA_BYTES = np.array([0, 0, 0, 0, 2, 4, 4])
_GRADIENT_BYTES = np.array([4, 2, 2])
_STATE_BYTES = np.array([4, 2, 1])
_STATES = {Moments.FP32: 0, Moments.BF16: 1, Moments.INT8: 2}
_RULES: dict[type, int] = {Adam: 0, Sgd: 1, Lion: 2}
_AMSGRAD, _NESTEROV, _FIRST_STEP = 1, 2, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCpus:
    """How many threads an update has, and the processors on which they may run."""

    num_threads: int
    """Threads of an update; more would not make it faster."""
    pinned: tuple[int, ...]
    """The processors that the threads are pinned to, all to the whole set; empty to let the system choose."""


def update(
    pieces: Sequence[Piece],
    *,
    rounding: Rounding,
    moments: Moments,
    gradient_factor: float = 1.0,
    num_threads: int | None = None,
    isa: str | None = None,
) -> Packed | None:
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

    Returns:
        What makes the next update of the same parameters; None where nothing was changed.

    Raises:
        BadPieceError: Tensors do not fit together.
        HostKernelError: The library cannot be built or loaded.
    """
    library = host_library.load()
    assert library.piece_bytes == PIECE_BYTES, "abi.h and the packing disagree"
    cpus = _pinned_cpus(library, os.getpid())
    wanted = cpus.num_threads if num_threads is None else num_threads
    if wanted < 1:
        raise ConfigError(f"num_threads is {wanted}; an update needs at least one", key="num_threads")
    if isa is not None and isa not in library.isas:
        raise ConfigError(
            f"there is no instruction set {isa!r} here; choose one of {', '.join(library.isas)}", key="isa"
        )
    if not pieces or is_left_out(gradient_factor):
        return None
    packed = Packed(pieces, rounding=rounding, moments=moments, gradient_factor=float(gradient_factor))
    library.update(packed.bytes, len(pieces), wanted, isa)
    # As for any operation in place: a backward through the old values is caught.
    torch.autograd.graph.increment_version([piece.weight for piece in pieces])
    return packed


class Packed:
    """Pieces as the kernel reads them, for an update that can be made again; see `update_types.Repeatable`.

    Raises:
        BadPieceError: A tensor has the wrong device, type, size or layout, or overlaps with another.
        ConfigError: A number of a rule does not fit in fp32, or the rounding is not for weights of this type.
    """

    def __init__(
        self, pieces: Sequence[Piece], *, rounding: Rounding, moments: Moments, gradient_factor: float
    ) -> None:
        self.bytes = pack(pieces, rounding=rounding, moments=moments, gradient_factor=gradient_factor)
        self._table = np.frombuffer(self.bytes, dtype=_TABLE)
        self._weights = [piece.weight.data_ptr() for piece in pieces]
        self._gradient_bytes = self._table["num_elements"] * _GRADIENT_BYTES[self._table["formats"][:, 2]]
        self._written = _written(self._table)

    def fits(self, turn: Turn) -> bool:
        """Whether the weights are where they were, and none of what is written lies where a gradient does."""
        begins, ends = self._written
        if not len(begins) or turn.weights != self._weights:
            return False
        gradients = np.array(turn.gradients, dtype=np.int64)
        # Written ranges do not overlap: the last one that begins before the gradient ends is the only one to look at.
        before = np.searchsorted(begins, gradients + self._gradient_bytes) - 1
        clashes = (before >= 0) & (ends[before] > gradients) & (self._gradient_bytes > 0)
        return not clashes.any()

    def run(self, turn: Turn, gradient_factor: float | Tensor) -> None:
        """Update. The caller counts the weights as written."""
        if is_left_out(gradient_factor):
            return
        made: dict[tuple[int, int], tuple[bytes, int]] = {}
        for rule, step in turn.rules:
            if (id(rule), step) not in made:
                made[id(rule), step] = _constants(rule, step, float(gradient_factor)), _flags(rule, step)
        rows = [made[id(rule), step] for rule, step in turn.rules]
        table = self._table
        table["addresses"][:, 1] = turn.gradients
        table["ids"][:, 0] = turn.keys
        table["formats"][:, 5] = [flags for _, flags in rows]
        table["constants"] = np.frombuffer(b"".join([constants for constants, _ in rows]), "f4").reshape(len(rows), -1)
        library = host_library.load()
        library.update(self.bytes, len(rows), _pinned_cpus(library, os.getpid()).num_threads, None)


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


def pack(pieces: Sequence[Piece], *, rounding: Rounding, moments: Moments, gradient_factor: float) -> bytearray:
    """The pieces as the kernel reads them; valid for as long as their tensors live. Some microseconds a piece.

    Raises:
        BadPieceError: A tensor has the wrong device, type, size or layout, or overlaps with another.
        ConfigError: A number of a rule does not fit in fp32, or the rounding is not for weights of this type.
    """
    check_pieces(pieces, rounding=rounding, moments=moments, device=torch.device("cpu"))
    packed = bytearray(PIECE_BYTES * len(pieces))
    # Most pieces of an update share their rule and step.
    seen: dict[tuple[ElementwiseRule, int], tuple[bytes, int]] = {}
    for index, piece in enumerate(pieces):
        key = (piece.rule, piece.step)
        if key not in seen:
            seen[key] = _constants(piece.rule, piece.step, gradient_factor), _flags(piece.rule, piece.step)
        constants, flags = seen[key]
        begin = index * PIECE_BYTES
        _HEAD.pack_into(
            packed,
            begin,
            *addresses_of(piece),
            piece.weight.numel(),
            piece.key & MASK,
            piece.first_element & MASK,
            _RULES[type(piece.rule)],
            # An fp32 weight is its own master.
            0 if piece.weight.dtype is torch.float32 else _WEIGHTS[piece.weight.dtype, rounding],
            _GRADIENTS[piece.gradient.dtype],
            _STATES[moments],
            len(state_names(piece.rule)),
            flags,
        )
        packed[begin + _HEAD.size : begin + PIECE_BYTES] = constants
    _refuse_overlaps(packed)
    return packed


def _flags(rule: ElementwiseRule, step: int) -> int:
    if isinstance(rule, Adam):
        return _AMSGRAD if rule.amsgrad else 0
    if isinstance(rule, Sgd):
        return (_NESTEROV if rule.nesterov else 0) | (_FIRST_STEP if step == 1 else 0)
    return 0


def _constants(rule: ElementwiseRule, step: int, gradient_factor: float) -> bytes:
    """The numbers of a rule at a step, in the order of abi.h: computed in double, as torch does, and rounded once."""
    factor = -gradient_factor if rule.maximize else gradient_factor
    decay = 1 - rule.lr * rule.weight_decay
    if isinstance(rule, Adam):
        weight_factor, gradient_decay = (decay, 0.0) if rule.is_decoupled else (1.0, rule.weight_decay)
        correction = (1 - rule.beta2**step) ** 0.5
        step_size = rule.lr / (1 - rule.beta1**step)
        moving = (1 - rule.beta1, 0.0, 1 - rule.beta2, rule.beta2, correction, rule.eps, step_size)
    elif isinstance(rule, Sgd):
        weight_factor, gradient_decay = 1.0, rule.weight_decay
        moving = (0.0, rule.momentum, 1 - rule.dampening, 0.0, 0.0, 0.0, rule.lr)
    else:
        weight_factor, gradient_decay = decay, 0.0
        moving = (1 - rule.beta1, 0.0, 1 - rule.beta2, 0.0, 0.0, 0.0, rule.lr)
    try:
        return _CONSTANTS.pack(factor, weight_factor, gradient_decay, *moving)
    except OverflowError as error:
        raise ConfigError(
            f"a number of {rule} at step {step}, or the gradient factor {gradient_factor:g}, is beyond fp32's 3.4e38"
        ) from error


def _written(table: _Rows) -> tuple[_Places, _Places]:
    """Where the places begin and end that an update writes to, in their order; they do not overlap."""
    begins, ends, used = _places(table)
    used[:, 1] = False
    order = np.argsort(begins[used], kind="stable")
    return begins[used][order], ends[used][order]


def _places(table: _Rows) -> tuple[_Places, _Places, _Places]:
    """Where each tensor of each piece begins and ends, and whether it is there."""
    count = table["num_elements"]
    formats = table["formats"]
    state = count * _STATE_BYTES[formats[:, 3]]
    widths = [
        count * _WEIGHT_BYTES[formats[:, 1]],
        count * _GRADIENT_BYTES[formats[:, 2]],
        count * _EXTRA_BYTES[formats[:, 1]],
        *[state] * 3,
        *[-(-count // BLOCK) * 4] * 3,
    ]
    begins = table["addresses"].astype(np.int64)
    ends = begins + np.stack(widths, axis=1)
    return begins, ends, (begins != 0) & (ends > begins)


def _refuse_overlaps(packed: bytearray) -> None:
    """Threads write in any order: two places in the same memory would give a result by chance."""
    begins, ends, used = _places(np.frombuffer(packed, dtype=_TABLE))
    place = np.flatnonzero(used)
    order = place[np.argsort(begins.ravel()[place], kind="stable")]
    sorted_begins, sorted_ends = begins.ravel()[order], ends.ravel()[order]
    is_read_only = order % 9 == 1
    # Gradients may share memory with each other: they are only read.
    last_written = np.maximum.accumulate(np.where(is_read_only, 0, sorted_ends))
    last_any = np.maximum.accumulate(sorted_ends)
    reach = np.where(is_read_only[1:], last_written[:-1], last_any[:-1])
    clash = np.flatnonzero(sorted_begins[1:] < reach)
    if clash.size:
        later = int(clash[0]) + 1
        earlier = int(np.flatnonzero(sorted_ends[:later] > sorted_begins[later])[-1])
        first, second = (divmod(int(order[i]), 9) for i in (earlier, later))
        raise BadPieceError(
            f"the {_TENSOR_NAMES[first[1]]} of piece {first[0]} and the {_TENSOR_NAMES[second[1]]} of piece {second[0]} "
            "share memory; every element may be updated once only"
        )


def worker_cpus(root: Path = _ROOT) -> WorkerCpus:
    """What suits this process: its affinity mask, its control group's quota, and its share of the machine's ranks.

    Args:
        root: Where `proc` and `sys` are; another folder for tests.
    """
    allowed = available_cpus()
    part, num_parts = _rank_on_this_machine()
    return choose_cpus(one_of_each_core(allowed, root), cpu_quota=read_cpu_quota(root), part=part, num_parts=num_parts)


def available_cpus() -> tuple[int, ...]:
    """The processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def one_of_each_core(cpus: tuple[int, ...], root: Path = _ROOT) -> tuple[int, ...]:
    """The first of the given processors of each physical core; all of them where the system does not tell."""
    cores: dict[tuple[str, str] | int, int] = {}
    for cpu in cpus:
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        try:
            siblings = (folder / "thread_siblings_list").read_text().strip()
            core: tuple[str, str] | int = ("siblings", siblings)
        except OSError:
            core = cpu
        cores.setdefault(core, cpu)
    return tuple(cores.values())


def read_cpu_quota(root: Path = _ROOT) -> float | None:
    """How many processors' time the control group allows; None without a limit."""
    try:
        limit, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    try:
        folder = root / "sys/fs/cgroup/cpu"
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        return None if quota <= 0 else quota / int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError, ZeroDivisionError):
        return None


def choose_cpus(cores: tuple[int, ...], *, cpu_quota: float | None, part: int = 0, num_parts: int = 1) -> WorkerCpus:
    """Share cores among the ranks of a machine, leave one of each share to the launcher, and obey the quota.

    Under a quota that is smaller than the share nothing is pinned: the other containers of the machine would choose the
    same processors.

    Example:
        >>> choose_cpus((0, 1, 2, 3), cpu_quota=None)
        WorkerCpus(num_threads=3, pinned=(0, 1, 2, 3))
        >>> choose_cpus((0, 1, 2, 3), cpu_quota=2.5)
        WorkerCpus(num_threads=2, pinned=())
    """
    begin, end = part * len(cores) // num_parts, (part + 1) * len(cores) // num_parts
    share = cores[begin:end]
    if cpu_quota is not None and cpu_quota / num_parts < len(share):
        return WorkerCpus(num_threads=max(1, math.ceil(cpu_quota / num_parts) - 1), pinned=())
    if len(share) < 2:
        # The launcher is on that core too, or more ranks than cores share the machine.
        return WorkerCpus(num_threads=1, pinned=())
    return WorkerCpus(num_threads=len(share) - 1, pinned=share)


def _rank_on_this_machine() -> tuple[int, int]:
    """(this rank, number of ranks) as torchrun and its like tell every process; (0, 1) for a process by itself."""
    try:
        rank, num_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1
    # A launcher that gave each rank an affinity mask of its own has divided the machine already.
    is_divided = len(available_cpus()) < (os.cpu_count() or 1)
    return (rank, num_ranks) if 0 <= rank < num_ranks and not is_divided else (0, 1)
