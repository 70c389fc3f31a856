"""Refuse `torch.compile` around modules with activation policies.

The compiler goes through the forwards of the modules that a compiled one calls, past what stands around their calls: the
policies would be left out, and nobody told. What is compiled at the time of `apply` is found by looking. What is compiled
later around modules with policies meets their calls, which are shown to the compiler for that. And a module with a policy that is
compiled in place later, in the place of the policy's call, is found when the model is called; the model itself, where
nobody would be called, when it is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn

from lowtide import compat
from lowtide.errors import ActivationError

ADVICE = "compile the blocks before you apply policies: for block in model.layers: block.compile()"


def refuse_compiled_around(module: nn.Module, path: str) -> None:
    """Raise where the call of a module with a policy is inside of compiled code."""
    if compat.is_compiled_around():
        raise ActivationError(
            f"torch.compile around {type(module).__name__} at {path or 'the top'} would go past its activation policy; {ADVICE}"
        )


def refuse_compiled_holders(model: nn.Module, paths: Iterable[str]) -> None:
    """Raise where a module is compiled that calls one of those at the paths."""
    for path in paths:
        parts = path.split(".") if path else []
        for num_parts in range(len(parts)):
            holder = model.get_submodule(".".join(parts[:num_parts]))
            if compat.compiled_original(holder) is not None or compat.uncompiled(compat.call_of(holder)) is not None:
                where = ".".join(parts[:num_parts]) or "the top"
                raise ActivationError(
                    f"{type(holder).__name__} at {where} is compiled, and holds {path}: its code would go past the activation "
                    f"policy there; leave it as it is and {ADVICE}"
                )


class CompileCheck:
    """Takes the calls of the whole model, for all policies on it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._watched: dict[str, nn.Module] = {}
        self._is_active = True
        self._refusal = partial(
            ActivationError,
            f"{type(model).__name__} has an activation policy as a whole, which code compiled in its place would leave out; "
            "remove() the policy, call model.compile() first, and apply the policy after that",
        )
        self.inner = compat.replace_call(model, self._call)
        """What the model's call is without it."""

    @classmethod
    def of(cls, model: nn.Module) -> CompileCheck:
        """The one that stands around the model's calls, or a new one."""
        owner = getattr(compat.call_of(model), "__self__", None)
        return owner if isinstance(owner, CompileCheck) and owner._is_active else cls(model)

    def watch(self, modules: dict[str, nn.Module]) -> None:
        """From now on these have policies."""
        self._watched |= modules
        if "" in modules:
            compat.guard_compile(self._model, self._refusal)

    def forget(self, modules: dict[str, nn.Module]) -> None:
        """And no longer. With the last of them the model gets its calls back, unless others have taken them since."""
        for path in modules:
            self._watched.pop(path, None)
        if "" in modules:
            compat.unguard_compile(self._model, self._refusal)
        if not self._watched and self._is_active:
            self._is_active = False
            if compat.call_of(self._model) == self._call:
                compat.replace_call(self._model, self.inner)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        for path, module in self._watched.items():
            if path and compat.uncompiled(compat.call_of(module)) is not None:
                raise ActivationError(
                    f"{type(module).__name__} at {path} was compiled after it was given its activation policy, which the "
                    f"compiled code leaves out; remove() the policies, and {ADVICE}"
                )
        run: Callable[..., Any] = self.inner or compat.plain_call(self._model)
        return run(*args, **kwargs)


def call_inside(module: nn.Module) -> Callable[..., Any] | None:
    """What `module(...)` runs, a check around it left out."""
    call = compat.call_of(module)
    owner = getattr(call, "__self__", None)
    return owner.inner if isinstance(owner, CompileCheck) else call
