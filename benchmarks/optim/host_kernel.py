"""The host kernel's speed for every format and instruction set, beside torch's fused AdamW and torch's plain operators.

python -m benchmarks.optim.host_kernel --out FOLDER --commit 0123abc [--threads 1 15] [--elements 67108864] [--quick]

Every row updates the same number of parameters in one piece, far more than the caches hold. Memory is written once before
the clock starts; the first update, which makes the threads, is not counted. Bytes are those that the update must read and
write once; the machine may move more.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.optim.huge_pages import advise_huge_pages
from benchmarks.records import machine
from lowtide.hardware.machine import this_machine
from lowtide.lab.record import write_json
from lowtide.optim import reference
from lowtide.optim.host import kernel as host_kernel
from lowtide.optim.rules import UNSIGNED, Adam, ElementwiseRule, Lion, Sgd, state_names
from lowtide.optim.update_types import Moments, Piece, Rounding

SCHEMA = "lowtide.host_kernel_benchmark/1"
ADAMW = Adam(lr=1e-4, weight_decay=0.1)
FORMATS: tuple[tuple[str, torch.dtype, Rounding], ...] = (
    ("fp32", torch.float32, Rounding.NEAREST),
    ("bf16 exact", torch.bfloat16, Rounding.EXACT),
    ("bf16 master", torch.bfloat16, Rounding.MASTER),
    ("bf16 stochastic", torch.bfloat16, Rounding.STOCHASTIC),
    ("bf16 nearest", torch.bfloat16, Rounding.NEAREST),
    ("fp16 master", torch.float16, Rounding.MASTER),
)
RULES: tuple[tuple[str, ElementwiseRule], ...] = (
    ("AdamW", ADAMW),
    ("AdamW amsgrad", Adam(lr=1e-4, weight_decay=0.1, amsgrad=True)),
    ("SGD momentum", Sgd(lr=1e-2, momentum=0.9)),
    ("Lion", Lion(lr=1e-4, weight_decay=0.1)),
)

Row = dict[str, Any]


_STAGGER_BYTES = 5 * 4096 + 320
"""Between the beginnings of a piece's tensors within a large page: at one offset in all of them they meet the same banks."""


class _Pages:
    """Memory for the tensors of one piece: small pages, large ones, or large ones with their beginnings apart."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._count = 0

    def memory(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        self._count += self.kind == "huge apart"
        skipped = self._count * _STAGGER_BYTES // dtype.itemsize
        whole = torch.empty(num_elements + skipped, dtype=dtype)
        if self.kind != "small":
            advise_huge_pages(whole)
        return whole[skipped:].zero_()


def make_piece(
    num_elements: int, dtype: torch.dtype, rounding: Rounding, moments: Moments, rule: ElementwiseRule, pages: str
) -> Piece:
    """A parameter with a gradient in bf16 (fp32 for fp32 weights) and its state."""
    made = _Pages(pages)
    gradient = made.memory(num_elements, torch.bfloat16 if dtype is not torch.float32 else dtype)
    # Drawn for a part and repeated: drawing takes longer than all updates together.
    part = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).mul_(1e-3).to(gradient.dtype)
    for chunk in gradient.split(part.numel()):
        chunk.copy_(part[: chunk.numel()])
    state: dict[str, torch.Tensor] = {}
    for name in state_names(rule):
        if moments is Moments.INT8:
            state[name] = made.memory(num_elements, torch.uint8 if name in UNSIGNED else torch.int8)
            state[f"{name}_scale"] = torch.zeros(-(-num_elements // 128))
        else:
            state[name] = made.memory(num_elements, torch.float32 if moments is Moments.FP32 else torch.bfloat16)
    return Piece(
        weight=made.memory(num_elements, dtype).fill_(0.5),
        gradient=gradient,
        state=state,
        rule=rule,
        step=10,
        remainder=made.memory(num_elements, torch.int16) if rounding is Rounding.EXACT else None,
        master=made.memory(num_elements, torch.float32).fill_(0.5) if rounding is Rounding.MASTER else None,
        key=1,
    )


def moved_bytes(piece: Piece, rounding: Rounding) -> float:
    """Bytes for each element: the gradient is read, the weight of a master only written, the rest read and written."""
    weight = piece.weight.element_size() * (1 if rounding is Rounding.MASTER else 2)
    kept = sum(2 * tensor.element_size() for tensor in (piece.remainder, piece.master) if tensor is not None)
    state = 2 * sum(tensor.nbytes for tensor in piece.state.values()) / max(piece.weight.numel(), 1)
    return piece.gradient.element_size() + weight + kept + state


def measure(call: Callable[[], None], num_repeats: int) -> list[float]:
    """Seconds of each repeat, after one that is not counted."""
    call()
    times = []
    for _ in range(num_repeats):
        began_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - began_s)
    return times


def _row(name: str, num_elements: int, element_bytes: float, times: list[float], **more: object) -> Row:
    median_s = statistics.median(times)
    row: Row = {
        "name": name,
        **more,
        "num_elements": num_elements,
        "bytes_per_element": element_bytes,
        "times_s": times,
        "median_s": median_s,
        "gparams_per_s": num_elements / median_s / 1e9,
        "best_gparams_per_s": num_elements / min(times) / 1e9,
        "gbytes_per_s": num_elements * element_bytes / median_s / 1e9,
    }
    print(
        f"{name:<44} {row['gparams_per_s']:6.3f} Gparam/s (best {row['best_gparams_per_s']:.3f})  "
        f"{element_bytes:5.1f} B  {row['gbytes_per_s']:6.1f} GB/s",
        flush=True,
    )
    return row


def torch_rows(num_elements: int, num_threads: int, num_repeats: int) -> list[Row]:
    """The fused AdamW of torch on fp32, its single-tensor loop, and the reference that runs without the kernel."""
    torch.set_num_threads(num_threads)
    rows = []
    for name, settings in (("fused", {"fused": True}), ("loop", {"foreach": False})):
        weight = torch.full((num_elements,), 0.5, requires_grad=True)
        weight.grad = make_piece(
            num_elements, torch.float32, Rounding.NEAREST, Moments.FP32, Sgd(lr=0.1), "small"
        ).gradient
        optimizer = torch.optim.AdamW([weight], lr=1e-4, weight_decay=0.1, **settings)  # type: ignore[arg-type]  # bools by name
        times = measure(lambda: optimizer.step(), num_repeats)
        rows.append(_row(f"torch {name} fp32, {num_threads} threads", num_elements, 28.0, times, threads=num_threads))
    for name, dtype, rounding in FORMATS[:3]:
        piece = make_piece(num_elements, dtype, rounding, Moments.FP32, ADAMW, "small")
        times = measure(
            lambda: reference.update([piece], rounding=rounding, moments=Moments.FP32), max(1, num_repeats // 3)
        )
        label = f"torch operators {name}, {num_threads} threads"
        rows.append(_row(label, num_elements, moved_bytes(piece, rounding), times, threads=num_threads))
    return rows


def kernel_row(
    num_elements: int,
    case: tuple[str, torch.dtype, Rounding],
    moments: Moments,
    rule: tuple[str, ElementwiseRule],
    isa: str,
    num_threads: int,
    num_repeats: int,
    pages: str,
) -> Row:
    name, dtype, rounding = case
    piece = make_piece(num_elements, dtype, rounding, moments, rule[1], pages)
    times = measure(
        lambda: host_kernel.update([piece], rounding=rounding, moments=moments, num_threads=num_threads, isa=isa),
        num_repeats,
    )
    label = f"{rule[0]} {name} {moments.value} {isa} {num_threads}t{'' if pages == 'small' else f' {pages}'}"
    more = {"isa": isa, "threads": num_threads, "pages": pages, "rule": rule[0], "moments": moments.value}
    return _row(label, num_elements, moved_bytes(piece, rounding), times, format=name, **more)


def rows_of(arguments: argparse.Namespace) -> list[Row]:
    """All rows: every format with the best instruction set and every number of threads, then what else differs."""
    size, repeats = arguments.elements, arguments.repeats
    isas = host_kernel.available_isas()
    adamw = RULES[0]
    rows = []
    for threads in arguments.threads:
        rows += torch_rows(size, threads, repeats)
        for case in FORMATS if not arguments.quick else FORMATS[:3]:
            for moments in Moments:
                rows.append(kernel_row(size, case, moments, adamw, isas[-1], threads, repeats, "small"))
        for pages in ("huge", "huge apart"):
            for case in FORMATS[1:3]:
                rows.append(kernel_row(size, case, Moments.FP32, adamw, isas[-1], threads, repeats, pages))
            rows.append(kernel_row(size, FORMATS[1], Moments.INT8, adamw, isas[-1], threads, repeats, pages))
    if arguments.quick:
        return rows
    for isa in isas[:-1]:
        for case in FORMATS[:3]:
            for moments in Moments:
                rows.append(kernel_row(size, case, moments, adamw, isa, arguments.threads[-1], repeats, "small"))
    for rule in RULES[1:]:
        rows.append(kernel_row(size, FORMATS[1], Moments.FP32, rule, isas[-1], arguments.threads[-1], repeats, "small"))
    return rows


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--elements", type=int, default=1 << 26)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, host_kernel.default_num_threads()])
    parser.add_argument(
        "--quick", action="store_true", help="the formats that are used most, and no other instruction set"
    )
    arguments = parser.parse_args()
    arguments.threads = list(dict.fromkeys(arguments.threads))
    record: Row = {
        "schema": SCHEMA,
        "commit": arguments.commit,
        "hardware": this_machine().processor,
        "machine": machine(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "rows": rows_of(arguments),
    }
    if arguments.out is not None:
        path = arguments.out / f"host_kernel_{time.strftime('%Y-%m-%dT%H%M')}_{arguments.commit}.json"
        write_json(path, record)
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
