"""PolicyCall: takes the calls of one module, and runs each as the module's policy says.

Note [Compiled code around policies is refused]
The compiler goes through the forwards of the modules that a compiled one calls, past what stands around their calls: the
policies would be left out, and nobody told. What is compiled at the time of `apply` is found by looking. What is compiled
later around modules with policies meets their calls, which are shown to the compiler for that. And a module with a policy that is
compiled in place later, in the place of the policy's call, is found when the model is called; the model itself, where
nobody would be called, when it is compiled.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lowtide import compat
from lowtide.activations.group_call import GroupCall, MovingBuffers, TrainingModes, checkpointed
from lowtide.activations.policy import CompileBudget, Keep, Offload, Policy, Recompute, Selective
from lowtide.activations.saved import Held, Saved, take
from lowtide.activations.segments import Segments
from lowtide.activations.selective import explain_fault, selective_contexts
from lowtide.activations.stash import Stash
from lowtide.errors import ActivationError
from lowtide.memory.cuda_mover import CudaMover
from lowtide.memory.emulated_mover import EmulatedMover
from lowtide.memory.mover import Mover

CompileGroup = Callable[[nn.Module, str, float], Callable[..., Any]]
"""Takes a module, its path, and the share of its saved bytes that is allowed; returns the function that runs its calls."""
IsWeight = Callable[[torch.Tensor], bool]
"""Whether a tensor is a weight, or shares memory with one: weights never travel as activations."""
ADVICE = "compile the blocks before you apply policies: for block in model.layers: block.compile()"


@dataclass(slots=True, eq=False)
class Shared:
    """What the modules of one model share."""

    offloading: Offloading
    compile_group: CompileGroup
    """Compiles a module whose policy is a compile budget."""
    segments: Segments = field(default_factory=Segments)
    num_recomputed: int = 0
    num_remade: int = 0

    def count_recomputed(self) -> None:
        """A group runs again for its own backward."""
        self.num_recomputed += 1

    def count_remade(self) -> None:
        """A group runs again for the inputs of those after it in its segment."""
        self.num_remade += 1


class PolicyCall:
    """Stands around one module, outside of its hooks and its compiled code.

    Args:
        module: The module.
        path: Where the module is in the model.
        policy: What becomes of the tensors that its forward saves.
        shared: With the other modules of the model.
    """

    def __init__(self, module: nn.Module, path: str, policy: Policy, shared: Shared) -> None:
        self._module, self._path, self._policy, self._shared = module, path, policy, shared
        self._buffers = MovingBuffers(module)
        self._parts = [*module.modules()]
        self._parameters = {id(parameter) for parameter in module.parameters()}
        self._inner: Callable[..., Any] | None = None
        self._compiled: Callable[..., Any] | None = None
        self._is_active = False
        self._thread = threading.local()
        self._selective = selective_contexts(policy.rule) if isinstance(policy, Selective) else None
        self._check()

    def install(self) -> None:
        """Take the module's calls."""
        if isinstance(self._policy, CompileBudget):
            self._compiled = self._shared.compile_group(self._module, self._path, self._policy.share)
        # Said first: `remove` undoes as much as was done.
        self._inner = compat.call_of(self._module)
        self._is_active = True
        compat.replace_call(self._module, self._call)
        compat.show_call_to_compiler(self._module, shows=not isinstance(self._policy, Keep))

    def remove(self) -> None:
        """Give the module's calls back. Where others have taken them since, calls pass through here to what was before."""
        if self._is_active:
            self._is_active = False
            compat.show_call_to_compiler(self._module, shows=False)
            if compat.call_of(self._module) == self._call:
                compat.replace_call(self._module, self._inner)

    def _check(self) -> None:
        label = f"{type(self._module).__name__} at {self._path or 'the top'}"
        call = _call_inside(self._module)
        if isinstance(getattr(call, "__self__", None), PolicyCall):
            raise ActivationError(
                f"{label} has an activation policy already; remove() the first one before you apply another"
            )
        if isinstance(self._policy, CompileBudget) and call is not None and compat.uncompiled(call) is None:
            raise ActivationError(
                f"the calls of {label} go through something else already (tile_sequence, put_on_host), and CompileBudget "
                "compiles the module past it; remove() that first, or give the module another policy"
            )
        if not isinstance(self._policy, Selective):
            return
        for module in self._module.modules():
            if compat.compiled_original(module) is not None or compat.uncompiled(compat.call_of(module)) is not None:
                raise ActivationError(
                    f"{label} is compiled, and Selective has to see each operator by itself; give it CompileBudget(share=...), "
                    "with which the compiler chooses what to keep, or Recompute"
                )

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        run = self._inner or compat.plain_call(self._module)
        if not self._is_active or getattr(self._thread, "passes", False) or isinstance(self._policy, Keep):
            return run(*args, **kwargs)
        if compat.is_compiled_around():
            raise ActivationError(
                f"torch.compile around {type(self._module).__name__} at {self._path or 'the top'} would go past its "
                f"activation policy; {ADVICE}"
            )
        if self._compiled is not None:
            return self._compiled(*args, **kwargs)
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        leaves, structure = compat.flatten((args, kwargs))
        if not self._needs_gradient(leaves):
            return run(*args, **kwargs)
        return self._run_by_policy(run, args, kwargs, leaves, structure)

    def _run_by_policy(
        self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any], structure: Any
    ) -> Any:
        policy = self._policy
        if isinstance(policy, Offload) and not policy.recompute:
            with self._shared.offloading.hooks(policy, self._module, leaves):
                return run(*args, **kwargs)
        self._refuse_given_parameters()
        if isinstance(policy, Selective):
            run = functools.partial(self._explained, run)
        modes = TrainingModes(self._parts)
        call = GroupCall(run, (args, kwargs), structure, self._buffers, modes, self._shared.count_recomputed)
        if isinstance(policy, Offload):
            with self._shared.offloading.hooks(policy, self._module, leaves):
                return checkpointed(call, leaves)
        if isinstance(policy, Selective):
            return checkpointed(call, leaves, self._selective)
        assert isinstance(policy, Recompute)
        if policy.segment == 1:
            return checkpointed(call, leaves)
        shared = self._shared
        return shared.segments.run(call, self._pass, leaves, length=policy.segment, on_again=shared.count_remade)

    def _refuse_given_parameters(self) -> None:
        """Refuse a call inside `functional_call`: in the backward the module would run again with its own parameters."""
        if not compat.is_functional_call():
            return
        if {id(parameter) for parameter in self._module.parameters()} != self._parameters:
            raise ActivationError(
                f"functional_call gives {type(self._module).__name__} at {self._path or 'the top'} other parameters for this "
                f"call, and its policy {type(self._policy).__name__} runs it again in the backward, when it has its own; call it "
                "under torch.no_grad(), or give the module the policy Keep"
            )

    def _pass(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module from outside, through whatever was put around it after this, but without its policy."""
        self._thread.passes = True
        try:
            return self._module(*args, **kwargs)
        finally:
            self._thread.passes = False

    def _explained(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except RuntimeError as error:
            assert isinstance(self._policy, Selective)
            label = f"{type(self._module).__name__} at {self._path or 'the top'}"
            fault = explain_fault(error, label, self._policy.rule)
            if fault is None:
                raise
            raise fault from error

    def _needs_gradient(self, leaves: list[Any]) -> bool:
        return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves) or any(
            parameter.requires_grad for parameter in self._module.parameters()
        )


# One object for each share: code that was compiled for one must not serve another.
_compiler = functools.cache(compat.BudgetedCompiler)


def compiled(module: nn.Module, path: str, share: float) -> Callable[..., Any]:
    """The module compiled by torch, with a share of what it would save."""
    call: Callable[..., Any] = torch.compile(compat.plain_call(module), backend=_compiler(share))
    return call


class Offloading:
    """The stash of a model, made when the first tensor goes: a model may still be moved before it runs.

    Args:
        mover: Makes the copies. None: one of its own for the device of the first inputs. On the CPU that is an emulated one,
            of use for tests alone.
        is_weight: More weights than the group's own parameters and buffers; None without any.
        poison: See `Stash`.
    """

    def __init__(self, mover: Mover | None, is_weight: IsWeight | None, *, poison: bool) -> None:
        self._mover, self._is_weight, self._poison = mover, is_weight, poison
        self._lock = threading.Lock()
        self.stash: Stash | None = None

    def hooks(self, policy: Offload, module: nn.Module, leaves: Iterable[Any]) -> saved_tensors_hooks:
        """A context for one call of a group: what is saved in it goes to the host, where the policy says so."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        stash = self._stash_for(tensors, module)
        weights = {*module.parameters(), *module.buffers(), *(t for t in tensors if isinstance(t, nn.Parameter))}
        storages = {compat.storage_key(weight) for weight in weights if compat.plain_storage(weight) is not None}
        parcel = stash.open_parcel(policy.depth, module)
        is_weight = self._is_weight or (lambda tensor: False)

        def pack(tensor: torch.Tensor) -> Saved:
            goes = stash.accepts(tensor, policy.min_bytes) and compat.storage_key(tensor) not in storages
            return stash.put(parcel, tensor) if goes and not is_weight(tensor) else Held(tensor)

        return saved_tensors_hooks(compat.uncompiled_hook(pack), compat.uncompiled_hook(take))

    def close(self) -> None:
        """Free the stash's host memory."""
        if self.stash is not None:
            self.stash.close()

    def _stash_for(self, tensors: list[torch.Tensor], module: nn.Module) -> Stash:
        with self._lock:
            if self.stash is None:
                tensors = [*tensors, *module.parameters()]
                device = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
                own = (
                    EmulatedMover()
                    if device is None
                    else CudaMover(device, max_kept_bytes=sys.maxsize, poison=self._poison)
                )
                self.stash = Stash(self._mover or own, poison=self._poison)
            return self.stash


class CompileCheck:
    """Takes the calls of the whole model, for all policies on it; see Note [Compiled code around policies is refused]."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._watched: dict[str, nn.Module] = {}
        self._is_active = False
        self._refusal = partial(
            ActivationError,
            f"{type(model).__name__} has an activation policy as a whole, which code compiled in its place would leave out; "
            "remove() the policy, call model.compile() first, and apply the policy after that",
        )
        self.inner: Callable[..., Any] | None = None
        """The model's call as it was before."""

    @classmethod
    def of(cls, model: nn.Module) -> CompileCheck:
        """The one that stands around the model's calls, or a new one."""
        owner = getattr(compat.call_of(model), "__self__", None)
        return owner if isinstance(owner, CompileCheck) and owner._is_active else cls(model)

    def watch(self, modules: dict[str, nn.Module]) -> None:
        """From now on these have policies. With the first of them the model's calls are taken."""
        if not self._is_active:
            # Said first: `forget` undoes as much as was done.
            self.inner = compat.call_of(self._model)
            self._is_active = True
            compat.replace_call(self._model, self._call)
        self._watched |= modules
        if "" in modules:
            compat.guard_compile(self._model, self._refusal)

    def forget(self, modules: dict[str, nn.Module]) -> None:
        """These have no policies any more. With the last of them the model gets its calls back, unless they were taken since."""
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


def refuse_compiled_holders(model: nn.Module, paths: Iterable[str]) -> None:
    """Raise if a module is compiled that calls one of the modules at the paths."""
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


def _call_inside(module: nn.Module) -> Callable[..., Any] | None:
    """The function that `module(...)` runs, without a check around it."""
    call = compat.call_of(module)
    owner = getattr(call, "__self__", None)
    return owner.inner if isinstance(owner, CompileCheck) else call
