"""Autocast for the ghost device: the same operators are cast as on the target, and cast weights are cached as there.

The lists are torch's own, for CUDA and for the host. The cache matters for memory: a weight cast to bf16 lives until the
autocast context ends, or as long as the backward needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowtide import compat
from lowtide.tracing.ghost import recurrent
from lowtide.tracing.ghost.operators import tensors_in
from lowtide.tracing.ghost.tensor import Ghost

LOWER_PRECISION = (
    "_convolution.deprecated", "_convolution", "conv1d", "conv2d", "conv3d",
    "conv_tbc", "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "convolution",
    "prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm",
    "chain_matmul", "linalg_multi_dot", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell",
    "rnn_tanh_cell", "rnn_relu_cell", "_scaled_dot_product_flash_attention", "scaled_dot_product_attention",
)  # fmt: skip

FP32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh", "tan",
    "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm", "group_norm",
    "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity", "poisson_nll_loss",
    "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss",
    "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss",
    "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp",
    "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d",
    "upsample_nearest3d", "_upsample_nearest_exact3d",
    "upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_trilinear3d",
    "upsample_bicubic2d", "_upsample_bicubic2d_aa",
    "rms_norm",
)  # fmt: skip

FP32_SET_DTYPE = (
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
    "linalg_matrix_norm", "linalg_matrix_norm.str_ord",
    "sum", "sum.dim_IntList",
)  # fmt: skip
"""Computed in fp32 by passing `dtype=`, so that no cast copy is kept, unless the caller named a dtype."""

WIDEST = ("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
          "scatter_add")  # fmt: skip
"""All floating arguments are brought to the widest type among them."""


HOST_LOWER_PRECISION = (
    "conv1d", "conv1d.padding", "conv2d", "conv2d.padding", "conv3d", "conv3d.padding", "_convolution.deprecated", "conv_tbc",
    "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "prelu", "addmm", "_addmm_activation", "matmul", "mm",
    "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "mkldnn_rnn_layer", "scaled_dot_product_attention",
    "_native_multi_head_attention",
)  # fmt: skip
HOST_WIDEST = ("stack", "cat", "index_copy")
"""Whatever else the host's autocast touches runs in fp32."""

SINCE = {"rms_norm": (2, 12)}
"""Operators that older versions of torch do not cast; 2.11 was looked up, where exactly the change came was not."""


class WeightCasts:
    """Weights cast under the current autocast context."""

    def __init__(self) -> None:
        self.torch_version = (2, 13)
        """The version to predict for."""
        self.has_cast = False
        """Whether anything was cast in the current trace, up or down: else autocast changes nothing in it."""
        self._casts: dict[int, tuple[Tensor, Tensor]] = {}

    def begin_trace(self, torch_version: tuple[int, int]) -> None:
        """A trace begins, for a version of torch."""
        self.torch_version = torch_version
        self.has_cast = False

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """The tensor in `dtype`; a trainable fp32 leaf is cast once per context."""
        if not tensor.is_floating_point() or tensor.dtype in (dtype, torch.float64) or not isinstance(tensor, Ghost):
            return tensor
        self.has_cast = True
        is_weight = tensor.requires_grad and tensor.is_leaf and tensor.dtype is torch.float32 and not tensor._is_view()
        if not (is_weight and dtype is not torch.float32 and torch.is_autocast_cache_enabled()):
            return tensor.to(dtype)
        if id(tensor) not in self._casts:
            self._casts[id(tensor)] = (tensor, tensor.to(dtype))
        return self._casts[id(tensor)][1]

    def clear(self) -> None:
        """Forget all casts, when the context ends."""
        self._casts.clear()


def register_fallback() -> torch.library.Library:
    """Leave operators without a rule as they are; the returned library must be kept alive."""
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    return fallback


def register(casts: WeightCasts, library: torch.library.Library, *, is_host: bool) -> None:
    """Give the ghost device the autocast rules of CUDA, or those of the host."""
    rules: tuple[tuple[tuple[str, ...], Callable[[Any, WeightCasts], Callable[..., Any]]], ...]
    rules = ((LOWER_PRECISION, _lower), (FP32, _raise), (FP32_SET_DTYPE, _name_dtype), (WIDEST, _widen))
    if is_host:
        others = set(compat.operators_cast_on_host()) - set(HOST_LOWER_PRECISION) - set(HOST_WIDEST)
        rules = ((HOST_LOWER_PRECISION, _lower), (tuple(others), _raise), (HOST_WIDEST, _widen))
    else:
        rules = (*rules, (("_cudnn_rnn",), _recur))
    for names, make in rules:
        for name in names:
            if (overload := compat.find_overload(name)) is not None:
                library.impl(name, make(overload, casts), "AutocastPrivateUse1")


def _call(
    overload: Any, casts: WeightCasts, dtype: torch.dtype | None, args: Any, kwargs: Any, cast_all: Callable[..., Any]
) -> Any:
    """Call an operator with its arguments cast; None leaves them as they are."""
    with compat.without_autocast():
        if dtype is None:
            return overload(*args, **kwargs)
        named = {key: _cast(value, casts, dtype) for key, value in kwargs.items()} if kwargs else {}
        return overload(*cast_all(args, casts, dtype), **named)


def _lower(overload: Any, casts: WeightCasts) -> Callable[..., Any]:
    cast_all = _cast if len(overload._schema.arguments) == 2 else _cast_last_first

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return _call(overload, casts, torch.get_autocast_dtype("ghost"), args, kwargs, cast_all)

    return kernel


def _recur(overload: Any, casts: WeightCasts) -> Callable[..., Any]:
    def kernel(inputs: Tensor, weight: Any, stride: int, buffer: Any, hx: Tensor, cx: Any, *args: Any) -> Any:
        dtype = torch.get_autocast_dtype("ghost")
        with compat.without_autocast():
            weight, buffer = recurrent.cast_flat(weight, buffer, dtype)
            return overload(casts.cast(inputs, dtype), weight, stride, buffer, *_cast((hx, cx), casts, dtype), *args)

    return kernel


def _raise(overload: Any, casts: WeightCasts) -> Callable[..., Any]:
    since = SINCE.get(overload._overloadpacket.__name__, (0, 0))

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = None if casts.torch_version < since else torch.float32
        return _call(overload, casts, dtype, args, kwargs, _cast_last_first)

    return kernel


def _name_dtype(overload: Any, casts: WeightCasts) -> Callable[..., Any]:
    position = next(
        (i for i, a in enumerate(overload._schema.arguments) if a.name == "dtype" and not a.kwarg_only), None
    )

    def kernel(*args: Any, **kwargs: Any) -> Any:
        is_low = isinstance(args[0], Tensor) and args[0].dtype in (torch.bfloat16, torch.float16)
        is_named = kwargs.get("dtype") is not None or (
            position is not None and len(args) > position and args[position] is not None
        )
        if is_low and not is_named:
            casts.has_cast = True
            if position is not None and len(args) > position:
                args = (*args[:position], torch.float32, *args[position + 1 :])
            else:
                kwargs = {**kwargs, "dtype": torch.float32}
        with compat.without_autocast():
            return overload(*args, **kwargs)

    return kernel


def _widen(overload: Any, casts: WeightCasts) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        is_wide = any(tensor.dtype is torch.float32 for tensor in tensors_in([*args, *kwargs.values()]))
        dtype = torch.float32 if is_wide else torch.get_autocast_dtype("ghost")
        return _call(overload, casts, dtype, args, kwargs, _cast)

    return kernel


def _cast(value: Any, casts: WeightCasts, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return casts.cast(value, dtype)
    if isinstance(value, list | tuple):
        return type(value)(_cast(item, casts, dtype) for item in value)
    return value


def _cast_last_first(args: Any, casts: WeightCasts, dtype: torch.dtype) -> Any:
    """Torch casts the arguments of one call from the last to the first: so its compiler evaluates them.

    Measured: linear layers and convolutions do, the two of a product (`matmul`) are cast in their own order.
    """
    return tuple(reversed([_cast(value, casts, dtype) for value in reversed(args)]))
