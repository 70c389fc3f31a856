"""One row: one way to hold activations, forward and backward of a Llama, in a process of its own.

python -m benchmarks.activations.row '{"model": "3.14b", "batch": "8x2048", "kind": "policy", "policy": "offload"}'
"""

from __future__ import annotations

import contextlib
import resource
import statistics
import time
from typing import Any

import torch

from benchmarks.session.row import SIZES, build, load
from benchmarks.suite import Row, answer


def _around(row: Row) -> contextlib.AbstractContextManager[Any]:
    """What the peers put around a forward."""
    if "save_on_cpu" in row["kind"]:
        return torch.autograd.graph.save_on_cpu(pin_memory=True)
    return contextlib.nullcontext()


def run(row: Row) -> Row:
    """Train the row's steps without an optimizer, and report."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.backends.mkldnn.enabled = False  # some processors lack what its bf16 kernels use
    rows, length = (int(part) for part in row["batch"].split("x"))
    model = build(row["model"], on=device, recompute=row["kind"].startswith("checkpoint"), positions=length)
    applied = None
    if row["kind"] == "policy":
        from lowtide.activations import CompileBudget, apply, policy_of

        policy = CompileBudget(share=row["share"]) if "share" in row else policy_of(row["policy"])
        applied = apply(model, policy)
    elif row["kind"] == "torch budget":
        import torch._functorch.config as functorch

        functorch.activation_memory_budget = row["share"]
        for layer in model.model.layers:
            layer.compile()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, SIZES[row["model"]]["v"], (rows, length), generator=generator).to(device)
    times, losses = [], []
    started = time.perf_counter()
    for step in range(row["warm_up"] + row["steps"]):
        if device == "cuda":
            if step == row["warm_up"]:
                # Compiling and the first step's own allocations are not the steady state.
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        begun = time.perf_counter()
        with _around(row):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        model.zero_grad()
        losses.append(loss.item())
        if device == "cuda":
            torch.cuda.synchronize()
        if step >= row["warm_up"]:
            times.append(time.perf_counter() - begun)
        elif step == 0:
            first_s = time.perf_counter() - started
    result: Row = {
        **row,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "first_step_s": first_s,
        "step_s": times,
        "median_s": statistics.median(times),
        "losses": losses,
        "host_peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    if device == "cuda":
        result["max_allocated_bytes"] = torch.cuda.max_memory_allocated()
        result["max_reserved_bytes"] = torch.cuda.max_memory_reserved()
    if applied is not None:
        stats = applied.stats()
        result["offloaded_bytes"] = stats.offloaded_bytes // (row["warm_up"] + row["steps"])
        result["num_recomputed"] = stats.num_recomputed
    return result


if __name__ == "__main__":
    answer(run, load)
