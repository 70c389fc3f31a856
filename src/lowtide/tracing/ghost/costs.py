"""CudaCosts: what CUDA kernels and libraries allocate beside an operator's outputs, and how long it takes them.

Each rule states its cause: a library that keeps a workspace, a kernel that copies a strided input, a convolution that
rearranges its operands. Figures behind the rules: `benchmarks/accuracy/calibrate_ops.py` on an H200.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lowtide.hardware import Hardware
from lowtide.tracing.ghost import convolutions, recurrent
from lowtide.tracing.ghost.operators import Course, Operator

MATRIX_PRODUCTS = frozenset(
    {
        "aten.mm",
        "aten.addmm",
        "aten.bmm",
        "aten.baddbmm",
        "aten.addbmm",
        "aten._addmm_activation",
        "aten.mv",
        "aten.addmv",
        "aten.dot",
    }
)
EFFICIENCY = 0.7
"""Share of the device's best rates that ordinary kernels reach; only the shape of the time axis depends on it."""
_ATTENTION_STATISTICS = 4
MAX_THREADS = 512
WARP = 32
MIN_VALUES_PER_THREAD = 16
MAX_VALUES_PER_THREAD = 256
THREADS_PER_SM = 2048
BACKWARD_ATTENTION = 2.5
"""Products in the backward of fused attention (five) over those in its forward (two)."""


class CudaCosts:
    """The costs of one target device under one torch version."""

    def __init__(self, hardware: Hardware, torch_version: str) -> None:
        self._hardware = hardware
        self._workspace_bytes = hardware.cublas_workspace_for(torch_version)
        self._lt_workspace_bytes = hardware.cublaslt_workspace_for(torch_version)
        self._warm: set[tuple[int, str]] = set()
        self._kept: set[str] = set()

    def lasting(self, op: Operator, args: tuple[Any, ...]) -> Iterable[tuple[str, int]]:
        """CuBLAS keeps one workspace per thread that calls it: the main one, and autograd's. CuDNN keeps the state of its
        dropout, one for all recurrent layers.
        """
        if op.name == "aten._cudnn_rnn" and recurrent.drops(args) and "dropout" not in self._kept:
            self._kept.add("dropout")
            yield "cuDNN", self._hardware.num_sms * recurrent.DROPOUT_BYTES_PER_SM
        if op.name not in MATRIX_PRODUCTS or not self._workspace_bytes:
            return
        thread = threading.get_ident()
        if (thread, "cuBLAS") not in self._warm:
            self._warm.add((thread, "cuBLAS"))
            yield "cuBLAS", self._workspace_bytes
        if op.name in ("aten.addmm", "aten._addmm_activation") and (thread, "cuBLASLt") not in self._warm:
            self._warm.add((thread, "cuBLASLt"))
            if self._lt_workspace_bytes:
                yield "cuBLASLt", self._lt_workspace_bytes

    def has_course(self, op: Operator) -> bool:
        """Whether scratch memory is taken before and between the operator's outputs."""
        return op.name in _COURSES

    def course(self, op: Operator, args: tuple[Any, ...], out: Any) -> Course:
        """What such an operator takes and frees, in order."""
        return _COURSES[op.name](args, out)

    def passing(self, op: Operator, args: tuple[Any, ...], out: Any) -> list[list[int]]:
        """Scratch that lives while the operator runs: stages, one after the other."""
        staged = _STAGED_RULES.get(op.name)
        if staged is not None:
            return staged(args, out, self._hardware.num_sms)
        rule = _RULES.get(op.name)
        return [] if rule is None else [rule(args, out, self._hardware.num_sms)]

    def seconds(self, op: Operator, args: tuple[Any, ...], out: Any) -> float:
        """Roofline: the longer of arithmetic and memory traffic."""
        hardware = self._hardware
        tensors = [*_tensors(args), *_tensors(out)]
        moved = sum(t.numel() * t.element_size() for t in tensors)
        seconds = moved / (hardware.memory_bytes_per_s * EFFICIENCY) if hardware.memory_bytes_per_s else 0.0
        flops = num_flops(op.name, args, out)
        if flops:
            rate = hardware.flops(str(tensors[0].dtype), allow_tf32=False)
            if rate:
                seconds = max(seconds, flops / (rate * EFFICIENCY))
        return seconds


class HostCosts(CudaCosts):
    """The host's kernels keep no workspaces; their scratch memory lies outside torch's tensors and is not counted."""

    def lasting(self, op: Operator, args: tuple[Any, ...]) -> Iterable[tuple[str, int]]:
        """Nothing."""
        return ()

    def has_course(self, op: Operator) -> bool:
        """None has."""
        return False

    def passing(self, op: Operator, args: tuple[Any, ...], out: Any) -> list[list[int]]:
        """Nothing."""
        return []


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _copy_if_strided(tensor: Any) -> int:
    """Kernels that need dense rows copy an input that has none."""
    return 0 if not isinstance(tensor, Tensor) or tensor.is_contiguous() else _nbytes(tensor)


def _reduce(args: Any, out: Any, num_sms: int) -> list[int]:
    tensor = args[0]
    dims = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else []
    return _staging(tensor, dims, num_sms)


def _reduce_norm(args: Any, out: Any, num_sms: int) -> list[int]:
    return _staging(args[0], args[2] if len(args) > 2 and args[2] else [], num_sms)


def _reduce_one(args: Any, out: Any, num_sms: int) -> list[int]:
    return _staging(args[0], [args[1]] if len(args) > 1 and isinstance(args[1], int) else [], num_sms)


def _staging(tensor: Tensor, dims: Any, num_sms: int) -> list[int]:
    if tensor.dim() == 0 or tensor.numel() == 0:
        return []
    accumulator = max(tensor.element_size(), 4) if tensor.is_floating_point() else 8
    return list(staging_bytes(describe_reduction(tensor, dims, accumulator), num_sms))


def _softmax_backward(args: Any, out: Any, num_sms: int) -> list[int]:
    return [_nbytes(out)]  # the product of gradient and output


def _safe_softmax(args: Any, out: Any, num_sms: int) -> list[int]:
    return [args[0].numel()]  # which entries are minus infinity


def _first_strided(args: Any, out: Any, num_sms: int) -> list[int]:
    return [_copy_if_strided(args[0])]


def _first_two_strided(args: Any, out: Any, num_sms: int) -> list[int]:
    return [_copy_if_strided(args[0]), _copy_if_strided(args[1])]


def _layer_norm_backward(args: Any, out: Any, num_sms: int) -> list[int]:
    return [_copy_if_strided(args[0]), _copy_if_strided(args[1])]


def _roll(args: Any, out: Any, num_sms: int) -> list[int]:
    return [_nbytes(out)] * (len(args[1]) - 1)  # one dimension after the other


def _embedding_backward(args: Any, out: Any, num_sms: int) -> list[int]:
    """Sorted by token, summed in segments of at most ten rows, in fp32; few tokens take a kernel without all that."""
    gradient, indices, num_weights = args[0], args[1], args[2]
    count = indices.numel()
    if count <= 3072 and not args[4]:
        return [_copy_if_strided(gradient)]
    segments = min(count, num_weights)
    partial = count // 10 + segments
    return [_copy_if_strided(gradient), 40 * count + 8 * segments, 4 * partial * gradient.size(-1)]


def _index_put(args: Any, out: Any, num_sms: int) -> list[int]:
    if len(args) < 4 or not args[3]:
        return []
    count = max((index.numel() for index in args[1] if isinstance(index, Tensor)), default=0)
    return [48 * count]  # sorted so that equal rows can be summed without atomics


def _sort(args: Any, out: Any, num_sms: int) -> list[int]:
    return [2 * _nbytes(args[0])]


def _cudnn_attention_backward(args: Any, out: Any, num_sms: int) -> list[int]:
    query, key = args[1], args[2]
    batch, heads, length, size = query.shape
    needed = batch * heads * length * (size + 1) * _ATTENTION_STATISTICS  # dq in fp32 and one number a row
    if key.size(1) != heads:
        needed += 2 * batch * heads * key.size(2) * size * query.element_size()  # dk and dv before heads are grouped
    return [needed]


def _flash_attention_backward(args: Any, out: Any, num_sms: int) -> list[int]:
    query, key = args[1], args[2]
    batch, heads, length, size = query.shape
    rounded, wide = -(-length // 128) * 128, -(-size // 32) * 32
    needed = [batch * heads * rounded * 4, batch * heads * rounded * wide * 4]
    if key.size(1) != heads:
        needed += [batch * heads * key.size(2) * size * query.element_size()] * 2
    return needed


def _efficient_attention_backward(args: Any, out: Any, num_sms: int) -> list[list[int]]:
    """The query's gradient is summed in fp32 tiles, each with a lock of 16 bytes, whole tiles even for a part of one.

    Row sums of gradient times output come first; in half precision the kernel makes them itself, in fp32 torch does, by way
    of the whole product. Tile sizes as in torch's `mem_eff_attention/kernels/cutlassB.h` for compute capability 8 and newer.
    """
    gradient, query = args[0], args[1]
    batch, heads, length, size = query.shape
    is_half = query.element_size() == 2
    rows, columns = (64, 64) if size <= 64 else (128, 128 if is_half and size <= 128 else 64)
    tiles = -(-length // rows) * -(-size // columns)
    copied = _copy_if_strided(gradient.transpose(1, 2))
    sums = 4 * batch * heads * length
    summed = [copied, sums, 4 * batch * heads * tiles * (rows * columns + 4)]
    return [summed] if is_half else [[copied, _nbytes(gradient), sums, sums], summed]


def _ctc_backward(args: Any, out: Any, num_sms: int) -> list[int]:
    return [_nbytes(args[6])]  # the backward variables, in a table like that of the forward ones


def _dropout(args: Any, out: Any) -> Course:
    return [out[1], out[0]]  # the mask first


def _upsample_backward(args: Any, out: Any, num_sms: int) -> list[int]:
    is_same_size = list(args[1]) == list(args[2][2:])
    return [] if is_same_size else [_copy_if_strided(args[0])]  # one to one is a plain copy into the output


_RULES: dict[str, Callable[[Any, Any, int], list[int]]] = {
    **dict.fromkeys(
        ("aten.sum", "aten.mean", "aten.amax", "aten.amin", "aten.any", "aten.all", "aten.nansum", "aten.var"), _reduce
    ),
    **dict.fromkeys(("aten.prod", "aten.argmax", "aten.argmin", "aten.max", "aten.min"), _reduce_one),
    "aten.linalg_vector_norm": _reduce_norm,
    "aten._softmax_backward_data": _softmax_backward,
    "aten._safe_softmax": _safe_softmax,
    "aten._softmax": _first_strided,
    "aten._log_softmax": _first_strided,
    "aten._log_softmax_backward_data": _first_two_strided,
    "aten.native_layer_norm": _first_strided,
    "aten.native_layer_norm_backward": _layer_norm_backward,
    "aten._fused_rms_norm": _first_strided,
    "aten._fused_rms_norm_backward": _layer_norm_backward,
    "aten.roll": _roll,
    "aten.embedding_dense_backward": _embedding_backward,
    "aten.index_put": _index_put,
    "aten.index_put_": _index_put,
    "aten._index_put_impl_": _index_put,
    "aten.sort": _sort,
    "aten._ctc_loss_backward": _ctc_backward,
    "aten.upsample_bilinear2d_backward": _upsample_backward,
    "aten.upsample_nearest2d_backward": _upsample_backward,
    "aten._scaled_dot_product_cudnn_attention_backward": _cudnn_attention_backward,
    "aten._scaled_dot_product_flash_attention_backward": _flash_attention_backward,
}
_STAGED_RULES: dict[str, Callable[[Any, Any, int], list[list[int]]]] = {
    "aten._scaled_dot_product_efficient_attention_backward": _efficient_attention_backward,
}
_COURSES: dict[str, Callable[[Any, Any], Course]] = {
    "aten.native_dropout": _dropout,
    "aten.convolution": convolutions.forward_course,
    "aten.convolution_backward": convolutions.backward_course,
    "aten._cudnn_rnn": recurrent.forward_course,
    "aten._cudnn_rnn_backward": recurrent.backward_course,
}


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction as the kernel sees it, dimensions merged."""

    num_outputs: int
    inputs_per_output: int
    reduces_fastest: bool
    """Whether the dimension of the smallest stride is reduced."""
    vector: int
    """Outputs computed by one thread side by side."""
    accumulator_bytes: int


def describe_reduction(tensor: Tensor, dims: Sequence[int], accumulator_bytes: int) -> Reduction:
    """The reduction of a tensor over some dimensions (all of them when none is given)."""
    reduced = {d % tensor.dim() for d in dims} if dims else set(range(tensor.dim()))
    sizes = tensor.shape
    inputs = outputs = 1
    for d, size in enumerate(sizes):
        if d in reduced:
            inputs *= size
        else:
            outputs *= size
    reduced_strides = [tensor.stride(d) for d in reduced if sizes[d] > 1]
    kept = [(tensor.stride(d), sizes[d]) for d in range(tensor.dim()) if d not in reduced and sizes[d] > 1]
    reduces_fastest = not kept or (bool(reduced_strides) and min(reduced_strides) < min(kept)[0])
    vector = 1
    if not reduces_fastest and kept and min(kept)[0] == 1:
        others = [*reduced_strides, *(stride for stride, _ in kept if stride != 1)]
        for candidate in (4, 2):
            if min(kept)[1] % candidate == 0 and all(stride % candidate == 0 for stride in others):
                vector = candidate
                break
    return Reduction(
        num_outputs=outputs,
        inputs_per_output=inputs,
        reduces_fastest=reduces_fastest,
        vector=vector,
        accumulator_bytes=accumulator_bytes,
    )


def staging_bytes(reduction: Reduction, num_sms: int) -> tuple[int, int]:
    """Bytes of the staging buffer and of its semaphores; zeros where one block finishes each output by itself.

    Blocks that share an output hand partial results over in global memory. Summing a gradient over all tokens for a bias of
    some thousand elements takes up to 130 MiB of it on an H200, more than the bias and its gradient by orders of magnitude.
    The rules are those of torch's `Reduce.cuh`.
    """
    outputs, inputs = reduction.num_outputs, reduction.inputs_per_output
    if outputs == 0 or inputs == 0:
        return 0, 0
    threads = MAX_THREADS // reduction.vector
    width_of, height_of = (inputs, outputs) if reduction.reduces_fastest else (outputs // reduction.vector, inputs)
    width_limit = threads if width_of >= threads else _last_power(width_of)
    height_limit = threads if height_of >= threads else _last_power(height_of)
    width = min(width_limit, WARP)
    height = min(height_limit, threads // width)
    width = min(width_limit, threads // height)
    step_input, step_output = (width, 1) if reduction.reduces_fastest else (1, width)
    values = -(-inputs // step_input)
    splits_warps = values >= min(height * 16, MAX_VALUES_PER_THREAD)
    if splits_warps:
        step_input *= height
        values = -(-inputs // step_input)
    else:
        step_output *= height
    grid = -(-(outputs // reduction.vector) // step_output)
    target = num_sms * (THREADS_PER_SM // (width * height))
    if not (splits_warps and values >= MAX_VALUES_PER_THREAD and grid <= target):
        return 0, 0
    blocks = max(min(-(-target // grid), -(-values // MIN_VALUES_PER_THREAD)), -(-values // MAX_VALUES_PER_THREAD))
    if blocks <= 1:
        return 0, 0
    staging = reduction.accumulator_bytes * outputs * blocks
    if not reduction.reduces_fastest:
        staging *= width * reduction.vector
    return staging, 4 * grid


def _last_power(number: int) -> int:
    return 1 << max(number.bit_length() - 1, 0)


def num_flops(name: str, args: tuple[Any, ...], out: Any) -> float:
    """Operations of one call; 0 for operators that are bound by memory traffic anyway."""
    formula = _FORMULAS.get(name)
    return 0.0 if formula is None else float(formula(args, out))


def _product(left: int) -> Callable[[tuple[Any, ...], Any], Any]:
    def formula(args: tuple[Any, ...], out: Any) -> Any:
        return 2.0 * math.prod(out.shape) * args[left].shape[-1]

    return formula


def _grouped_product(args: tuple[Any, ...], out: Any) -> Any:
    if args[0].dim() == 2 and args[1].dim() == 2:  # the weights' gradients: each row is used by one group only
        return 2.0 * math.prod(out.shape[1:]) * args[0].shape[-1]
    return 2.0 * math.prod(out.shape) * args[0].shape[-1]


def _attention(scale: float, first: int) -> Callable[[tuple[Any, ...], Any], Any]:
    def formula(args: tuple[Any, ...], out: Any) -> Any:
        query, key = args[first], args[first + 1]
        batch, heads, length, size = query.shape
        return scale * 4.0 * batch * heads * length * key.shape[2] * size

    return formula


def _convolution(args: tuple[Any, ...], out: Any) -> Any:
    return 2.0 * math.prod(out.shape) * math.prod(args[1].shape[1:])


def _convolution_backward(args: tuple[Any, ...], out: Any) -> Any:
    return 4.0 * math.prod(args[0].shape) * math.prod(args[2].shape[1:])


_FORMULAS: dict[str, Callable[[tuple[Any, ...], Any], Any]] = {
    "aten.mm": _product(0),
    "aten.bmm": _product(0),
    "aten.addmm": _product(1),
    "aten.baddbmm": _product(1),
    "aten._addmm_activation": _product(1),
    "aten._grouped_mm": _grouped_product,
    "aten.convolution": _convolution,
    "aten.convolution_backward": _convolution_backward,
    **{f"aten._scaled_dot_product_{kind}_attention": _attention(1.0, 0) for kind in ("cudnn", "flash", "efficient")},
    **{
        f"aten._scaled_dot_product_{kind}_attention_backward": _attention(BACKWARD_ATTENTION, 1)
        for kind in ("cudnn", "flash", "efficient")
    },
}
