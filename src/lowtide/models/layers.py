"""The parts that the reference models share: their output, the next-token loss, and layers that can be recomputed."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """The loss and the logits, under the names that Hugging Face gives them.

    `model(**batch).loss` drops this object, and with it the last reference to the logits, before the backward starts.
    Keep the object itself and the logits live through the backward too, which costs their bytes at the peak.
    """

    loss: Tensor | None
    """Scalar; None when no labels were given."""
    logits: Tensor | None
    """One score per class: `[batch, length, vocab]` for text, `[batch, classes]` for images; None where the loss was
    computed without them."""


IGNORED_LABEL = -100
"""Positions with this label count neither in the sum nor in the mean, as everywhere in torch and Hugging Face."""


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy in fp32 over the labels that are not ignored.

    The labels are shifted, not the logits: dropping the last position of the logits would copy the largest tensor of
    the step. Low-precision logits are upcast first, as Hugging Face does, because a sum over the vocabulary loses too
    much in bf16; that copy is one of the reasons for a peak at the loss.

    Args:
        logits: `[batch, length, vocab]`.
        labels: `[batch, length]`, the input ids themselves; the shift happens here.
    """
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED_LABEL)


class LayerStack(nn.ModuleList):
    """A `ModuleList` that can be called, and that can trade its layers' activations for a second forward.

    With `gradient_checkpointing` on, only each layer's input survives the forward; the layer runs again in the
    backward.
    """

    gradient_checkpointing: bool = False

    def forward(self, hidden: Tensor, *context: Tensor) -> Tensor:
        """Run the layers in order.

        Args:
            hidden: What flows from layer to layer.
            context: Tensors every layer is given as they are (rotary tables, for one).
        """
        for layer in self:
            if self.gradient_checkpointing:
                hidden = checkpoint(layer, hidden, *context, use_reentrant=False)
            else:
                hidden = layer(hidden, *context)
        return hidden


class LayeredModel(nn.Module):
    """Base of the models made of a LayerStack: switches recomputation under the names that Hugging Face uses."""

    def gradient_checkpointing_enable(self) -> None:
        """Keep only each layer's input for the backward. Embeddings, final norm, head and loss stay outside."""
        self._set_gradient_checkpointing(True)

    def gradient_checkpointing_disable(self) -> None:
        """Keep every activation that the backward needs."""
        self._set_gradient_checkpointing(False)

    def _set_gradient_checkpointing(self, value: bool) -> None:
        for module in self.modules():
            if isinstance(module, LayerStack):
                module.gradient_checkpointing = value
