"""How long a step takes: the host and the device side by side, and steps that were measured on an H200."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
import torch
from torch import nn

import lowtide
from benchmarks.session.row import SIZES
from lowtide.errors import BadRecordError
from lowtide.hardware.rates import DeviceRates
from lowtide.tracing.step_trace import Op, Phase, StepTrace, seconds_of, step_time
from lowtide.tracing.trace_json import trace_from_dict, trace_to_dict
from tests.hardware.h200_record import measured_rates
from tests.tracing.samples import tiny_trace


def trace_of(seconds: list[float], launch_s: float) -> StepTrace:
    ops = tuple(Op(name="aten.mm", module="", source="", phase=Phase.FORWARD, seconds=value) for value in seconds)
    trace = tiny_trace()
    return replace(trace, ops=ops, target=replace(trace.target, launch_s=launch_s))


def test_large_operators_hide_the_hosts_work() -> None:
    found = step_time(trace_of([2.0, 2.0, 2.0], launch_s=1.0))
    assert found is not None
    assert (found.step_s, found.device_s, found.bound_by) == (7.0, 6.0, "device")


def test_small_operators_wait_for_the_host() -> None:
    found = step_time(trace_of([0.25, 0.25, 0.0, 0.25], launch_s=1.0))
    assert found is not None
    assert (found.step_s, found.device_s, found.bound_by) == (4.25, 0.75, "launches")


def test_a_view_costs_the_host_alone() -> None:
    assert step_time(trace_of([0.0, 0.0, 1.0], launch_s=0.5)) == step_time(trace_of([1.0], launch_s=1.5))


def test_phases_sum_to_the_step() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
    trace = lowtide.trace(model, torch.ones(8, 64), loss=lambda model, batch: model(batch).sum(), hardware="rtx-4090")
    found = step_time(trace)
    assert found is not None
    assert sum(found.phases.values()) == pytest.approx(found.step_s)
    assert found.phases[Phase.BACKWARD] > 0


def test_the_host_has_no_rates() -> None:
    trace = lowtide.trace(
        nn.Linear(4, 4), torch.ones(2, 4), loss=lambda model, batch: model(batch).sum(), hardware="cpu"
    )
    assert step_time(trace) is None


def test_traces_of_older_versions_know_no_launches() -> None:
    record = trace_to_dict(tiny_trace())
    del record["target"]["launch_s"]
    assert trace_from_dict(record).target.launch_s == 0.0


def test_a_step_under_a_plan_has_the_simulated_time() -> None:
    trace = tiny_trace()
    assert step_time(replace(trace, host_bytes=0)) is None
    lanes = {"compute": 1.0, "to device": 2.5, "launches": 0.5}
    managed = replace(trace, host_bytes=0, offloaded_bytes={"layers.0": 5}, simulated_s={"step": 3.0, **lanes})
    found = step_time(managed)
    assert found is not None
    assert (found.step_s, found.device_s, found.bound_by) == (3.0, 1.0, "to device")
    assert step_time(trace_from_dict(trace_to_dict(managed))) == found
    assert trace_from_dict(trace_to_dict(managed)).offloaded_bytes == {"layers.0": 5}
    with pytest.raises(BadRecordError, match=r"offloaded_bytes\[0\] is -1.5, expected int"):
        trace_from_dict({**trace_to_dict(managed), "offloaded_bytes": {"layers.0": -1.5}})
    with pytest.raises(BadRecordError, match="simulated_s lacks step"):
        trace_from_dict({**trace_to_dict(managed), "simulated_s": lanes})


MEASURED_MS = {
    ("3.14b", "8x2048", True): 899,
    ("3.14b", "4x2048", True): 454,
    ("3.14b", "8x2048", False): 701,
    ("3.14b", "2x16384", True): 2411,
    ("3.14b", "2x16384", False): 1868,
    ("8b", "4x2048", True): 922,
    ("13b", "8x2048", True): 3222,
    ("launch-bound", "2x64", True): 41,
}
"""Forward and backward by plain torch on an H200: model, batch, whether each layer is recomputed. See docs/speed.md and
docs/activations.md; the last is the median of six rows in `launch_versus`."""


def llama(name: str, *, recompute: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    size = SIZES[name]
    config = LlamaConfig(
        hidden_size=size["h"],
        num_hidden_layers=size["l"],
        intermediate_size=size["f"],
        num_attention_heads=size["a"],
        num_key_value_heads=size["k"],
        vocab_size=size["v"],
        max_position_embeddings=16384,
        tie_word_embeddings=False,
        use_cache=False,
    )
    with torch.device("meta"):
        model: nn.Module = LlamaForCausalLM(config).to(torch.bfloat16)
    if recompute:
        model.gradient_checkpointing_enable()  # type: ignore[operator]  # transformers'
    return model.train()


def priced(trace: StepTrace, rates: DeviceRates) -> StepTrace:
    """The same step on a device with other rates."""
    ops = [op if op.work is None else replace(op, seconds=seconds_of(op.name, op.work, rates)) for op in trace.ops]
    return replace(trace, ops=tuple(ops))


@pytest.mark.slow
def test_steps_that_were_measured_on_an_h200() -> None:
    """The efficiencies are fitted to these steps, and the launches to the last: this holds the formula, and is not blind.

    A calibration is: the rates that it measured, of kernels and of one other model, tell these steps as well.
    """
    errors, blind = [], []
    calibrated = measured_rates()
    for (name, batch, recompute), measured_ms in MEASURED_MS.items():
        rows, length = map(int, batch.split("x"))
        ids = torch.zeros(rows, length, dtype=torch.int64)
        trace = lowtide.trace(
            llama(name, recompute=recompute), {"input_ids": ids, "labels": ids}, hardware="h200", torch_version="2.11.0"
        )
        found, other = step_time(trace), step_time(priced(trace, calibrated))
        assert found is not None
        assert other is not None
        assert found.bound_by == ("launches" if name == "launch-bound" else "device")
        errors.append(abs(1e3 * found.step_s / measured_ms - 1))
        blind.append(abs(1e3 * other.step_s / measured_ms - 1))
    assert statistics.median(errors) < 0.015
    assert max(errors) < 0.05
    assert statistics.median(blind) < 0.03
    assert max(blind) < 0.05
