"""What a recipe says about how numbers are multiplied, for as long as its run lasts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from lowtide.lab.recipe import Recipe


@contextlib.contextmanager
def arithmetic(recipe: Recipe, device: torch.device) -> Iterator[None]:
    """The recipe's precision of fp32 products, and kernels that any processor has; taken back afterwards."""
    precision = torch.get_float32_matmul_precision()
    # None leaves the other flags as they are; setting them too, as `mkldnn.flags` does, warns where there is no Intel card.
    was_enabled = bool(torch.backends.mkldnn.set_flags(None, None, None, None)[0])
    torch.set_float32_matmul_precision(recipe.matmul_precision)
    if device.type == "cpu" and recipe.torch_dtype != torch.float32:
        # oneDNN's half precision kernels use instructions that some processors lack, and the process dies on those.
        torch.backends.mkldnn.set_flags(False, None, None, None)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(was_enabled, None, None, None)
        torch.set_float32_matmul_precision(precision)
