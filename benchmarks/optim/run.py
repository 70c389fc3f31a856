"""The peers' rows on one GPU, to stand beside those of `benchmarks.session.run optimizer`.

python -m benchmarks.optim.run peers --out FOLDER --commit 0123abc
"""

from __future__ import annotations

from benchmarks.suite import Row, main

LLAMA = {"model": "3.14b", "batch": "8x2048"}

SUITES: dict[str, list[Row]] = {
    "peers": [
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
}

if __name__ == "__main__":
    main("benchmarks.optim.peers", "lowtide.optimizer_benchmark/1", SUITES)
