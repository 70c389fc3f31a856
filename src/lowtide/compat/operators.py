"""Operators, the dispatch modes between a call and its operator, who calls it, and nested arguments."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from lowtide.compat.autograd import ENGINE_FUNCTION
from lowtide.compat.devices import num_storage_owners, reference_count


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


def forget_kernels(library: torch.library.Library) -> None:
    """Take back what a library has registered."""
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


def without_torch_function() -> contextlib.AbstractContextManager[None]:
    """Call torch functions on tensor subclasses as if they were plain tensors."""
    return torch._C.DisableTorchFunctionSubclass()


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
