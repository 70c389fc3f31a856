"""LSTM, GRU and RNN layers as cuDNN runs them: one operator forward, one backward, and a reserve kept between them.

Counted in outputs of one level, the output and the reserve together are 6 a level for an LSTM (four gates, the cell, the output), 7
for a GRU, 2 for a plain RNN; dropout keeps one bit for each number of a level, for each direction of the next. Torch copies the
weights into one buffer, kept for the backward, unless they lie in one already: it lays fp32 and fp16 weights so when a model comes
to the device, and bf16 ones never. Under autocast the cast weights are that buffer.

The workspace is a rule, read off measured layers on an H200 (cuDNN 9.19), 576 of them in fp32: some outputs, one more a level, and
a share of the weights. Within 2.5% for the layers of both `fresh` lists; narrow layers (256) take up to twice that. Only layers of
both ways were measured of plain RNNs and GRUs in half precision.

On the host an LSTM runs level by level in oneDNN, with a workspace kept for the backward; other layers are traced as if cuDNN ran
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.tracing.ghost.operators import FREE, META, Course

aten = torch.ops.aten

RNN_RELU, RNN_TANH, LSTM, GRU = range(4)
RESERVE_OUTPUTS = {RNN_RELU: 2, RNN_TANH: 2, LSTM: 6, GRU: 7}
"""Outputs' worth of memory that each level keeps for the backward, its own output included."""
WORKSPACE_OUTPUTS = {RNN_RELU: 7.0, RNN_TANH: 7.0, LSTM: 7.0, GRU: 5.25}
WEIGHT_SHARES = {RNN_RELU: 0.3, RNN_TANH: 0.3, LSTM: 0.3, GRU: 0.42}
"""What the kernels need besides one output per level in fp32, and the share of the weights' bytes that the workspace holds too."""
HALF_OUTPUTS, HALF_WEIGHT_SHARE = {RNN_RELU: 4.5, RNN_TANH: 4.5, LSTM: 6.0, GRU: 5.8}, 1.1
"""The same in half precision, the share for all kinds of layers."""
BOTH_WAYS_OUTPUTS = {2: 0.5, 4: 1.0}
"""What layers of both ways need in addition, by the bytes of a number; a GRU needs nothing."""
RESERVE_HEAD_BYTES = 256
"""Each reserve has these besides the numbers it keeps."""
DROPOUT_BYTES_PER_SM = 2048 * 24
"""The state of cuDNN's dropout: one generator a thread."""
FLAT_TYPES = (torch.float32, torch.float16, torch.float64)
"""Types whose weights torch lays into one buffer when a layer comes to the device."""
PAGE_BYTES = 4096
"""To which oneDNN rounds each part of a workspace."""


def _layer(mode: int) -> Any:
    """Stands in for one of torch's layers on the ghost device."""

    def run(
        inputs: Tensor, hx: Any, params: Sequence[Tensor], has_biases: bool, num_layers: int, dropout: float,
        train: bool, bidirectional: bool, batch_first: bool,
    ) -> Any:  # fmt: skip
        state, cells = hx if mode == LSTM else (hx, None)
        hidden = state.size(2) if cells is None else cells.size(2)
        projected = state.size(2) if state.size(2) != hidden else 0
        stride = (4 if has_biases else 2) + bool(projected)
        out = aten._cudnn_rnn(
            inputs, list(params), stride, None, state, cells, mode, hidden, projected, num_layers, batch_first, dropout,
            train, bidirectional, [], None,
        )  # fmt: skip
        return out[:2] if cells is None else out[:3]

    return run


KERNELS = {
    "lstm.input": _layer(LSTM),
    "gru.input": _layer(GRU),
    "rnn_tanh.input": _layer(RNN_TANH),
    "rnn_relu.input": _layer(RNN_RELU),
}


def _parts_of(flat: Tensor, weights: Sequence[Tensor]) -> Iterator[Tensor]:
    """Views of one buffer, one after the other in the shapes of the weights."""
    offset = 0
    for weight in weights:
        yield flat.narrow(0, offset, weight.numel()).view(weight.shape)
        offset += weight.numel()


class _FlatCast(torch.autograd.Function):
    """Casts weights into one buffer; returns the buffer and the weights as views of it."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        flat = torch.empty(sum(weight.numel() for weight in weights), dtype=dtype, device=weights[0].device)
        parts = [part.copy_(weight) for part, weight in zip(_parts_of(flat, weights), weights, strict=True)]
        ctx.mark_non_differentiable(flat)
        ctx.set_materialize_grads(False)
        ctx.dtypes = [weight.dtype for weight in weights]
        return flat, *parts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        # In torch each weight has a cast of its own, and autograd runs the last one first.
        pairs = reversed(list(zip(gradients[1:], ctx.dtypes, strict=True)))
        cast = [None if gradient is None else gradient.to(dtype) for gradient, dtype in pairs]
        return None, *reversed(cast)


def cast_flat(
    weights: Sequence[Tensor], buffer: Tensor | None, dtype: torch.dtype
) -> tuple[list[Tensor], Tensor | None]:
    """Weights as autocast hands them to `_cudnn_rnn`, and the buffer they lie in."""
    if weights[0].dtype is dtype:
        return list(weights), buffer
    flat, *parts = _FlatCast.apply(dtype, *weights)  # type: ignore[no-untyped-call]
    return parts, flat


def lstm_on_host(
    inputs: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool, num_layers: int, dropout: float,
    train: bool, bidirectional: bool, batch_first: bool,
) -> Any:  # fmt: skip
    """An LSTM on the host, as torch's `mkldnn_rnn` spells it."""
    if hx[0].size(2) != hx[1].size(2):
        return KERNELS["lstm.input"](
            inputs, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first
        )
    hidden = (inputs.transpose(0, 1) if batch_first else inputs).contiguous()
    states, cells, directions, stride = [], [], 2 if bidirectional else 1, 4 if has_biases else 2
    for layer in range(num_layers):
        outputs = []
        for number in range(layer * directions, (layer + 1) * directions):
            weights = list(params[stride * number : stride * (number + 1)])
            biases = weights[2:] or [torch.zeros_like(weights[0]), torch.zeros_like(weights[0])]
            out, state, cell, _ = aten.mkldnn_rnn_layer(
                hidden, *weights[:2], *biases, hx[0].select(0, number), hx[1].select(0, number), number % directions > 0,
                [], 2, hx[0].size(2), num_layers, has_biases, bidirectional, batch_first, train,
            )  # fmt: skip
            outputs.append(out)
            states.append(state)
            cells.append(cell)
        hidden = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and train and layer < num_layers - 1:
            hidden = torch.dropout(hidden, dropout, True)
    return hidden.transpose(0, 1) if batch_first else hidden, torch.stack(states), torch.stack(cells)


HOST_KERNELS = {**KERNELS, "lstm.input": lstm_on_host}


def layer_on_host(inputs: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Outputs of `mkldnn_rnn_layer`; the workspace is oneDNN's for fp32, to the byte in 300 layers of random sizes."""
    state, hidden, length, batch = args[4], args[9], inputs.size(0), inputs.size(1)
    wide, narrow = _line(max(inputs.size(2), hidden)), _line(hidden)
    parts = [
        length * _line(4 * hidden),
        *[2 * (length + 1) * wide] * 3,
        *[2 * (length + 1) * hidden] * 2,
        length * narrow,
    ]
    workspace = sum(-(-4 * batch * part // PAGE_BYTES) * PAGE_BYTES for part in parts) if args[-1] else 0
    return (
        torch.empty(length, batch, hidden, dtype=inputs.dtype, device=META),
        torch.empty_like(state, memory_format=torch.contiguous_format),
        torch.empty_like(state, memory_format=torch.contiguous_format),
        torch.empty(workspace, dtype=torch.uint8, device=META),
    )


def layer_backward_on_host(inputs: Tensor, *args: Any, **__: Any) -> tuple[Tensor, ...]:
    """Gradients of the input, of both weights and biases, and of the first state and cell."""
    return tuple(torch.empty(t.shape, dtype=t.dtype, device=META) for t in (inputs, *args[:6]))


def _line(count: int) -> int:
    """Numbers from one row of a workspace to the next: whole cache lines, and no multiple of 256."""
    rounded = -(-count // 16) * 16
    return rounded + 16 if rounded % 256 == 0 else rounded


def _output_bytes(inputs: Tensor, hidden: int, bidirectional: bool) -> int:
    """Bytes of one level's output."""
    return inputs.size(0) * inputs.size(1) * hidden * (2 if bidirectional else 1) * inputs.element_size()


def has_dropout(args: Any) -> bool:
    """Whether a call of `_cudnn_rnn` has dropout between its levels."""
    return bool(args[12] and args[11] > 0)


def forward_shapes(
    inputs: Tensor, weight: Any, stride: int, buffer: Any, hx: Tensor, cx: Any, mode: int, hidden: int, projected: int,
    layers: int, batch_first: bool, dropout: float, train: bool, bidirectional: bool, *_: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Outputs of `_cudnn_rnn`: sequence, last states, reserve, and the weights' buffer where they are not in one."""
    first, second = (inputs.size(1), inputs.size(0)) if batch_first else (inputs.size(0), inputs.size(1))
    width = (projected or hidden) * (2 if bidirectional else 1)
    out = torch.empty(first, second, width, dtype=inputs.dtype, device=META)
    level_bytes = _output_bytes(inputs, hidden, bidirectional)
    kept = (RESERVE_OUTPUTS[mode] * layers - 1) * level_bytes + RESERVE_HEAD_BYTES if train else 0
    if train and dropout > 0:
        # Each direction of the next level drops numbers of its own.
        kept += (layers - 1) * (2 if bidirectional else 1) * level_bytes // inputs.element_size() // 8
    is_flat = buffer is not None or len({part.untyped_storage()._cdata for part in weight}) == 1
    return (
        out.transpose(0, 1) if batch_first else out,
        torch.empty_like(hx),
        torch.empty(0, dtype=inputs.dtype, device=META) if cx is None else torch.empty_like(cx),
        torch.empty(kept, dtype=torch.uint8, device=META),
        torch.empty(0 if is_flat else sum(part.numel() for part in weight), dtype=inputs.dtype, device=META),
    )


def backward_shapes(
    inputs: Tensor, weight: Sequence[Tensor], stride: int, buffer: Any, hx: Tensor, cx: Any, *args: Any, **__: Any
) -> tuple[Any, ...]:
    """Gradients of `_cudnn_rnn_backward`: the input's has time first, those of the weights are views of one buffer."""
    flat = torch.empty(sum(w.numel() for w in weight), dtype=inputs.dtype, device=META)
    batch_first = bool(args[8])
    given = inputs.transpose(0, 1) if batch_first else inputs
    gradient = torch.empty(given.shape, dtype=given.dtype, device=META)
    return (
        gradient.transpose(0, 1) if batch_first else gradient,
        torch.empty_like(hx),
        None if cx is None else torch.empty_like(cx),
        list(_parts_of(flat, weight)),
    )


def forward_course(args: Any, out: Any) -> Course:
    """Memory of the forward, in order: the input with time first, the outputs, the workspace, and the reserve."""
    output, states, cells, reserve, buffer = out
    workspace = _workspace(args[0], args[1], args[6], args[7], args[9], args[13])
    return [*_copies(args[10], args[0]), output, states, cells, buffer, workspace, reserve]


def backward_course(args: Any, out: Any) -> Course:
    """Memory of the backward, in order: first for the data, then for the weights."""
    workspace = _workspace(args[0], args[1], args[10], args[11], args[13], args[17])
    for_data, for_weights = _copies(args[14], args[0], args[7]), _copies(args[14], args[0])
    data = [part for part in out[:3] if part is not None]
    return [
        *for_data, *data, workspace, *[FREE] * (len(for_data) + 1),
        *for_weights, *out[3][:1], workspace, *[FREE] * (len(for_weights) + 1),
    ]  # fmt: skip


def _copies(batch_first: bool, *tensors: Tensor | None) -> list[int]:
    timed = [each.transpose(0, 1) if batch_first else each for each in tensors if each is not None]
    return [each.nbytes for each in timed if not each.is_contiguous()]


def _workspace(
    inputs: Tensor, weight: Sequence[Tensor], mode: int, hidden: int, layers: int, bidirectional: bool
) -> int:
    level_bytes, weights = (_output_bytes(inputs, hidden, bidirectional), sum(part.nbytes for part in weight))
    is_half = inputs.element_size() == 2
    outputs = (HALF_OUTPUTS if is_half else WORKSPACE_OUTPUTS)[mode] + layers
    if bidirectional and mode != GRU:
        outputs += BOTH_WAYS_OUTPUTS[2 if is_half else 4]
    return int(outputs * level_bytes + (HALF_WEIGHT_SHARE if is_half else WEIGHT_SHARES[mode]) * weights)
