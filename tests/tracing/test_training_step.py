"""The step itself, on the CPU: the same weights as a loop written by hand, the phases in order."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.errors import ConfigError, TraceError
from lowtide.tracing.settings import Implementation, StepSettings
from lowtide.tracing.step_trace import Category, Phase, StepTrace
from lowtide.tracing.training_step import (
    TrainingStep,
    about_step,
    activations_applied,
    choose_implementation,
    tensors_in,
    update_in_backward,
    watch_gradients,
    watch_modules,
)
from tests.tracing.gelu_blocks import INNER, WIDE, WIDER, WIDTH, Block, batch


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh()).square().mean()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def ran(settings: StepSettings, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> list[Phase]:
    phases: list[Phase] = []
    TrainingStep(model, (x,), optimizer, None, settings)("cpu", phases.append)
    return phases


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize(
    ("settings", "by_hand"),
    [
        (StepSettings(), lambda m, o, x: (m(x).backward(), o.step(), o.zero_grad())),
        (StepSettings(accumulate=2), lambda m, o, x: (m(x).backward(), m(x).backward(), o.step(), o.zero_grad())),
        (
            StepSettings(max_grad_norm=0.01),
            lambda m, o, x: (m(x).backward(), nn.utils.clip_grad_norm_(m.parameters(), 0.01), o.step(), o.zero_grad()),
        ),
    ],
)
def test_the_same_weights_as_by_hand(settings: StepSettings, by_hand: Callable[..., Any]) -> None:
    model = Net()
    other = copy.deepcopy(model)
    x = torch.randn(3, 4)
    optimizer, reference = adamw(model.parameters()), adamw(other.parameters())
    for _ in range(3):
        ran(settings, model, optimizer, x)
        by_hand(other, reference, x)
    assert same(model, other)


def test_an_update_in_the_backward_is_the_same_update() -> None:
    model = Net()
    other = copy.deepcopy(model)
    x = torch.randn(3, 4)
    optimizer, reference = adamw(model.parameters()), adamw(other.parameters())
    update_in_backward(optimizer)
    for _ in range(3):
        model(x).backward()
        assert all(p.grad is None for p in model.parameters())  # freed as soon as it was used
        other(x).backward()
        reference.step()
        reference.zero_grad()
    assert same(model, other)
    assert set(optimizer.state) == set(model.parameters())


def test_an_update_in_the_backward_takes_over_existing_state() -> None:
    model = Net()
    other = copy.deepcopy(model)
    x = torch.randn(3, 4)
    optimizer, reference = adamw(model.parameters()), adamw(other.parameters())
    for network, opt in ((model, optimizer), (other, reference)):
        ran(StepSettings(), network, opt, x)
    update_in_backward(optimizer)
    model(x).backward()
    ran(StepSettings(), other, reference, x)
    assert same(model, other)


def test_the_phases_in_order() -> None:
    model = Net()
    once = [Phase.FORWARD, Phase.LOSS, Phase.BACKWARD]
    assert ran(StepSettings(), model, adamw(model.parameters()), torch.randn(3, 4)) == [*once, Phase.UPDATE]
    phases = ran(StepSettings(accumulate=3), model, adamw(model.parameters()), torch.randn(3, 4))
    assert phases == [*once * 3, Phase.UPDATE]


def test_no_hook_stays_behind_even_after_an_error() -> None:
    class Broken(Net):
        def forward(self, x: Tensor) -> Tensor:
            raise ZeroDivisionError

    model = Broken()
    with pytest.raises(ZeroDivisionError):
        ran(StepSettings(), model, adamw(model.parameters()), torch.randn(3, 4))
    assert not model._forward_hooks


@pytest.mark.parametrize(("keep", "is_none"), [(True, False), (False, True)])
def test_gradients_stay_or_go(keep: bool, is_none: bool) -> None:
    model = Net()
    ran(StepSettings(keep_gradients=keep), model, adamw(model.parameters()), torch.randn(3, 4))
    assert all((p.grad is None) == is_none for p in model.parameters())
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_autocast_covers_forward_and_loss_only() -> None:
    dtypes: list[torch.dtype] = []
    is_on: dict[Phase, bool] = {}

    class Watched(Net):
        def forward(self, x: Tensor) -> Tensor:
            out = self.a(x)
            dtypes.append(out.dtype)
            return out.float().mean()

    step = TrainingStep(Watched(), (torch.randn(3, 4),), None, None, StepSettings(autocast="bfloat16"))
    step("cpu", lambda phase: is_on.update({phase: torch.is_autocast_enabled("cpu")}))
    assert dtypes == [torch.bfloat16]
    assert (is_on[Phase.LOSS], is_on[Phase.BACKWARD], is_on[Phase.UPDATE]) == (True, False, False)


@dataclass
class Output:
    loss: Tensor


@pytest.mark.parametrize(
    ("batch", "wrap"),
    [
        ({"x": torch.ones(3, 4)}, lambda loss: Output(loss)),
        ({"x": torch.ones(3, 4)}, lambda loss: {"loss": loss}),
        ((torch.ones(3, 4),), lambda loss: loss),
        ([torch.ones(3, 4)], lambda loss: Output(loss)),
        (torch.ones(3, 4), lambda loss: loss),
    ],
)
def test_batches_and_outputs_of_every_kind(batch: Any, wrap: Callable[[Tensor], Any]) -> None:
    class Model(Net):
        def forward(self, x: Tensor) -> Any:
            return wrap(super().forward(x))

    model = Model()
    TrainingStep(model, batch, None, None, StepSettings(keep_gradients=True))("cpu", lambda phase: None)
    assert all(p.grad is not None for p in model.parameters())


def test_a_loss_function_gets_model_and_batch() -> None:
    batch = {"x": torch.ones(3, 4), "y": torch.zeros(3, 8)}
    loss = lambda model, batch: F.mse_loss(model.a(batch["x"]), batch["y"])  # noqa: E731
    model = Net()
    TrainingStep(model, batch, None, loss, StepSettings(keep_gradients=True))("cpu", lambda phase: None)
    assert model.a.weight.grad is not None
    assert model.b.weight.grad is None


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda loss: loss.expand(3), r"scalar tensor, got a tensor of shape \[3\]"),
        (lambda loss: {"logits": loss}, "Model returned a dict without a loss; add labels"),
        (lambda loss: {"loss": None}, "without a loss"),
        (lambda loss: (loss,), "Model returned a tuple without a loss"),
    ],
)
def test_what_is_no_loss(output: Callable[[Tensor], Any], message: str) -> None:
    class Model(Net):
        def forward(self, x: Tensor) -> Any:
            return output(super().forward(x))

    with pytest.raises(TraceError, match=message):
        TrainingStep(Model(), (torch.ones(3, 4),), None, None, StepSettings())("cpu", lambda phase: None)


class TestImplementation:
    @pytest.mark.parametrize(
        ("implementation", "foreach", "fused"),
        [
            (Implementation.FOREACH, True, False),
            (Implementation.FUSED, False, True),
            (Implementation.LOOP, False, False),
        ],
    )
    def test_flags(self, implementation: Implementation, foreach: bool, fused: bool) -> None:
        optimizer = adamw(Net().parameters())
        choose_implementation(optimizer, implementation)
        assert (optimizer.param_groups[0]["foreach"], optimizer.param_groups[0]["fused"]) == (foreach, fused)

    def test_an_optimizer_without_a_fused_form(self) -> None:
        optimizer = torch.optim.RMSprop(Net().parameters())
        with pytest.raises(ConfigError, match="RMSprop has no fused implementation"):
            choose_implementation(optimizer, Implementation.FUSED)
        choose_implementation(optimizer, Implementation.LOOP)
        assert optimizer.param_groups[0]["foreach"] is False


@pytest.mark.parametrize(("attention", "is_math"), [("math", True), ("flash", True)])
def test_only_the_chosen_attention_and_math_are_allowed(attention: str, is_math: bool) -> None:
    seen: list[tuple[bool, bool, bool]] = []

    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            cuda = torch.backends.cuda
            seen.append((cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()))
            return super().forward(x)

    TrainingStep(Model(), (torch.ones(3, 4),), None, None, StepSettings(attention=attention))("cpu", lambda phase: None)
    assert seen == [(attention == "flash", False, is_math)]
    assert torch.backends.cuda.mem_efficient_sdp_enabled()


class TestAbout:
    @pytest.mark.parametrize(
        ("batch", "words"),
        [
            (torch.ones(2, 3), "2x3 float32"),
            ((torch.ones(2, 3), torch.ones(2, dtype=torch.int64)), "2x3 float32; 2 int64"),
            (
                {"ids": torch.ones(8, 9), "labels": torch.ones(8, 9), "n": torch.ones(())},
                "ids, labels 8x9 float32; n one number float32",
            ),
            ({"image": {"pixels": torch.ones(1, 2)}, "name": "a", "size": 3}, "image.pixels 1x2 float32"),
        ],
    )
    def test_the_batch(self, batch: Any, words: str) -> None:
        assert about_step(TrainingStep(nn.Linear(3, 2), batch, None, None, StepSettings()))["batch"] == words

    @pytest.mark.parametrize(
        ("make", "words"),
        [
            (lambda weights: None, "none"),
            (torch.optim.AdamW, "AdamW"),
            (lambda weights: torch.optim.SGD(weights, lr=0.5, momentum=0.9), "SGD(lr=0.5, momentum=0.9)"),
            (
                lambda weights: torch.optim.Adam(weights, betas=(0.8, 0.9), fused=True),
                "Adam(betas=(0.8, 0.9), fused=True)",
            ),
        ],
    )
    def test_the_optimizer_and_what_is_not_its_default(self, make: Callable[..., Any], words: str) -> None:
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1, dtype=torch.bfloat16))
        found = about_step(TrainingStep(model, None, make(model.parameters()), None, StepSettings()))
        assert found["optimizer"] == words
        assert found["dtype"] == "float32 and bfloat16"


NUM_BLOCKS = 9


class Stack(nn.Module):
    def __init__(self, num_blocks: int = NUM_BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(num_blocks)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def predicted(word: str | None) -> StepTrace:
    return lowtide.trace(Stack(), batch(), settings=StepSettings(activations=word))


def kept_bytes(trace: StepTrace) -> int:
    """Activations of the blocks when the forward has ended, without the batch and the loss."""
    last = max(index for index, event in enumerate(trace.events) if event.phase in (Phase.FORWARD, Phase.LOSS))
    alive = [item for item in trace.alive_at(last) if item.category is Category.ACTIVATIONS]
    return sum(item.requested_bytes for item in alive if item.module != "(batch)" and item.requested_bytes > 4)


# Autograd saves each block's input, the input of gelu and its output; the first input is the batch, and the last
# output is saved by no one.
KEPT = {
    None: (NUM_BLOCKS - 1) * INNER + NUM_BLOCKS * 2 * WIDE,
    "keep": (NUM_BLOCKS - 1) * INNER + NUM_BLOCKS * 2 * WIDE,
    # Outputs of both matmuls; the last one too, which autograd alone would have let go.
    "selective": NUM_BLOCKS * (INNER + WIDE),
    "recompute": (NUM_BLOCKS - 1) * INNER,
    # Inputs of blocks 0 (the batch), 3 and 6.
    "recompute/3": 2 * INNER,
    # Blocks 0, 4 and 8.
    "recompute/4": 2 * INNER,
}


@pytest.mark.parametrize("word", KEPT)
def test_what_is_kept_until_the_backward(word: str | None) -> None:
    assert kept_bytes(predicted(word)) == KEPT[word]


@pytest.mark.parametrize("word", [word for word in KEPT if word])
def test_the_same_is_kept_in_a_real_step(word: str) -> None:
    model = Stack()
    observed = lowtide.observe(model, batch(), settings=StepSettings(activations=word), steps=2)
    assert kept_bytes(observed) == KEPT[word]
    # And the model has no policy any more.
    plain = lowtide.observe(model, batch(), steps=2)
    assert kept_bytes(plain) == KEPT[None]


@pytest.mark.parametrize("word", ["selective", "recompute", "recompute/3"])
def test_predicted_and_real_steps_peak_alike(word: str) -> None:
    """The same operators run on both: only workspaces and the random generator's state differ."""
    observed = lowtide.observe(Stack(), batch(), settings=StepSettings(activations=word), steps=2)
    guess = predicted(word)
    workspaces = sum(item.bytes for item in guess.alive_at(guess.peak_event) if item.category is Category.WORKSPACE)
    assert guess.peak_bytes - workspaces == pytest.approx(observed.peak_bytes, rel=0.01)


def test_segments_run_each_block_once_more() -> None:
    """Forward, then again for the inputs inside of a segment (not its last block), then for the backward itself."""
    counts = {
        word: sum(op.name == "aten.gelu" for op in predicted(word).ops) for word in ("keep", "recompute", "recompute/3")
    }
    assert counts == {"keep": NUM_BLOCKS, "recompute": 2 * NUM_BLOCKS, "recompute/3": 2 * NUM_BLOCKS + 6}


def test_a_policy_needs_blocks() -> None:
    with pytest.raises(ConfigError, match="Linear has no repeated blocks"):
        lowtide.trace(nn.Linear(2, 2), torch.ones(1, 2), settings=StepSettings(activations="recompute"))


def test_a_policy_is_taken_off_when_the_step_fails() -> None:
    model = Stack(2)
    with pytest.raises(ZeroDivisionError), activations_applied(model, StepSettings(activations="recompute")):
        raise ZeroDivisionError
    with activations_applied(model, StepSettings(activations="recompute")):
        pass  # it would be refused if the first one were still on


class TestOffload:
    """Inputs of 128 MiB, of which no byte exists here."""

    ROWS = 2**17
    INNER, WIDE = 4 * 2**17 * WIDTH, 4 * 2**17 * WIDER

    def predicted(self, word: str) -> StepTrace:
        with torch.device("meta"):
            model, x = Stack(), torch.randn(self.ROWS, WIDTH)
        return lowtide.trace(model, x, settings=StepSettings(activations=word))

    def test_two_inputs_wait_for_their_copies_and_the_others_are_gone(self) -> None:
        assert kept_bytes(self.predicted("recompute")) == (NUM_BLOCKS - 1) * self.INNER
        assert kept_bytes(self.predicted("offload")) == 2 * self.INNER

    def test_without_recomputation_two_tensors_wait(self) -> None:
        assert kept_bytes(self.predicted("offload/all")) == 2 * self.WIDE

    def test_in_the_backward_one_input_is_ahead_of_the_running_block(self) -> None:
        """Beside both lies the gradient between blocks, and nothing that grows with the number of blocks."""
        trace = self.predicted("offload")
        for block in (2, 4, 5):
            inside = [
                index
                for index, event in enumerate(trace.events)
                if event.phase is Phase.BACKWARD and trace.ops[event.op].module.startswith(f"blocks.{block}")
            ]
            highest = max(inside, key=lambda index: trace.events[index].allocated_bytes)
            alike = [item for item in trace.alive_at(highest) if item.requested_bytes == self.INNER]
            assert [item.phase for item in alike if item.module != "(batch)"] == [Phase.BACKWARD] * 3

    def test_no_copy_on_the_host_is_counted(self) -> None:
        """What goes and comes back is allocated once more on the card, and nothing else is."""
        plain, away = self.predicted("recompute"), self.predicted("offload")

        def births(trace: StepTrace) -> int:
            return sum(item.requested_bytes for item in trace.allocations if item.born is not None)

        # All inputs, the batch among them, but the last two, which are still there.
        assert births(away) - births(plain) == (NUM_BLOCKS - 2) * self.INNER

    def test_weights_do_not_travel(self) -> None:
        trace = self.predicted("offload/all")
        copied = [op for op in trace.ops if op.name == "aten.copy_" and op.phase is Phase.FORWARD]
        assert len(copied) == 3 * NUM_BLOCKS  # the input, and what goes in and out of gelu


class Buffered(nn.Module):
    """A block with a constant buffer, and statistics that move."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("mask", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.norm(self.layer(x))) * self.mask
        return out


@pytest.mark.parametrize("word", ["selective", "recompute", "recompute/2", "offload", "offload/all"])
def test_blocks_with_buffers(word: str) -> None:
    model = nn.Sequential(*(Buffered() for _ in range(4)))

    def peak(word: str) -> int:
        trace = lowtide.trace(
            model, batch(), loss=lambda model, batch: model(batch).sum(), settings=StepSettings(activations=word)
        )
        return trace.peak_bytes

    if word == "offload/all":
        assert peak(word) == peak("keep")  # each tensor is below its 1 MiB
    else:
        assert peak(word) < peak("keep")


class Heard:
    """A listener that writes down what it hears."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def enter_module(self, path: str) -> None:
        self.said.append(f"enter {path!r}")

    def leave_module(self, *, has_weights: bool) -> None:
        self.said.append(f"leave {has_weights}")


def test_gradients_are_seen_before_the_users_hooks_free_them() -> None:
    layer = nn.Linear(2, 2, bias=False)

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    layer.weight.register_post_accumulate_grad_hook(drop)
    seen: list[tuple[int, ...]] = []
    with watch_gradients(layer, lambda gradient: seen.append(tuple(gradient.shape))):
        layer(torch.ones(1, 2)).sum().backward()
    assert seen == [(2, 2)]
    layer(torch.ones(1, 2)).sum().backward()
    assert seen == [(2, 2)]  # the watch has ended
    assert layer.weight.grad is None  # the user's hook has not


def test_modules_are_heard_in_order_and_only_inside() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    heard = Heard()
    with watch_modules(model, heard):
        model(torch.ones(1, 2))
        nn.ReLU()(torch.ones(1))  # not of the model
    model(torch.ones(1, 2))
    assert heard.said == [
        "enter ''",
        "enter '0'",
        "leave True",
        "enter '1'",
        "leave False",
        "leave True",
        "enter 'ReLU'",
        "leave False",
    ]


@dataclass
class Labelled:
    images: Tensor
    names: list[str]


def test_tensors_of_a_batch_are_found_in_every_nest() -> None:
    images, mask, ids = torch.ones(1), torch.ones(2), torch.ones(3)
    nest = {"batch": (Labelled(images, ["a", "b"]), [mask, None]), "ids": ids, "kind": Labelled, "raw": b"12"}
    assert [len(tensor) for tensor in tensors_in(nest)] == [1, 2, 3]
