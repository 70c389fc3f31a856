"""What the host's Python takes in a step that is bound by its launches: plain, managed in several ways, and beside updates.

python -m benchmarks.session.launches --out FOLDER --commit 0123abc

The model has 24 small layers, so that the device waits for the host all the time. "Beside updates" means that another thread
runs the host's update kernel on other memory all the while. The planner's rates of launches come from these rows.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import lowtide
from benchmarks.records import machine
from benchmarks.session.row import build
from lowtide.lab.record import json_text
from lowtide.optim.host import kernel as host_kernel
from lowtide.optim.rules import require_rule
from lowtide.optim.update_types import Moments, Piece, Rounding

DEVICE, HOST = {"update": "device"}, {"update": "host"}
ROWS: list[tuple[str, dict[str, Any] | None]] = [
    ("plain", None),
    ("resident, updates on the device in backward", {"weights": "resident", **DEVICE}),
    ("streamed, updates on the device in backward", {"weights": "streamed", **DEVICE}),
    ("streamed, updates on the host in backward", {"weights": "streamed", **HOST}),
    ("resident, updates on the host in backward", {"weights": "resident", **HOST}),
    ("streamed, updates on the device deferred", {"weights": "streamed", **DEVICE, "schedule": "deferred"}),
    ("streamed, updates on the host deferred", {"weights": "streamed", **HOST, "schedule": "deferred"}),
    ("resident, recompute", {"weights": "resident", **DEVICE, "activations": "recompute"}),
    ("resident, selective", {"weights": "resident", **DEVICE, "activations": "selective"}),
]


@contextlib.contextmanager
def updates_elsewhere() -> Iterator[None]:
    """The host's kernel works on memory of its own in another thread."""
    over = threading.Event()
    weight = torch.nn.Parameter(torch.zeros(64 << 20))
    optimizer = torch.optim.AdamW([weight])
    rule = require_rule(optimizer, optimizer.param_groups[0])
    state = {name: torch.zeros(weight.numel()) for name in ("exp_avg", "exp_avg_sq")}
    piece = Piece(weight=weight.detach(), gradient=torch.zeros(weight.numel()), state=state, rule=rule, step=1, key=1)

    def work() -> None:
        while not over.is_set():
            host_kernel.update([piece], rounding=Rounding.NEAREST, moments=Moments.FP32)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def measure(words: dict[str, Any] | None, *, device: str, num_steps: int) -> dict[str, float]:
    """Median seconds of a step, alone and beside updates."""
    model = build("many launches", on=device, recompute=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    session = None
    if words is not None:
        plan = lowtide.make_plan(model, **{"schedule": "in_backward", **words})
        session = lowtide.manage(model, optimizer, plan, precision="bf16 exact")
    ids = torch.zeros(1, 16, dtype=torch.int64, device=device)

    def step() -> float:
        begun = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        return time.perf_counter() - begun

    for _ in range(5):
        step()
    found = {"alone_s": statistics.median(step() for _ in range(num_steps))}
    with updates_elsewhere():
        found["beside_updates_s"] = statistics.median(step() for _ in range(num_steps))
    if session is not None:
        session.close()
    return found


def main() -> None:
    """Measure all rows and write a record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--steps", type=int, default=15)
    given = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    rows = []
    for name, words in ROWS:
        rows.append({"name": name, **measure(words, device="cuda" if has_gpu else "cpu", num_steps=given.steps)})
        print(f"{name}: {rows[-1]['alone_s'] * 1e3:.1f} ms, beside updates {rows[-1]['beside_updates_s'] * 1e3:.1f} ms")
    record = {
        "schema": "lowtide.launches/1",
        "commit": given.commit,
        "hardware": {"name": torch.cuda.get_device_name() if has_gpu else "cpu", **machine()},
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "rows": rows,
    }
    given.out.mkdir(parents=True, exist_ok=True)
    kind = "h200" if has_gpu else "cpu"
    path = given.out / f"launches_{datetime.now(UTC):%Y-%m-%dT%H%M}_{kind}_{given.commit}.json"
    path.write_text(json_text(record), encoding="utf-8")


if __name__ == "__main__":
    main()
