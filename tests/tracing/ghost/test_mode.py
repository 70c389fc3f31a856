"""The ghost mode: what is allocated, what is known, and what autograd does with gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from operator import attrgetter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.errors import BatchMismatchError, MissingKernelError, ValueReadError
from tests.tracing.ghost.ghost_process import GhostProcess, Lab


class TestStorages:
    def test_an_output_costs_its_bytes_and_dies_with_its_last_reference(self, ghosts: GhostProcess) -> None:
        def step(lab: Lab) -> list[int]:
            x = lab.ghost(8, 4)
            seen = [lab.live_bytes]
            y = x + 1
            seen.append(lab.live_bytes)
            z = y.view(4, 8)
            del y
            seen.append(lab.live_bytes)  # the view keeps the storage
            del z
            return [*seen, lab.live_bytes]

        assert ghosts(step) == [128, 256, 256, 128]

    def test_views_allocate_nothing(self, ghosts: GhostProcess) -> None:
        def step(lab: Lab) -> tuple[int, set[int]]:
            x = lab.ghost(2, 6, 4)
            lab.mark()
            views = [
                x.view(12, 4), x.t() if x.dim() == 2 else x.transpose(0, 2), x[0], x[:, 1:3], x.expand(3, 2, 6, 4),
                x.unbind(1), x.split(2, 1), x.chunk(2, -1), x.unsqueeze(0), x.permute(2, 0, 1), x.detach(), x.real,
                x.as_strided((2, 2), (1, 1)), x.unfold(1, 2, 2), x.diagonal(), x.flatten(),
            ]  # fmt: skip
            flat = [view for group in views for view in (group if isinstance(group, tuple | list) else (group,))]
            return lab.num_events, {view.life.number for view in flat}

        events, lives = ghosts(step)
        assert events == 0
        assert lives == {0}

    def test_reshape_copies_only_what_it_must(self, ghosts: GhostProcess) -> None:
        def step(lab: Lab) -> list[tuple[str, int]]:
            x = lab.ghost(3, 5)
            lab.mark()
            same = x.reshape(15)
            copy = x.t().reshape(15)
            assert same.life is x.life
            assert copy.life is not x.life
            return lab.births

        assert ghosts(step) == [("aten.clone", 60)]

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
    def test_bytes_follow_the_dtype(self, ghosts: GhostProcess, dtype: torch.dtype) -> None:
        def step(lab: Lab) -> list[tuple[str, int]]:
            lab.mark()
            keep = torch.zeros(7, 3, dtype=dtype, device="ghost")
            return lab.births if keep is not None else []

        assert ghosts(step) == [("aten.zeros", 21 * dtype.itemsize)]

    def test_writing_in_place_allocates_nothing_and_gives_the_same_tensor(self, ghosts: GhostProcess) -> None:
        def step(lab: Lab) -> tuple[int, bool]:
            x, y = lab.ghost(16), lab.ghost(16)
            lab.mark()
            is_same = x.add_(y) is x and x.mul_(2) is x and x.copy_(y) is x and x.zero_() is x
            torch.add(x, y, out=x)
            torch._foreach_add_([x, y], 1.0)
            return lab.num_events, is_same

        assert ghosts(step) == (0, True)

    def test_a_shape_changed_in_place_is_seen_outside(self, ghosts: GhostProcess) -> None:
        """`CatBackward` cuts the gradient by the shapes of what was joined."""

        def step(lab: Lab) -> tuple[object, ...]:
            x = lab.ghost(2, 5, needs_grad=True)
            lab.mark()
            y = (x * 1.0).unsqueeze_(1)
            shapes = [tuple(y.shape), tuple(y.squeeze_(1).t_().shape), tuple(y.transpose_(0, 1).unsqueeze_(1).shape)]
            events = lab.num_events
            torch.cat([y, lab.ghost(2, 3, 5)], 1).sum().backward()
            return shapes, events, tuple(x.grad.shape)

        assert ghosts(step) == ([(2, 1, 5), (5, 2), (2, 1, 5)], 1, (2, 5))

    def test_a_shape_changed_in_place_keeps_the_values(self, ghosts: GhostProcess) -> None:
        ids = torch.arange(6).view(2, 3)

        def step(lab: Lab) -> tuple[object, ...]:
            x = lab.known(ids)
            row = x[1]
            x.t_()
            return x.tolist(), row.tolist()

        assert ghosts(step) == (ids.t().tolist(), ids[1].tolist())

    def test_an_empty_tensor_costs_nothing(self, ghosts: GhostProcess) -> None:
        assert ghosts(lambda lab: (lab.mark(), torch.empty(0, 5, device="ghost") + 1, lab.num_events)[2]) == 0


class TestOperators:
    def test_a_dropout_mask_is_one_byte_an_element_and_comes_first(self, ghosts: GhostProcess) -> None:
        def step(lab: Lab) -> list[tuple[str, int]]:
            x = lab.ghost(100, 10, needs_grad=True)
            lab.mark()
            y = F.dropout(x, 0.1, training=True)
            return lab.births if y is not None else []

        assert ghosts(step) == [("aten.native_dropout", 1000), ("aten.native_dropout", 4000)]

    @pytest.mark.parametrize(("hardware", "copies"), [("h200", 1), ("cpu", 0)])
    def test_group_norm_copies_channels_last_on_a_card_alone(
        self, ghosts: GhostProcess, hardware: str, copies: int
    ) -> None:
        def step(lab: Lab) -> tuple[int, bool]:
            lab = Lab(hardware)
            x = lab.ghost(2, 8, 16, 16).contiguous(memory_format=torch.channels_last)
            lab.mark()
            with lab.mode:
                y = F.group_norm(x, 4)
            return [nbytes for _, nbytes in lab.births].count(4 * 2 * 8 * 256), y.is_contiguous()

        assert ghosts(step) == (1 + copies, bool(copies))

    def test_the_backward_of_silu_is_one_operator_with_one_output(self, ghosts: GhostProcess) -> None:
        def step(lab: Lab) -> list[tuple[str, int]]:
            x = lab.ghost(64, needs_grad=True)
            y = F.silu(x).sum()
            lab.recorder.begin_phase(lab.phase.BACKWARD)
            lab.mark()
            y.backward()
            return lab.births

        assert ghosts(step) == [("aten.ones_like", 4), ("aten.silu_backward", 256)]

    def test_fused_rms_norm_keeps_the_input_and_one_number_a_row(self, ghosts: GhostProcess) -> None:
        def step(lab: Lab) -> tuple[list[str], int, int]:
            x = lab.ghost(32, 64, needs_grad=True)
            weight = lab.ghost(64, needs_grad=True)
            start = lab.live_bytes
            first = len(lab.calls)
            y = F.rms_norm(x * 1.0, (64,), weight)
            rows = 4 * 32
            return lab.calls[first:], lab.live_bytes - start, 4 * 32 * 64 * 2 + rows if y is not None else 0

        ops, grown, expected = ghosts(step)
        assert [op for op in ops if op != "aten.detach"] == ["aten.mul", "aten._fused_rms_norm"]
        assert grown == expected  # the norm's input and output, and rstd; no normalised copy

    def test_layer_norm_keeps_mean_and_rstd(self, ghosts: GhostProcess) -> None:
        def step(lab: Lab) -> list[tuple[str, int]]:
            x, weight = lab.ghost(32, 64, needs_grad=True), lab.ghost(64, needs_grad=True)
            lab.mark()
            y = F.layer_norm(x, (64,), weight, weight)
            return lab.outputs if y is not None else []

        assert ghosts(step) == [("aten.native_layer_norm", 8192)] + [("aten.native_layer_norm", 128)] * 2

    def test_convolutions_of_channels_last_inputs_stay_channels_last(self, ghosts: GhostProcess) -> None:
        def step(lab: Lab) -> tuple[bool, bool]:
            weight = lab.ghost(8, 4, 3, 3)
            last = F.conv2d(lab.ghost(2, 4, 6, 6).to(memory_format=torch.channels_last), weight)
            first = F.conv2d(lab.ghost(2, 4, 6, 6), weight)
            return last.is_contiguous(memory_format=torch.channels_last), first.is_contiguous()

        assert ghosts(step) == (True, True)

    def test_an_operator_without_a_shape_function_is_named(self, ghosts: GhostProcess) -> None:
        def step(lab: Lab) -> None:
            library = torch.library.Library("lowtide_tests", "FRAGMENT")
            library.define("opaque(Tensor x) -> Tensor")
            library.impl("opaque", lambda x: x.clone(), "CPU")
            lab.recorder.enter_module("layers.3.mlp")
            try:
                attrgetter("ops.lowtide_tests.opaque")(torch)(lab.ghost(4))
            finally:
                library._destroy()

        with pytest.raises(
            MissingKernelError, match=r"lowtide_tests.opaque, called in 'layers.3.mlp'.*register_fake"
        ) as info:
            ghosts(step)
        assert (info.value.module, info.value.op) == ("layers.3.mlp", "lowtide_tests.opaque")

    def test_shapes_that_do_not_fit_are_named(self, ghosts: GhostProcess) -> None:
        def step(lab: Lab) -> None:
            lab.recorder.enter_module("head")
            lab.ghost(4, 5) @ lab.ghost(6, 7)

        with pytest.raises(
            BatchMismatchError, match=r"aten.mm in 'head' does not accept \[4, 5\] float32, \[6, 7\]"
        ) as info:
            ghosts(step)
        assert (info.value.module, info.value.op) == ("head", "aten.mm")

    def test_a_ghost_used_after_its_trace_says_so(self, ghosts: GhostProcess) -> None:
        def step(lab: Lab) -> str:
            from torch.utils._python_dispatch import _disable_current_modes

            x = lab.ghost(3)
            with _disable_current_modes():
                try:
                    x + 1
                except RuntimeError as error:
                    return str(error)
            return ""

        assert "outside the trace it belongs to" in ghosts(step)


class TestValues:
    def test_a_branch_on_a_known_mask_is_taken_as_for_real(self, ghosts: GhostProcess) -> None:
        ones, padded = torch.ones(2, 5, dtype=torch.int64), torch.tensor([[1, 1, 0], [1, 1, 1]])

        def step(lab: Lab) -> list[bool]:
            return [bool(lab.known(mask).bool().all()) for mask in (ones, padded)]

        assert ghosts(step) == [True, False]

    def test_item_and_arithmetic_on_known_values(self, ghosts: GhostProcess) -> None:
        ids = torch.tensor([[5, 2, 9], [4, 4, 1]])

        def step(lab: Lab) -> list[object]:
            x = lab.known(ids)
            position = (x == 9).nonzero()
            return [
                int(x.max()),
                (x + 1).sum().item(),
                x.cumsum(-1)[:, -1].tolist(),
                position.tolist(),
                float(x.float().mean()),
            ]

        assert ghosts(step) == [9, int((ids + 1).sum()), [16, 9], [[0, 2]], float(ids.float().mean())]

    @pytest.mark.parametrize("seed", range(3))
    def test_shapes_that_depend_on_values_are_the_real_ones(self, ghosts: GhostProcess, seed: int) -> None:
        mask = torch.rand(6, 7, generator=torch.Generator().manual_seed(seed)) > 0.5
        ids = torch.randint(0, 5, (20,), generator=torch.Generator().manual_seed(seed))

        def step(lab: Lab) -> list[tuple[int, ...]]:
            m, i, hidden = lab.known(mask), lab.known(ids), lab.ghost(6, 7, 3)
            found = [m.nonzero(), hidden[m], i.unique(), hidden.masked_select(m[..., None]), i.bincount()]
            return [tuple(t.shape) for t in found]

        num = int(mask.sum())
        assert ghosts(step) == [(num, 2), (num, 3), tuple(ids.unique().shape), (num * 3,), tuple(ids.bincount().shape)]

    def test_setting_by_a_mask_that_is_not_known_needs_no_values(self, ghosts: GhostProcess) -> None:
        def step(lab: Lab) -> tuple[object, ...]:
            x, value = lab.ghost(4, 3) * 1.0, lab.ghost(1)
            lab.mark()
            mask = x > 0
            x[mask] = 0.0
            y = torch.index_put(x, (mask,), value)
            return tuple(x.shape), tuple(y.shape), [nbytes for op, nbytes in lab.births if "index_put" in op]

        assert ghosts(step) == ((4, 3), (4, 3), [48])

    def test_numbers_make_names_lists_and_arrays(self, ghosts: GhostProcess) -> None:
        def step(lab: Lab) -> list[object]:
            x = lab.known(torch.tensor([4, 7]))
            listed = torch.tensor([x[0], x[1] + 1], device=x.device)
            return [f"expert_{x[1]}", f"{x[0]:03d}", listed.tolist(), x.cpu().numpy().sum()]

        assert ghosts(step) == ["expert_7", "004", [4, 8], 11]

    def test_large_values_are_read_for_real(self, ghosts: GhostProcess) -> None:
        """Above `HOST_GHOST_BYTES` what the step makes on the host is a ghost; what a value is computed from is not."""
        assert ghosts(lambda lab: sum(torch.zeros(2**18 + 1, device="ghost").tolist())) == 0

    def test_a_read_of_weights_says_where(self, ghosts: GhostProcess) -> None:
        def step(lab: Lab) -> None:
            lab.recorder.enter_module("blocks.1")
            weight = lab.ghost(4, needs_grad=True)
            if weight.sum() > 0:
                raise AssertionError

        with pytest.raises(ValueReadError, match=r"'blocks.1' \(test_mode.py:\d+\).*lowtide.observe") as info:
            ghosts(step)
        assert info.value.op == "aten._local_scalar_dense"

    def test_chance_is_not_known(self, ghosts: GhostProcess) -> None:
        with pytest.raises(ValueReadError):
            ghosts(lambda lab: torch.rand_like(lab.known(torch.ones(3))).sum().item())

    def test_a_write_through_a_view_makes_values_stale(self, ghosts: GhostProcess) -> None:
        def step(lab: Lab) -> None:
            x = lab.known(torch.arange(6))
            x.view(2, 3)[0].copy_(lab.ghost(3, dtype=torch.int64))  # not known
            x.sum().item()

        with pytest.raises(ValueReadError):
            ghosts(step)

    def test_a_write_of_known_values_is_followed_and_does_not_reach_back(self, ghosts: GhostProcess) -> None:
        def step(lab: Lab) -> tuple[int, int, int]:
            x = lab.known(torch.arange(6))
            before = x.sum()  # evaluated only after the write
            x.add_(10)
            after = x.sum()
            x.zero_()
            return before.item(), after.item(), x.sum().item()

        assert ghosts(step) == (15, 75, 0)

    def test_a_router_is_taken_to_be_in_balance(self, ghosts: GhostProcess) -> None:
        tokens, experts, count = 24, 8, 2

        def step(lab: Lab) -> tuple[list[int], bool]:
            _, chosen = lab.ghost(tokens, experts).topk(count, dim=-1)
            values = chosen.value().get()
            return values.flatten().bincount(minlength=experts).tolist(), bool((values[:, 0] != values[:, 1]).all())

        loads, are_different = ghosts(step)
        assert loads == [tokens * count // experts] * experts
        assert are_different

    def test_a_number_read_by_the_optimizer_is_noted_not_refused(self, ghosts: GhostProcess) -> None:
        def step(lab: Lab) -> tuple[float, list[str]]:
            lab.recorder.begin_phase(lab.phase.UPDATE)
            return lab.ghost(4).norm().item(), list(lab.mode.notes)

        value, notes = ghosts(step)
        assert value == 1.0
        assert "taken to be 1" in notes[0]


def real_sums(graph: Callable[[Tensor], Tensor]) -> tuple[int, int]:
    """How often autograd's engine adds gradients for real, and how many of these sums are new tensors."""
    x = torch.randn(4, 4, requires_grad=True)
    total = graph(x).sum()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        total.backward()
    counts = Counter(event.name for event in profile.events() if event.name in ("aten::add", "aten::add_"))
    return counts.total(), counts["aten::add"]


def sines(x: Tensor) -> Tensor:
    return x.sin() * x.cos()


def shared(x: Tensor) -> Tensor:
    return x + x * 2  # both terms get the same gradient tensor: the first must not be overwritten


def three_terms(x: Tensor) -> Tensor:
    return x.sin() + x.cos() + x.exp()


def twice(x: Tensor) -> Tensor:
    y = x.exp()
    return y.sin() * y + y.cos() * y


def through_views(x: Tensor) -> Tensor:
    return x.view(-1).sin().sum() + x.t().cos().sum()


def through_slices(x: Tensor) -> Tensor:
    return x[:2].sin() * x[2:].cos()


def passed_on(x: Tensor, hook: Callable[[Tensor], None] | None = None) -> Tensor:
    y = x * 1.0
    cosine = y.cos()
    same = y + 0  # its gradient goes on to y as it is, and before that of the cosine
    if hook is not None:
        same.register_hook(hook)
    return cosine * cosine + same * same


def held(x: Tensor) -> Tensor:
    return passed_on(x, [].append)  # the user keeps the first gradient: it must not be added to


def expanded(x: Tensor) -> Tensor:
    return x.sum() + x.sin()  # one of the gradients is a number seen as a matrix: nothing to add to in place


class TestGradientSums:
    """Autograd adds in place where nobody else holds the gradient; the allocations must be those of real CUDA."""

    @pytest.mark.parametrize(
        "graph", [sines, shared, three_terms, twice, passed_on, held, through_views, through_slices, expanded]
    )
    def test_as_many_sums_allocate_as_on_a_real_device(
        self, ghosts: GhostProcess, graph: Callable[[Tensor], Tensor]
    ) -> None:
        def step(lab: Lab) -> tuple[int, int]:
            x = lab.ghost(4, 4, needs_grad=True)
            total = graph(x).sum()
            lab.recorder.begin_phase(lab.phase.BACKWARD)
            lab.mark()
            first = len(lab.calls)
            total.backward()
            return sum(op == "aten.add" for op in lab.calls[first:]), sum(op == "aten.add" for op, _ in lab.births)

        num_sums, num_new = real_sums(graph)
        assert num_sums > 0
        assert num_new > 0 or graph is not held  # or the test would prove nothing
        assert ghosts(step) == (num_sums, num_new)
