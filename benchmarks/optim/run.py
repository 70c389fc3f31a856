"""The peers' rows on one GPU, to stand beside those of `benchmarks.session.run optimizer`.

python -m benchmarks.optim.run peers --out FOLDER --commit 0123abc
"""

from __future__ import annotations

from benchmarks.suite import Row, main

LLAMA = {"model": "3.14b", "batch": "8x2048"}

HOST_LIMIT_BYTES = 114 << 30
"""The machine has 125 GiB: beyond this it would end the process, and perhaps the benchmark with it."""
LARGEST = {
    "peer": "deepspeed zero-3",
    "batch": "2x2048",
    "steps": 2,
    "warm_up": 1,
    "max_grad_norm": 1.0,
    "host_limit_bytes": HOST_LIMIT_BYTES,
}

SUITES: dict[str, list[Row]] = {
    "peers": [
        {"name": "plain torch, forward and backward", "peer": "none", **LLAMA},
        {"name": "DeepSpeed ZeRO-3, all on the host, no clipping", "peer": "deepspeed zero-3", **LLAMA},
        {
            "name": "DeepSpeed ZeRO-3, all on the host, clipped",
            "peer": "deepspeed zero-3",
            **LLAMA,
            "max_grad_norm": 1.0,
        },
        {"name": "FSDP2, CPUOffloadPolicy, fp32 master", "peer": "fsdp2", **LLAMA},
        {"name": "torchao CPUOffloadOptimizer, all bf16", "peer": "torchao", **LLAMA},
    ],
    # How far one GPU and 125 GiB carry DeepSpeed: all on the host, or (its "Twin-Flow") a share of the optimizer there.
    "largest": [
        {"name": "DeepSpeed ZeRO-3, 4.4b, all on the host", **LARGEST, "model": "4.4b"},
        {"name": "DeepSpeed ZeRO-3, 5.1b, all on the host", **LARGEST, "model": "5.1b"},
        {"name": "DeepSpeed ZeRO-3, 10b, half the optimizer on the host", **LARGEST, "model": "10b", "ratio": 0.5},
    ],
}

if __name__ == "__main__":
    main("benchmarks.optim.peers", "lowtide.optimizer_benchmark/1", SUITES)
