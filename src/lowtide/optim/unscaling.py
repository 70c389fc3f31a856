"""Divide an optimizer's gradients by the scale of the loss, and find out whether one of them was not finite."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide import compat
from lowtide.errors import LossScaleError
from lowtide.optim.loss_scale import to_fp32


def unscale_gradients(optimizer: torch.optim.Optimizer, scale: float, *, device: torch.device | None) -> Tensor | None:
    """Divide the gradients in place; a flag that is 1 where one was not finite, None where there are none.

    The arithmetic is in fp32, whatever the gradients are. Waits for no device, except where gradients are on several.

    Args:
        optimizer: Its parameters' gradients.
        scale: What the loss was multiplied by.
        device: Where the flag is wanted, if there are gradients: otherwise on another device than the host, if there is
            one among theirs, so that it can be reduced over ranks there.
    """
    # The reciprocal in double, as torch does: of fp32 it could be a bit off.
    factor = to_fp32(1.0 / scale)
    flags: dict[torch.device, Tensor] = {}
    with torch.no_grad():
        for (place, _), gradients in _gradients_of(optimizer).items():
            if place not in flags:
                flags[place] = torch.zeros((), dtype=torch.float32, device=place)
            inverse = torch.full((), factor, dtype=torch.float32, device=place)
            compat.unscale_in_place(gradients, flags[place], inverse)
        if not flags:
            return None
        first = min(flags, key=lambda place: (place != device, place.type == "cpu"))
        flag = flags.pop(first)
        for other in flags.values():
            # Blocking: a copy from a device that the host does not wait for may be read before it has arrived.
            flag = torch.maximum(flag, other.to(first))
        return flag


def _gradients_of(optimizer: torch.optim.Optimizer) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Each gradient once, by device and dtype."""
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.dtype.is_complex:
            raise LossScaleError(
                f"a gradient of {type(optimizer).__name__} is complex, {tuple(gradient.shape)} {gradient.dtype}; complex "
                "weights cannot be scaled: train them with an optimizer of their own, without the scaler"
            )
        if gradient.layout is torch.sparse_coo:
            # Rows that were looked up twice are summed first: the sum may overflow where its terms do not.
            parameter.grad = gradient.coalesce()
            gradient = parameter.grad.values()
        found.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return found
