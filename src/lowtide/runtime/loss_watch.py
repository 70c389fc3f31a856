"""LossWatch: notices a loss that is not finite, without waiting for the device before it must."""

from __future__ import annotations

import torch

from lowtide.activations.group_call import tensors_in
from lowtide.errors import NonFiniteLossError


class LossWatch:
    """Judges each backward by the loss that the model returned, else by the first gradient that arrives.

    Args:
        is_immediate: Judge at the start of the backward, because weights are updated in it. Otherwise the verdict stays
            on the device until `check`.
    """

    def __init__(self, *, is_immediate: bool) -> None:
        self._is_immediate = is_immediate
        self._loss: torch.Tensor | None = None
        self._is_finite: torch.Tensor | None = None

    def remember(self, output: object) -> None:
        """What the model returned, graph and all; the first scalar is taken for its loss."""
        self._loss = next(
            (
                tensor.detach()
                for tensor in tensors_in(output)
                if tensor.dim() == 0 and tensor.requires_grad and tensor.is_floating_point()
            ),
            None,
        )

    def forget_loss(self) -> None:
        """The model was called without a graph."""
        self._loss = None

    @property
    def has_verdict(self) -> bool:
        """Whether a backward was judged and no step has asked for it."""
        return self._is_finite is not None

    def forget(self) -> None:
        """The user gave the step up or begins the next."""
        self._is_finite = None

    def judge(self, gradient: torch.Tensor | None) -> None:
        """A backward begins, with this gradient."""
        loss, self._loss = self._loss, None
        evidence = loss if loss is not None else gradient
        if evidence is None:
            return
        with torch.no_grad():
            # A sum is not finite where an element is not, and makes no tensor of the gradient's size.
            finite = torch.isfinite(evidence.sum(dtype=torch.promote_types(evidence.dtype, torch.float32)))
        self._is_finite = finite if self._is_finite is None else self._is_finite & finite
        if self._is_immediate:
            self.check()

    def check(self) -> None:
        """Refuse a step whose loss was not finite."""
        finite, self._is_finite = self._is_finite, None
        if finite is not None and not bool(finite):
            raise NonFiniteLossError(
                "the loss of this step is NaN or infinite; nothing was updated, weights and optimizer are as before "
                "the step, and the gradients are what that loss gave. Call zero_grad(), look at the batch and the "
                "learning rate, and go on"
            )
