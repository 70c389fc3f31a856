"""LSTM, GRU and RNN layers as cuDNN runs them: one operator forward, one backward, and a reserve kept between them.

Measured on an H200 (cuDNN 9.19) over 576 layers of one to three levels. In units of one level's output, the output and the
reserve together are 6 a level for an LSTM (four gates, the cell, the output), 7 for a GRU, 2 for a plain RNN. The workspace is
7 units, one more a level, and a share of the weights; narrow layers (256) take up to twice that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
META = torch.device("meta")

RNN_RELU, RNN_TANH, LSTM, GRU = range(4)
RESERVE_UNITS = {RNN_RELU: 2, RNN_TANH: 2, LSTM: 6, GRU: 7}
"""Outputs' worth of memory that each level keeps for the backward, its own output included."""
WORKSPACE_UNITS = 7
"""What the kernels need beside one unit per level."""
WEIGHT_SHARE = 0.3
"""Share of the weights' bytes that the workspace holds as well."""


def lstm(
    inputs: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool, num_layers: int, dropout: float,
    train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Stands in for `aten::lstm.input` on the ghost device."""
    projected = hx[0].size(2) if hx[0].size(2) != hx[1].size(2) else 0
    stride = (4 if has_biases else 2) + bool(projected)
    out = aten._cudnn_rnn(
        inputs, list(params), stride, None, hx[0], hx[1], LSTM, hx[1].size(2), projected, num_layers, batch_first,
        dropout, train, bidirectional, [], None,
    )  # fmt: skip
    return out[0], out[1], out[2]


def plain(mode: int) -> Any:
    """Stands in for `aten::gru.input`, `rnn_tanh.input` and `rnn_relu.input`."""

    def run(
        inputs: Tensor, hx: Tensor, params: Sequence[Tensor], has_biases: bool, num_layers: int, dropout: float,
        train: bool, bidirectional: bool, batch_first: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out = aten._cudnn_rnn(
            inputs, list(params), 4 if has_biases else 2, None, hx, None, mode, hx.size(2), 0, num_layers, batch_first,
            dropout, train, bidirectional, [], None,
        )  # fmt: skip
        return out[0], out[1]

    return run


KERNELS = {
    "lstm.input": lstm,
    "gru.input": plain(GRU),
    "rnn_tanh.input": plain(RNN_TANH),
    "rnn_relu.input": plain(RNN_RELU),
}


def _unit(inputs: Tensor, hidden: int, bidirectional: bool) -> int:
    """Bytes of one level's output."""
    return inputs.size(0) * inputs.size(1) * hidden * (2 if bidirectional else 1) * inputs.element_size()


def forward_shapes(
    inputs: Tensor, weight: Any, stride: int, buffer: Any, hx: Tensor, cx: Any, mode: int, hidden: int, projected: int,
    layers: int, batch_first: bool, dropout: float, train: bool, bidirectional: bool, *_: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Outputs of `_cudnn_rnn`: sequence, last states, reserve, and the weights' buffer, which is flat already."""
    first, second = (inputs.size(1), inputs.size(0)) if batch_first else (inputs.size(0), inputs.size(1))
    width = (projected or hidden) * (2 if bidirectional else 1)
    out = torch.empty(first, second, width, dtype=inputs.dtype, device=META)
    kept = RESERVE_UNITS[mode] * layers - 1 if train else 0
    return (
        out.transpose(0, 1) if batch_first else out,
        torch.empty_like(hx),
        torch.empty(0, dtype=inputs.dtype, device=META) if cx is None else torch.empty_like(cx),
        torch.empty(kept * _unit(inputs, hidden, bidirectional), dtype=torch.uint8, device=META),
        torch.empty(0, dtype=inputs.dtype, device=META),
    )


def backward_shapes(
    inputs: Tensor, weight: Sequence[Tensor], stride: int, buffer: Any, hx: Tensor, cx: Any, *_: Any, **__: Any
) -> tuple[Any, ...]:
    """Gradients of `_cudnn_rnn_backward`: those of the weights are views of one buffer."""
    flat = torch.empty(sum(w.numel() for w in weight), dtype=inputs.dtype, device=META)
    parts, offset = [], 0
    for part in weight:
        parts.append(flat.narrow(0, offset, part.numel()).view(part.shape))
        offset += part.numel()
    return torch.empty_like(inputs), torch.empty_like(hx), None if cx is None else torch.empty_like(cx), parts


def forward_bytes(args: Any, out: Any, num_sms: int) -> list[list[int]]:
    """Scratch of the forward: the input with time first, and the kernels' workspace."""
    return [[_copied(args[0]), _workspace(args[0], args[1], args[7], args[9], args[13])]]


def backward_bytes(args: Any, out: Any, num_sms: int) -> list[list[int]]:
    """Scratch of the backward, first for the data, then for the weights."""
    inputs, output = args[0], args[6]
    workspace = _workspace(inputs, args[1], args[11], args[13], args[17])
    copies = [_copied(inputs), _copied(output), _copied(args[7])]
    return [[*copies, workspace], [*copies, workspace]]


def _workspace(inputs: Tensor, weight: Sequence[Tensor], hidden: int, layers: int, bidirectional: bool) -> int:
    units = WORKSPACE_UNITS + layers + bool(bidirectional)
    weights = sum(part.numel() * part.element_size() for part in weight)
    return units * _unit(inputs, hidden, bidirectional) + int(WEIGHT_SHARE * weights)


def _copied(tensor: Any) -> int:
    return 0 if tensor is None or tensor.is_contiguous() else tensor.numel() * tensor.element_size()
