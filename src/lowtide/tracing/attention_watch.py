"""AttentionWatch: sees the attention calls of a real step, to say which of them fall back to the math backend, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lowtide import compat
from lowtide.tracing.attention_choices import AttentionChoices
from lowtide.tracing.attention_rules import Backend, Call, call_of
from lowtide.tracing.attention_use import attention_use
from lowtide.tracing.roles import ModulePaths
from lowtide.tracing.step_trace import StepTrace


class AttentionWatch:
    """A context around one step, which it does not change. Meant for a warm-up step: looking on costs time.

    Which backend ran is in the record of the step; torch does not say why, so the rules are asked.
    """

    def __init__(self, model: nn.Module, choices: AttentionChoices) -> None:
        self._choices = choices
        self._modules: list[str] = []
        self._paths = ModulePaths(model, self)
        self._mode = _Calls(self)

    def __enter__(self) -> None:
        self._paths.__enter__()
        self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch's has no types

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)  # type: ignore[no-untyped-call]
        self._paths.__exit__(*error)

    def enter_module(self, path: str) -> None:
        """A module's forward begins."""
        self._modules.append(path)

    def leave_module(self, *, has_weights: bool) -> None:
        """The innermost module's forward ends."""
        self._modules.pop()

    def see(self, call: Call) -> None:
        """Attention is called."""
        if torch.is_autocast_enabled("cuda"):
            call = replace(call, dtype=torch.get_autocast_dtype("cuda"))  # it casts below the place we look at
        self._choices.choose(call, self._modules[-1] if self._modules else "")

    def explained(self, trace: StepTrace) -> StepTrace:
        """The trace of a later step with the reasons for math, where math did run."""
        if not any(use.backend == Backend.MATH for use in attention_use(trace)):
            return trace
        return replace(trace, notes=(*trace.notes, *self._choices.notes_on_math()))


class _Calls(TorchFunctionMode):
    """Tells the watch of attention calls, and runs everything as it is."""

    def __init__(self, watch: AttentionWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            self._watch.see(call_of(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


def attention_watch(model: nn.Module, device: torch.device) -> AttentionWatch | None:
    """The watch for a model on its card; None where it cannot help.

    The host has backends of its own, and a compiled module would be compiled once for the watch and again without it.
    """
    if device.type != "cuda" or any(_is_compiled(module) for module in model.modules()):
        return None
    major, minor = (int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    return AttentionWatch(model, AttentionChoices(torch.cuda.get_device_capability(device), (major, minor)))


def _is_compiled(module: nn.Module) -> bool:
    return compat.compiled_original(module) is not None or compat.call_of(module) is not None
