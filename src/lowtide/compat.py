"""Every private torch touchpoint, in one file, so that a new torch version is checked in one place (2.11 to 2.13)."""

from __future__ import annotations

import contextlib
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

SavedTensor = torch._C._autograd.SavedTensor
"""What a node of a graph, or a checkpoint, keeps for the backward: a tensor, or what a hook packed it into."""


class WatchingMode(TorchDispatchMode):  # torch's __init_subclass__ has no types
    """A dispatch mode for watching real steps: no side effects of its own, and it lets higher-order operators pass."""

    # torch refuses these under a mode that does not say so (flex_attention run eagerly, for one).
    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # By default the first operator under a mode imports torch._dynamo, for a second or two, and that import leaves
        # a reference cycle through the frames that were running: the user's.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled, as it would be unwatched; its inner operators are not seen."""
        return True


def is_autograd_holder(kind: type) -> bool:
    """Whether `autograd_references` has something to say about objects of this type."""
    return issubclass(kind, torch.Tensor | torch.autograd.graph.Node | SavedTensor)


def autograd_references(holder: object) -> list[object]:
    """What a tensor, an autograd node or a saved tensor keeps alive from C++, where the collector cannot see it.

    For a tensor: its node, its gradient, the base it is a view of, its indices and values. For a node: the nodes before
    it, the leaf it accumulates into, what it saved for the backward. Packed values (`saved_tensors_hooks`) come as they
    were packed together with their unpack hook; nothing is unpacked, because that may copy or recompute.
    """
    if isinstance(holder, torch.Tensor):
        # A subclass would get to see these attribute reads through __torch_function__.
        with torch._C.DisableTorchFunctionSubclass():
            return _tensor_references(holder)
    if isinstance(holder, SavedTensor):
        return _saved_references(holder)
    references = [function for function, _ in getattr(holder, "next_functions", ())]
    references.append(getattr(holder, "variable", None))
    for name in dir(type(holder)):
        if name.startswith("_raw_saved_"):
            try:
                saved = getattr(holder, name)
            except RuntimeError:  # a list of saved tensors that the backward has freed already
                continue
            for entry in saved if isinstance(saved, list | tuple) else (saved,):
                references += _saved_references(entry)
    return [reference for reference in references if reference is not None]


def _saved_references(saved: Any) -> list[object]:  # Any: torch's stub of SavedTensor lacks both
    try:
        return [reference for reference in (saved.data, saved.unpack_hook) if reference is not None]
    except RuntimeError:  # packed by hooks of C++, or freed by the backward
        return []


def _tensor_references(tensor: torch.Tensor) -> list[object]:
    references: list[object] = [tensor.grad_fn, tensor._base]
    if tensor.is_leaf or tensor.retains_grad:  # reading it elsewhere warns
        references.append(tensor.grad)
    if tensor.layout is torch.sparse_coo:
        references += (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        references += (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        references += (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    return [reference for reference in references if reference is not None]


def plain_storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage that holds the tensor's bytes; None where it has none of its own (sparse, opaque, meta, fake).

    Torch keeps one Python object per storage alive for as long as the storage lives, whoever holds it: its `id` is a
    key, and a weak reference to it tells of the storage's death.
    """
    # A subclass would get to see these reads through __torch_function__.
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.layout is not torch.strided:
            return None
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return None
    # A tensor of a trace has no bytes: a meta storage stands for them, and is shared as theirs would be.
    is_stand_in = getattr(type(tensor), "has_storage_of_its_own", False)
    return None if storage.device.type == "meta" and not is_stand_in else storage


def register_python_backend(name: str, module: object) -> None:
    """Give torch's spare backend slot (PrivateUse1) a name, a Python device module and do-nothing device guards."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(name, backend_module=module)


def next_node_number() -> int:
    """The sequence number that the next autograd node of this thread will get."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def current_node_number() -> int | None:
    """The sequence number of the autograd node that runs in this thread, None outside of any."""
    node: Any = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def reference_count(tensor: torch.Tensor) -> int:
    """How many C++ owners a tensor has, its Python object included."""
    counted: Any = tensor
    return int(counted._use_count())


def storage_over(flat: torch.Tensor) -> torch.UntypedStorage:
    """A new storage over exactly the bytes of a flat tensor, which keeps them alive; on any device, without a copy."""
    # Not the public `from_dlpack`: it asks the driver about the memory and records events, at every call.
    shared: torch.Tensor = torch._C._from_dlpack(torch._C._to_dlpack(flat))
    return shared.untyped_storage()


def num_storage_owners(tensor: torch.Tensor) -> int:
    """How many tensors share the storage, `tensor` included."""
    # The storage's Python object, made to ask the question, is one owner itself.
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) - 1


def find_overload(name: str) -> object | None:
    """The overload of an aten operator named as in its schema (`sum.dim_IntList`), None where this torch has none."""
    packet_name, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, packet_name, None)
    return None if packet is None else getattr(packet, overload or "default", None)


def without_autocast() -> contextlib.AbstractContextManager[None]:
    """Run without the spare backend's autocast rules, inside one of them."""
    every_key: Any = torch._C.DispatchKey
    keys = torch._C.DispatchKeySet(every_key.AutocastPrivateUse1)
    guard: contextlib.AbstractContextManager[None] = torch._C._ExcludeDispatchKeyGuard(keys)
    return guard


def allow_foreach_on(kind: type[torch.Tensor]) -> None:
    """Let the optimizers take their foreach form for parameters of this type, as they do for plain CUDA parameters."""
    from torch.optim.optimizer import _foreach_supported_types

    if kind not in _foreach_supported_types:
        _foreach_supported_types.append(kind)


def treat_cuda_as(name: str, on_autocast_exit: Callable[[], None]) -> None:
    """Make `torch.autocast("cuda")` mean the backend `name` in this process, and tell of the outermost context's end."""
    original_init = torch.autocast.__init__
    original_clear = torch.clear_autocast_cache

    def init(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        original_init(self, name if device_type == "cuda" else device_type, *args, **kwargs)

    def clear() -> None:
        on_autocast_exit()
        original_clear()

    torch.autocast.__init__ = init  # type: ignore[method-assign]
    torch.clear_autocast_cache = clear


def operators_with_fallback() -> list[str]:
    """Operators that CPU and CUDA run in one kernel and that torch takes apart on any other device."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and has_kernel(name, "CompositeImplicitAutograd") and has_kernel(name, "CPU")
    ]
    # This one has a kernel for CUDA and none for the CPU.
    return [*names, *(["_fused_rms_norm"] if find_overload("_fused_rms_norm") is not None else [])]


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


def operator_path(value: object) -> str | None:
    """The dotted name below `torch` of an operator or an operator namespace, None for anything else.

    They look like modules and cannot be pickled as such.
    """
    if isinstance(value, type(torch.ops)):
        return "ops"
    if isinstance(value, type(torch.ops.aten)):
        return f"ops.{value.name}"
    if isinstance(value, torch._ops.OpOverloadPacket | torch._ops.OpOverload):
        return f"ops.{value}"
    return None


def operator_at(path: str) -> object:
    """The operator or namespace that `operator_path` named."""
    found: object = torch
    for part in path.split("."):
        found = getattr(found, part)
    return found


def post_accumulate_hooks(parameter: torch.Tensor) -> dict[int, Any]:
    """The hooks that run when a parameter's gradient is complete, by number: the dictionary itself, {} without any."""
    hooks: dict[int, Any] | None = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return {} if hooks is None else hooks


def register_first_gradient_hook(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """Run a hook when the parameter's gradient is complete, before those registered earlier; returns its handle."""
    handle = parameter.register_post_accumulate_grad_hook(hook)
    hooks: dict[int, Any] = parameter._post_accumulate_grad_hooks
    # Autograd walks the dictionary itself, whose order `move_to_end` of an OrderedDict does not change.
    for number in [number for number in hooks if number != handle.id]:
        hooks[number] = hooks.pop(number)
    return handle


def make_last_gradient_hook(parameter: torch.Tensor, handle: Any) -> bool:
    """Let this one of the parameter's post-accumulate hooks run after all others; whether there are others."""
    hooks = post_accumulate_hooks(parameter)
    if len(hooks) < 2 or handle.id not in hooks:
        return False
    if next(reversed(hooks)) != handle.id:
        # See `register_first_gradient_hook` on why it is not moved in place.
        hooks[handle.id] = hooks.pop(handle.id)
    return True


class MemoryProfile:
    """A context that records every operator and every allocation of all threads that work for this one.

    `roots` holds the profiler's event trees afterwards. The profiler sits below Python: it holds no tensor and makes
    none, so autograd sums gradients in place as it would unwatched, which it does not under a dispatch mode.
    """

    def __init__(self) -> None:
        self.roots: list[Any] = []
        self._profile = torch.autograd.profiler.profile(use_kineto=True, record_shapes=True, profile_memory=True)

    def __enter__(self) -> MemoryProfile:
        self._profile.__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._profile.__exit__(kind, error, traceback)
        if kind is None and self._profile.kineto_results is not None:
            self.roots = self._profile.kineto_results.experimental_event_tree()


def is_profiling() -> bool:
    """Whether a torch profiler watches this thread: torch has room for one."""
    return bool(torch._C._autograd._profiler_enabled())


def start_allocator_history(device: torch.device, max_entries: int) -> None:
    """Let the CUDA allocator note each request with its Python stack; what it noted before is dropped."""
    torch.cuda.memory._record_memory_history(
        "all", context="alloc", stacks="python", max_entries=max_entries, device=device, clear_history=True
    )


def stop_allocator_history(device: torch.device) -> None:
    """End what `start_allocator_history` began."""
    torch.cuda.memory._record_memory_history(None, device=device)


def allocator_history(device: torch.device) -> list[dict[str, Any]]:
    """What the CUDA allocator noted, oldest first.

    Each entry has `action`, `addr`, `size` (as requested) and, for an allocation, `frames`, the innermost first.
    """
    entries: list[dict[str, Any]] = torch.cuda.memory._snapshot(device)["device_traces"][device.index]
    return entries


def tensor_hooks(tensor: torch.Tensor) -> list[Callable[..., object]]:
    """The hooks that run when a tensor's gradient is computed or accumulated."""
    hooks: list[Callable[..., object]] = list((tensor._backward_hooks or {}).values())
    hooks += (getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values()
    return hooks


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether hooks see the tensor's gradient before it is accumulated."""
    return bool(tensor._backward_hooks)


def accumulates_into(leaf: torch.Tensor) -> bool:
    """Whether the running backward adds to the leaf's `.grad`: not `torch.autograd.grad`, nor one with other `inputs`."""
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # asked about a leaf whose gradient is given to the caller
        return False


def has_saved_tensor_hooks() -> bool:
    """Whether what autograd saves at this moment goes through `saved_tensors_hooks` (offloading, checkpointing)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def allocator_segments() -> list[dict[str, Any]]:
    """The CUDA allocator's segments, each with its `blocks` in order of address."""
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()
    return segments


ENGINE_FUNCTION = "_engine_run_backward"
"""The Python function that enters autograd's engine: under it, until the next Python frame, everything is C++."""


def without_dispatch() -> contextlib.AbstractContextManager[None]:
    """Run operators on a wrapper itself: of use only where they change its shape and touch no data."""
    guard: contextlib.AbstractContextManager[None] = torch._C._DisableTorchDispatch()
    return guard


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


def without_modes() -> contextlib.AbstractContextManager[None]:
    """Run operators as they are, unseen by the dispatch modes of this thread."""
    from torch.utils._python_dispatch import _disable_current_modes

    modes: contextlib.AbstractContextManager[None] = _disable_current_modes()
    return modes


def push_mode_below(mode: TorchDispatchMode) -> None:
    """Put a dispatch mode of this thread below all that are there, where it stays until `remove_mode`.

    A `with` block around another mode takes the topmost mode away at its end, whichever that is. Below the others a
    mode is never the one that is taken by mistake, however the blocks around it begin and end.
    """
    above = []
    while torch._C._len_torch_dispatch_stack():
        above.append(torch._C._pop_torch_dispatch_stack(None))
    torch._C._push_on_torch_dispatch_stack(mode)
    for other in reversed(above):
        torch._C._push_on_torch_dispatch_stack(other)


def has_mode(mode: TorchDispatchMode) -> bool:
    """Whether a dispatch mode is on this thread's stack; while one runs an operator, torch takes it off."""
    num_modes = torch._C._len_torch_dispatch_stack()
    return any(torch._C._get_dispatch_stack_at(index) is mode for index in range(num_modes))


def remove_mode(mode: TorchDispatchMode) -> None:
    """Take a dispatch mode off this thread's stack, wherever it is; nothing happens where it is not."""
    if not has_mode(mode):
        return
    above = []
    while (top := torch._C._pop_torch_dispatch_stack(None)) is not mode:
        above.append(top)
    for other in reversed(above):
        torch._C._push_on_torch_dispatch_stack(other)


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


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors that share a storage, on meta too; valid while both live."""
    return int(tensor.untyped_storage()._cdata)


def lock_host_memory(buffer: torch.Tensor) -> str | None:
    """Lock a host tensor's memory for copies; what CUDA answered where it could not, None where it did.

    Registered memory has exactly the tensor's size; torch's own locked allocations are rounded up to a power of two.
    """
    answer = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)
    if int(answer) == 0:
        return None
    # CUDA keeps the refusal as its last error, and the next kernel that the user starts would be blamed for it.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return str(answer)


def unlock_host_memory(address: int) -> None:
    """Undo `lock_host_memory` of the memory that begins there."""
    torch.cuda.cudart().cudaHostUnregister(address)


def backward_number() -> int | None:
    """A number that tells the backward that this thread is running from others; None outside of one."""
    number = int(torch._C._current_graph_task_id())
    return None if number < 0 else number


def call_after_backward(callback: Callable[[], None]) -> None:
    """Have the running backward call this at its end, in the thread that called `backward`. Not called if it fails."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


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


def without_torch_function() -> contextlib.AbstractContextManager[None]:
    """Call torch functions on tensor subclasses as if they were plain tensors."""
    return torch._C.DisableTorchFunctionSubclass()


def step_hooks(optimizer: torch.optim.Optimizer) -> tuple[list[Any], list[Any]]:
    """The hooks that users registered before and after this optimizer's step, and every optimizer's, in torch's order."""
    from torch.optim import optimizer as module

    before = [*module._global_optimizer_pre_hooks.values(), *optimizer._optimizer_step_pre_hooks.values()]
    after = [*optimizer._optimizer_step_post_hooks.values(), *module._global_optimizer_post_hooks.values()]
    return before, after


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Take the step of the optimizer's class by itself: the wrapper around it would call hooks."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    step(optimizer)


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


def shallow_optimizer(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], state: Any
) -> torch.optim.Optimizer:
    """An optimizer of the same class and settings over other parameters and state, without the user's hooks."""
    shadow = object.__new__(type(optimizer))
    shadow.__dict__.update(optimizer.__dict__)
    shadow.__dict__.pop("step", None)
    shadow.param_groups, shadow.state = groups, state
    shadow._optimizer_step_pre_hooks = OrderedDict()
    shadow._optimizer_step_post_hooks = OrderedDict()
    for name in SCALER_ATTRIBUTES:
        shadow.__dict__.pop(name, None)
    return shadow


def oldest_node(ends: list[Any], since: int) -> Any:  # nodes have no public type
    """Of the graph nodes that these lead to and that were made since a node number, the oldest; None without one."""
    found: Any = None
    oldest = sys.maxsize
    seen: set[Any] = set()
    waiting = list(ends)
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        # Accumulations of gradients have the largest number there is, so that they run at once.
        number = int(node._sequence_nr())
        if number < since or number > sys.maxsize // 2:
            continue
        if number < oldest:
            found, oldest = node, number
        waiting += [following for following, _ in node.next_functions]
    return found


def version_of(tensor: torch.Tensor) -> int:
    """How often the tensor was written to in place."""
    return int(tensor._version)


def unscale_in_place(gradients: list[torch.Tensor], flag: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply gradients of one device and dtype in fp32; the flag becomes 1 where one of them was not finite.

    No synchronisation. The flag and the factor are single fp32 numbers on the gradients' device. Kernels exist for CUDA
    and for the CPU, for real dtypes only.
    """
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, flag, factor)


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


def keeps_graph() -> bool:
    """Whether the running backward keeps its graph (`retain_graph=True`), for others to come. True outside of one."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def has_no_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a stand-in for one: on meta, or fake, or of a device that only predicts."""
    # Not torch's spare backend under any other name: that may be a real card.
    without = ("meta", "ghost")
    # By name: importing the class would import the compiler's parts, where nobody predicts.
    return tensor.device.type in without or type(tensor).__name__ == "FakeTensor"


def assert_on_device(condition: torch.Tensor, message: str) -> None:
    """Let the device stop with an error when it finds the condition false; nobody waits for it."""
    torch._assert_async(condition, message)


def flatten(value: object) -> tuple[list[Any], Any]:
    """The leaves of nested containers, and the structure that `unflatten` puts them back into."""
    from torch.utils import _pytree

    leaves, structure = _pytree.tree_flatten(value)
    return leaves, structure


def unflatten(leaves: Sequence[Any], structure: Any) -> Any:
    """Undo `flatten`: new containers around the leaves."""
    from torch.utils import _pytree

    return _pytree.tree_unflatten(leaves, structure)


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """The module's own buffers by name: the dictionary itself, so that one can be put back."""
    return module._buffers


def operator_name(operator: object) -> str:
    """The name of an operator without its namespace and overload: `mm`, `flex_attention`."""
    name = operator.name() if isinstance(operator, torch._ops.OperatorBase) else str(operator)
    return str(name).rpartition("::")[2].partition(".")[0]


def operator_arguments(operator: object) -> dict[str, Any]:
    """The names of an operator's arguments in their order, with their defaults; {} where it does not say."""
    schema = getattr(operator, "_schema", None)
    return {} if schema is None else {argument.name: argument.default_value for argument in schema.arguments}


class BudgetedCompiler:
    """A backend for `torch.compile`: the default one, which keeps a share of what it would save for the backward.

    Code is shared between equal modules compiled by the same backend object, and by that object only: one object for
    each share keeps a module from running code that was made for another share.
    """

    def __init__(self, share: float) -> None:
        self.share = share

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        """Compile one graph. The budget counts at this moment, when forward and backward are parted."""
        from torch._functorch import config
        from torch._inductor.compile_fx import compile_fx

        with config.patch(activation_memory_budget=self.share):
            compiled: Any = compile_fx(graph, inputs)
        return compiled  # type: ignore[no-any-return]  # of two kinds, by settings that are not made here
