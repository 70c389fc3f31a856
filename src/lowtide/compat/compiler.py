"""torch's compiler: what it has compiled, work in other threads beside it, and its partitioner of a joint graph.

Checked in torch 2.13: while any thread traces or compiles, `torch.compiler.is_compiling()` is true in all of them, and the
optimizers of `torch.optim` then compute their bias corrections with tensors instead of Python's numbers: the same update
rounds differently. The compiler holds `torch._dynamo.convert_frame.compile_lock` meanwhile.

The partitioner is called as inductor calls it, without the compiler behind it. Checked in 2.11.0 and 2.13.0, on builds for
CUDA and for the CPU, on a machine without a GPU:

- `aot_module_simplified` traces forward and backward as one graph and hands it to its `partition_fn`.
- `compile_fx.partition_fn`, which inductor gives there, runs inductor's passes over that graph and then calls
  `torch._inductor.config.custom_partitioner_fn` in place of torch's partitioner, which takes the same arguments.
- `min_cut_rematerialization_partition` reads `activation_memory_budget` when it is called, and works on any copy of the graph.
- The compiler marks parameters and buffers as static, so that keeping them costs nothing; untraced by it, we say so ourselves.
- Saved values have one name as outputs of the forward and as inputs of the backward, and a value that is computed again
  in the backward has the name it had in the forward.
"""

from __future__ import annotations

import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, fx, nn

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_POLL_S = 0.02
_guard = threading.Lock()
_num_waiting = 0
"""Threads that compile and wait for work of another one: that must not wait for the compiler in turn."""


def _compile_lock() -> Any:
    """The compiler's lock; None as long as nothing was compiled."""
    return getattr(sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None)


@contextmanager
def without_compilation() -> Iterator[None]:
    """Run functions that were given to `torch.compile` as they are: what is called once on small tensors is not worth it."""
    if "torch._dynamo" not in sys.modules:  # nobody has compiled, and to import it takes a second
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def outside_compilation() -> Iterator[None]:
    """While no other thread compiles. Where a thread that compiles waits for this one, it goes on beside it."""
    lock = _compile_lock()
    is_held = False
    while lock is not None and not is_held and not _num_waiting:
        is_held = lock.acquire(timeout=_POLL_S)
    try:
        yield
    finally:
        if is_held:
            lock.release()


@contextmanager
def waiting() -> Iterator[None]:
    """Around a wait for work that may be `outside_compilation`, so that it cannot be a wait for oneself."""
    global _num_waiting
    lock = _compile_lock()
    is_compiling = lock is not None and lock._is_owned()
    with _guard:
        _num_waiting += is_compiling
    try:
        yield
    finally:
        with _guard:
            _num_waiting -= is_compiling


def uncompiled_hook(hook: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The hook, for use around compiled code, which would compile the hook too when it calls it.

    Checked in torch 2.13: compiled, a hook sees versions of tensors that are not those of the real ones.
    """
    # As long as nothing was compiled there is nothing to hide from, and asking would import the compiler.
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return hook
    hidden: Callable[Arguments, Result] = dynamo.disable(hook)
    return hidden


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


def is_compiled_around() -> bool:
    """Whether this thread runs inside of a `torch.compile` that would take in everything called from here."""
    # While the compiler looks at this very code, and while it runs the code itself because it could not follow.
    # Read, not imported: the module is there from the start, while the compiler takes seconds to import.
    return torch.compiler.is_dynamo_compiling() or torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None


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
    """Undo `guard_compile`. May be repeated."""
    others = [other for other in _GUARDS.pop(module, ()) if other is not refusal]
    if others:
        _GUARDS[module] = others
    kind: Any = torch.nn.Module
    if not _GUARDS and kind.compile is _guarded_compile:
        kind.compile = _COMPILE


class BudgetedCompiler:
    """A backend for `torch.compile`: a given one, which keeps a share of what it would save for the backward.

    Code is shared between equal modules compiled by the same backend object, and by that object only: one object for
    each share keeps a module from running code that was made for another share.
    """

    def __init__(self, share: float, backend: str = "inductor") -> None:
        self.share = share
        self.backend = backend

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        """Compile one graph. The budget counts now, when forward and backward are parted."""
        from torch._dynamo.backends.registry import lookup_backend
        from torch._functorch import config

        with config.patch(activation_memory_budget=self.share):
            compiled: Any = lookup_backend(self.backend)(graph, inputs)
        return compiled  # type: ignore[no-any-return]  # of two kinds, by settings that are not made here


@dataclass(frozen=True, slots=True, kw_only=True)
class JointGraph:
    """One graph of a forward and its backward, after inductor's passes over it."""

    module: fx.GraphModule
    arguments: dict[str, Any]
    """For the partitioner, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackward:
    """A joint graph cut into the forward's and the backward's."""

    forward: fx.Graph
    backward: fx.Graph
    num_outputs: int
    """The first outputs of the forward, which its caller gets; the others are saved for the backward."""


def trace_joint_graph(
    function: Callable[..., tuple[Tensor, ...]], weights: Sequence[Tensor], inputs: Sequence[Tensor]
) -> JointGraph:
    """The joint graph of `function(*weights, *inputs)`, traced on tensors without values on the host's device.

    Args:
        function: Returns tensors; the first of those that need a gradient starts the backward, as all others do.
        weights: Parameters and buffers: what outlives the step. Only their form counts; they may be on the meta device.
        inputs: What changes from step to step.

    Raises:
        ValueError: Nothing that the function returns needs a gradient.
    """
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._inductor import compile_fx, config
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode

    catcher = _make_catcher()
    # Models hold small tensors of their own that are no buffers; those are taken as they are.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # Inductor's passes over random operators look for the mode there.
    with mode, V.set_fake_mode(mode), config.patch(custom_partitioner_fn=catcher):
        fakes = [torch.empty_like(tensor, device="cpu") for tensor in (*weights, *inputs)]
        for fake, tensor in zip(fakes, (*weights, *inputs), strict=True):
            fake.requires_grad_(tensor.requires_grad)
        try:
            aot_module_simplified(
                _AsModule(function),  # type: ignore[arg-type]  # annotated for dynamo's graphs, made for any module
                fakes,
                fw_compiler=_no_backward,
                partition_fn=compile_fx.partition_fn,
                decompositions=select_decomp_table(),
                keep_inference_input_mutations=True,
            )
        except _Caught as caught:
            arguments = {**caught.arguments, "static_lifetime_input_indices": list(range(len(weights)))}
            return JointGraph(module=caught.module, arguments=arguments)
    raise AssertionError("either the joint graph is caught or there is no backward, and both end the trace")


def partition(joint: JointGraph, budget: float) -> ForwardBackward:
    """Cut a joint graph as torch does under an activation memory budget; the graph itself stays as it is."""
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    with config.patch(activation_memory_budget=budget):
        forward, backward = min_cut_rematerialization_partition(_copy(joint.module), **joint.arguments)
    num_outputs = joint.arguments["num_fwd_outputs"]
    return ForwardBackward(forward=forward.graph, backward=backward.graph, num_outputs=num_outputs)


def fusible_operators() -> frozenset[object]:
    """The operators that the partitioner takes to be computed within the kernel of a neighbour, with any overload."""
    from torch._functorch.partitioners import get_default_op_list

    return frozenset(get_default_op_list().fusible_ops)


def is_view(operator: object) -> bool:
    """Whether an operator returns its first argument seen differently, so that nothing is allocated."""
    return isinstance(operator, torch._ops.OpOverload) and operator.is_view


def writes_argument(operator: object) -> bool:
    """Whether an operator writes over an argument, and returns that."""
    return isinstance(operator, torch._ops.OpOverload) and operator._schema.is_mutable


class _AsModule(nn.Module):
    """A function where a module is asked for."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        return self._function(*args)


class _Caught(Exception):  # noqa: N818  # carries the graph out of the tracer; nothing is wrong
    def __init__(self, module: fx.GraphModule, arguments: dict[str, Any]) -> None:
        super().__init__("a joint graph was caught")
        self.module = module
        self.arguments = arguments


def _make_catcher() -> Any:
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Catcher(CustomPartitionerFn):
        """Stands in for the partitioner, and ends the trace."""

        def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **arguments: Any) -> Any:
            raise _Caught(gm, {"_joint_inputs": joint_inputs, **arguments})

        def uuid(self) -> None:
            """No cached code is of this partitioner."""

    return Catcher()


def _no_backward(gm: fx.GraphModule, example_inputs: Any) -> Any:
    # A joint graph is caught before anything is compiled: only a forward by itself comes here.
    raise ValueError("nothing that the function returns needs a gradient, so that there is no backward")


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    outputs = graph.graph_copy(module.graph, {})
    (old,) = (node for node in module.graph.nodes if node.op == "output")
    graph.output(outputs).meta.update(old.meta)
    return fx.GraphModule(module, graph)
