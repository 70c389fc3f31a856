"""Costs: what CUDA kernels and libraries allocate besides an operator's outputs, and how long it takes them.

Each rule states its cause: a library that keeps a workspace, a kernel that copies a strided input, a convolution that
rearranges its operands. Figures behind the rules: `benchmarks/accuracy/calibrate_ops.py` on an H200.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lowtide.hardware import Hardware
from lowtide.tracing.ghost import convolutions, recurrent
from lowtide.tracing.ghost.operators import FREE, Course, Operator, tensors_in
from lowtide.tracing.step_trace import Work, seconds_of

MATRIX_PRODUCTS = frozenset(
    f"aten.{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "addbmm", "_addmm_activation", "mv", "addmv", "dot")
)
_ATTENTION_STATISTICS = 4
MAX_THREADS = 512
WARP = 32
MIN_VALUES_PER_THREAD = 16
MAX_VALUES_PER_THREAD = 256
THREADS_PER_SM = 2048
BACKWARD_ATTENTION = 2.5
"""Products in the backward of fused attention (five) over those in its forward (two)."""
_Rule = Callable[[Any, Any, int], Course]
"""From the arguments, the outputs and the number of multiprocessors to scratch memory."""
_Formula = Callable[[Any, Any], Any]


class Costs:
    """The costs of one target device under one torch version.

    The host's kernels keep no workspaces; their scratch memory lies outside torch's tensors and is not counted.
    """

    def __init__(self, hardware: Hardware, torch_version: str) -> None:
        self._hardware = hardware
        self._rates = hardware.rates
        self._workspace_bytes = hardware.cublas_workspace_for(torch_version)
        self._lt_workspace_bytes = hardware.cublaslt_workspace_for(torch_version)
        self._courses = {} if hardware.is_host else _COURSES
        self._rules = {} if hardware.is_host else _RULES
        self._kept: set[tuple[int, str]] = set()

    def lasting(self, op: Operator, args: tuple[Any, ...]) -> Iterator[tuple[str, int]]:
        """Workspaces that a call takes for good: (owner, bytes).

        CuBLAS keeps one per thread that calls it: the main one, and autograd's. CuDNN keeps the state of its dropout, one for
        all recurrent layers.
        """
        if self._hardware.is_host:
            return
        if op.name == "aten._cudnn_rnn" and recurrent.has_dropout(args):
            yield from self._keep(0, "cuDNN", self._hardware.num_sms * recurrent.DROPOUT_BYTES_PER_SM)
        if op.name in MATRIX_PRODUCTS:
            thread = threading.get_ident()
            yield from self._keep(thread, "cuBLAS", self._workspace_bytes)
            if op.name in ("aten.addmm", "aten._addmm_activation"):
                yield from self._keep(thread, "cuBLASLt", self._lt_workspace_bytes)

    def _keep(self, thread: int, owner: str, num_bytes: int) -> Iterator[tuple[str, int]]:
        """What an owner takes the first time."""
        if num_bytes and (thread, owner) not in self._kept:
            self._kept.add((thread, owner))
            yield owner, num_bytes

    def course(self, op: Operator) -> Callable[[Any, Any], Course] | None:
        """What gives the memory of an operator, in order, that takes scratch memory before and between its outputs."""
        return self._courses.get(op.name)

    def passing(self, op: Operator, args: tuple[Any, ...], out: Any) -> Course:
        """Scratch memory besides the outputs of any other operator, while it runs."""
        rule = self._rules.get(op.name)
        return [] if rule is None else rule(args, out, self._hardware.num_sms)

    def timed(self, op: Operator, args: tuple[Any, ...], out: Any) -> tuple[float, Work]:
        """How long the device takes, 0 where its rates are not known, and what it does."""
        tensors = [*tensors_in(args), *tensors_in(out)]
        work = Work(
            sum(tensor.nbytes for tensor in tensors),
            num_flops(op.name, args, out),
            str(tensors[0].dtype) if tensors else "",
        )
        return seconds_of(op.name, work, self._rates), work


def _copy_if_strided(tensor: Any) -> int:
    """Kernels that need dense rows copy an input that has none."""
    return 0 if not isinstance(tensor, Tensor) or tensor.is_contiguous() else tensor.nbytes


def _reduction(position: int, *kinds: type) -> _Rule:
    """The rule of a reduction whose dimensions are an argument of these types; of any other type they are all."""

    def rule(args: Any, out: Any, num_sms: int) -> Course:
        given = args[position] if len(args) > position and isinstance(args[position], kinds) else []
        return _staging(args[0], [given] if isinstance(given, int) else given, num_sms)

    return rule


def _staging(tensor: Tensor, dims: Any, num_sms: int) -> Course:
    if tensor.dim() == 0 or tensor.numel() == 0:
        return []
    accumulator = max(tensor.element_size(), 4) if tensor.is_floating_point() else 8
    return list(staging_bytes(describe_reduction(tensor, dims, accumulator), num_sms))


def _strided(*positions: int) -> _Rule:
    """The rule of an operator that copies these arguments where they are strided."""
    return lambda args, out, num_sms: [_copy_if_strided(args[position]) for position in positions]


def _embedding_backward(args: Any, out: Any, num_sms: int) -> Course:
    """Sorted by token, summed in segments of at most ten rows, in fp32; few tokens take a kernel without all that."""
    gradient, indices, num_weights = args[0], args[1], args[2]
    count = indices.numel()
    if count <= 3072 and not args[4]:
        return [_copy_if_strided(gradient)]
    segments = min(count, num_weights)
    partial = count // 10 + segments
    return [_copy_if_strided(gradient), 40 * count + 8 * segments, 4 * partial * gradient.size(-1)]


def _index_put(args: Any, out: Any, num_sms: int) -> Course:
    if len(args) < 4 or not args[3]:
        return []
    count = max((index.numel() for index in args[1] if isinstance(index, Tensor)), default=0)
    return [48 * count]  # sorted so that equal rows can be summed without atomics


def _cudnn_attention_backward(args: Any, out: Any, num_sms: int) -> Course:
    query, key = args[1], args[2]
    batch, heads, length, size = query.shape
    needed = batch * heads * length * (size + 1) * _ATTENTION_STATISTICS  # dq in fp32 and one number a row
    if key.size(1) != heads:
        needed += 2 * batch * heads * key.size(2) * size * query.element_size()  # dk and dv before heads are grouped
    return [needed]


def _flash_attention_backward(args: Any, out: Any, num_sms: int) -> Course:
    query, key = args[1], args[2]
    batch, heads, length, size = query.shape
    rounded, wide = -(-length // 128) * 128, -(-size // 32) * 32
    needed: Course = [batch * heads * rounded * 4, batch * heads * rounded * wide * 4]
    if key.size(1) != heads:
        needed += [batch * heads * key.size(2) * size * query.element_size()] * 2
    return needed


def _efficient_attention_backward(args: Any, out: Any, num_sms: int) -> Course:
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
    before = [] if is_half else [size for size in (copied, gradient.nbytes, sums, sums) if size]
    return [*before, *[FREE] * len(before), copied, sums, 4 * batch * heads * tiles * (rows * columns + 4)]


def _upsample_backward(args: Any, out: Any, num_sms: int) -> Course:
    is_same_size = list(args[1]) == list(args[2][2:])
    return [] if is_same_size else [_copy_if_strided(args[0])]  # one to one is a plain copy into the output


_RULES: dict[str, _Rule] = {
    **{
        f"aten.{name}": _reduction(1, list, tuple)
        for name in ("sum", "mean", "amax", "amin", "any", "all", "nansum", "var")
    },
    **{f"aten.{name}": _reduction(1, int) for name in ("prod", "argmax", "argmin", "max", "min")},
    "aten.linalg_vector_norm": _reduction(2, list, tuple),
    # The product of gradient and output.
    "aten._softmax_backward_data": lambda args, out, num_sms: [out.nbytes],
    # Which entries are minus infinity.
    "aten._safe_softmax": lambda args, out, num_sms: [args[0].numel()],
    "aten._softmax": _strided(0),
    "aten._log_softmax": _strided(0),
    "aten._log_softmax_backward_data": _strided(0, 1),
    "aten.native_layer_norm": _strided(0),
    "aten.native_layer_norm_backward": _strided(0, 1),
    "aten._fused_rms_norm": _strided(0),
    "aten._fused_rms_norm_backward": _strided(0, 1),
    # One dimension after the other.
    "aten.roll": lambda args, out, num_sms: [out.nbytes] * (len(args[1]) - 1),
    "aten.embedding_dense_backward": _embedding_backward,
    "aten.index_put": _index_put,
    "aten.index_put_": _index_put,
    "aten._index_put_impl_": _index_put,
    "aten.sort": lambda args, out, num_sms: [2 * args[0].nbytes],
    # The backward variables, in a table like that of the forward ones.
    "aten._ctc_loss_backward": lambda args, out, num_sms: [args[6].nbytes],
    "aten.upsample_bilinear2d_backward": _upsample_backward,
    "aten.upsample_nearest2d_backward": _upsample_backward,
    "aten._scaled_dot_product_cudnn_attention_backward": _cudnn_attention_backward,
    "aten._scaled_dot_product_flash_attention_backward": _flash_attention_backward,
    "aten._scaled_dot_product_efficient_attention_backward": _efficient_attention_backward,
}
_COURSES: dict[str, Callable[[Any, Any], Course]] = {
    "aten.native_dropout": lambda args, out: [out[1], out[0]],  # the mask first
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
    inputs = math.prod(sizes[d] for d in reduced)
    outputs = math.prod(size for d, size in enumerate(sizes) if d not in reduced)
    reduced_strides = [tensor.stride(d) for d in reduced if sizes[d] > 1]
    kept = [(tensor.stride(d), sizes[d]) for d in range(tensor.dim()) if d not in reduced and sizes[d] > 1]
    reduces_fastest = not kept or (bool(reduced_strides) and min(reduced_strides) < min(kept)[0])
    vector = 1
    if not reduces_fastest and kept and min(kept)[0] == 1:
        others = [*reduced_strides, *(stride for stride, _ in kept if stride != 1)]
        multiples = [n for n in (4, 2) if all(number % n == 0 for number in (min(kept)[1], *others))]
        vector = max(multiples, default=1)
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


def _product(left: int) -> _Formula:
    return lambda args, out: 2.0 * math.prod(out.shape) * args[left].shape[-1]


def _grouped_product(args: Any, out: Any) -> Any:
    # The weights' gradients use each row for one group only.
    are_gradients = args[0].dim() == 2 and args[1].dim() == 2
    return 2.0 * math.prod(out.shape[1:] if are_gradients else out.shape) * args[0].shape[-1]


def _attention(scale: float, first: int, causal: int) -> _Formula:
    """Two products in the forward. `first` is the query's place among the arguments, `causal` that of `is_causal`."""

    def formula(args: Any, out: Any) -> Any:
        batch, heads, length, size = args[first].shape
        is_causal = len(args) > causal and args[causal] is True
        return scale * (2.0 if is_causal else 4.0) * batch * heads * length * args[first + 1].shape[2] * size

    return formula


_FORMULAS: dict[str, _Formula] = {
    "aten.mm": _product(0),
    "aten.bmm": _product(0),
    "aten.addmm": _product(1),
    "aten.baddbmm": _product(1),
    "aten._addmm_activation": _product(1),
    "aten._grouped_mm": _grouped_product,
    "aten.convolution": lambda args, out: 2.0 * math.prod(out.shape) * math.prod(args[1].shape[1:]),
    "aten.convolution_backward": lambda args, out: 4.0 * math.prod(args[0].shape) * math.prod(args[2].shape[1:]),
    **{
        f"aten._scaled_dot_product_{kind}_attention": _attention(1.0, 0, causal)
        for kind, causal in (("cudnn", 6), ("flash", 4), ("efficient", 6))
    },
    **{
        f"aten._scaled_dot_product_{kind}_attention_backward": _attention(BACKWARD_ATTENTION, 1, causal)
        for kind, causal in (("cudnn", 14), ("flash", 11), ("efficient", 11))
    },
}
