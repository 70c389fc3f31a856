"""The time of a traced step under a plan: that of the search that found the plan, and what changes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.activations import apply
from lowtide.hardware import find_hardware
from lowtide.models import resolve_model
from lowtide.models.gpt import GPT, GPTConfig
from lowtide.planning.timeline import Lane


@pytest.mark.parametrize(
    ("budget", "schedule"), [("200MiB", "deferred"), ("260MiB", "in_backward"), ("600MiB", "deferred")]
)
def test_the_time_of_a_traced_plan_is_that_of_its_search(budget: str, schedule: str) -> None:
    config = GPTConfig(vocab_size=512, context_length=128, num_layers=8, hidden_size=512, num_heads=8)
    with torch.device("meta"):
        model = GPT(config).to(torch.bfloat16)
    ids = torch.zeros(4, 128, dtype=torch.int64)
    found = lowtide.plan(
        model,
        {"input_ids": ids, "labels": ids},
        optimizer=torch.optim.AdamW,
        device_memory=budget,
        host_memory="4GiB",
        schedule=schedule,
        hardware="rtx-4090",
    )
    # The search has costs by policy and kind of block, from a step in which all is streamed and so a little is added to
    # small operators; the trace has those of this very step.
    assert found.trace.simulated_s is not None
    assert found.trace.simulated_s["step"] == pytest.approx(found.step_s, rel=0.12)
    for lane in Lane:
        assert found.trace.simulated_s[lane] == pytest.approx(found.simulated.busy_s[lane], rel=0.12, abs=1e-5)


def test_a_slower_link_shows_in_the_time_of_a_traced_plan() -> None:
    source = resolve_model("gpt-tiny")
    model, batch = source.build(torch.bfloat16), source.make_batch("2x64")
    plan = lowtide.make_plan(model, activations="selective")
    card = find_hardware("rtx-4090")
    assert card.host_link_bytes_per_s is not None
    slow = replace(card, host_link_bytes_per_s=card.host_link_bytes_per_s / 1000)
    times = []
    for hardware in (card, slow):
        trace = lowtide.trace(model, batch, optimizer=torch.optim.AdamW, plan=plan, hardware=hardware)
        assert trace.simulated_s is not None
        times.append(trace.simulated_s)
    # What the four blocks stream comes once for the forward; the last of them may still be there for the backward.
    copied = sum(each.nbytes for each in model.get_submodule("layers").parameters())
    assert copied / (slow.host_link_bytes_per_s or 1.0) < times[1]["to device"]
    assert times[1]["to device"] == pytest.approx(1000 * times[0]["to device"], rel=0.01)
    assert times[1]["step"] > times[0]["step"]


def test_no_time_where_the_rates_are_not_known() -> None:
    source = resolve_model("gpt-tiny")
    model, batch = source.build(torch.bfloat16), source.make_batch("2x64")
    plan = lowtide.make_plan(model)
    assert lowtide.trace(model, batch, optimizer=torch.optim.AdamW, plan=plan, hardware="24GiB").simulated_s is None


@pytest.mark.parametrize(("policy", "without"), [("offload", "recompute"), ("offload/all", "keep")])
def test_what_blocks_send_to_the_host_is_in_the_time_of_a_traced_plan(policy: str, without: str) -> None:
    """Its bytes are those that the policies of a real step send, and they go over the link once each way."""
    blocks = [nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(4)]
    model, batch = nn.Sequential(*blocks), torch.ones(1024, 256)
    with apply(model, policy) as applied:
        model(batch.requires_grad_()).sum().backward()
        sent = applied.offloaded_bytes()
        assert sum(sent.values()) == applied.stats().offloaded_bytes > 0
    card = find_hardware("rtx-4090")
    words: dict[str, Any] = {"optimizer": torch.optim.AdamW, "loss": lambda m, x: m(x).sum(), "hardware": card}
    traces = []
    for word in (policy, without):
        plan = lowtide.make_plan(model, weights="resident", update="device", activations=word)
        traces.append(lowtide.trace(model, batch, plan=plan, **words))
    offloading, other = traces
    assert offloading.offloaded_bytes == sent
    assert not other.offloaded_bytes
    assert offloading.simulated_s is not None
    assert other.simulated_s is not None
    assert card.rates is not None
    num_bytes = sum(sent.values())
    for lane, rate in (
        (Lane.TO_HOST, card.rates.to_host_bytes_per_s),
        (Lane.TO_DEVICE, card.rates.to_device_bytes_per_s),
    ):
        assert offloading.simulated_s[lane] - other.simulated_s[lane] == pytest.approx(num_bytes / rate)
