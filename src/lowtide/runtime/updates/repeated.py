"""LastUpdate: an update of some parameters as a kernel has it, to be made again in the next step.

A kernel looks at its pieces with care (types, sizes, places, overlaps), which takes several times as long as to launch it, and
finds the same in each step. So what it has found is kept with the facts that it depends on. As long as these hold, the next
update differs in addresses, in its number and in the numbers of its rule; where one does not, all is looked at again. No tensor
is kept: whether the user holds a weight's memory is told by how many tensors share it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lowtide.optim.rules import Adafactor, Rule, Sgd, form_of
from lowtide.optim.state import ParameterState
from lowtide.optim.update_types import Repeatable, Turn
from lowtide.runtime.updates.chunk_optimizer import Update


@dataclass(slots=True)
class _Facts:
    """What was found of one parameter."""

    revision: int
    """Revision of its state: as long as it stays, so do the state's tensors."""
    rule: Rule
    """The last that was of the form."""
    form: tuple[object, ...]
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    device: torch.device
    gradient: torch.dtype

    def hold(self, target: torch.Tensor, state: ParameterState, rule: Rule) -> bool:
        """Whether all is as it was, and the gradient lies as the weight does."""
        gradient = target.grad
        if gradient is None or state.revision != self.revision:
            return False
        if rule is not self.rule:
            if isinstance(rule, Adafactor) or form_of(rule) != self.form:
                return False
            self.rule = rule
        return (
            target.dtype is self.dtype
            and gradient.dtype is self.gradient
            and target.shape == self.shape
            and target.stride() == self.stride == gradient.stride()
            and target.device == self.device == gradient.device
        )


class LastUpdate:
    """See the file's docstring. Made right after an update of pieces in the order of `updates`.

    Args:
        made: The update.
        states: Of the parameters, after it.
        rules: By which they were updated.
        draws: Whether it draws random bits, for which each parameter and step has a key.
    """

    def __init__(
        self,
        made: Repeatable,
        updates: Sequence[Update],
        states: Sequence[ParameterState],
        rules: Sequence[Rule],
        *,
        draws: bool,
    ) -> None:
        self.made = made
        self._draws = draws
        self._facts = [_facts(*item) for item in zip(updates, states, rules, strict=True)]

    def turn(
        self,
        updates: Sequence[Update],
        states: Sequence[ParameterState | None],
        rules: Sequence[Rule],
        key_of: Callable[[torch.Tensor, int], int],
    ) -> Turn | None:
        """What has changed since; None where more has than `made` can take.

        Args:
            updates: To be made now.
            states: Of their parameters; None before the first update.
            rules: By which they are to be made.
            key_of: The key of a parameter's update of that number.
        """
        if len(self._facts) != len(updates):
            return None
        turn = Turn(weights=[], gradients=[], rules=[], keys=[])
        for facts, update, state, rule in zip(self._facts, updates, states, rules, strict=True):
            target = update.target
            if state is None or not facts.hold(target, state, rule):
                return None
            assert target.grad is not None and not isinstance(rule, Adafactor)  # noqa: PT018
            step = state.step + 1
            turn.weights.append(target.data_ptr())
            turn.gradients.append(target.grad.data_ptr())
            turn.rules.append((rule, 1 if state.lacks_momentum and isinstance(rule, Sgd) else step))
            turn.keys.append(key_of(update.parameter, step) if self._draws else 0)
        return turn if self.made.fits(turn) else None


def _facts(update: Update, state: ParameterState, rule: Rule) -> _Facts:
    target = update.target
    assert target.grad is not None and not isinstance(rule, Adafactor)  # noqa: PT018
    return _Facts(
        revision=state.revision,
        rule=rule,
        form=form_of(rule),
        dtype=target.dtype,
        shape=target.shape,
        stride=target.stride(),
        device=target.device,
        gradient=target.grad.dtype,
    )
