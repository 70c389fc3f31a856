"""Outputs in the layouts CUDA gives them, as read off an H200 (torch 2.11): later copies depend on them."""

from __future__ import annotations

from operator import attrgetter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.errors import ValueReadError
from lowtide.tracing.ghost.shapes import SHAPES, ShapeMemory
from tests.tracing.ghost.ghost_process import GhostProcess, Lab

aten = torch.ops.aten
META = torch.device("meta")


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def heads_inside(batch: int, heads: int, length: int, size: int) -> Tensor:
    return meta(batch, length, heads, size).transpose(1, 2)


class TestAttention:
    """Measured strides: a query as a projection leaves it, {196608, 64, 768, 1} for 16 x 12 x 256 x 64."""

    query = heads_inside(16, 12, 256, 64)

    def test_cudnn_keeps_the_layout_of_the_query(self) -> None:
        out, sums, *_ = SHAPES[aten._scaled_dot_product_cudnn_attention.default](
            self.query, self.query, self.query, None, True
        )
        assert out.stride() == (196608, 64, 768, 1)
        assert sums.shape == (16, 12, 256, 1)
        plain = meta(16, 12, 256, 64)
        out, sums, *_ = SHAPES[aten._scaled_dot_product_cudnn_attention.default](plain, plain, plain, None, False)
        assert out.is_contiguous()
        assert sums is None

    def test_a_query_that_is_a_part_of_one_projection_gives_a_dense_output(self) -> None:
        part = meta(8, 512, 3, 12, 64)[:, :, 0].transpose(1, 2)
        assert part.stride() == (1179648, 64, 2304, 1)
        out, *_ = SHAPES[aten._scaled_dot_product_cudnn_attention.default](part, part, part, None, True)
        assert out.stride() == (393216, 64, 768, 1)

    @pytest.mark.parametrize("name", ["flash", "efficient"])
    def test_the_others_put_the_heads_inside_always(self, name: str) -> None:
        plain = meta(2, 4, 32, 16)
        shape = SHAPES[getattr(aten, f"_scaled_dot_product_{name}_attention").default]
        out = shape(plain, plain, plain, None, True)[0]
        assert out.shape == plain.shape
        assert out.transpose(1, 2).is_contiguous()

    def test_gradients_have_the_shapes_of_their_inputs(self) -> None:
        query, key = heads_inside(2, 8, 32, 16), heads_inside(2, 2, 48, 16)
        for name in ("cudnn", "flash"):
            shape = SHAPES[getattr(aten, f"_scaled_dot_product_{name}_attention_backward").default]
            assert [tuple(g.shape) for g in shape(query, query, key, key)] == [
                (2, 8, 32, 16),
                (2, 2, 48, 16),
                (2, 2, 48, 16),
            ]

    @pytest.mark.parametrize(("length", "padded"), [(49, 64), (64, 64), (512, 512)])
    def test_the_gradient_of_a_bias_has_padded_rows(self, length: int, padded: int) -> None:
        query, bias = heads_inside(2, 3, length, 32), meta(2, 3, length, length)
        shape = SHAPES[aten._scaled_dot_product_efficient_attention_backward.default]
        *_, gradient = shape(query, query, query, query, bias, None, None, None, None, 0.0, [True] * 4)
        assert gradient.shape == bias.shape
        assert gradient.untyped_storage().nbytes() == 2 * 2 * 3 * length * padded


class TestConvolutions:
    @pytest.mark.parametrize(("input_last", "weight_last"), [(True, False), (False, True), (True, True)])
    def test_channels_last_win(self, input_last: bool, weight_last: bool) -> None:
        inputs, weight = meta(2, 8, 16, 16), meta(4, 8, 3, 3)
        inputs = inputs.to(memory_format=torch.channels_last) if input_last else inputs
        weight = weight.to(memory_format=torch.channels_last) if weight_last else weight
        out = SHAPES[aten.convolution.default](inputs, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        assert out.shape == (2, 4, 16, 16)
        assert out.is_contiguous(memory_format=torch.channels_last)

    def test_only_the_gradients_that_are_wanted(self) -> None:
        gradient, inputs, weight = meta(2, 4, 16, 16), meta(2, 8, 16, 16), meta(4, 8, 3, 3)
        rest = ([4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        found = SHAPES[aten.convolution_backward.default](gradient, inputs, weight, *rest, [False, True, True])
        assert found[0] is None
        assert [tuple(g.shape) for g in found[1:]] == [(4, 8, 3, 3), (4,)]


class TestNorms:
    @pytest.mark.parametrize(("dtype", "kept"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float32)])
    def test_statistics_are_kept_in_fp32(self, dtype: torch.dtype, kept: torch.dtype) -> None:
        inputs = meta(2, 8, 4, 4, dtype=dtype)
        out, mean, deviation = SHAPES[aten.native_batch_norm.default](inputs, None, None, None, None, True, 0.1, 1e-5)
        assert (out.dtype, mean.dtype, mean.shape, deviation.shape) == (dtype, kept, (8,), (8,))

    def test_evaluation_keeps_none(self) -> None:
        inputs = meta(2, 8, 4, 4)
        assert SHAPES[aten.native_batch_norm.default](inputs, None, None, None, None, False, 0.1, 1e-5)[1].numel() == 0


@pytest.mark.parametrize(
    ("left", "right", "shape"),
    [((10, 4), (3, 4, 6), (10, 6)), ((3, 5, 4), (3, 4, 6), (3, 5, 6)), ((4, 10), (10, 6), (3, 4, 6))],
)
def test_grouped_products(left: tuple[int, ...], right: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Tokens sorted by expert times a matrix an expert; and the gradient of these matrices."""
    offsets = torch.empty(3, dtype=torch.int32, device=META)
    assert SHAPES[aten._grouped_mm.default](meta(*left), meta(*right), offsets).shape == shape


def test_the_fused_gru_cell_keeps_five_numbers_a_unit() -> None:
    """As in torch's `RNN.cu`."""
    batch, size = 4, 6
    state, gates = meta(batch, size), meta(batch, 3 * size)
    out, workspace = SHAPES[aten._thnn_fused_gru_cell.default](gates, gates, state)
    assert (out.shape, workspace.shape) == ((batch, size), (batch, 5 * size))
    grads = SHAPES[aten._thnn_fused_gru_cell_backward.default](state, workspace, True)
    assert [tuple(grad.shape) for grad in grads] == [(batch, 18), (batch, 18), (batch, size), (18,), (18,)]
    assert SHAPES[aten._thnn_fused_gru_cell_backward.default](state, workspace, False)[3:] == (None, None)


STEPS, BATCH, LABELS = 30, 3, 12
LENGTHS = torch.tensor([7, 9, 4])


@pytest.mark.parametrize("is_list", [False, True])
@pytest.mark.parametrize("is_padded", [False, True])
def test_the_ctc_table_is_as_long_as_the_longest_target(ghosts: GhostProcess, is_list: bool, is_padded: bool) -> None:
    targets = torch.ones((BATCH, 11) if is_padded else (int(LENGTHS.sum()),), dtype=torch.int64)
    times = torch.full((BATCH,), STEPS)

    def step(lab: Lab) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], int]:
        scores = lab.ghost(STEPS, BATCH, LABELS, needs_grad=True)
        lengths = [LENGTHS.tolist()] if is_list else [lab.known(LENGTHS)]
        steps = times.tolist() if is_list else lab.known(times)
        made = attrgetter("_ctc_loss")(torch)(scores.detach(), lab.known(targets), steps, lengths[0], 0, False)
        loss = F.ctc_loss(scores, lab.known(targets), steps, lengths[0])
        lab.recorder.begin_phase(lab.phase.BACKWARD)
        lab.mark()
        loss.backward()
        scratch = max(nbytes for op, nbytes in lab.births if op == "aten._ctc_loss_backward")
        return [tuple(t.shape) for t in made], [tuple(scores.grad.shape)], scratch

    real = attrgetter("_ctc_loss")(torch)(
        torch.randn(STEPS, BATCH, LABELS).log_softmax(-1), targets, times.tolist(), LENGTHS.tolist(), 0, False
    )
    shapes, grads, scratch = ghosts(step)
    assert shapes == [tuple(t.shape) for t in real]
    assert grads == [(STEPS, BATCH, LABELS)]
    assert scratch == 4 * max(STEPS * BATCH * LABELS, BATCH * STEPS * (2 * 9 + 1))


def test_a_packed_sequence_has_no_padding(ghosts: GhostProcess) -> None:
    lengths = torch.tensor([5, 3, 2])

    def step(lab: Lab) -> tuple[tuple[int, ...], list[int]]:
        packed = torch.nn.utils.rnn.pack_padded_sequence(lab.ghost(3, 5, 4), lab.known(lengths).cpu(), batch_first=True)
        return tuple(packed.data.shape), list(packed.batch_sizes.tolist())

    real = torch.nn.utils.rnn.pack_padded_sequence(torch.zeros(3, 5, 4), lengths, batch_first=True)
    assert ghosts(step) == (tuple(real.data.shape), real.batch_sizes.tolist())


def test_lengths_that_depend_on_weights_are_refused(ghosts: GhostProcess) -> None:
    def step(lab: Lab) -> None:
        attrgetter("_pack_padded_sequence")(torch)(lab.ghost(3, 5, 4), lab.ghost(3, dtype=torch.int64), True)

    with pytest.raises(ValueReadError, match="lengths"):
        ghosts(step)


class TestMemory:
    """What is remembered is what torch's own shape functions say; views and memory that is shared are asked for each time."""

    CALLS = (
        (aten.mul.Tensor, (meta(4, 8), meta(8, dtype=torch.float32)), {}),
        (aten.mul.Tensor, (meta(4, 8), 2.0), {}),
        (aten.mul.Tensor, (meta(4, 8, dtype=torch.int64), 2), {}),
        (aten.mul.Tensor, (meta(4, 8, dtype=torch.int64), 2.0), {}),
        (aten.add.Tensor, (meta(8, 4).t(), meta(4, 8)), {}),
        (aten.add.Tensor, (meta(4, 8), meta(8)), {"alpha": 2}),
        (aten.native_layer_norm.default, (meta(4, 8), [8], meta(8), None, 1e-5), {}),
        (aten.sum.dim_IntList, (meta(4, 8), [0], True), {}),
        (aten.sum.dim_IntList, (meta(4, 8), [0], True), {"dtype": torch.float32}),
        (aten.t.default, (meta(4, 8),), {}),
        (aten.split.Tensor, (meta(4, 8), 2), {}),
        (aten.expand.default, (meta(1, 8), [4, 8]), {}),
    )

    @staticmethod
    def described(out: object) -> list[object]:
        outputs = out if isinstance(out, list | tuple) else [out]
        return [
            type(out),
            *((each.shape, each.stride(), each.dtype, each.untyped_storage().nbytes()) for each in outputs),
        ]

    def test_the_second_answer_is_the_first(self) -> None:
        memory = ShapeMemory()
        for func, args, kwargs in (*self.CALLS, *self.CALLS):
            found = memory.call(func, args, kwargs)
            assert self.described(found) == self.described(func(*args, **kwargs)), (func, args, kwargs)

    def test_what_is_new_is_new_again_and_a_view_is_of_its_own_argument(self) -> None:
        memory = ShapeMemory()
        first, second = meta(4, 8), meta(4, 8)
        made = [memory.call(aten.mul.Tensor, (argument, 2.0), {}) for argument in (first, second)]
        assert len({tensor.untyped_storage()._cdata for tensor in (first, second, *made)}) == 4
        for argument in (first, second):
            view = memory.call(aten.t.default, (argument,), {})
            assert view.untyped_storage()._cdata == argument.untyped_storage()._cdata

    def test_torch_is_asked_once(self) -> None:
        asked = []

        def func(tensor: Tensor) -> Tensor:
            asked.append(tensor)
            return torch.empty_like(tensor)

        memory = ShapeMemory()
        for _ in range(3):
            memory.call(func, (meta(4, 8),), {})
        assert len(asked) == 1
        memory.call(func, (meta(8, 4),), {})
        assert len(asked) == 2
