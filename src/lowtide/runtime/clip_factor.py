"""ClipFactor: clipping by the global norm without a pass over the gradients: the update multiplies by the factor itself.

The norm of a gradient that leaves for the host is taken on the device, before it leaves. Where gradients are added up on
the host, over several backwards, the worker takes it there after each addition. The total is the fp32 norm of the
gradients' fp32 norms, in the order of the parameters, wherever each lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lowtide.memory.mover import Mover, Ticket


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
    """Of gradients with these norms, which are `scale` times too large.

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
