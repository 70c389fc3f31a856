"""GhostMachine: a process in which torch believes in a CUDA card of a given kind.

Installs, once per process: the ghost device, CUDA's autocast rules, CUDA's choice of attention, fused kernels that torch has
for CUDA only, and the optimizers' defaults for CUDA. Only the tracing subprocess becomes one.
"""

from __future__ import annotations

from typing import Any

import torch

from lowtide import compat
from lowtide.hardware import Hardware
from lowtide.tracing.ghost import autocast, device
from lowtide.tracing.ghost.attention import Attention
from lowtide.tracing.ghost.costs import CudaCosts
from lowtide.tracing.ghost.mode import GhostMode
from lowtide.tracing.ghost.tensor import Ghost
from lowtide.tracing.recorder import Recorder


class GhostMachine:
    """The process-wide part of tracing. `mode_for` gives the part that belongs to one trace."""

    _instance: GhostMachine | None = None

    def __init__(self) -> None:
        self.device = device.register()
        self._casts = autocast.WeightCasts()
        self._attention: Attention | None = None
        self._libraries = autocast.register(self._casts)
        library = torch.library.Library("aten", "IMPL")
        library.impl("scaled_dot_product_attention", self._attend, "AutogradPrivateUse1")
        library.impl("scaled_dot_product_attention", self._attend, "PrivateUse1")
        for name in ("_fused_rms_norm", "_fused_rms_norm_backward"):
            # With a backend kernel of their own these keep their autograd formula; without, torch takes them apart.
            if compat.find_overload(name) is not None:
                library.impl(name, _never_called, "PrivateUse1")
        self._libraries.append(library)
        compat.allow_foreach_on(Ghost)
        compat.treat_cuda_as(self.device.type, self._casts.clear)

    @classmethod
    def get(cls) -> GhostMachine:
        """The machine of this process."""
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    def mode_for(self, recorder: Recorder, hardware: Hardware, torch_version: str) -> GhostMode:
        """The dispatch mode of a trace on a card under a torch version."""
        major, minor = (int(part) for part in torch_version.split("+")[0].split(".")[:2])
        self._attention = Attention(hardware.compute_capability, (major, minor))
        mode = GhostMode(recorder, self.device, CudaCosts(hardware, torch_version))
        mode.learn_owner_count()
        return mode

    @property
    def attention(self) -> Attention:
        """The attention choices of the current trace."""
        assert self._attention is not None, "no trace has begun"
        return self._attention

    def _attend(self, *args: Any, **kwargs: Any) -> Any:
        return self.attention(*args, **kwargs)


def _never_called(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a ghost operator reached its backend kernel")
