"""Observing on a card: the record must equal the allocator's own statistics, and the prediction must come close."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.errors import ObserveError
from lowtide.models.gpt import GPT, GPTConfig
from lowtide.models.resnet import ResNet, ResNetConfig
from lowtide.runtime.prediction.trace import trace
from lowtide.tracing.explanation.compare import compare_traces
from lowtide.tracing.observation.observe import observe
from lowtide.tracing.settings import StepSettings, UpdateSchedule
from lowtide.tracing.step_trace import Category, Phase
from lowtide.tracing.training_step import OptimizerFactory, TrainingStep

pytestmark = pytest.mark.gpu

TOLERANCE = 0.02
"""The largest error of a prediction, relative to the hardware."""
Made = tuple[nn.Module, dict[str, Tensor]]


def make_gpt() -> Made:
    torch.manual_seed(0)
    config = GPTConfig(num_layers=6, hidden_size=512, num_heads=8, vocab_size=8192, context_length=512)
    ids = torch.randint(0, 8192, (8, 512))
    return GPT(config), {"input_ids": ids, "labels": ids.clone()}


def make_resnet() -> Made:
    torch.manual_seed(0)
    images, labels = torch.randn(16, 3, 128, 128), torch.randint(0, 1000, (16,))
    return ResNet(ResNetConfig(blocks=(2, 2, 2, 2))), {"pixel_values": images, "labels": labels}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


CASES = [
    ("gpt-fp32", make_gpt, torch.float32, StepSettings(), torch.optim.AdamW),
    ("gpt-bf16", make_gpt, torch.bfloat16, StepSettings(), torch.optim.AdamW),
    ("gpt-autocast", make_gpt, torch.float32, StepSettings(autocast="bfloat16"), torch.optim.AdamW),
    ("gpt-recompute", make_gpt, torch.bfloat16, StepSettings(activations="recompute"), torch.optim.AdamW),
    ("gpt-selective", make_gpt, torch.bfloat16, StepSettings(activations="selective"), torch.optim.AdamW),
    ("gpt-segments", make_gpt, torch.bfloat16, StepSettings(activations="recompute/2"), torch.optim.AdamW),
    ("gpt-offload", make_gpt, torch.bfloat16, StepSettings(activations="offload"), torch.optim.AdamW),
    ("gpt-offload-all", make_gpt, torch.bfloat16, StepSettings(activations="offload/all"), torch.optim.AdamW),
    ("gpt-accumulate", make_gpt, torch.bfloat16, StepSettings(accumulate=2, max_grad_norm=1.0), torch.optim.AdamW),
    (
        "gpt-in-backward",
        make_gpt,
        torch.bfloat16,
        StepSettings(activations="recompute", update=UpdateSchedule.IN_BACKWARD),
        torch.optim.AdamW,
    ),
    ("resnet-fp32", make_resnet, torch.float32, StepSettings(), sgd),
    ("resnet-autocast", make_resnet, torch.float32, StepSettings(autocast="bfloat16"), sgd),
]
by_case = pytest.mark.parametrize(
    ("make", "dtype", "settings", "optimizer"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)


@pytest.fixture(autouse=True)
def _empty_card() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    yield
    gc.collect()
    torch.cuda.empty_cache()


def cast(batch: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}


@by_case
def test_the_record_equals_the_allocators_statistics(
    make: Callable[[], Made], dtype: torch.dtype, settings: StepSettings, optimizer: OptimizerFactory
) -> None:
    model, batch = make()
    model, batch = model.to("cuda", dtype), {key: value.cuda() for key, value in cast(batch, dtype).items()}
    made = optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    observed = observe(model, batch, optimizer=made, settings=settings)
    # `observe` compares with the statistics of the very step, and notes each difference.
    assert [note for note in observed.notes if "differs" in note or "not seen" in note] == []
    assert sum(observed.at_peak.values()) == observed.peak_bytes
    assert observed.curve[-1] == observed.start_allocated_bytes
    named = [a.bytes for a in observed.alive_at(observed.peak_event) if a.module and a.op]
    assert sum(named) >= 0.98 * observed.peak_bytes
    # Weights are rounded up to 512 bytes each, and blocks of the large pool may keep up to 1 MiB that was not split off.
    weights = sum(tensor.nbytes for tensor in {*model.parameters(), *model.buffers()})
    num_tensors = len({*model.parameters(), *model.buffers()})
    assert weights <= observed.at_peak[Category.WEIGHTS] <= weights + num_tensors * 2**20
    # With lines of code for the forward's activations: most of them come from the model's own file.
    kept = [
        a for a in observed.alive_at(observed.peak_event) if a.category is Category.ACTIVATIONS and a.born is not None
    ]
    assert sum(a.bytes for a in kept if a.source) >= 0.9 * sum(a.bytes for a in kept)
    # Updates that run inside the backward belong to the optimizer, not to a module.
    updater = type(made).__name__
    backward = [op for op in observed.ops if op.phase is Phase.BACKWARD and op.module != updater]
    assert sum("." in op.module for op in backward) >= 0.5 * len(backward)


def test_unwatched_steps_have_the_same_peak() -> None:
    model, batch = make_gpt()
    model, batch = model.to("cuda", torch.bfloat16), {key: value.cuda() for key, value in batch.items()}
    optimizer = torch.optim.AdamW(model.parameters())
    observed = observe(model, batch, optimizer=optimizer)
    step = TrainingStep(model, batch, optimizer, None, StepSettings())
    torch.cuda.reset_peak_memory_stats()
    step("cuda", lambda phase: None)
    assert torch.cuda.max_memory_allocated() == observed.peak_bytes
    assert torch.cuda.max_memory_reserved() == observed.peak_reserved_bytes


@by_case
def test_the_prediction_is_close_to_the_card(
    make: Callable[[], Made],
    dtype: torch.dtype,
    settings: StepSettings,
    optimizer: OptimizerFactory,
    request: pytest.FixtureRequest,
) -> None:
    if "H200" not in torch.cuda.get_device_name():
        pytest.skip("predictions are made for the H200 here")
    if make is make_resnet and settings.autocast is not None:
        # 2.08% low; no rule that was tried meets its 8x8 and its 4x4 layers, see docs/accuracy.md.
        reason = "cuDNN takes one part for each image for 1x1 weight gradients of 8x8 images"
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    model, batch = make()
    model, batch = model.to(dtype), cast(batch, dtype)
    predicted = trace(model, batch, optimizer=optimizer, settings=settings, hardware="h200")
    model, batch = model.cuda(), {key: value.cuda() for key, value in batch.items()}
    made = optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    result = compare_traces(predicted, observe(model, batch, optimizer=made, settings=settings))
    assert result.peak.error is not None
    assert abs(result.peak.error) <= TOLERANCE, "\n".join(result.summary())
    assert result.predicted_place.phase is result.observed_place.phase, "\n".join(result.summary())


def test_a_batch_on_the_host_is_moved() -> None:
    observed = observe(nn.Linear(8, 8).cuda(), torch.ones(4, 8), loss=lambda model, x: model(x).sum(), steps=2)
    assert "the batch was moved from cpu to cuda:0" in observed.notes


def test_out_of_memory_says_where() -> None:
    class Greedy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out = self.inner(x)
            torch.empty(2**42, dtype=torch.uint8, device=x.device)  # 4 TiB
            loss: Tensor = out.sum()
            return loss

    with pytest.raises(
        ObserveError, match=r"in the forward at test_observe_gpu\.py:\d+.*'inner': 4\.0 TiB was asked for"
    ):
        observe(Greedy().cuda(), torch.ones(4, 4).cuda())


def test_models_on_two_kinds_of_device() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).cuda())
    with pytest.raises(ObserveError, match="on 2 devices"):
        observe(model, torch.ones(1, 2))


def test_a_running_profiler_is_not_ended() -> None:
    with torch.autograd.profiler.profile(), pytest.raises(ObserveError, match="profiler is running"):
        observe(nn.Linear(2, 2).cuda(), torch.ones(1, 2).cuda(), loss=lambda model, x: model(x).sum())
