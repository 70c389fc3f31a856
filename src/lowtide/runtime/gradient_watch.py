"""GradientWatch: notices gradients that are not finite where weights are updated in the backward.

Their norms are taken on the device, which has the gradients in hand, and the verdict of each chunk follows them to the
host. An update on the host waits for its gradients anyway, so it knows, and is left out. On the device our own kernels read
the verdict there, and leave the update out. torch's own step does not ask: it is made. The loop is told as soon as the
verdict is on the host, at the next backward at the latest. `Deferred` judges all gradients before the first update: see
`managed_optimizer`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils import get_total_norm

from lowtide import compat
from lowtide.errors import NonFiniteGradientError
from lowtide.memory.mover import Mover, Ticket
from lowtide.runtime.gradients import norm_of

MAX_NAMES = 3
"""That a message lists."""
TOO_LARGE = "A norm beyond 1.8e19 counts as infinite: its square is, in fp32."


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the gradients of a chunk are finite."""

    names: tuple[str, ...]
    is_left_out: bool
    """Whether the update is not made where they are not."""
    on_device: torch.Tensor
    """The verdict itself."""
    _finite: torch.Tensor
    arrived: Ticket
    """The verdict is on the host."""
    undo: Callable[[], None] = lambda: None
    """Takes back what was counted for an update that was left out."""

    def gate(self) -> torch.Tensor:
        """For `Settings.gate`."""
        closed = torch.full((), torch.nan, dtype=torch.float32, device=self.on_device.device)
        return closed.masked_fill_(self.on_device, 1.0)

    def is_known(self) -> bool:
        """Whether `is_finite` would not wait."""
        return self.arrived.is_done()

    def is_finite(self) -> bool:
        """Waits for the gradients."""
        self.arrived.wait()
        return bool(self._finite)


class GradientWatch:
    """Keeps the verdicts until the loop asks; all in the loop's thread, or autograd's while the loop waits for it."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._open: deque[Verdict] = deque()

    def judge(
        self,
        names: Iterable[str],
        norms: Sequence[torch.Tensor],
        *,
        is_left_out: bool,
        undo: Callable[[], None] = lambda: None,
    ) -> Verdict:
        """Gradients with these norms are about to be used for an update. Waits for nothing."""
        device = self._mover.device
        with torch.no_grad():
            finite = torch.isfinite(torch.stack([norm.to(device) for norm in norms])).all()
            # From torch's own pool of locked memory: it is given to somebody else only when nobody holds it any more.
            with compat.without_modes():  # an emulated device must not count it
                on_host = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=device.type == "cuda")
            copied = self._mover.to_host(on_host, finite, [self._mover.now()])
        verdict = Verdict(tuple(names), is_left_out, finite, on_host, copied.ended, undo)
        self._open.append(verdict)
        return verdict

    def check(self, *, waits: bool) -> None:
        """Refuse to go on after an update by gradients that were not finite.

        Args:
            waits: For verdicts that are still on their way; else the next call sees them.

        Raises:
            NonFiniteGradientError: The message says which weights were updated with them and which were not.
        """
        spoiled: list[Verdict] = []
        while self._open and (waits or self._open[0].is_known()):
            verdict = self._open.popleft()
            if not verdict.is_finite():
                spoiled.append(verdict)
        if spoiled:
            # One backward's gradients: those of the layers before are on their way.
            spoiled += [verdict for verdict in self._open if not verdict.is_finite()]
            self._open.clear()
            for verdict in spoiled:
                verdict.undo()
            raise NonFiniteGradientError(_message(spoiled))


def refuse_non_finite_gradients(
    taken: Mapping[int, torch.Tensor],
    others: Mapping[int, torch.Tensor],
    name: Callable[[int], str],
    *,
    is_after_updates: bool = False,
) -> None:
    """Refuse a step before its first update, or before those that a backward has left to it. Waits for its gradients.

    Args:
        taken: Norms of some gradients, by the numbers of their parameters.
        others: Gradients whose norms nobody has taken.
        name: Of a parameter, for the message.
        is_after_updates: Whether the backward has made its own, for the message.

    Raises:
        NonFiniteGradientError: A gradient is NaN or infinite.
    """
    with torch.no_grad():
        if _are_finite(taken.values()) and _are_finite(_totals(others.values())):
            return
        # A total of halves is infinite long before their own norms are, in fp32.
        norms = {**taken, **{number: norm_of(gradient) for number, gradient in others.items()}}
        if _are_finite(norms.values()):
            return
        names = [name(number) for number in sorted(norms) if not bool(torch.isfinite(norms[number]))]
    if is_after_updates:
        outcome = "what step() itself updates is as before, and all other weights took the step in the backward"
    else:
        outcome = "nothing was updated, weights and optimizer are as before the step"
    raise NonFiniteGradientError(
        f"the gradients of {listed(names)} are NaN or infinite; {outcome}. Call zero_grad(), look at the batch and the "
        f"learning rate, and go on. {TOO_LARGE}"
    )


def _are_finite(norms: Iterable[torch.Tensor]) -> bool:
    """Waits once for each device."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for norm in norms:
        by_device.setdefault(norm.device, []).append(norm)
    return all(bool(torch.isfinite(torch.stack(alike)).all()) for alike in by_device.values())


def _totals(gradients: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Norms of many gradients at once, in a few launches for each device."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    found: list[torch.Tensor] = []
    for gradient in gradients:
        if gradient.layout is torch.strided:
            by_device.setdefault(gradient.device, []).append(gradient)
        else:
            found.append(norm_of(gradient))
    return found + [get_total_norm(alike) for alike in by_device.values()]


def listed(names: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def _message(spoiled: Sequence[Verdict]) -> str:
    left_out = [name for verdict in spoiled if verdict.is_left_out for name in verdict.names]
    updated = [name for verdict in spoiled if not verdict.is_left_out for name in verdict.names]
    parts = ["a backward that updates brought gradients that are NaN or infinite, with a finite loss."]
    if left_out:
        parts.append(f"Left as they were: {listed(left_out)}.")
    if updated:
        parts.append(
            f"Updated by torch's own step on the device, and their weights are lost: {listed(updated)}. Load a checkpoint; "
            "with a precision Lowtide's own update would have left them out."
        )
    parts.append(
        "All other weights that it reached took the step. Schedule.DEFERRED judges all gradients before the first update, "
        f"and would have changed nothing. {TOO_LARGE}"
    )
    return " ".join(parts)
