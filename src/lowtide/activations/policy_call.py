"""PolicyCall: takes the calls of one module, and runs each as the module's policy says."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lowtide import compat
from lowtide.activations.compile_check import call_inside, refuse_compiled_around
from lowtide.activations.group_call import GroupCall, checkpointed
from lowtide.activations.moving_buffers import MovingBuffers
from lowtide.activations.offloading import Offloading
from lowtide.activations.policy import CompileBudget, Keep, Offload, Policy, Recompute, Selective
from lowtide.activations.segments import Segments
from lowtide.activations.selective import explain_fault, selective_contexts
from lowtide.activations.training_modes import TrainingModes
from lowtide.errors import ActivationError

CompileGroup = Callable[[nn.Module, str, float], Callable[..., Any]]
"""From a module, its path and the share of what it may save to what takes its calls."""


class Counts:
    """How often groups have run again, over all modules of a model."""

    def __init__(self) -> None:
        self.num_recomputed = 0
        self.num_remade = 0

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
        path: Of the module in the model.
        policy: What becomes of the tensors that its forward saves.
        offloading: Shared by the modules of the model.
        segments: Shared by the modules of the model.
        counts: Shared by the modules of the model.
        compile_group: Compiles the module, where its policy is a compile budget.
    """

    def __init__(
        self,
        module: nn.Module,
        path: str,
        policy: Policy,
        *,
        offloading: Offloading,
        segments: Segments,
        counts: Counts,
        compile_group: CompileGroup,
    ) -> None:
        self._module, self._path, self._policy = module, path, policy
        self._offloading, self._segments, self._counts = offloading, segments, counts
        self._compile = compile_group
        self._buffers = MovingBuffers(module)
        self._parts = [*module.modules()]
        self._parameters = {id(parameter) for parameter in module.parameters()}
        self._inner: Callable[..., Any] | None = None
        self._compiled: Callable[..., Any] | None = None
        self._is_active = False
        self._thread = threading.local()
        self._check()

    def install(self) -> None:
        """Take the module's calls."""
        if isinstance(self._policy, CompileBudget):
            self._compiled = self._compile(self._module, self._path, self._policy.share)
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
        call = call_inside(self._module)
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
        if not self._is_active or getattr(self._thread, "passes", False):
            return run(*args, **kwargs)
        if isinstance(self._policy, Keep):
            return run(*args, **kwargs)
        refuse_compiled_around(self._module, self._path)
        if self._compiled is not None:
            return self._compiled(*args, **kwargs)
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        leaves, structure = compat.flatten((args, kwargs))
        if not self._needs_gradient(leaves):
            return run(*args, **kwargs)
        return self._run_by_policy(run, args, kwargs, leaves, structure)

    def _run_by_policy(
        self,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: list[Any],
        structure: Any,
    ) -> Any:
        policy = self._policy
        if isinstance(policy, Offload) and not policy.recompute:
            with self._offloading.hooks(policy, self._module, leaves):
                return run(*args, **kwargs)
        self._refuse_given_parameters()
        if isinstance(policy, Selective):
            run = functools.partial(self._explained, run)
        modes = TrainingModes(self._parts)
        call = GroupCall(run, args, kwargs, structure, self._buffers, modes, self._counts.count_recomputed)
        if isinstance(policy, Offload):
            with self._offloading.hooks(policy, self._module, leaves):
                return checkpointed(call, leaves)
        if isinstance(policy, Selective):
            return checkpointed(call, leaves, selective_contexts(policy.rule))
        assert isinstance(policy, Recompute)
        if policy.segment == 1:
            return checkpointed(call, leaves)
        return self._segments.run(call, self._pass, leaves, length=policy.segment, on_again=self._counts.count_remade)

    def _refuse_given_parameters(self) -> None:
        """The module would run again in the backward, when `functional_call` has given it its own parameters back."""
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
        with self._passing():
            return self._module(*args, **kwargs)

    @contextmanager
    def _passing(self) -> Iterator[None]:
        self._thread.passes = True
        try:
            yield
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


def compiled(module: nn.Module, path: str, share: float) -> Callable[..., Any]:
    """The module compiled by torch, with a share of what it would save."""
    call: Callable[..., Any] = torch.compile(compat.plain_call(module), backend=_compiler(share))
    return call


@functools.cache
def _compiler(share: float) -> compat.BudgetedCompiler:
    # One object for each share: code that was compiled for one must not serve another.
    return compat.BudgetedCompiler(share)
