"""Outputs of operators for which torch's own shape functions differ from CUDA, or refuse what CUDA takes.

Fused attention: in the layouts CUDA gives them, since a later `.transpose(1, 2)` copies or not by that. Each function makes meta
tensors; the mode turns them into ghosts. Scratch memory is in `costs`. Where a shape depends on the values of an argument
(lengths of sequences, which come with the batch), the function takes the ghosts themselves, so that it can ask for values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowtide import compat
from lowtide.errors import ValueReadError
from lowtide.tracing.ghost import convolutions, recurrent
from lowtide.tracing.ghost.operators import META, tensors_in
from lowtide.tracing.ghost.tensor import Ghost

aten = torch.ops.aten


def _like_query(query: Tensor, heads: int, length: int, size: int) -> Tensor:
    """Batch x heads x length x size, stored with the heads innermost but one: what the projections around it want."""
    batch = query.size(0)
    return torch.empty(batch, length, heads, size, dtype=query.dtype, device=META).transpose(1, 2)


def _same_layout(tensor: Tensor) -> Tensor:
    """A new tensor whose dimensions are stored in the same order, without gaps."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda d: (-strides[d], d))
    packed = torch.empty([tensor.size(d) for d in order], dtype=tensor.dtype, device=META)
    return packed.permute([order.index(d) for d in range(tensor.dim())])


def _scalar() -> Tensor:
    return torch.empty((), dtype=torch.int64, device=META)


def _cudnn(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, needs_sums: bool, *_: Any, **__: Any
) -> tuple[Any, ...]:
    batch, heads, length, _size = query.shape
    out = _same_layout(query[..., : value.size(3)])
    sums = torch.empty(batch, heads, length, 1, dtype=torch.float32, device=META) if needs_sums else None
    return out, sums, None, None, length, key.size(2), _scalar(), _scalar(), None


def _cudnn_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    return _same_layout(query), _same_layout(key), _same_layout(value)


def _flash(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Any, ...]:
    batch, heads, length, size = query.shape
    out = _like_query(query, heads, length, size)
    sums = torch.empty(batch, heads, length, dtype=torch.float32, device=META)
    state = torch.empty(2, dtype=torch.uint64, device=META)
    return out, sums, None, None, length, key.size(2), state, _scalar(), None


def _flash_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    return tuple(_like_query(t, t.size(1), t.size(2), t.size(3)) for t in (query, key, value))


def _efficient(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, needs_sums: bool, *_: Any, **__: Any
) -> tuple[Any, ...]:
    batch, heads, length, _size = query.shape
    out = _like_query(query, heads, length, value.size(3))
    padded = -(-length // 32) * 32 if needs_sums else 0
    sums = torch.empty(batch, heads, padded, dtype=torch.float32, device=META)
    return out, sums, torch.empty((), dtype=torch.int64), torch.empty((), dtype=torch.int64)


def _efficient_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, out: Tensor, sums: Tensor, seed: Any,
    offset: Any, dropout: float, wanted: list[bool], *_: Any, **__: Any,
) -> tuple[Any, ...]:  # fmt: skip
    grads: list[Any] = [_like_query(t, t.size(1), t.size(2), t.size(3)) for t in (query, key, value)]
    if mask is not None and wanted[3]:
        length = mask.size(-1)
        padded = torch.empty(*mask.shape[:-1], -(-length // 16) * 16, dtype=query.dtype, device=META)
        grads.append(padded[..., :length])
    else:
        grads.append(None)
    return tuple(grads)


def _grouped_product(left: Tensor, right: Tensor, offsets: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """Any floating type, as the CUDA fallback takes it; torch's shape function insists on bf16."""
    dtype = left.dtype
    if left.dim() == 2 and right.dim() == 2:
        assert offsets is not None
        return torch.empty(offsets.size(0), left.size(0), right.size(1), dtype=dtype, device=META)
    if left.dim() == 2 or right.dim() == 2:
        return torch.empty(left.size(-2), right.size(-1), dtype=dtype, device=META)
    return torch.empty(left.size(0), left.size(1), right.size(2), dtype=dtype, device=META)


def _convolution(inputs: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    out: Tensor = aten.convolution.default(inputs, weight, *args, **kwargs)
    return torch.empty(out.shape, dtype=out.dtype, device=META, memory_format=convolutions.layout(inputs, weight))


def _convolution_backward(gradient: Tensor, inputs: Tensor, weight: Tensor, *args: Any, **__: Any) -> tuple[Any, ...]:
    wanted = args[-1]
    layout = convolutions.layout(inputs, weight)
    return (
        torch.empty(inputs.shape, dtype=inputs.dtype, device=META, memory_format=layout) if wanted[0] else None,
        torch.empty(weight.shape, dtype=weight.dtype, device=META, memory_format=layout) if wanted[1] else None,
        torch.empty(gradient.size(1), dtype=gradient.dtype, device=META) if wanted[2] else None,
    )


def _batch_norm(
    inputs: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *_: Any
) -> tuple[Any, ...]:
    statistics = torch.float32 if inputs.dtype in (torch.float16, torch.bfloat16) else inputs.dtype
    size = inputs.size(1) if training else 0
    saved = (torch.empty(size, dtype=statistics, device=META) for _ in range(2))
    return torch.empty_like(inputs), *saved


def _batch_norm_backward(gradient: Tensor, inputs: Tensor, weight: Any, *args: Any) -> tuple[Any, ...]:
    wanted, kind = args[-1], inputs.dtype if weight is None else weight.dtype
    return (
        torch.empty_like(inputs) if wanted[0] else None,
        torch.empty(inputs.size(1), dtype=kind, device=META) if wanted[1] else None,
        torch.empty(inputs.size(1), dtype=kind, device=META) if wanted[2] else None,
    )


def _gru_cell(input_gates: Tensor, hidden_gates: Tensor, state: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """Torch's fused cell (`RNN.cu`): the new state, and five numbers for each of its own for the backward."""
    return torch.empty_like(state), torch.empty(state.size(0), 5 * state.size(1), dtype=state.dtype, device=META)


def _gru_cell_backward(grad: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Any, ...]:
    gates = [torch.empty(grad.size(0), 3 * grad.size(1), dtype=grad.dtype, device=META) for _ in range(2)]
    biases = [torch.empty(3 * grad.size(1), dtype=grad.dtype, device=META) if has_bias else None for _ in range(2)]
    return *gates, torch.empty_like(grad), *biases


def _layer_norm_on_host(inputs: Tensor, shape: Any, weight: Tensor | None, *_: Any) -> tuple[Tensor, ...]:
    """Statistics in the input's type unless the weights have another; on CUDA they are in fp32."""
    kind = inputs.dtype if weight is None else weight.dtype
    rows = [*inputs.shape[: inputs.dim() - len(shape)], *(1 for _ in shape)]
    saved = (torch.empty(rows, dtype=kind, device=META) for _ in range(2))
    return torch.empty(inputs.shape, dtype=inputs.dtype, device=META), *saved


SHAPES: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_cudnn_attention.default: _cudnn,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    aten._scaled_dot_product_flash_attention.default: _flash,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention.default: _efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten._grouped_mm.default: _grouped_product,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten._thnn_fused_gru_cell.default: _gru_cell,
    aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
    aten.native_batch_norm.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten._cudnn_rnn.default: recurrent.forward_shapes,
    aten._cudnn_rnn_backward.default: recurrent.backward_shapes,
}
HOST_SHAPES: dict[Any, Callable[..., Any]] = {
    **SHAPES,
    aten.native_layer_norm.default: _layer_norm_on_host,
    aten.mkldnn_rnn_layer.default: recurrent.layer_on_host,
    aten.mkldnn_rnn_layer_backward.default: recurrent.layer_backward_on_host,
}
"""The same for the host."""


def _numbers(values: Any) -> list[int] | None:
    """Lengths given as a tensor or a list; None where they are not known."""
    if isinstance(values, Ghost):
        known = values.value()
        if known is None:
            return None
        values = known.get()
    return [int(value) for value in (values.tolist() if isinstance(values, Tensor) else values)]


def _ctc(log_probs: Tensor, targets: Tensor, input_lengths: Any, lengths: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
    """Torch's own CUDA kernel (`LossCTC.cu`): the loss of each sequence, and the table of forward variables.

    The table has a place for each label of the longest target, with blanks around it. Where the lengths are not known it is
    as long as it could be. cuDNN's kernel, which torch prefers for int32 targets on the host, is not modelled.
    """
    steps, batch = log_probs.shape[:2]
    known = _numbers(lengths)
    longest = int(targets.shape[-1]) if known is None else max(known, default=0)
    return (
        torch.empty(batch, dtype=log_probs.dtype, device=META),
        torch.empty(batch, steps, 2 * longest + 1, dtype=log_probs.dtype, device=META),
    )


def _ctc_backward(grad: Tensor, log_probs: Tensor, *_: Any, **__: Any) -> Tensor:
    """The gradient; a second table is scratch (see `costs`)."""
    return torch.empty(log_probs.shape, dtype=log_probs.dtype, device=META)


def _pack_padded(inputs: Ghost, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """A padded batch with the padding taken out, and how many sequences still run at each step: the latter on the host."""
    known = _numbers(lengths)
    if known is None:
        raise ValueReadError(
            "pack_padded_sequence needs the lengths of the sequences, and they depend on weights or chance. Give them "
            "as part of the batch, or use lowtide.observe on a machine with a GPU.",
            op="aten._pack_padded_sequence",
        )
    with compat.without_modes():
        out: tuple[Tensor, Tensor] = aten._pack_padded_sequence(inputs.inner, torch.tensor(known), batch_first)
    return out


VALUE_SHAPES: dict[Any, Callable[..., Any]] = {
    aten._ctc_loss.default: _ctc,
    aten._ctc_loss.Tensor: _ctc,
    aten._ctc_loss_backward.default: _ctc_backward,
    aten._ctc_loss_backward.Tensor: _ctc_backward,
    aten._pack_padded_sequence.default: _pack_padded,
}


class ShapeMemory:
    """What operators return, by what they were given: a deep model's layers ask for the same again and again.

    Many of torch's shape functions are Python, and took most of a trace's time.
    """

    def __init__(self) -> None:
        self._forms: dict[Any, tuple[Any, ...] | None] = {}

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What the function returns for arguments on meta."""
        key = (func, torch.get_default_dtype(), _form(args), _form(tuple(kwargs.items())))
        try:
            forms = self._forms.get(key)
        except TypeError:  # an argument that has no form, such as a generator of random numbers
            return func(*args, **kwargs)
        if forms is not None:
            made = tuple(form and torch.empty_strided(*form[:2], dtype=form[2], device=META) for form in forms)
            return made if isinstance(forms, _Several) else made[0]
        out = func(*args, **kwargs)
        if key not in self._forms:
            self._forms[key] = _forms_of_new(out, tensors_in([*args, *kwargs.values()]))
        return out


class _Several(tuple[Any, ...]):
    """The forms of an operator that returns a tuple."""


def _form(value: Any) -> Any:
    """All that a shape may depend on."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.storage_offset(), value.dtype, value.is_conj(), value.is_neg()
    if isinstance(value, list | tuple):
        return tuple(map(_form, value))
    return type(value), value


def _forms_of_new(out: Any, given: list[Tensor]) -> tuple[Any, ...] | None:
    """Shape, strides and dtype of each output; None where one is not all of a storage of its own."""
    outputs = out if isinstance(out, tuple) else (out,)
    storages = {tensor.untyped_storage()._cdata for tensor in given}
    forms: list[Any] = []
    for each in outputs:
        if each is None:
            forms.append(None)
            continue
        if not isinstance(each, Tensor) or each.device.type != "meta" or each.is_conj() or each.is_neg():
            return None
        form = (each.shape, each.stride(), each.dtype)
        storage = each.untyped_storage()
        alone = torch.empty_strided(*form[:2], dtype=form[2], device=META).untyped_storage()
        if storage._cdata in storages or storage.nbytes() != alone.nbytes() or each.storage_offset():
            return None
        storages.add(storage._cdata)
        forms.append(form)
    return _Several(forms) if isinstance(out, tuple) else tuple(forms)
