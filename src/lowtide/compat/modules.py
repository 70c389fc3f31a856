"""What runs in a loop: modules' calls, hooks and wrappers; optimizers' steps; and the compiler around or beside them.

Checked in torch 2.13: while any thread traces or compiles, `torch.compiler.is_compiling()` is true in all of them, and the
optimizers of `torch.optim` then compute their bias corrections with tensors instead of Python's numbers: the same update
rounds differently. The compiler holds `torch._dynamo.convert_frame.compile_lock` meanwhile.
"""

from __future__ import annotations

import sys
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


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


def parameter_ids(module: torch.nn.Module) -> set[int]:
    """`id`s of the parameters of a module and all modules in it. `Module.parameters` takes four times as long."""
    found: set[int] = set()
    seen: set[int] = set()
    waiting: list[torch.nn.Module | None] = [module]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            found.update(map(id, each._parameters.values()))
            waiting += each._modules.values()
    found.discard(id(None))
    return found


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
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """The module's own buffers by name: the dictionary itself, so that one can be put back."""
    return module._buffers


def parallel_wrappers() -> tuple[type[nn.Module], ...]:
    """Classes of modules that run another module on several processes or devices.

    Those of FSDP only where somebody has imported it: no module can be one before, and the import takes a second.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    sharded = () if fsdp is None else (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)
    return (DistributedDataParallel, nn.DataParallel, *sharded)


def sharding_of(parameter: torch.Tensor) -> str | None:
    """What has made the parameter a part of one that lies on several processes; None for a whole one."""
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    if tensors is not None and isinstance(parameter, tensors.DTensor):
        return "DTensor (fully_shard or tensor parallelism)"
    if getattr(parameter, "_is_flat_param", False) or getattr(parameter, "_fsdp_flattened", False):
        return "FullyShardedDataParallel"
    return None


def running_data_parallel() -> nn.Module | None:
    """The DistributedDataParallel whose forward is running; None outside of one."""
    return DistributedDataParallel._active_ddp_module


def step_hooks(optimizer: torch.optim.Optimizer) -> tuple[list[Any], list[Any]]:
    """The hooks that users registered before and after this optimizer's step, and every optimizer's, in torch's order."""
    from torch.optim import optimizer as module

    before = [*module._global_optimizer_pre_hooks.values(), *optimizer._optimizer_step_pre_hooks.values()]
    after = [*optimizer._optimizer_step_post_hooks.values(), *module._global_optimizer_post_hooks.values()]
    return before, after


def step_without_hooks(optimizer: torch.optim.Optimizer, *arguments: Any) -> bool:
    """Take the step of the optimizer's class by itself: the wrapper around it would call hooks. True: it was taken."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    step(optimizer, *arguments)
    return True


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell learning rate schedulers that `step` was called: they warn otherwise."""
    optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers set it on the fly


def copy_scheduler_mark(source: object, target: object) -> None:
    """Where a scheduler has put its wrapper around one `step`, let it find its mark on the one in its place."""
    if hasattr(source, "_wrapped_by_lr_sched"):
        target._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers set it on the fly


SCALER_ATTRIBUTES = ("grad_scale", "found_inf")
"""What a GradScaler puts on a fused optimizer for the time of its `step`: the kernels unscale, or skip the update."""


UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_
"""What a GradScaler runs on the gradients of each device, with its flag and its scale there."""


def scaler_values(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Copies of what a GradScaler has put on the optimizer: it takes them away when `step` returns."""
    found = {name: vars(optimizer)[name] for name in SCALER_ATTRIBUTES if name in vars(optimizer)}
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in found.items()}


OPTIMIZER_BOOKKEEPING = frozenset(
    {
        *SCALER_ATTRIBUTES,
        "__getstate__",
        "_need_device_dtype_check_for_fused",
        "_opt_called",
        "_optimizer_load_state_dict_post_hooks",
        "_optimizer_load_state_dict_pre_hooks",
        "_optimizer_state_dict_post_hooks",
        "_optimizer_state_dict_pre_hooks",
        "_optimizer_step_post_hooks",
        "_optimizer_step_pre_hooks",
        "_warned_capturable_if_run_uncaptured",
        "param_groups",
        "state",
        "step",
        "zero_grad",
    }
)
"""Attributes of an optimizer that are torch's own, or a session's: all others say something about its rule."""


def shallow_optimizer(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], state: Any
) -> torch.optim.Optimizer:
    """An optimizer of the same class and settings over other parameters and state, without the user's hooks."""
    shadow: torch.optim.Optimizer = object.__new__(type(optimizer))
    shadow.__dict__.update(optimizer.__dict__)
    shadow.__dict__.pop("step", None)
    for name in SCALER_ATTRIBUTES:
        shadow.__dict__.pop(name, None)
    complete_optimizer(shadow, groups, state)
    return shadow


def complete_optimizer(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], state: Any) -> None:
    """Give an object of an optimizer's class what its `step` needs beside the class's own attributes; no hooks."""
    optimizer.param_groups, optimizer.state = groups, state
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._optimizer_step_post_hooks = OrderedDict()


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
