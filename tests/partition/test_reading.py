"""From graphs to programs: sizes as arithmetic on shapes, views that are no buffers, and what is saved."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowtide import compat
from lowtide.lab.budget.points import recomputed_share
from lowtide.partition.fusion import fuse
from lowtide.partition.program import Work
from lowtide.partition.reading import Partition, read_partition

ROWS, WIDTH, HIDDEN = 8, 16, 64
FLOAT = 4

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def squared_layers(first: Tensor, second: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return ((torch.relu(x @ first) @ second).square().sum(),)


def cut(budget: float) -> compat.Halves:
    weights = [torch.empty(WIDTH, HIDDEN).requires_grad_(), torch.empty(HIDDEN, WIDTH).requires_grad_()]
    return compat.partition(compat.trace_joint_graph(squared_layers, weights, [torch.empty(ROWS, WIDTH)]), budget)


def read(budget: float) -> Partition:
    return read_partition(cut(budget))


def test_inputs_are_the_weights_and_the_batch() -> None:
    partition = read(1.0)
    sizes = [partition.forward.sizes[buffer] for buffer in partition.kept]
    assert sizes == [WIDTH * HIDDEN * FLOAT, HIDDEN * WIDTH * FLOAT, ROWS * WIDTH * FLOAT]
    assert partition.forward.inputs == partition.kept
    assert set(partition.kept) <= set(partition.backward.inputs)


def test_saved_bytes_are_those_of_what_the_backward_reads() -> None:
    # relu's result for the second weight's gradient and as its own mask, and the second product for the square's.
    assert read(1.0).saved_bytes == (ROWS * HIDDEN + ROWS * WIDTH) * FLOAT
    assert read(0.0).saved_bytes == 0


def test_transposed_weights_are_the_weights() -> None:
    partition = read(1.0)
    assert not partition.saved & set(partition.kept)
    assert all("permute" not in buffer and "t_" not in buffer for buffer in partition.forward.sizes)


def test_gradients_and_tangents() -> None:
    partition = read(1.0)
    assert sorted(partition.backward.sizes[buffer] for buffer in partition.backward.outputs) == sorted(
        [WIDTH * HIDDEN * FLOAT, HIDDEN * WIDTH * FLOAT]
    )
    assert [partition.backward.sizes[buffer] for buffer in partition.tangents] == [FLOAT]


def test_each_buffer_begins_once_and_is_read_afterwards() -> None:
    partition = read(0.0)
    for program in (partition.forward, partition.backward):
        begun = set(program.inputs)
        for step in program.steps:
            assert set(step.reads) <= begun
            assert not set(step.writes) & begun
            begun |= set(step.writes)
        assert program.outputs <= begun


def test_kinds_of_work() -> None:
    work = {step.name.partition("_")[0]: step.work for step in read(1.0).forward.steps}
    assert work["mm"] is Work.KERNEL
    assert work["relu"] is Work.POINTWISE
    assert work["sum"] is Work.REDUCTION


def test_results_of_one_operator_are_buffers_of_their_own() -> None:
    def function(weight: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        query = (x @ weight).view(1, 2, 8, 8)
        out = torch.ops.aten._scaled_dot_product_efficient_attention(query, query, query, None, True)[0]
        left, right = out.split(4, dim=-1)
        return ((left * right).sum(),)

    weight = torch.empty(16, 16).requires_grad_()
    partition = read_partition(
        compat.partition(compat.trace_joint_graph(function, [weight], [torch.empty(8, 16)]), 1.0)
    )
    (attention,) = (step for step in partition.forward.steps if "attention" in step.name)
    assert partition.forward.sizes[attention.writes[0]] == 2 * 8 * 8 * FLOAT
    assert len(attention.writes) == 4
    # The two halves of a split are the attention's first result.
    assert attention.writes[0] in partition.saved


@pytest.mark.parametrize("is_formula", [True, False])
def test_each_attention_has_a_copy_of_a_bias_that_is_a_formula(is_formula: bool) -> None:
    batch, heads, length = 3, 2, 8
    shared = heads * length * length * FLOAT

    def function(weight: Tensor, slopes: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        query = (x @ weight).view(batch, heads, length, 8)
        bias = slopes.exp() if is_formula else slopes
        repeated = bias.expand(batch, -1, -1, -1)
        return (torch.ops.aten._scaled_dot_product_efficient_attention(query, query, query, repeated, True)[0].sum(),)

    weight, slopes = torch.empty(16, 16).requires_grad_(), torch.empty(heads, length, length).requires_grad_()
    joint = compat.trace_joint_graph(function, [weight, slopes], [torch.empty(batch * length, 16)])
    partition = read_partition(compat.partition(joint, 0.0))
    copies = [
        partition.backward.sizes[step.writes[0]]
        for program in (partition.forward, partition.backward)
        for step in program.steps
        if step.name.endswith(" bias")
    ]
    # In the forward, again in the backward, and for the attention's own backward, there with the batch written out.
    assert copies == ([shared, shared, batch * shared] if is_formula else [])
    if is_formula:
        attention = next(step for step in partition.forward.steps if step.operator.endswith("efficient_attention"))
        assert {f"{attention.name} bias"} < set(attention.reads)
        fused = fuse(partition.backward)
        assert not [step for step in fused.steps if step.operator == "aten.exp"], "it is computed inside of the copies"


def bias_copies(partition: Partition) -> list[int]:
    """Bytes of the copies that attention gets, in the forward and in the backward."""
    steps = (*partition.forward.steps, *partition.backward.steps)
    return [partition.backward.sizes[step.writes[0]] for step in steps if step.name.endswith(" bias")]


def attend(x: Tensor, bias: Tensor, length: int) -> Tensor:
    query = x.view(3, 2, length, 8)
    repeated = bias.expand(3, 2, length, length)
    attended: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(query, query, query, repeated, True)[0]
    return attended


@pytest.mark.parametrize(
    ("shape", "in_forward", "in_backward"),
    [
        # Shared by the batch, by the heads, by both: what is repeated along them takes no memory in the forward.
        ((2, 8, 8), 2 * 8 * 8, 6 * 8 * 8),
        ((3, 1, 8, 8), 3 * 8 * 8, 6 * 8 * 8),
        ((8, 8), 8 * 8, 6 * 8 * 8),
        # A row for all queries, a number for all keys: the kernel wants the matrix.
        ((3, 1, 1, 8), 3 * 8 * 8, 6 * 8 * 8),
        ((2, 8, 1), 2 * 8 * 8, 6 * 8 * 8),
    ],
)
def test_what_the_copy_of_a_bias_holds(shape: tuple[int, ...], in_forward: int, in_backward: int) -> None:
    def function(weight: Tensor, slopes: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return (attend(x @ weight, slopes.exp(), 8).sum(),)

    weights = [torch.empty(16, 16).requires_grad_(), torch.empty(shape).requires_grad_()]
    partition = read_partition(
        compat.partition(compat.trace_joint_graph(function, weights, [torch.empty(24, 16)]), 0.0)
    )
    assert bias_copies(partition) == [in_forward * FLOAT, in_forward * FLOAT, in_backward * FLOAT]


def test_rows_of_a_bias_are_aligned() -> None:
    def function(weight: Tensor, slopes: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return (attend(x @ weight, torch.nn.functional.pad(slopes.exp(), (0, 3))[..., :5], 5).sum(),)

    weights = [torch.empty(16, 16).requires_grad_(), torch.empty(2, 5, 5).requires_grad_()]
    partition = read_partition(
        compat.partition(compat.trace_joint_graph(function, weights, [torch.empty(15, 16)]), 0.0)
    )
    padded = 2 * 5 * 8 * FLOAT
    assert bias_copies(partition) == [padded, padded]
    # What the bias is cut from has aligned rows, and is what the attention's backward reads.
    last = next(step for step in partition.backward.steps if step.operator.endswith("attention_backward"))
    assert [buffer for buffer in last.reads if "pad" in buffer and partition.backward.sizes[buffer] == padded]


@pytest.mark.parametrize("kind", ["product", "sum", "output"])
def test_a_bias_that_is_a_buffer_is_not_copied(kind: str) -> None:
    def function(weight: Tensor, slopes: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        bias = {"product": slopes @ slopes, "sum": slopes.expand(4, 2, 8, 8).exp().sum(0), "output": slopes.exp()}[kind]
        loss = attend(x @ weight, bias, 8).sum()
        return (loss, bias) if kind == "output" else (loss,)

    weights = [torch.empty(16, 16).requires_grad_(), torch.empty(2, 8, 8)]
    joint = compat.trace_joint_graph(function, weights[:1], [weights[1], torch.empty(24, 16)])
    partition = read_partition(compat.partition(joint, 1.0))
    assert not [step for step in partition.forward.steps if step.name.endswith(" bias")]


def test_what_the_caller_has_got_is_not_donated() -> None:
    def function(weight: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        hidden = (x @ weight).exp()
        out = hidden @ weight
        return (out.square().sum(), out)

    weight = torch.empty(WIDTH, WIDTH).requires_grad_()
    halves = compat.partition(compat.trace_joint_graph(function, [weight], [torch.empty(ROWS, WIDTH)]), 1.0)
    partition = read_partition(halves)
    # The hidden tensor and the result are saved; the result is returned too.
    assert partition.saved_bytes == 2 * ROWS * WIDTH * FLOAT
    assert sum(partition.forward.sizes[buffer] for buffer in partition.donated) == ROWS * WIDTH * FLOAT


@pytest.mark.parametrize(("view", "is_turned"), [("flatten", False), ("t", True)])
def test_views_that_turn_are_told_from_those_that_do_not(view: str, is_turned: bool) -> None:
    def function(weight: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        product = x @ weight
        seen = product.t() if view == "t" else product.flatten()
        return (seen.square().sum(),)

    weight = torch.empty(WIDTH, WIDTH).requires_grad_()
    halves = compat.partition(compat.trace_joint_graph(function, [weight], [torch.empty(ROWS, WIDTH)]), 1.0)
    (square,) = (step for step in read_partition(halves).forward.steps if step.name.startswith("pow"))
    assert square.turned == (set(square.reads) if is_turned else set())


def test_a_buffer_that_is_written_over_does_not_begin_anew() -> None:
    norm = torch.nn.BatchNorm1d(WIDTH)
    weights = {**dict(norm.named_parameters()), **dict(norm.named_buffers())}

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        out = torch.func.functional_call(norm, dict(zip(weights, tensors[:-1], strict=True)), tensors[-1])
        return (out.square().sum(),)

    joint = compat.trace_joint_graph(function, list(weights.values()), [torch.empty(ROWS, WIDTH)])
    partition = read_partition(compat.partition(joint, 1.0))
    begun = [buffer for step in partition.forward.steps for buffer in step.writes]
    assert len(begun) == len(set(begun))
    assert not set(begun) & set(partition.kept)


def test_all_of_the_forward_is_computed_again_without_a_budget() -> None:
    assert recomputed_share(cut(0.0)) == pytest.approx(1.0)
    assert recomputed_share(cut(1.0)) == 0.0
