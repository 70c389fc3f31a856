"""LayerStack: equal layers run one after another, each recomputed in the backward when asked."""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


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
