"""Compile small models with inductor on the host, and compare what they save and need with what a sweep reads off the graph.

    python -m benchmarks.compiled.check

A row takes as long as compiling does. Bytes are those of the allocator of the host, watched by torch's profiler.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.records import RESULTS, checkout, machine
from lowtide import compat
from lowtide.lab.budget import make_point, trace_recipe
from lowtide.lab.recipe import Recipe
from lowtide.lab.record import write_json
from lowtide.lab.training import make_model
from lowtide.models import resolve_model

SCHEMA = "lowtide.budget_check/1"
MODELS = {"deep-one-tiny": "16x96", "gpt-tiny": "16x128", "llama-tiny": "16x128"}
BUDGETS = (1.0, 0.6, 0.3, 0.05, 0.0)


def measure(recipe: Recipe, budget: float) -> tuple[int, int]:
    """Bytes that the compiled model saves, and those of its peak with weights and batch, in its second step."""
    source = resolve_model(recipe.model, settings=recipe.model_settings)
    model = make_model(recipe, source)
    batch = source.make_batch(recipe.batch or source.default_batch)
    model.compile(backend=compat.BudgetedCompiler(budget), dynamic=False)
    lasting = (*model.parameters(), *model.buffers(), *batch.values())
    kept = {tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in lasting}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**batch).loss
    saved_bytes = sum(size for key, size in saved.items() if key not in kept)
    loss.backward()
    del loss
    model.zero_grad()
    return saved_bytes, sum(kept.values()) + allocated_peak(lambda: model(**batch).loss)


def allocated_peak(forward: Callable[[], Tensor]) -> int:
    """Most bytes that a forward and its backward have allocated at a time."""
    gc.collect()
    with compat.MemoryProfile() as profile:
        forward().backward()
    alive = peak = 0
    for _, size in sorted(_allocations(profile.roots), key=lambda event: event[0]):
        alive += size
        peak = max(peak, alive)
    return peak


def _allocations(events: list[Any]) -> Iterator[tuple[int, int]]:
    for event in events:
        if str(event.tag).endswith("Allocation"):
            yield event.start_time_ns, event.extra_fields.alloc_size
        yield from _allocations(event.children)


def main() -> None:
    torch.set_num_threads(1)
    # Code of an earlier run would make the seconds those of reading files.
    torch.compiler.config.force_disable_caches = True
    rows = []
    for name, batch in MODELS.items():
        recipe = Recipe(model=name, batch=batch, plan=None, device="cpu")
        joint, _ = trace_recipe(recipe)
        for budget in BUDGETS:
            point = make_point(joint, budget, on_host=True)
            torch.compiler.reset()
            start = time.perf_counter()
            saved_bytes, peak_bytes = measure(recipe, budget)
            row = {
                "name": name,
                "batch": batch,
                "budget": budget,
                "measured_saved_bytes": saved_bytes,
                "static_saved_bytes": point.saved_bytes,
                "measured_peak_bytes": peak_bytes,
                "static_peak_bytes": point.peak_bytes,
                "unfused_peak_bytes": point.unfused_peak_bytes,
                "compile_seconds": time.perf_counter() - start,
                "static_seconds": point.seconds,
            }
            rows.append(row)
            print(row, flush=True)
    commit = checkout()
    record = {
        "schema": SCHEMA,
        "commit": commit,
        "hardware": "the host's processor, inductor's C++ backend",
        "machine": machine(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "rows": rows,
    }
    write_json(RESULTS / "budget_check" / f"{time.strftime('%Y-%m-%dT%H%M')}_host_{commit}.json", record)


if __name__ == "__main__":
    main()
