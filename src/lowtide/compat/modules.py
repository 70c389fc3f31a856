"""Modules: their calls, hooks, buffers and compiled forms."""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


def restore_registrations(model: torch.nn.Module) -> None:
    """What transformers notes down when it constructs a model and a model that was unpickled lacks.

    Without it a model that asks for its own hidden states gets none.
    """
    registry = getattr(sys.modules.get("transformers.utils.output_capturing"), "_CAN_RECORD_REGISTRY", None)
    if registry is None:
        return
    for module in model.modules():
        flags = getattr(module, "_can_record_outputs", None)
        if flags:
            registry.setdefault(str(type(module)), flags)


def parametrized_names(module: object) -> list[str] | None:
    """The tensors of a module that `torch.nn.utils.parametrize` computes; None for a module without any."""
    if not isinstance(module, torch.nn.Module) or not torch.nn.utils.parametrize.is_parametrized(module):
        return None
    return list(vars(module)["_modules"]["parametrizations"])


def rebuild_parametrized(kind: type[torch.nn.Module], names: list[str]) -> torch.nn.Module:
    """An empty module of a class that computes these tensors; its state is still to come."""
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    torch.nn.utils.parametrize._inject_new_class(module)
    for name in names:
        torch.nn.utils.parametrize._inject_property(module, name)
    return module


def uncompiled(function: object) -> object | None:
    """The function that `torch.compile` was given, None for anything it did not return."""
    if not isinstance(function, types.FunctionType):
        return None
    return getattr(function, "_torchdynamo_orig_callable", None)


def compiled_original(module: torch.nn.Module) -> torch.nn.Module | None:
    """The module inside what `torch.compile` returned, None for anything else."""
    # By name: importing the class would import the compiler, for seconds, where nobody compiles.
    if type(module).__name__ != "OptimizedModule":
        return None
    original = vars(module)["_modules"].get("_orig_mod")
    return original if isinstance(original, torch.nn.Module) else None


def replace_call(module: torch.nn.Module, call: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """What `module(...)` runs from now on, hooks and compiled code included; returns what it ran before.

    None, also as the answer, is the module's own way. torch keeps `Module.compile`'s result in this place, and leaves it
    out of copies and pickles: a copy of a managed model is a plain one.
    """
    before: Callable[..., Any] | None = module._compiled_call_impl
    module._compiled_call_impl = call
    return before


def call_of(module: torch.nn.Module) -> Callable[..., Any] | None:
    """What `module(...)` runs instead of the module's own way: what was put there, or code compiled in place."""
    call: Callable[..., Any] | None = module._compiled_call_impl
    return call


def is_compiled_around() -> bool:
    """Whether this thread runs inside of a `torch.compile` that would take in everything called from here."""
    # While the compiler looks at this very code, and while it runs the code itself because it could not follow.
    # Read, not imported: the module is there from the start, while the compiler takes seconds to import.
    return torch.compiler.is_dynamo_compiling() or torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None


_FUNCTIONAL_CALL = torch.nn.utils.stateless._functional_call.__code__


def is_functional_call() -> bool:
    """Whether this thread runs inside of `torch.func.functional_call`, which gives modules other tensors for one call.

    It tells nobody: it writes to the modules' own dictionaries. So it is looked for among the callers, which takes
    microseconds; ask where something is not as it was.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _FUNCTIONAL_CALL:
            return True
        frame = frame.f_back
    return False


_GUARDS: weakref.WeakKeyDictionary[torch.nn.Module, list[Callable[[], Exception]]] = weakref.WeakKeyDictionary()
_COMPILE = torch.nn.Module.compile


def _guarded_compile(module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    for refusal in _GUARDS.get(module, ()):
        raise refusal()
    _COMPILE(module, *args, **kwargs)


def guard_compile(module: torch.nn.Module, refusal: Callable[[], Exception]) -> None:
    """Let `module.compile()` raise this, until `unguard_compile`. The refusal must not hold the module: it is kept.

    `Module.compile` puts its code in the very place where a replaced call stands, and tells nobody. torch's own method is
    exchanged while there is a guard, and not an attribute of the module, which would travel with copies and pickles.
    """
    _GUARDS.setdefault(module, []).append(refusal)
    kind: Any = torch.nn.Module
    if kind.compile is _COMPILE:
        kind.compile = _guarded_compile


def unguard_compile(module: torch.nn.Module, refusal: Callable[[], Exception]) -> None:
    """And no longer. May be repeated."""
    others = [other for other in _GUARDS.pop(module, ()) if other is not refusal]
    if others:
        _GUARDS[module] = others
    kind: Any = torch.nn.Module
    if not _GUARDS and kind.compile is _guarded_compile:
        kind.compile = _COMPILE


_MARK = -1
"""No hook has this number."""


def show_call_to_compiler(module: torch.nn.Module, *, shows: bool) -> None:
    """Let the compiler go through what `replace_call` has put there, when it looks into whoever calls the module.

    It would go to `forward` by itself otherwise, past the replaced call, unless the module seems to have hooks. This
    mark is among the settings of hooks, and has no hook to it: `module(...)` does the same as without.
    """
    if shows:
        module._forward_hooks_with_kwargs[_MARK] = True
    else:
        module._forward_hooks_with_kwargs.pop(_MARK, None)


def plain_call(module: torch.nn.Module) -> Callable[..., Any]:
    """What `module(...)` runs when nothing replaced it."""
    call: Callable[..., Any] = module._call_impl
    return call


def has_module_hooks(module: torch.nn.Module) -> bool:
    """Whether somebody registered forward or backward hooks on the module itself."""
    return any(
        (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
    )


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """The module's own buffers by name: the dictionary itself, so that one can be put back."""
    return module._buffers


class BudgetedCompiler:
    """A backend for `torch.compile`: a given one, which keeps a share of what it would save for the backward.

    Code is shared between equal modules compiled by the same backend object, and by that object only: one object for
    each share keeps a module from running code that was made for another share.
    """

    def __init__(self, share: float, backend: str = "inductor") -> None:
        self.share = share
        self.backend = backend

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        """Compile one graph. The budget counts at this moment, when forward and backward are parted."""
        from torch._dynamo.backends.registry import lookup_backend
        from torch._functorch import config

        with config.patch(activation_memory_budget=self.share):
            compiled: Any = lookup_backend(self.backend)(graph, inputs)
        return compiled  # type: ignore[no-any-return]  # of two kinds, by settings that are not made here
