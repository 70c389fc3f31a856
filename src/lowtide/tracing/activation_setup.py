"""Activation policies and a chunked loss put on a model for a step, and taken off again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from lowtide.activations.apply import apply
from lowtide.activations.huggingface_head import chunked_head
from lowtide.activations.policy import Keep
from lowtide.activations.policy_call import CompileGroup
from lowtide.memory.mover import Mover
from lowtide.tracing.settings import StepSettings


@contextlib.contextmanager
def activations_applied(
    model: nn.Module,
    settings: StepSettings,
    *,
    mover: Mover | None = None,
    compile_group: CompileGroup | None = None,
) -> Iterator[None]:
    """Put what the settings say about activations on a model; afterwards it is as it came.

    Args:
        model: Real, or of ghosts.
        settings: Of the step.
        mover: Carries offloaded tensors; None takes the one of the model's device.
        compile_group: Compiles a group under a budget; None takes torch's compiler.

    Raises:
        ConfigError: The model has no repeated blocks for a policy, or no head that can be chunked.
    """
    with contextlib.ExitStack() as stack:
        if settings.chunked_loss:
            stack.callback(chunked_head(model).remove)
        policy = settings.policy
        if policy is not None and policy != Keep():
            stack.callback(apply(model, policy, mover=mover, compile_group=compile_group).remove)
        yield
