"""Clipping: gradients are multiplied so that their global norm is at most `max_grad_norm`.

The norm of a gradient that leaves for the host is taken on the device, before it leaves. Where gradients are added up on
the host, over several backwards, the worker takes it there after each addition. The total is the fp32 norm of the
gradients' fp32 norms, in the order of the parameters, wherever each lies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from lowtide.errors import NonFiniteGradientError
from lowtide.memory.mover import Mover, Ticket
from lowtide.runtime.parameters.gradients import norm_of


@dataclass(frozen=True, slots=True)
class ClipFactor:
    """What each update multiplies its gradients by."""

    total: torch.Tensor
    """The norm before clipping, on the device."""
    on_device: torch.Tensor
    """The factor, one number, for updates there."""
    _on_host: torch.Tensor
    _arrived: Ticket

    def on_host(self) -> float:
        """The number; waits for the gradients that it depends on."""
        self._arrived.wait()
        return float(self._on_host)


def clip_factor(
    norms: Sequence[torch.Tensor], max_norm: float, mover: Mover, scale: torch.Tensor | None = None
) -> ClipFactor:
    """The factor for gradients with these norms, which are `scale` times too large.

    Called where the computation is told what to do; waits for nothing on the device.
    """
    device = mover.device
    with torch.no_grad():
        stacked = torch.stack([norm.to(device) for norm in norms]) if norms else torch.zeros(1, device=device)
        total: torch.Tensor = torch.linalg.vector_norm(stacked)
        if scale is not None:
            total = total / scale.to(device)
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        # From torch's own pool of locked memory: it is given to somebody else only when nobody holds it any more.
        on_host = torch.empty((), dtype=torch.float32, device="cpu", pin_memory=device.type == "cuda")
        copied = mover.to_host(on_host, factor, [mover.now()])
    return ClipFactor(total, factor, on_host, copied.ended)


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
