"""`lowtide.trace(plan=...)`: the step as `manage` runs it, against sessions on an emulated device."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.errors import ConfigError, PlanError
from lowtide.tracing.step_trace import Category
from lowtide.tracing.trace_json import load_trace, save_trace, trace_from_dict, trace_to_dict

adamw = partial(torch.optim.AdamW, lr=1e-3)


class Layers(nn.Module):
    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    value: Tensor = model(batch).sum()
    return value


BATCH = torch.ones(2, 256)
traced = partial(lowtide.trace, loss=loss, hardware="h200")
plans = pytest.mark.parametrize(
    "words",
    [
        {"weights": "streamed", "update": "host"},
        {"weights": "streamed", "update": "host", "schedule": "in_backward"},
        {"weights": "streamed", "update": "device", "schedule": "in_backward"},
        {"weights": "resident", "update": "host"},
    ],
    ids=lambda words: "-".join(words.values()),
)


@plans
def test_an_optimizer_and_a_function_that_makes_it_give_the_same(words: dict[str, Any]) -> None:
    model = Layers()
    plan = lowtide.make_plan(model, **words)
    made = traced(model, BATCH, optimizer=adamw, plan=plan)
    given = traced(model, BATCH, optimizer=adamw(model.parameters()), plan=plan)
    assert trace_to_dict(made) == trace_to_dict(given)


@plans
def test_the_host_holds_what_a_session_takes(words: dict[str, Any]) -> None:
    model = Layers()
    optimizer = adamw(model.parameters())
    plan = lowtide.make_plan(model, **words)
    result = traced(model, BATCH, optimizer=optimizer, plan=plan)
    assert result.pinned_bytes is not None
    assert result.host_bytes is not None
    with lowtide.manage(model, optimizer, plan, device="cpu") as session:
        tiers = {row.tier: row for row in session.stats().tiers}
    # More where there is room for it, which a note says.
    assert result.host_bytes <= tiers["host"].peak_bytes
    assert result.pinned_bytes <= tiers["pinned"].peak_bytes
    if not any("more for gradients that wait" in note for note in result.notes):
        assert (result.host_bytes, result.pinned_bytes) == (tiers["host"].peak_bytes, tiers["pinned"].peak_bytes)


def without_workspace(result: lowtide.StepTrace) -> int:
    return result.peak_bytes - result.at_peak[Category.WORKSPACE]


def test_streamed_weights_take_less_of_the_device_than_plain_ones() -> None:
    model = Layers(8)
    plain = traced(model, BATCH, optimizer=adamw)
    plan = lowtide.make_plan(model, weights="streamed", update="host", schedule="in_backward")
    managed = traced(model, BATCH, optimizer=adamw, plan=plan)
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert without_workspace(plain) > 4 * weight_bytes  # weights, gradients and two moments
    assert without_workspace(managed) < weight_bytes
    assert plain.host_bytes is plain.pinned_bytes is None


def test_a_precision_has_its_state() -> None:
    model = Layers().bfloat16()
    plan = lowtide.make_plan(model, weights="resident", update="device")
    batch = BATCH.bfloat16()
    exact = traced(model, batch, optimizer=adamw, plan=plan, precision="bf16 exact")
    small = traced(model, batch, optimizer=adamw, plan=plan, precision="bf16 exact", moments="8bit")
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    saved = exact.start_allocated_bytes - small.start_allocated_bytes
    assert 5.5 * num_parameters < saved < 6 * num_parameters  # two moments of 4 bytes or of 1, and their scales


@pytest.mark.parametrize("precision", [None, "bf16 exact"])
def test_a_model_on_meta_and_an_optimizer_to_be_made(precision: str | None) -> None:
    with torch.device("meta"):
        empty = Layers().bfloat16()
    plan = lowtide.make_plan(empty, weights="streamed", update="host")
    fused = partial(torch.optim.AdamW, fused=True)
    batch = BATCH.bfloat16()
    on_meta = traced(empty, batch, optimizer=fused, plan=plan, precision=precision)
    on_host = traced(Layers().bfloat16(), batch, optimizer=fused, plan=plan, precision=precision)
    assert on_meta.peak_bytes == on_host.peak_bytes
    assert (on_meta.host_bytes, on_meta.pinned_bytes) == (on_host.host_bytes, on_host.pinned_bytes)


def test_a_static_partition_is_that_of_the_hardware() -> None:
    model = Layers()
    result = traced(model, BATCH, optimizer=adamw, plan=lowtide.StaticPartition(share=0.5, device_memory="4MiB"))
    assert result.host_bytes is not None
    assert result.host_bytes > 0


def test_a_budget_that_does_not_hold_the_step_is_said() -> None:
    model = Layers()
    plan = lowtide.make_plan(model, weights="resident", update="device", device_memory="2MiB")
    said: list[str] = []
    result = traced(model, BATCH, optimizer=adamw, plan=plan, on_progress=said.append)
    assert any("does not hold the step" in line for line in said)
    assert any("device_memory of 2.0 MiB does not hold the step" in note for note in result.notes), result.notes
    assert result.peak_reserved_bytes > 2 << 20


def test_the_host_survives_a_file(tmp_path: Path) -> None:
    model = Layers()
    plan = lowtide.make_plan(model, weights="streamed", update="host")
    result = traced(model, BATCH, optimizer=adamw, plan=plan)
    path = save_trace(result, tmp_path / "trace.json")
    assert load_trace(path).host_bytes == result.host_bytes
    record = json.loads(path.read_text())
    older = {key: value for key, value in record.items() if key not in ("host_bytes", "pinned_bytes")}
    assert trace_from_dict(older).host_bytes is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"plan": None, "precision": "bf16 exact"}, "there is no plan; give plan="),
        ({"optimizer": None}, "give the optimizer that manage"),
        ({"plan": lowtide.WarmUp(device_memory="1GiB")}, "made from the first step of the run"),
        ({"settings": lowtide.StepSettings(activations="recompute")}, r"give them to make_plan\(activations="),
        ({"settings": lowtide.StepSettings(update="in_backward")}, r"make_plan\(schedule='in_backward'\)"),
    ],
)
def test_arguments_that_do_not_fit_each_other(words: dict[str, Any], message: str) -> None:
    model = Layers()
    arguments = {"optimizer": adamw, "plan": lowtide.make_plan(model, weights="streamed"), **words}
    with pytest.raises(ConfigError, match=message):
        traced(model, BATCH, **arguments)


def test_paged_state_is_not_predicted() -> None:
    model = Layers().bfloat16()
    plan = lowtide.make_plan(model, weights="resident", update="paged")
    with pytest.raises(ConfigError, match="'paged'.*not predicted"):
        traced(model, BATCH.bfloat16(), optimizer=adamw, plan=plan, precision="bf16 exact")


def test_a_plan_for_another_model_is_refused() -> None:
    plan = lowtide.make_plan(Layers(5), weights="streamed")
    with pytest.raises(PlanError):
        traced(Layers(4), BATCH, optimizer=adamw, plan=plan)
