"""Floating point operations against torch's own flop counter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lowtide.tracing.ghost.arithmetic import num_flops

aten = torch.ops.aten


def meta(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


CONVOLUTION = ([2, 2], [1, 1], [1, 1], False, [0, 0], 1)


@pytest.mark.parametrize(
    ("overload", "args", "out"),
    [
        (aten.mm.default, (meta(5, 7), meta(7, 3)), meta(5, 3)),
        (aten.addmm.default, (meta(3), meta(5, 7), meta(7, 3)), meta(5, 3)),
        (aten.bmm.default, (meta(2, 5, 7), meta(2, 7, 3)), meta(2, 5, 3)),
        (aten.baddbmm.default, (meta(2, 5, 3), meta(2, 5, 7), meta(2, 7, 3)), meta(2, 5, 3)),
        (aten.convolution.default, (meta(2, 3, 8, 8), meta(4, 3, 3, 3), None, *CONVOLUTION), meta(2, 4, 4, 4)),
        (
            aten.convolution_backward.default,
            (meta(2, 4, 4, 4), meta(2, 3, 8, 8), meta(4, 3, 3, 3), None, *CONVOLUTION, [True, True, False]),
            (meta(2, 3, 8, 8), meta(4, 3, 3, 3), None),
        ),
        (
            aten._scaled_dot_product_cudnn_attention.default,
            (meta(2, 4, 16, 8), meta(2, 4, 16, 8), meta(2, 4, 16, 8)),
            meta(2, 4, 16, 8),
        ),
        (
            aten._scaled_dot_product_efficient_attention_backward.default,
            (meta(2, 4, 16, 8), meta(2, 4, 16, 8), meta(2, 4, 16, 8), meta(2, 4, 16, 8)),
            None,
        ),
    ],
)
def test_as_torch_counts(overload: Any, args: tuple[Any, ...], out: Any) -> None:
    expected = flop_registry[overload.overloadpacket](*args, out_val=out)
    assert num_flops(overload._schema.name.replace("::", "."), args, out) == expected


def test_other_operators_are_bound_by_memory() -> None:
    assert num_flops("aten.add", (meta(4), meta(4)), meta(4)) == 0.0
