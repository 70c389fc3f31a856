from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.errors import ConfigError, ObserveError
from lowtide.models.gpt import GPT, GPTConfig
from lowtide.runtime.prediction.trace import trace
from lowtide.tracing.observation.observe import device_of, move_batch, observe
from lowtide.tracing.settings import StepSettings, UpdateSchedule
from lowtide.tracing.step_trace import Category, Phase, StepTrace

FLOAT = 4
ROWS, INNER, WIDE, OUT = 50, 100, 200, 10


def make_mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INNER, WIDE, bias=False), nn.ReLU(), nn.Linear(WIDE, OUT, bias=False))


def total(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).sum()
    return loss


def observe_mlp(**options: object) -> StepTrace:
    return observe(make_mlp(), torch.ones(ROWS, INNER), loss=total, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "autocast", "said"),
    [
        (torch.bfloat16, "torch.bfloat16", "autocast=bfloat16 casts no weight: they are in bfloat16 already"),
        (torch.float32, torch.float32, "autocast=float32 changes nothing: torch's autocast computes in bfloat16"),
    ],
)
def test_an_autocast_that_does_nothing_says_so(dtype: torch.dtype, autocast: str, said: str) -> None:
    model = make_mlp().to(dtype)
    with pytest.warns(UserWarning, match=said):
        found = observe(model, torch.ones(ROWS, INNER, dtype=dtype), loss=total, autocast=autocast)
    assert any(said in note for note in found.notes)


def test_every_byte_of_a_small_step_is_where_arithmetic_says() -> None:
    trace = observe_mlp()
    first, second = INNER * WIDE * FLOAT, WIDE * OUT * FLOAT
    batch, hidden = ROWS * INNER * FLOAT, ROWS * WIDE * FLOAT
    weights = first + second
    assert trace.start_allocated_bytes == weights + batch
    # In the forward the ReLU's input and output are the most; the input dies when the next layer's turn comes.
    assert trace.phase_peaks()[Phase.FORWARD] == weights + batch + 2 * hidden
    # In the backward of the ReLU its output, the gradient behind it and the one before it, with the loss and its own
    # gradient, one number each; the second layer's gradient is complete, the first layer's is not begun.
    assert trace.peak_bytes == weights + batch + second + 3 * hidden + 2 * FLOAT
    assert trace.peak_phase is Phase.BACKWARD
    assert trace.at_peak == {
        Category.WEIGHTS: weights,
        Category.GRADIENTS: second,
        Category.OPTIMIZER: 0,
        Category.ACTIVATIONS: batch + hidden + FLOAT,
        Category.TEMPORARIES: 2 * hidden + FLOAT,
        Category.WORKSPACE: 0,
    }
    assert trace.peak_reserved_bytes == trace.peak_bytes
    assert trace.curve[-1] == trace.start_allocated_bytes
    assert (trace.origin, trace.target.card, trace.num_parameters) == ("observed", "cpu", weights // FLOAT)


@pytest.mark.parametrize("settings", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}])
def test_a_prediction_for_the_host_updates_as_torch_does_there(settings: dict[str, bool]) -> None:
    """Where nothing is said that is parameter by parameter; cards copy all of them at once."""

    def optimizer(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, **settings)

    batch = torch.ones(ROWS, INNER)
    predicted = trace(make_mlp(), batch, optimizer=optimizer, loss=total, hardware="cpu")
    observed = observe(make_mlp(), batch, optimizer=optimizer, loss=total)
    # The host's allocator rounds nothing.
    assert predicted.phase_peaks() == observed.phase_peaks()
    assert predicted.peak_reserved_bytes == predicted.peak_bytes


def test_optimizer_state_and_gradients_are_counted_at_the_update() -> None:
    trace = observe_mlp(optimizer=lambda parameters: torch.optim.AdamW(parameters, foreach=False))
    weights = (INNER * WIDE + WIDE * OUT) * FLOAT
    counters = 2 * FLOAT  # AdamW keeps a step number for each parameter
    assert trace.by_category_at(-1)[Category.OPTIMIZER] == 2 * weights + counters
    update = next(index for index, event in enumerate(trace.events) if event.phase is Phase.UPDATE)
    assert trace.by_category_at(update)[Category.GRADIENTS] == weights
    moments = {
        a.op: a.module for a in trace.allocations if a.bytes == INNER * WIDE * FLOAT and a.op.startswith("state")
    }
    assert moments == {"state exp_avg": "0", "state exp_avg_sq": "0"}


def test_names_lines_and_uses() -> None:
    trace = observe_mlp()
    [activation] = [a for a in trace.allocations if a.category is Category.ACTIVATIONS and a.shape == (ROWS, WIDE)]
    assert (activation.module, activation.op, activation.dtype) == ("1", "aten.relu", "float32")
    assert activation.source.startswith("test_observe.py:")
    assert [trace.ops[use].phase for use in (activation.uses[0], activation.uses[-1])] == [
        Phase.FORWARD,
        Phase.BACKWARD,
    ]
    # What called observe is not part of the step.
    assert {op.source for op in trace.ops if op.phase is Phase.UPDATE} <= {""}
    gradient = next(a for a in trace.allocations if a.category is Category.GRADIENTS)
    assert gradient.module == "2"


def test_a_sum_of_gradients_takes_no_memory() -> None:
    """Autograd adds in place; under a dispatch mode it does not, and the record must not show that."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(64, 64, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.inner(x)
            return (hidden.sin() + hidden.cos() + hidden.tanh()).sum()

    trace = observe(Residual(), torch.ones(32, 64))
    sums = [a for a in trace.allocations if a.phase is Phase.BACKWARD and a.op == "aten.add"]
    assert sums == []
    hidden = 32 * 64 * FLOAT
    backward = [e for e in trace.events if e.phase is Phase.BACKWARD]
    # hidden and tanh's output are saved; the running sum, one more gradient and its factor (cos, then -sin) come on top.
    assert max(e.allocated_bytes for e in backward) - trace.start_allocated_bytes <= 5 * hidden + 2 * FLOAT


def test_observing_trains_exactly_as_training_does() -> None:
    settings = StepSettings(accumulate=2, max_grad_norm=0.5)
    torch.manual_seed(0)
    config = GPTConfig(num_layers=2, hidden_size=32, num_heads=2, vocab_size=64, context_length=16, dropout=0.0)
    model = GPT(config)
    plain = copy.deepcopy(model)
    ids = torch.randint(0, 64, (2, 16))
    trace = observe(
        model, {"input_ids": ids, "labels": ids}, optimizer=torch.optim.AdamW(model.parameters()), settings=settings
    )
    optimizer = torch.optim.AdamW(plain.parameters())
    for _ in range(3):
        for _ in range(2):
            plain(input_ids=ids, labels=ids).loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    named = [a.bytes for a in trace.alive_at(trace.peak_event) if a.module and a.op]
    assert sum(named) >= 0.98 * trace.peak_bytes
    assert sum(trace.at_peak.values()) == trace.peak_bytes


def test_storages_that_grow_are_counted_anew() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        out = torch.empty(0)
        torch.mul(x, 2.0, out=out)
        return model(x).sum() + out.sum().item()

    trace = observe(nn.Linear(INNER, 1), torch.ones(ROWS, INNER), loss=loss)
    [grown] = [a for a in trace.allocations if a.op == "aten.mul"]
    assert grown.bytes == ROWS * INNER * FLOAT


def test_settings_are_taken_off_again() -> None:
    torch.manual_seed(0)
    config = GPTConfig(num_layers=2, hidden_size=32, num_heads=2, vocab_size=64, context_length=16)
    model = GPT(config)
    calls: list[int] = []
    parameter = next(model.parameters())
    handle = parameter.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=None)
    ids = torch.randint(0, 64, (2, 16))
    trace = observe(
        model,
        {"input_ids": ids, "labels": ids},
        optimizer=optimizer,
        settings=StepSettings(activations="recompute", update=UpdateSchedule.IN_BACKWARD),
        steps=2,
    )
    assert len(calls) == 2  # the user's own hook ran, and is still there
    assert [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()][:2] == [1, 0]  # type: ignore[attr-defined]
    handle.remove()
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert all(p.grad is None for p in model.parameters())
    assert optimizer.param_groups[0]["foreach"] is None
    assert len(optimizer.state) == len(list(model.parameters()))
    recomputed = [a for a in trace.allocations if a.phase is Phase.BACKWARD and a.category is Category.ACTIVATIONS]
    assert {a.module.split(".")[1] for a in recomputed} == {"0", "1"}


@pytest.mark.parametrize(
    "settings", [StepSettings(), StepSettings(activations="recompute", update=UpdateSchedule.IN_BACKWARD)]
)
def test_nothing_keeps_the_model_alive(settings: StepSettings) -> None:
    model = GPT(GPTConfig(num_layers=2, hidden_size=32, num_heads=2, vocab_size=64, context_length=16))
    ids = torch.randint(0, 64, (2, 16))
    observe(model, {"input_ids": ids, "labels": ids}, optimizer=torch.optim.SGD, settings=settings, steps=2)
    alive = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert alive() is None
    finally:
        gc.enable()


def test_out_of_memory_says_where_and_how_much() -> None:
    class Greedy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            torch.empty(2**48, dtype=torch.uint8)  # 256 TiB
            return self.inner(x).sum()

    pattern = r"aten\.empty in 'Greedy', in the forward, asked for 256\.0 TiB with 144 B in tensors.*Last allocations: .*batch"
    with pytest.raises(ObserveError, match=pattern):
        observe(Greedy(), torch.ones(4, 4))


def test_errors_of_the_model_come_through_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        observe(make_mlp(), torch.ones(3, 7), loss=total)


def test_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="steps must be at least 2"):
        observe_mlp(steps=1)
    with pytest.raises(
        ConfigError, match=r"precision is bfloat16, but '0\.weight' is float32.*model\.to\(torch\.bfloat16\)"
    ):
        observe_mlp(settings=StepSettings(precision="bfloat16"))
    assert observe_mlp(settings=StepSettings(precision="float32")).settings["precision"] == "float32"


def test_progress_is_told() -> None:
    said: list[str] = []
    observe_mlp(on_progress=said.append, steps=2)
    assert said == ["running step 1 of 2", "running step 2 of 2"]


META = torch.device("meta")


class Spread(nn.Module):
    """Claims parameters on devices that this machine need not have."""

    def __init__(self, **devices: str) -> None:
        super().__init__()
        self._devices = devices

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        for name, device in self._devices.items():
            yield name, SimpleNamespace(device=torch.device(device))


def test_the_device_of_a_model() -> None:
    assert device_of(nn.Linear(2, 2)) == torch.device("cpu")
    assert device_of(nn.Identity()) == torch.device("cpu")
    assert device_of(Spread(a="cuda:1", b="cuda:1")) == torch.device("cuda:1")


def test_models_that_cannot_be_observed() -> None:
    with pytest.raises(ObserveError, match=r"'weight' of Linear is on the meta device.*Use lowtide\.trace"):
        device_of(nn.Linear(2, 2, device=META))
    with pytest.raises(ObserveError, match=r"Spread is on 2 devices: cuda:0 \(such as 'a'\), cpu \(such as 'b'\)"):
        device_of(Spread(a="cuda:0", b="cpu", c="cpu"))
    with pytest.raises(ObserveError, match="only steps on cpu and cuda"):
        device_of(Spread(a="xla:0"))


def test_a_batch_is_moved_where_it_must() -> None:
    batch = {"ids": torch.ones(2), "more": [torch.ones(3), ("text", torch.ones(1, device=META))], "flag": True}
    moved, origins = move_batch(batch, META)
    assert origins == {torch.device("cpu")}
    assert moved["ids"].device == moved["more"][0].device == META
    assert moved["more"][1][0] == "text"
    assert moved["flag"] is True


def test_a_batch_that_is_there_already_stays_the_same_object() -> None:
    batch = {"ids": torch.ones(2)}
    assert move_batch(batch, torch.device("cpu")) == (batch, set())
    assert move_batch(batch, torch.device("cpu"))[0] is batch


def test_a_batch_without_values() -> None:
    with pytest.raises(ObserveError, match=r"shape \[2, 3\] on the meta device"):
        move_batch([torch.ones(2, 3, device=META)], torch.device("cpu"))
