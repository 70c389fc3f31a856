"""Norms of gradients: judged, so that none that is not finite reaches the weights, and clipped.

Losses and gradients that are not finite are noticed before they reach the weights, where that is possible.

Their norms are taken on the device, which has the gradients in hand: one that is not finite says that the gradient is
not. An update on the host waits for its gradients anyway; their norms follow them, so that it knows, and is left out.
On the device our own kernels are told there, and leave the update out. torch's own step does not ask: it is made. The
norms of updates on the device go to the host together, at the end of the backward, because a copy for each chunk would
cost the loop more than the update itself. The loop is told as soon as they are there, at the next backward at the
latest. `Deferred` judges all gradients before the first update: see `managed_optimizer`.

Clipping multiplies gradients so that their global norm is at most `max_grad_norm`. The norm of a gradient that leaves
for the host is taken on the device, before it leaves. Where gradients are added up on the host, over several backwards,
the worker takes it there after each addition. The total is the fp32 norm of the gradients' fp32 norms, in the order of
the parameters, wherever each lies.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.utils import get_total_norm

from lowtide import compat
from lowtide.errors import NonFiniteGradientError, NonFiniteLossError
from lowtide.memory.mover import Mover, Ticket

_NARROWED = frozenset((torch.float32, torch.bfloat16, torch.float16))
"""Types whose norms are in fp32."""


def norm_of(gradient: torch.Tensor) -> torch.Tensor:
    """In fp32, of doubles and complex numbers in their own precision; on their device, without a copy of the gradient."""
    if torch.is_grad_enabled():  # not in a backward, as a rule: to switch it off takes almost as long as the norm
        with torch.no_grad():
            return norm_of(gradient)
    if gradient.layout is not torch.strided:
        gradient = gradient.coalesce().values()
    # torch narrows none of these, and would refuse.
    is_own = gradient.is_complex() or gradient.dtype is torch.float64
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, dtype=None if is_own else torch.float32)
    return norm


def norms_to_judge(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Finite where `norm_of` each is, in a few launches: the last bits may be others, so that nobody may clip by them."""
    if torch.is_grad_enabled():  # as above
        with torch.no_grad():
            return norms_to_judge(gradients)
    are_strided = {gradient.layout for gradient in gradients} == {torch.strided}
    if are_strided and _NARROWED.issuperset([gradient.dtype for gradient in gradients]):
        return compat.norms_in_fp32(gradients)
    return [norm_of(gradient) for gradient in gradients]


class LossJudge(Protocol):
    """What the passes tell and ask about losses."""

    @property
    def has_verdict(self) -> bool:
        """Whether a backward was judged and no step has asked for it."""

    def remember(self, output: object) -> None:
        """What the model returned, graph and all."""

    def forget_loss(self) -> None:
        """The model was called without a graph."""

    def forget(self) -> None:
        """The user gave the step up or begins the next."""

    def judge(self, gradient: torch.Tensor | None) -> None:
        """A backward begins, with this gradient."""


class LossWatch:
    """Judges each backward by the loss that the model returned, else by the first gradient that arrives.

    Args:
        is_immediate: Judge at the start of the backward, because weights are updated in it. Otherwise the verdict stays
            on the device until `check`.
        is_left_to_gradients: Judge nothing here.
    """

    def __init__(self, *, is_immediate: bool, is_left_to_gradients: bool = False) -> None:
        self._is_immediate = is_immediate
        self._is_left_to_gradients = is_left_to_gradients
        self._loss: torch.Tensor | None = None
        self._is_finite: torch.Tensor | None = None

    def remember(self, output: object) -> None:
        """What the model returned, graph and all; the first scalar is taken for its loss."""
        self._loss = next(
            (
                tensor.detach()
                for tensor in compat.tensors_in(output)
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
        if evidence is None or self._is_left_to_gradients:
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


MAX_NAMES = 3
"""That a message lists."""
TOO_LARGE = "A norm beyond 1.8e19 counts as infinite: its square is, in fp32."


@dataclass(slots=True, eq=False)
class Verdict:
    """Whether the gradients of a chunk are finite."""

    names: tuple[str, ...]
    is_left_out: bool
    """Whether the update is not made where they are not."""
    norms: tuple[torch.Tensor, ...]
    """One for each gradient, on the device. They live as long as this: who called `backward` may be on another stream than the
    one that made them, whose next tensor would otherwise get their memory before they were read.
    """
    undo: Callable[[], None] = lambda: None
    """Takes back what was counted for an update that was left out."""
    _sent: torch.Tensor | None = None
    """The norms on the host, from `_arrived` on."""
    _arrived: Ticket | None = None

    @property
    def arrived(self) -> Ticket:
        """From when on `is_finite` does not wait."""
        assert self._arrived is not None, "the norms have not been sent"
        return self._arrived

    def gate(self) -> torch.Tensor:
        """For `Settings.gate`: 1, or a NaN."""
        with torch.no_grad():
            norms = self.norms[0] if len(self.norms) == 1 else torch.stack(self.norms)
            # `x - x` is 0, or NaN where x is NaN or infinite. Each norm for itself, as `is_finite` asks: finite norms may have
            # an infinite sum, and an update would be left out that nobody hears of.
            nothing = norms - norms
            return (nothing.sum() if nothing.ndim else nothing).add_(1.0).to(torch.float32)

    def be_sent(self, sent: torch.Tensor, arrived: Ticket) -> None:
        """The norms are on their way to this memory on the host."""
        self._sent, self._arrived = sent, arrived

    def is_known(self) -> bool:
        """Whether `is_finite` would not wait."""
        return self._arrived is not None and self._arrived.is_done()

    def is_finite(self) -> bool:
        """Waits for the gradients."""
        self.arrived.wait()
        return all(map(math.isfinite, self._sent.tolist() if self._sent is not None else ()))


class GradientWatch:
    """Keeps the verdicts until the loop asks; all in the loop's thread, or autograd's while the loop waits for it."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._open: deque[Verdict] = deque()
        self._unsent: list[Verdict] = []

    def judge(
        self,
        names: Iterable[str],
        norms: Sequence[torch.Tensor],
        *,
        is_left_out: bool,
        undo: Callable[[], None] = lambda: None,
    ) -> Verdict:
        """Gradients with these norms are about to be used for an update on the device. Waits for nothing."""
        verdict = Verdict(tuple(names), is_left_out, self._here(norms), undo)
        # First to be sent: one that is asked about and never sent would never be known.
        self._unsent.append(verdict)
        self._open.append(verdict)
        return verdict

    def judge_sent(self, names: Iterable[str], norms: Sequence[torch.Tensor]) -> Verdict:
        """Gradients with these norms were sent to the host, for an update there that asks first. Waits for nothing."""
        verdict = Verdict(tuple(names), True, self._here(norms))
        self._send([verdict])
        # Not before: one that could not be sent would never be known.
        self._open.append(verdict)
        return verdict

    def send(self) -> None:
        """A backward is over: what it judged on the device goes to the host."""
        if self._unsent:
            self._send(self._unsent)
            # Not before: where there is no memory for it, the next call sends them.
            self._unsent = []

    def _here(self, norms: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """What was added up on the host has its norm there."""
        device = self._mover.device
        return tuple([norm if norm.device == device else norm.to(device) for norm in norms])

    def _send(self, verdicts: Sequence[Verdict]) -> None:
        # After a backward that broke off the loop sends them, wherever it is: the copy may run outside of inference mode.
        with torch.inference_mode(False), torch.no_grad():
            norms = torch.stack([norm for verdict in verdicts for norm in verdict.norms])
            # From torch's own pool of locked memory: it is given to somebody else only when nobody holds it any more.
            with compat.without_modes():  # an emulated device must not count it
                # The user may have set another default device.
                on_host = torch.empty(norms.shape, dtype=norms.dtype, device="cpu", pin_memory=norms.is_cuda)
                parts = on_host.split([len(verdict.norms) for verdict in verdicts])
            copied = self._mover.to_host(on_host, norms, [self._mover.now()])
        for verdict, part in zip(verdicts, parts, strict=True):
            verdict.be_sent(part, copied.ended)

    def check(self, *, waits: bool) -> None:
        """Refuse to go on after an update by gradients that were not finite.

        Args:
            waits: For verdicts that are still on their way; else the next call sees them.

        Raises:
            NonFiniteGradientError: The message says which weights were updated with them and which were not.
        """
        self.send()
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
        # A total of 16-bit numbers is infinite long before their own norms are, in fp32.
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
    parts = [
        "a backward that updates brought gradients that are NaN or infinite.",
        "What it was judged by before was finite: the loss that the model returned, or else the first gradient.",
    ]
    if left_out:
        parts.append(f"Left as they were: {listed(left_out)}.")
    if updated:
        parts.append(
            f"Updated by torch's own step on the device, and their weights are lost: {listed(updated)}. Load a checkpoint; "
            "with a precision Lowtide's own update would have left them out."
        )
    parts.append(
        "All other weights that it reached, if any, took the step. Schedule.DEFERRED judges all gradients before the first update, "
        f"and would have changed nothing. {TOO_LARGE}"
    )
    return " ".join(parts)


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
