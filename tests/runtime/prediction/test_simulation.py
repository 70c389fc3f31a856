"""The time of a traced step under a plan: that of the search that found the plan, and what changes it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import lowtide
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


def test_no_time_where_the_rates_or_the_copies_are_not_known() -> None:
    source = resolve_model("gpt-tiny")
    model, batch = source.build(torch.bfloat16), source.make_batch("2x64")
    for policy, hardware in (("keep", "24GiB"), ("offload/all", "rtx-4090")):
        plan = lowtide.make_plan(model, activations=policy)
        assert (
            lowtide.trace(model, batch, optimizer=torch.optim.AdamW, plan=plan, hardware=hardware).simulated_s is None
        )
