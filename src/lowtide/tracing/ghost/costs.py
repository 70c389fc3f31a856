"""CudaCosts: what CUDA kernels and libraries allocate beside an operator's outputs, and how long it takes them.

Each rule states its cause: a library that keeps a workspace, a kernel that copies a strided input, a convolution that
rearranges its operands. Figures behind the rules: `benchmarks/accuracy/calibrate_ops.py` on an H200.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from lowtide.hardware import Hardware
from lowtide.tracing.ghost import convolutions, recurrent, reductions
from lowtide.tracing.ghost.arithmetic import num_flops
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
"""Share of the card's best rates that ordinary kernels reach; only the shape of the time axis depends on it."""


class CudaCosts:
    """The costs of one target card under one torch version."""

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
    return list(reductions.staging_bytes(reductions.describe(tensor, dims, accumulator), num_sms))


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


_ATTENTION_STATISTICS = 4


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
