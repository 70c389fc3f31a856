"""Operators: found by name, named for others, and those that only torch itself calls."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


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
