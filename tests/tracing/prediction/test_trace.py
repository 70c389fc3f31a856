"""`lowtide.trace`: whole steps as arithmetic on bytes, against a count on the CPU, and what it says to bad input."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
import lowtide.activations
from lowtide.errors import (
    BatchMismatchError,
    ConfigError,
    MissingKernelError,
    TooLargeError,
    TraceCrashedError,
    TraceError,
    UnknownNameError,
    ValueReadError,
)
from lowtide.runtime.prediction.trace import trace
from lowtide.tracing.settings import Implementation, StepSettings, UpdateSchedule
from lowtide.tracing.step_trace import Category, Phase, StepTrace
from tests.tracing.ghost.step_bytes import after, peak_in, real_peak, requested_curve

IN, HIDDEN, OUT, ROWS = 64, 128, 32, 16


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(IN, HIDDEN)
        self.down = nn.Linear(HIDDEN, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).sum()


WEIGHTS = 4 * (IN * HIDDEN + HIDDEN + HIDDEN * OUT + OUT)
LARGEST = 4 * IN * HIDDEN
BATCH = 4 * ROWS * IN
SAVED = 4 * ROWS * HIDDEN
"""Bytes of relu's output: saved for its own backward, and as the input of the second layer."""
LOSS = 4


def trace_mlp(optimizer: Any = torch.optim.AdamW, **settings: Any) -> StepTrace:
    return trace(MLP(), (torch.randn(ROWS, IN),), optimizer=optimizer, settings=StepSettings(**settings))


class TestMLP:
    """Exact equality in requested bytes; scratch and library workspaces left out."""

    @pytest.mark.parametrize(
        ("optimizer", "implementation", "state", "extra"),
        [
            # Momentum: one state. Foreach and the plain loop update in place.
            (lambda p: torch.optim.SGD(p, 0.1), Implementation.FOREACH, 0, 0),
            (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), Implementation.FOREACH, WEIGHTS, 0),
            (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), Implementation.LOOP, WEIGHTS, 0),
            (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), Implementation.FUSED, WEIGHTS, 0),
            # Adam: two states. Foreach takes the root of all second moments at once, the loop two temporaries a weight.
            (torch.optim.AdamW, Implementation.FOREACH, 2 * WEIGHTS, WEIGHTS),
            (torch.optim.AdamW, Implementation.LOOP, 2 * WEIGHTS, 2 * LARGEST),
            # Fused: nothing beside the states, and the step counts live on the card, four bytes for each weight.
            (torch.optim.AdamW, Implementation.FUSED, 2 * WEIGHTS + 4 * 4, 0),
        ],
    )
    def test_each_optimizer(self, optimizer: Any, implementation: Implementation, state: int, extra: int) -> None:
        result = trace_mlp(optimizer, implementation=implementation)
        start = WEIGHTS + BATCH + state
        assert requested_curve(result)[0] == start
        assert (
            after(result, Phase.LOSS if Phase.LOSS in result.phase_peaks() else Phase.FORWARD) == start + SAVED + LOSS
        )
        assert after(result, Phase.BACKWARD) == start + WEIGHTS + LOSS
        assert peak_in(result, Phase.UPDATE) == start + WEIGHTS + LOSS + extra
        assert requested_curve(result)[-1] == start

    def test_the_default_is_what_torch_does_on_cuda(self) -> None:
        names = {op.name for op in trace_mlp().ops}
        assert "aten._foreach_lerp_" in names

    def test_the_peak_of_the_backward(self) -> None:
        """After the second layer: its gradients, relu's output and its gradient, and the gradient of relu's input."""
        start = WEIGHTS + BATCH + 2 * WEIGHTS
        second = 4 * (HIDDEN * OUT + OUT)
        ones = 4
        at_relu = start + LOSS + ones + SAVED + second + 2 * SAVED
        at_end = start + LOSS + ones + WEIGHTS + SAVED
        assert peak_in(trace_mlp(), Phase.BACKWARD) == max(at_relu, at_end)

    def test_gradients_kept_between_steps(self) -> None:
        result = trace_mlp(keep_gradients=True)
        start = WEIGHTS + BATCH + 2 * WEIGHTS + WEIGHTS
        assert requested_curve(result)[0] == start
        assert requested_curve(result)[-1] == start
        assert after(result, Phase.BACKWARD) == start + LOSS
        assert result.by_category_at(-1)[Category.GRADIENTS] > 0

    def test_accumulation_adds_into_the_first_gradient(self) -> None:
        result = trace_mlp(accumulate=3)
        start = WEIGHTS + BATCH + 2 * WEIGHTS
        assert after(result, Phase.BACKWARD) == start + WEIGHTS + LOSS
        # The last backward holds all gradients so far, and each new one until it is added.
        single = peak_in(trace_mlp(), Phase.BACKWARD)
        assert peak_in(result, Phase.BACKWARD) > single
        assert sum(op.name == "aten.relu" for op in result.ops) == 3

    def test_an_update_in_the_backward_keeps_no_gradient(self) -> None:
        result = trace_mlp(update=UpdateSchedule.IN_BACKWARD)
        start = WEIGHTS + BATCH + 2 * WEIGHTS
        assert requested_curve(result)[0] == start
        assert after(result, Phase.BACKWARD) == start + LOSS
        sizes = [a.requested_bytes for a in result.allocations if a.category is Category.GRADIENTS]
        assert sum(sizes) == WEIGHTS

    def test_clipping_needs_norms_not_copies(self) -> None:
        with_clip, without = trace_mlp(max_grad_norm=1.0), trace_mlp()
        assert peak_in(with_clip, Phase.UPDATE) - peak_in(without, Phase.UPDATE) < 4 * 16

    def test_without_an_optimizer(self) -> None:
        result = trace_mlp(None)
        assert requested_curve(result)[0] == requested_curve(result)[-1] == WEIGHTS + BATCH
        assert result.at_peak[Category.OPTIMIZER] == 0

    @pytest.mark.parametrize(("precision", "factor"), [("bfloat16", 2), ("float16", 2), ("float32", 1)])
    def test_precision_converts_weights_and_floating_inputs(self, precision: str, factor: int) -> None:
        result = trace_mlp(precision=precision)
        assert requested_curve(result)[0] == (WEIGHTS + BATCH + 2 * WEIGHTS) // factor

    def test_autocast_casts_each_weight_once(self) -> None:
        result = trace(MLP(), (torch.randn(ROWS, IN),), optimizer=torch.optim.AdamW, autocast="bfloat16")
        casts = [a.requested_bytes for a in result.allocations if a.op == "aten._to_copy" and a.phase is Phase.FORWARD]
        assert sum(casts) == WEIGHTS // 2 + BATCH // 2
        # In the backward the matrices' casts are needed again; the biases' died with the context. The sum reads the second
        # layer's output in bf16.
        start = WEIGHTS + BATCH + 2 * WEIGHTS
        held = 2 * (IN * HIDDEN + HIDDEN * OUT) + BATCH // 2 + SAVED // 2 + LOSS
        last = Phase.LOSS if Phase.LOSS in result.phase_peaks() else Phase.FORWARD
        # The first layer's cast weight is not needed: its input has no gradient.
        assert after(result, last) == start + held - 2 * IN * HIDDEN

    @pytest.mark.parametrize(
        ("dtype", "autocast", "said"),
        [
            # The mean of a bf16 tensor is taken in bf16 under autocast too.
            (
                torch.bfloat16,
                torch.bfloat16,
                "changes nothing: the step has nothing to cast, its weights are in bfloat16",
            ),
            (torch.float32, "fp32", "changes nothing: torch's autocast computes in bfloat16 or float16 alone"),
        ],
    )
    def test_an_autocast_that_changes_nothing_says_so(self, dtype: torch.dtype, autocast: Any, said: str) -> None:
        model, batch = nn.Linear(IN, OUT, dtype=dtype), torch.randn(ROWS, IN, dtype=dtype)
        step = {"optimizer": torch.optim.AdamW, "loss": lambda model, batch: model(batch).mean()}
        with pytest.warns(UserWarning, match=said):
            result = trace(model, batch, **step, autocast=autocast)
        assert any(said in note for note in result.notes)
        assert result.curve.tolist() == trace(model, batch, **step).curve.tolist()

    def test_an_autocast_that_only_widens_says_so(self) -> None:
        model, batch = nn.Linear(IN, OUT, dtype=torch.bfloat16), torch.randn(ROWS, IN, dtype=torch.bfloat16)
        step = {"loss": lambda model, batch: model(batch).softmax(-1).square().mean()}
        with pytest.warns(UserWarning, match="casts no weight: they are in bfloat16 already, and only norms, softmax"):
            result = trace(model, batch, **step, autocast="bf16")
        assert result.peak_bytes > trace(model, batch, **step).peak_bytes

    def test_categories_sum_to_the_peak_and_the_curve(self) -> None:
        result = trace_mlp()
        assert sum(result.at_peak.values()) == result.peak_bytes
        assert (sum(result.stacked.values()) == result.curve).all()
        assert result.start_allocated_bytes == result.curve[-1]  # a steady state

    def test_everything_at_the_peak_has_a_module_and_an_operator(self) -> None:
        result = trace_mlp()
        assert all(a.module and a.op for a in result.alive_at(result.peak_event))
        sources = {
            a.source for a in result.allocations if a.phase is Phase.FORWARD and a.category is not Category.WORKSPACE
        }
        assert all(source.startswith("test_trace.py:") for source in sources)

    def test_the_backward_is_named_after_the_forward(self) -> None:
        gradients = [a for a in trace_mlp().allocations if a.category is Category.GRADIENTS]
        assert [(a.module, a.requested_bytes) for a in gradients] == [
            ("down", 4 * HIDDEN * OUT), ("down", 4 * OUT), ("up", 4 * IN * HIDDEN), ("up", 4 * HIDDEN),
        ]  # fmt: skip


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(3, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids)).sum()


class TestParameters:
    def test_tied_weights_are_counted_once(self) -> None:
        ids = torch.zeros(2, 5, dtype=torch.int64)
        result = trace(Tied(), (ids,), optimizer=lambda p: torch.optim.SGD(p, 0.1))
        weights = 4 * (50 * 8) + 4 * (9 + 3)
        assert requested_curve(result)[0] == weights + 8 * 10
        assert result.num_parameters == 50 * 8 + 12
        gradients = [a for a in result.allocations if a.category is Category.GRADIENTS]
        assert [a.requested_bytes for a in gradients].count(4 * 50 * 8) >= 1
        assert (
            after(result, Phase.BACKWARD) == weights + 8 * 10 + 4 * 50 * 8 + LOSS
        )  # one gradient, none for the unused

    def test_frozen_weights_have_no_gradient_and_no_state(self) -> None:
        model = MLP()
        model.up.requires_grad_(False)
        result = trace(model, (torch.randn(ROWS, IN),), optimizer=torch.optim.AdamW)
        trained = 4 * (HIDDEN * OUT + OUT)
        start = WEIGHTS + BATCH + 2 * trained
        assert requested_curve(result)[0] == start
        assert after(result, Phase.BACKWARD) == start + trained + LOSS

    def test_buffers_are_weights(self) -> None:
        model = nn.BatchNorm1d(32)
        result = trace(model, (torch.randn(4, 32),), loss=lambda m, b: m(*b).sum(), optimizer=torch.optim.SGD)
        assert sum(a.requested_bytes for a in result.alive_at(-1) if a.category is Category.WEIGHTS) == 4 * 4 * 32 + 8

    def test_views_of_one_buffer_cost_it_once(self) -> None:
        flat = torch.randn(100)

        class Views(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = nn.Parameter(flat[:40]), nn.Parameter(flat[40:])

            def forward(self, x: Tensor) -> Tensor:
                return (self.a.sum() + self.b.sum()) * x

        assert requested_curve(trace(Views(), (torch.ones(()),)))[0] == 400 + 4

    def test_on_the_meta_device_as_with_real_weights(self) -> None:
        with torch.device("meta"):
            model = MLP()
        batch = (torch.randn(ROWS, IN),)
        assert (trace(model, batch).curve == trace(MLP(), batch).curve).all()

    def test_neither_model_nor_batch_is_touched(self) -> None:
        model, batch = MLP(), (torch.randn(ROWS, IN),)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer = torch.optim.AdamW(model.parameters())
        trace(model, batch, optimizer=optimizer)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert all(p.grad is None for p in model.parameters())
        assert not optimizer.state
        assert not model._forward_hooks


class TinyGPT(nn.Module):
    """One block, tied head, fp32."""

    def __init__(self, vocabulary: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        batch, length = ids.shape
        x = self.tokens(ids) + self.places.weight[:length]
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*qkv.unbind(0), is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return F.cross_entropy(self.head(self.norm3(x)).flatten(0, 1), labels.flatten())


class TestGPT:
    VOCABULARY, WIDTH, HEADS, LENGTH, BATCH = 96, 32, 4, 64, 2

    def run(self) -> StepTrace:
        model = TinyGPT(self.VOCABULARY, self.WIDTH, self.HEADS, self.LENGTH)
        ids = torch.randint(0, self.VOCABULARY, (self.BATCH, self.LENGTH))
        return trace(model, (ids, ids.clone()), optimizer=torch.optim.AdamW, hardware="h200", torch_version="2.11.0")

    def test_what_the_forward_leaves_behind(self) -> None:
        result = self.run()
        rows, d, v = self.BATCH * self.LENGTH, self.WIDTH, self.VOCABULARY
        parameters = (
            v * d + self.LENGTH * d + 3 * 2 * d + 3 * d * (d + 1) + d * (d + 1) + 4 * d * (d + 1) + d * (4 * d + 1)
        )
        weights, batch = 4 * parameters, 2 * 8 * rows
        assert result.num_parameters == parameters
        assert requested_curve(result)[0] == 3 * weights + batch
        matrix = 4 * rows * d
        norms = 3 * (2 * matrix + 2 * 4 * rows)  # input and output, mean and 1/deviation a row
        attention = 3 * matrix + matrix + 4 * self.HEADS * rows  # q, k, v in one; the output; a number a head and row
        feed_forward = 2 * 4 * matrix  # before and after gelu
        loss = 4 * rows * v + 4 + 4  # log probabilities, the sum of the classes' weights, the loss
        last = Phase.LOSS if Phase.LOSS in result.phase_peaks() else Phase.FORWARD
        assert after(result, last) == 3 * weights + batch + norms + attention + feed_forward + loss
        assert after(result, Phase.BACKWARD) == 3 * weights + batch + weights + 4
        assert peak_in(result, Phase.UPDATE) == 3 * weights + batch + weights + 4 + weights


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu()).sum()


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(40, 16), nn.LayerNorm(16), nn.Linear(16, 40)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(F.gelu(self.norm(self.embedding(ids)))), labels)


class TestAgainstTheCPU:
    """The same model for real, counted by a dispatch mode of the test's own: equal to the byte."""

    @pytest.mark.parametrize(
        ("build", "batch"),
        [
            (MLP, (torch.randn(ROWS, IN),)),
            (MLP, (torch.randn(5 * ROWS, IN),)),
            (Convolutions, (torch.randn(2, 3, 16, 16),)),
            (Words, (torch.randint(0, 40, (64,)), torch.randint(0, 40, (64,)))),
        ],
    )
    @pytest.mark.parametrize(
        "make",
        [
            lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
            lambda p: torch.optim.AdamW(p, foreach=True),
            lambda p: torch.optim.AdamW(p, foreach=False),
        ],
    )
    def test_peak(self, build: type[nn.Module], batch: tuple[Tensor, ...], make: Callable[[Any], Any]) -> None:
        model = build()
        predicted = trace(build(), batch, optimizer=make)
        real = real_peak(model, batch, make(model.parameters()), lambda m, b: m(*b))
        assert max(requested_curve(predicted)) == real


class TestSaveOnCpu:
    def test_saved_tensors_leave_the_device(self) -> None:
        width, rows = 512, 1024  # above a mebibyte each, so that the host copies are not worth keeping for real

        class Plain(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a = nn.Linear(width, width, bias=False)

            def forward(self, x: Tensor) -> Tensor:
                return self.a(x).exp().exp().sum()

        class Offloaded(Plain):
            def forward(self, x: Tensor) -> Tensor:
                with torch.autograd.graph.save_on_cpu():
                    return super().forward(x)

        batch = (torch.randn(rows, width, device="meta"),)
        kept, offloaded = trace(Plain(), batch), trace(Offloaded(), batch)
        last = Phase.LOSS if Phase.LOSS in kept.phase_peaks() else Phase.FORWARD
        # exp saves its output, twice; the batch itself is held by the caller and stays.
        assert after(kept, last) - after(offloaded, last) == 2 * 4 * rows * width


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = MLP()

    def forward(self, x: Tensor) -> Tensor:
        loss = self.inner(x)
        return loss * 2 if loss.item() > 0 else loss


class Killed(MLP):
    def forward(self, x: Tensor) -> Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


class Aborted(MLP):
    def forward(self, x: Tensor) -> Tensor:
        os.abort()


class Noisy(MLP):
    def forward(self, x: Tensor) -> Tensor:
        print("a line that is not a message", flush=True)
        os.write(1, b"\x00" * 64)
        return super().forward(x)


class TestBadInput:
    batch = (torch.randn(ROWS, IN),)

    def test_a_value_read_names_the_module_and_the_line(self) -> None:
        with pytest.raises(ValueReadError, match=r"'Reader' \(test_trace.py:\d+\).*observe") as info:
            trace(Reader(), self.batch)
        assert info.value.op == "aten._local_scalar_dense"

    def test_a_batch_that_does_not_match_names_module_and_operator(self) -> None:
        with pytest.raises(BatchMismatchError, match=r"aten.addmm in 'up'.*\[16, 65\]") as info:
            trace(MLP(), (torch.randn(ROWS, IN + 1),))
        assert (info.value.module, info.value.op) == ("up", "aten.addmm")

    def test_a_batch_of_the_wrong_type(self) -> None:
        with pytest.raises(BatchMismatchError, match=r"\[16, 64\] int64.*same type") as info:
            trace(MLP(), (torch.zeros(ROWS, IN, dtype=torch.int64),))
        assert info.value.module == "up"

    def test_an_argument_the_forward_does_not_have(self) -> None:
        with pytest.raises(BatchMismatchError, match=r"MLP.forward cannot be called.*'x'.*pass loss="):
            trace(MLP(), {"pixels": torch.randn(ROWS, IN)})

    def test_an_operator_without_a_shape_function(self) -> None:
        class Opaque(MLP):
            def forward(self, x: Tensor) -> Tensor:
                library = torch.library.Library("lowtide_opaque", "FRAGMENT")
                library.define("opaque(Tensor x) -> Tensor")
                return torch.ops.lowtide_opaque.opaque(super().forward(x))

        with pytest.raises(MissingKernelError, match=r"lowtide_opaque.opaque, called in 'Opaque'.*register_fake"):
            trace(Opaque(), self.batch)

    @pytest.mark.parametrize(("name", "near"), [("h20", "h200"), ("rtx4090", "rtx-4090"), ("a100", "a100-80gb")])
    def test_an_unknown_card_suggests_near_ones(self, name: str, near: str) -> None:
        with pytest.raises(UnknownNameError, match=f"no hardware named '{name}'; did you mean .*'{near}'"):
            trace(MLP(), self.batch, hardware=name)

    def test_one_tensor_larger_than_any_card(self) -> None:
        with torch.device("meta"):
            model, batch = nn.Linear(8, 1 << 20), (torch.empty(1 << 20, 8),)
        with pytest.raises(TooLargeError, match=r"one tensor of 4.0 TiB \(\[1048576, 1048576\] float32\)") as info:
            trace(model, batch, loss=lambda m, b: m(*b).sum())
        assert info.value.needed_bytes is not None
        assert info.value.needed_bytes >= 4 << 40

    def test_a_loss_that_is_no_scalar(self) -> None:
        with pytest.raises(TraceError, match=r"scalar tensor, got a tensor of shape \[16, 128\]"):
            trace(MLP().up, self.batch)

    def test_an_output_without_a_loss(self) -> None:
        class Outputs(MLP):
            def forward(self, x: Tensor) -> Any:
                return {"logits": self.up(x)}

        with pytest.raises(TraceError, match="Outputs returned a dict without a loss"):
            trace(Outputs(), self.batch)

    @pytest.mark.parametrize(
        ("kind", "number"), [(Killed, signal.SIGKILL), pytest.param(Aborted, signal.SIGABRT, marks=pytest.mark.slow)]
    )
    def test_a_crash_is_an_exception_and_the_next_trace_works(self, kind: type[MLP], number: int) -> None:
        with pytest.raises(TraceCrashedError, match=rf"{kind.__name__}.*signal {int(number)}\b.*observe") as info:
            trace(kind(), self.batch)
        assert info.value.exit_code == -number
        assert info.value.signal == number
        assert trace(MLP(), self.batch).peak_bytes > 0

    def test_an_error_of_the_model_itself_comes_through(self) -> None:
        class Broken(MLP):
            def forward(self, x: Tensor) -> Tensor:
                raise KeyError("no such layer")

        with pytest.raises(KeyError, match="no such layer"):
            trace(Broken(), self.batch)

    def test_an_error_in_the_backward_comes_through(self) -> None:
        class Bad(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Tensor:
                return gradient @ gradient  # a number times a number: no matrix

        class Model(MLP):
            def forward(self, x: Tensor) -> Tensor:
                return Bad.apply(super().forward(x))

        with pytest.raises((TraceError, RuntimeError)):
            trace(Model(), self.batch)
        assert trace(MLP(), self.batch).peak_bytes > 0

    def test_what_cannot_be_pickled_is_named(self) -> None:
        model = MLP()
        model.lock = threading.Lock()
        with pytest.raises(
            TraceError, match=r"cannot be sent to the tracing subprocess: .*lock.*Keep open files, locks"
        ):
            trace(model, self.batch)

    def test_printing_does_not_disturb(self) -> None:
        assert (trace(Noisy(), self.batch).curve == trace(MLP(), self.batch).curve).all()


@pytest.mark.parametrize("optimizer", [torch.optim.LBFGS, lambda parameters: torch.optim.LBFGS(parameters)])
def test_an_optimizer_that_runs_the_step_itself_is_refused(optimizer: Any) -> None:
    with pytest.raises(ConfigError, match="LBFGS runs the forward and the backward itself"):
        trace(nn.Linear(4, 4), (torch.zeros(2, 4),), optimizer=optimizer, loss=lambda m, b: m(*b).sum())


def test_a_model_that_leaves_cycles_behind_is_traced() -> None:
    """Python frees them whenever it likes: also between the replay of the allocator and the trace's assembly."""

    class Cyclic(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x)
            for _ in range(500):
                knot: list[Any] = [out * 1.0]
                knot.append(knot)
            return out.mean()

    result = trace(Cyclic(4, 4), (torch.zeros(2, 4),))
    assert result.peak_bytes == sum(result.at_peak.values())


def test_progress_is_told() -> None:
    told: list[str] = []
    trace(MLP(), (torch.randn(ROWS, IN),), on_progress=told.append)
    assert told[0] == "placing the model"
    assert len(told) >= 3


def test_name_target_and_settings_are_kept() -> None:
    result = trace(MLP(), (torch.randn(ROWS, IN),), name="mine", hardware="RTX 4090", torch_version="2.12.1")
    assert (result.model, result.origin, result.target.card, result.target.torch_version) == (
        "mine", "predicted", "rtx-4090", "2.12.1",
    )  # fmt: skip
    assert result.settings["accumulate"] == 1


def test_a_model_is_not_held_after_its_trace() -> None:
    import gc
    import weakref

    model = MLP()
    reference = weakref.ref(model)
    trace(model, (torch.randn(ROWS, IN),), optimizer=torch.optim.AdamW)
    del model
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": "adamw"}, r"got 'adamw'; for example optimizer=torch.optim.AdamW"),
        (
            {"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters())},
            r"holds 2 parameters, none of them of this Linear",
        ),
        ({"torch_version": "banana"}, r"must look like 2.11.0, got 'banana'"),
        ({"torch_version": "3.1"}, r"made for torch 2.8 to 2.13"),
    ],
)
def test_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lowtide.trace(nn.Linear(4, 4), torch.randn(2, 4), **arguments)


def test_a_model_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"model must be a torch.nn.Module, got NoneType"):
        lowtide.trace(None, torch.randn(2, 4))  # type: ignore[arg-type]


def test_nothing_to_train() -> None:
    with pytest.raises(ConfigError, match=r"no parameter that requires a gradient"):
        lowtide.trace(nn.Linear(4, 4).requires_grad_(False), torch.randn(2, 4), optimizer=torch.optim.SGD)


def test_a_trace_prints_in_one_line() -> None:
    trace = lowtide.trace(nn.Linear(4, 4), torch.randn(2, 4), loss=lambda model, batch: model(batch).sum())
    assert repr(trace).startswith("StepTrace('Linear', predicted for h200, peak 0.0")
    assert "\n" not in repr(trace)
    assert repr(trace.at_peak).startswith("{'weights': ")


def test_what_stands_in_a_models_calls_cannot_be_traced() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    with (
        lowtide.activations.apply(model, "recompute"),
        pytest.raises(ConfigError, match=r"remove\(\) it first, and say settings=StepSettings"),
    ):
        lowtide.trace(model, torch.randn(2, 4), loss=lambda model, batch: model(batch).sum())
    with (
        lowtide.manage(model, None, lowtide.make_plan(model), device="cpu"),
        pytest.raises(ConfigError, match="under management"),
    ):
        lowtide.trace(model, torch.randn(2, 4), loss=lambda model, batch: model(batch).sum())


def test_the_state_of_an_optimizer_that_has_stepped_is_its_own() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters())

    def traced() -> StepTrace:
        return lowtide.trace(
            model, torch.randn(2, 64), loss=lambda model, batch: model(batch).sum(), optimizer=optimizer
        )

    before = traced()
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    after = traced()
    # The counts of steps, one number for each parameter, are there from the beginning.
    assert after.at_peak[Category.ACTIVATIONS] == before.at_peak[Category.ACTIVATIONS]
    assert 0 <= after.at_peak[Category.OPTIMIZER] - before.at_peak[Category.OPTIMIZER] <= 512 * 4
