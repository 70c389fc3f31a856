"""switch_plan: a session goes on under another plan, between two steps."""

from __future__ import annotations

import torch

from lowtide.planning.check_plan import check_plan
from lowtide.planning.plan import Plan
from lowtide.runtime.binding import copy_values
from lowtide.runtime.giving_back import bring_state_to_parameters, return_rest
from lowtide.runtime.machinery import Machinery


def switch_plan(machinery: Machinery, plan: Plan) -> Machinery:
    """Take the machinery apart and put the session together anew for the plan; the machinery must be quiet.

    Weights, gradients and optimizer state are carried over exactly, the optimizer stays wrapped, and steps, copies
    and fetches are counted on. The host holds the weights a second time while this runs. A plan that is for another model
    leaves the machinery as it is; where the new one cannot be made, the model and the optimizer are plain.
    """
    basis = machinery.basis
    check_plan(plan, basis.layout)
    legacy = machinery.hand_over()
    try:
        successor = Machinery(basis, plan, fill=copy_values, legacy=legacy)
    except BaseException:
        if legacy.managed is not None:
            legacy.managed.remove()
        return_rest(legacy.moved_along)
        bring_state_to_parameters(basis.optimizer)
        raise
    successor.limit = machinery.limit
    if basis.tracked is not None:
        basis.tracked.start()
    elif basis.is_on_cuda:
        # What filled the new buffers must be done before a copy on another stream takes their place.
        torch.cuda.synchronize(basis.mover.device)
    return successor
