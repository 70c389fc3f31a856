"""Activation policies, chunked losses and tables on the host beside torch's own ways, on one GPU.

python -m benchmarks.activations.run policies --out FOLDER --commit 0123abc
"""

from __future__ import annotations

from benchmarks.activations.suites import MODULES, SUITES
from benchmarks.suite import main

if __name__ == "__main__":
    main(MODULES, "lowtide.activation_benchmark/1", SUITES)
