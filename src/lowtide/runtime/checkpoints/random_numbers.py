"""The generators of random numbers that a loop draws from without naming one: torch's, Python's and NumPy's."""

from __future__ import annotations

import random
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from lowtide import compat


def random_state(device: torch.device) -> dict[str, Any]:
    """Where each generator is: the host's, and on a CUDA device that one's."""
    with compat.without_modes():
        return {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
            "python": _python_state(),
            "numpy": np.random.get_state(legacy=True),  # what a loop draws from without a generator
        }


def restore_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Set each generator to where it was when the state was taken."""
    with compat.without_modes():
        torch.set_rng_state(state["torch"])
        version, words, next_gauss = state["python"]
        random.setstate((version, tuple(map(int, words)), next_gauss))
        np.random.set_state(state["numpy"])
        on_cuda = state["cuda"]
        if device.type == "cuda" and on_cuda is not None:
            torch.cuda.set_rng_state(on_cuda, device)
        elif (device.type == "cuda") != (on_cuda is not None):
            here, there = ("CUDA", "the host") if device.type == "cuda" else ("the host", "CUDA")
            warnings.warn(
                f"the checkpoint was saved on {there} and is loaded on {here}, which draws random numbers from another "
                "generator: dropout and the last bits of results are not those of the undisturbed run",
                stacklevel=4,
            )


def _python_state() -> tuple[int, np.ndarray[Any, Any], float | None]:
    """Its 625 numbers are one array, and not as many lines of the index."""
    version, words, next_gauss = random.getstate()
    return version, np.array(words, dtype=np.uint32), next_gauss
