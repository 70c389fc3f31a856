"""Clipping by the global norm, over gradients on the device and on the host."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lowtide.errors import NonFiniteGradientError
from lowtide.runtime.gradients import norm_of


def clip_by_norm(parameters: Iterable[torch.Tensor], max_norm: float, *, is_judged: bool = False) -> torch.Tensor:
    """Scale the gradients in place so that their norm is at most `max_norm`; returns the norm they had.

    The norm is that of the gradients' norms, in the order of the parameters, wherever each gradient lies, in fp32 unless they
    are wider; the factor is torch's. Waits for gradients that are still on their way to the host.

    Args:
        parameters: With gradients, or without.
        max_norm: The norm afterwards.
        is_judged: Somebody else, such as a scaler, decides about gradients that are not finite.

    Raises:
        NonFiniteGradientError: The norm is NaN or infinite; no gradient was scaled.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    with torch.no_grad():
        norms = [norm_of(gradient) for gradient in gradients]
        device = next((norm.device for norm in norms if norm.device.type != "cpu"), norms[0].device)
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]))
        if not is_judged:
            refuse_non_finite(total, max_norm)
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        by_device = {gradient.device: factor.to(gradient.device) for gradient in gradients}
        for gradient in gradients:
            gradient.mul_(by_device[gradient.device].to(gradient.dtype))
    return total


def refuse_non_finite(norm: torch.Tensor, max_norm: float) -> None:
    """Refuse a step whose gradients cannot be clipped: times a factor of such a norm they would spoil every weight.

    Waits for the norm, which is the end of the backward; the loss was waited for just before.

    Raises:
        NonFiniteGradientError: The norm is NaN or infinite.
    """
    if not bool(torch.isfinite(norm)):
        raise NonFiniteGradientError(
            f"the norm of the gradients is {float(norm)}, by which max_grad_norm={max_norm} would clip them; nothing was "
            "updated, weights and optimizer are as before the step. Call zero_grad(), look at the batch and the learning "
            "rate, and go on"
        )
