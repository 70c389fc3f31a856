"""Tensors on their way: autograd's nodes, hooks and versions; operators and dispatch modes; storages and who holds them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import checkpoint as checkpoint_module
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

SavedTensor = torch._C._autograd.SavedTensor
"""What a node of a graph, or a checkpoint, keeps for the backward: a tensor, or what a hook packed it into."""


def has_autograd_references(kind: type) -> bool:
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


def next_node_number() -> int:
    """The sequence number that the next autograd node of this thread will get."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def current_node_number() -> int | None:
    """The sequence number of the autograd node that runs in this thread, None outside of any."""
    node: Any = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


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
    hooks: dict[int, Any] | None = getattr(parameter, "_post_accumulate_grad_hooks", None)
    if hooks is None or len(hooks) < 2 or handle.id not in hooks:
        return False
    if next(reversed(hooks)) != handle.id:
        # See `register_first_gradient_hook` on why it is not moved in place.
        hooks[handle.id] = hooks.pop(handle.id)
    return True


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


ENGINE_FUNCTION = "_engine_run_backward"
"""The Python function that enters autograd's engine: under it, until the next Python frame, everything is C++."""


FailedBackward = Callable[[Exception, Sequence[Any]], Callable[[], None] | None]
"""Given what came out of a backward, and its roots. None: it is for somebody else. Else the answer is called when the
exception's frames are gone, and may raise something else."""
_ENGINE = torch.autograd.graph._engine_run_backward
_LISTENERS: list[FailedBackward] = []
ChosenInputs = Callable[[Sequence[Any], Sequence[Any]], None]
"""Given the roots of a backward, and the inputs for which alone gradients are asked; may raise, and then nothing has run."""
_CHOICES: list[ChosenInputs] = []
Listener = TypeVar("Listener", FailedBackward, ChosenInputs)


def _engine_run_backward(roots: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    inputs = args[3] if len(args) > 3 else ()
    for look in tuple(_CHOICES) if inputs else ():
        look(roots, inputs)
    try:
        return _ENGINE(roots, *args, **kwargs)
    except Exception as error:
        repair = next((found for listen in _LISTENERS if (found := listen(error, roots)) is not None), None)
        if repair is None:
            raise
        told = error.with_traceback(None)  # whose frames hold what the backward has made
    told.__context__ = told.__cause__ = None
    repair()
    raise told


def watch_failed_backwards(listener: FailedBackward) -> Callable[[], None]:
    """Tell of every exception that comes out of a backward of this process, until the function that is returned is called.

    Operators raise in C++, where no hook of Python's is: the one place around them is the function that enters the engine.
    It is torch's own as long as nobody listens.
    """
    return _watch(_LISTENERS, listener)


def watch_chosen_inputs(look: ChosenInputs) -> Callable[[], None]:
    """Tell of every `torch.autograd.grad` and `backward(inputs=)` of this process before it runs, until the answer is called."""
    return _watch(_CHOICES, look)


def _watch(listeners: list[Listener], listener: Listener) -> Callable[[], None]:
    engine: Any = torch.autograd
    listeners.append(listener)
    engine._engine_run_backward = _engine_run_backward

    def stop() -> None:
        if listener in listeners:
            listeners.remove(listener)
        if not (_LISTENERS or _CHOICES):
            engine._engine_run_backward = _ENGINE

    return stop


def nodes_before(roots: Iterable[Any]) -> Iterator[Any]:
    """All nodes of the graph of these tensors."""
    waiting = [root.grad_fn for root in roots if getattr(root, "grad_fn", None) is not None]
    seen = {*waiting}
    while waiting:
        node: Any = waiting.pop()
        yield node
        new = {before for before, _ in node.next_functions if before is not None} - seen
        seen |= new
        waiting += new


def leaves_of_graph(roots: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
    """The leaves that the graph of these tensors accumulates gradients into."""
    return (node.variable for node in nodes_before(roots) if hasattr(node, "variable"))


def backward_number() -> int | None:
    """A number that tells the backward that this thread is running from others; None outside of one."""
    number = int(torch._C._current_graph_task_id())
    return None if number < 0 else number


def call_after_backward(callback: Callable[[], None]) -> None:
    """Have the running backward call this at its end, in the thread that called `backward`. Not called if it fails."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


class OldestNode:
    """Finds the oldest node that the calls of one module make. A call makes the same graph as the one before, as a rule:
    the way from its output to its first node is remembered, and tried before all nodes are looked at.
    """

    def __init__(self) -> None:
        self._way: tuple[int, ...] = ()

    def find(self, ends: list[Any], since: int) -> Any:  # nodes have no public type
        """The oldest graph node that these lead to and that was made since a node number; None without one."""
        if self._way and (node := _follow(self._way, ends)) is not None and node._sequence_nr() == since:
            return node  # nothing is older that was made since
        found, self._way = _search(ends, since)
        return found


def _follow(way: tuple[int, ...], ends: list[Any]) -> Any:
    """The node at the end of the way; None where the graph has no such way."""
    try:
        node = ends[way[0]]
        for edge in way[1:]:
            node = node.next_functions[edge][0]
    except (IndexError, AttributeError):
        return None
    return node


def _search(ends: list[Any], since: int) -> tuple[Any, tuple[int, ...]]:
    """The oldest node made since, and the way to it."""
    found: Any = None
    way: Any = None
    oldest = sys.maxsize
    seen: set[Any] = set()
    waiting: list[tuple[Any, Any]] = [(node, (None, edge)) for edge, node in enumerate(ends)]
    while waiting:
        node, step = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        # Accumulations of gradients have the largest number there is, so that they run at once.
        number = int(node._sequence_nr())
        if number < since or number > sys.maxsize // 2:
            continue
        if number < oldest:
            found, way, oldest = node, step, number
        waiting += [(following, (step, edge)) for edge, (following, _) in enumerate(node.next_functions)]
    edges: list[int] = []
    while way is not None:
        way, edge = way
        edges.append(edge)
    return found, tuple(reversed(edges))


def version_of(tensor: torch.Tensor) -> int:
    """How often the tensor was written to in place."""
    return int(tensor._version)


def keep_version(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """What is written to the tensor in here does not count: a backward may read what was there before, or does not read it."""
    return torch.autograd._unsafe_preserve_version_counter(tensor)  # type: ignore[attr-defined]


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """How often each tensor was written to in place."""
    return [tensor._version for tensor in tensors]


def keeps_graph() -> bool:
    """Whether the running backward keeps its graph (`retain_graph=True`), for others to come. True outside of one."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def find_overload(name: str) -> object | None:
    """The overload of an aten operator named as in its schema (`sum.dim_IntList`), None where this torch has none."""
    packet_name, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, packet_name, None)
    return None if packet is None else getattr(packet, overload or "default", None)


def operators_with_fallback() -> list[str]:
    """Operators that CPU and CUDA run in one kernel and that torch takes apart on any other device."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return [
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and has_kernel(name, "CompositeImplicitAutograd") and has_kernel(name, "CPU")
    ]


def operators_cast_on_host() -> list[str]:
    """Operators that the host's autocast gives other types, named as in their schemas."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    return [name.removeprefix("aten::") for name in names if has_kernel(name, "AutocastCPU")]


def unregister_kernels(library: torch.library.Library) -> None:
    """Take back the kernels that a library has registered."""
    library._destroy()


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


def unscale_in_place(gradients: list[torch.Tensor], flag: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply gradients of one device and dtype in fp32; the flag becomes 1 where one of them was not finite.

    No synchronisation. The flag and the factor are single fp32 numbers on the gradients' device. Kernels exist for CUDA
    and for the CPU, for real dtypes only.
    """
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, flag, factor)


def norms_in_fp32(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The norm of each, in a launch or two where they are of one device and type. Sums are
    in another order than for each alone.
    """
    return list(torch._foreach_norm(list(tensors), 2, dtype=torch.float32))


def assert_on_device(condition: torch.Tensor, message: str) -> None:
    """Let the device stop with an error when it finds the condition false; nobody waits for it."""
    torch._assert_async(condition, message)


def operator_name(operator: object) -> str:
    """The name of an operator without its namespace and overload: `mm`, `flex_attention`."""
    name = operator.name() if isinstance(operator, torch._ops.OperatorBase) else str(operator)
    return str(name).rpartition("::")[2].partition(".")[0]


def operator_arguments(operator: object) -> dict[str, Any]:
    """The names of an operator's arguments in their order, with their defaults; {} where it does not say."""
    schema = getattr(operator, "_schema", None)
    return {} if schema is None else {argument.name: argument.default_value for argument in schema.arguments}


def is_overload(operator: object) -> bool:
    """Whether an operator is one overload, and not one of a higher order."""
    return isinstance(operator, torch._ops.OpOverload)


def operator_key(operator: object, args: Sequence[Any]) -> object:
    """Tells calls of an operator of a higher order from others: compiled regions are all calls of one."""
    return (
        checkpoint_module._sac_storage_key(operator, args)
        if hasattr(checkpoint_module, "_sac_storage_key")
        else operator
    )


def uncounted_operators() -> set[object]:
    """Operators that a checkpoint runs of its own, more often in one run than in the other."""
    return set(checkpoint_module.SAC_IGNORED_OPS)


def detached_below_autograd(tensor: torch.Tensor) -> torch.Tensor:
    """A detached alias, with the same version, of an output that autograd has not seen yet; later calls give it instead."""
    # Else views would not share their version with what they are views of.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


class PlainMode(TorchDispatchMode):  # torch's __init_subclass__ has no types
    """A dispatch mode that the compiler does not know of."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # By default the first operator under a mode imports torch._dynamo, for a second or two, and that import leaves
        # a reference cycle through the frames that were running: the user's. And each operator passes through it.
        return False


class WatchingMode(PlainMode):
    """A dispatch mode for watching real steps: no side effects of its own, and it lets higher-order operators pass."""

    # torch refuses these under a mode that does not say so (flex_attention run eagerly, for one).
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled, as it would be unwatched; its inner operators are not seen."""
        return True


def without_autocast() -> contextlib.AbstractContextManager[None]:
    """Run without the spare backend's autocast rules, inside one of them."""
    every_key: Any = torch._C.DispatchKey
    keys = torch._C.DispatchKeySet(every_key.AutocastPrivateUse1)
    guard: contextlib.AbstractContextManager[None] = torch._C._ExcludeDispatchKeyGuard(keys)
    return guard


def without_dispatch() -> contextlib.AbstractContextManager[None]:
    """Run operators on a wrapper itself: of use only where they change its shape and touch no data."""
    guard: contextlib.AbstractContextManager[None] = torch._C._DisableTorchDispatch()
    return guard


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


without_function_modes: Callable[[], contextlib.AbstractContextManager[None]] = torch._C.DisableTorchFunction
"""Inside, no `__torch_function__` is called, neither a subclass's nor a mode's."""
without_torch_function: Callable[[], contextlib.AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass
"""Call torch functions on tensor subclasses as if they were plain tensors. torch's own class: windows ask for it many times."""


def is_in_transform() -> bool:
    """Whether a transform of `torch.func` (grad, vjp, vmap, ...) runs: its tensors are wrapped, and hold no memory."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside_transforms() -> contextlib.AbstractContextManager[object]:
    """What runs inside is not part of any transform of `torch.func`."""
    if not is_in_transform():
        return contextlib.nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that transforms of `torch.func` were given, inside of what they made of it."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def flatten(value: object) -> tuple[list[Any], Any]:
    """The leaves of nested containers, and the structure that `unflatten` puts them back into."""
    from torch.utils import _pytree

    leaves, structure = _pytree.tree_flatten(value)
    return leaves, structure


def unflatten(leaves: Sequence[Any], structure: Any) -> Any:
    """Undo `flatten`: new containers around the leaves."""
    from torch.utils import _pytree

    return _pytree.tree_unflatten(leaves, structure)


def tensors_in(value: object) -> list[torch.Tensor]:
    """Every tensor in nested lists, tuples, dictionaries and dataclasses, depth first."""
    found: list[torch.Tensor] = []
    _gather_tensors(value, found)
    return found


_LEAVES = frozenset((type(None), bool, int, float, str))
"""What most arguments of a module are that are no tensors; to ask whether one is a dataclass takes long."""
_SEQUENCES = (list, tuple)


def _gather_tensors(value: object, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif type(value) in _LEAVES:
        return
    elif isinstance(value, _SEQUENCES):
        for entry in value:
            _gather_tensors(entry, found)
    elif isinstance(value, dict):
        for entry in value.values():
            _gather_tensors(entry, found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _gather_tensors(getattr(value, field.name), found)


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
        except (NotImplementedError, RuntimeError):  # torch raises either for tensors without a storage, by their kind
            return None
    # A tensor of a trace has no bytes: a meta storage stands for them, and is shared as theirs would be.
    return None if storage.device.type == "meta" and not is_stand_in(tensor) else storage


def is_stand_in(tensor: torch.Tensor) -> bool:
    """Whether a tensor belongs to a trace: it says so of its class, and stands for a plain one."""
    return getattr(type(tensor), "has_storage_of_its_own", False)


def reference_count(tensor: torch.Tensor) -> int:
    """How many C++ owners a tensor has, its Python object included."""
    counted: Any = tensor
    return int(counted._use_count())


def exchange_contents(one: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange the memory, shape, device and gradient history of two plain tensors; each stays the same object.

    Unlike `torch.utils.swap_tensors` also where weak references point to them: recurrent modules keep some to their weights,
    and each goes on pointing to the same object.
    """
    torch._C._swap_tensor_impl(one, other)


def storage_over(flat: torch.Tensor) -> torch.UntypedStorage:
    """A new storage over exactly the bytes of a flat tensor, which keeps them alive; on any device, without a copy."""
    # Not the public `from_dlpack`: it asks the driver about the memory and records events, at every call.
    shared: torch.Tensor = torch._C._from_dlpack(torch._C._to_dlpack(flat))
    return shared.untyped_storage()


def num_storage_owners(tensor: torch.Tensor) -> int:
    """How many tensors share the storage, `tensor` included."""
    return num_owners(tensor.untyped_storage())


def num_owners(storage: torch.UntypedStorage) -> int:
    """How many tensors share the storage."""
    # Its Python object is one owner itself.
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def nums_of_owners(keys: Iterable[int]) -> list[int]:
    """`num_owners` of each storage, by its `storage_key`; it must be alive."""
    return [count - 1 for count in map(torch._C._storage_Use_Count, keys)]


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors that share a storage, on meta too; valid while both live."""
    return int(tensor.untyped_storage()._cdata)


def without_memory(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors on the host that look like the parameters and have no memory. Not on meta: there torch 2.11 refuses fused
    optimizers.
    """
    with FakeTensorMode():  # one for all: to enter it takes as long as to make a hundred tensors
        return {
            name: torch.empty_strided(
                parameter.shape,
                parameter.stride(),
                dtype=parameter.dtype,
                device="cpu",
                requires_grad=parameter.requires_grad,
            )
            for name, parameter in parameters.items()
        }


def meta_tensor_over(
    storage: torch.UntypedStorage, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], offset: int = 0
) -> torch.Tensor:
    """A meta tensor of this shape and type that is a view of a storage."""
    return torch.empty(0, dtype=dtype, device="meta").set_(storage, offset, size, stride)


def has_no_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a stand-in for one: on meta, or fake, or of a device that only predicts."""
    # Not torch's spare backend under any other name: that may be a real device.
    without = ("meta", "ghost")
    # By name: importing the class would import the compiler's parts, where nobody predicts.
    return tensor.device.type in without or type(tensor).__name__ == "FakeTensor"


def is_called_from_engine(plumbing: tuple[str, ...], *, has_own_thread: bool) -> bool:
    """Whether autograd's C++ code called the running operator, and not any Python function.

    Args:
        plumbing: How the files begin whose frames stand between an operator and the mode that sees it.
        has_own_thread: The engine runs in a thread of its own, as for a device; for the host in the one that asked for it.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(plumbing):
        frame = frame.f_back
    return frame is None or (not has_own_thread and frame.f_code.co_name == ENGINE_FUNCTION)


DISPATCH_FILE = str(sys.modules[TorchDispatchMode.__module__].__file__)
"""Holds frames between an operator and the mode that sees it."""


def would_sum_in_place(args: Sequence[Any]) -> bool:
    """Whether autograd's engine would have added to the first of two terms on the host, were it not watched.

    It does so where it holds the only reference to a term without gaps, and never under a dispatch mode.
    """
    return _num_references(args) <= num_sole_references() and num_storage_owners(args[0]) <= 1 and _is_dense(args[0])


def _num_references(args: Sequence[Any]) -> int:
    first = args[0]
    return reference_count(first) + sys.getrefcount(first)


class _ReferenceProbe(WatchingMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self.num_references = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor:
            self.num_references = _num_references(args)
        return func(*args, **(kwargs or {}))


@functools.cache
def num_sole_references() -> int:
    """How many references a gradient has that only the engine holds: it depends on torch's version, so it is tried.

    In this graph the sum's first term has no other owner. 0, so that no sum is taken for one, where torch sums in
    another way.
    """
    probe = _ReferenceProbe()
    with torch.inference_mode(False), torch.enable_grad(), probe:
        leaf = torch.ones(2, requires_grad=True)
        torch.autograd.backward((leaf.sin() * leaf.cos()).sum())
    return probe.num_references


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie without gaps or overlaps, in any order of dimensions."""
    expected = 1
    dims = [(stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
    for stride, size in sorted(dims):
        if stride != expected:
            return False
        expected *= size
    return True
