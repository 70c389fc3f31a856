"""ModelSource: how to build a model and a batch for it, without having built either."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from lowtide.models.batches import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model by name. It holds no tensors, so that it can be pickled to another process and built there.

    Example:
        >>> from lowtide.models import resolve_model
        >>> source = resolve_model("gpt-tiny")
        >>> source.make_batch("2x64")["input_ids"].shape
        torch.Size([2, 64])
        >>> batch = {name: tensor.to("meta") for name, tensor in source.make_batch("2").items()}
        >>> source.build(torch.bfloat16)(**batch).loss.shape
        torch.Size([])
    """

    name: str
    """What the user typed."""
    family: str
    """`gpt`, `llama`, `deep-one`, `resnet`; `hf:` and the model type for a Hugging Face config; `factory`."""
    default_batch: str
    """The text of a usual batch, which `make_batch` accepts."""
    build: Callable[[torch.dtype | None], nn.Module]
    """The model on the meta device, in training mode; None leaves the dtype to the model."""
    make_batch: Callable[[str], Batch]
    """Tensors on the host from a text such as `8x2048`; BatchMismatchError says what the model accepts."""
    build_on_host: Callable[[torch.dtype | None], nn.Module] | None = None
    """The same with the weights that the model's own code gives it, drawn or loaded; None where `build` is all there is."""
