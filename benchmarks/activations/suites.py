"""The rows of the activation suites, as plain data."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]

LLAMA = {"model": "3.14b", "steps": 5, "warm_up": 2}
SHORT, LONG = "8x2048", "2x16384"


def _rows(batch: str) -> list[Row]:
    rows: list[Row] = [
        {"name": "plain torch, everything kept", "kind": "plain"},
        {"name": "torch.utils.checkpoint on each layer", "kind": "checkpoint"},
        {"name": "the same in save_on_cpu(pin_memory=True)", "kind": "checkpoint save_on_cpu"},
        {"name": "selective", "kind": "policy", "policy": "selective"},
        {"name": "recompute", "kind": "policy", "policy": "recompute"},
        {"name": "recompute in segments of 5", "kind": "policy", "policy": "recompute/5"},
        {"name": "offload (inputs, on top of recompute)", "kind": "policy", "policy": "offload"},
        {"name": "torch.utils.checkpoint on each layer, again", "kind": "checkpoint"},
        {"name": "keep", "kind": "policy", "policy": "keep"},
    ]
    if batch == SHORT:
        # At the longer one what is saved is more than a host of 125 GiB may lock.
        rows += [
            {"name": "offload everything", "kind": "policy", "policy": "offload/all"},
            {
                "name": "save_on_cpu(pin_memory=True), everything",
                "kind": "save_on_cpu",
                "host_limit_bytes": 95 << 30,  # torch rounds each locked tensor up to a power of two
            },
        ]
    rows += [
        {"name": "torch.compile, activation budget 0.5", "kind": "torch budget", "share": 0.5},
        {"name": "compile budget 0.5", "kind": "policy", "policy": "compile-budget", "share": 0.5},
    ]
    return [{**LLAMA, "batch": batch, **row} for row in rows]


HEAD = {"tokens": 16384, "features": 4096, "vocab": 128256}

SUITES: dict[str, list[Row]] = {
    "policies": _rows(SHORT),
    "policies_long": _rows(LONG),
    "tiny": [{**row, "model": "tiny", "batch": "2x32", "steps": 1, "warm_up": 1} for row in _rows(SHORT)],
    "chunked_loss": [
        {"name": "head of 128k words, 16k tokens, bf16", **HEAD, "dtype": "bfloat16"},
        {"name": "head of 128k words, 16k tokens, fp32", **HEAD, "dtype": "float32", "steps": 3},
    ],
    "embedding": [
        {"name": "plain torch", "kind": "plain", "batch": "8x1024"},
        {"name": "the table on the host", "kind": "managed", "batch": "8x1024"},
    ],
}

MODULES = {
    suite: f"benchmarks.activations.{suite if suite in ('chunked_loss', 'embedding') else 'row'}" for suite in SUITES
}
"""What runs the rows of each suite."""
