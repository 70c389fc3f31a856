"""What a session, its plan and its statistics say when they are printed."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

import lowtide
from lowtide.runtime.statistics.session_stats import CacheRow, PhaseSeconds, SessionStats
from tests.runtime.session_samples import Streaming, stats_of


def test_a_session_and_its_plan_are_one_line_each() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters())
    plan = lowtide.make_plan(model, weights="streamed", update="host", device_memory="1MiB")
    words = "3 groups (3 streamed), chunks updated: 3 host, deferred, device budget 1.0 MiB"
    assert repr(plan) == f"<Plan for model {plan.fingerprint[:8]}: {words}>"
    with lowtide.manage(model, optimizer, plan) as session:
        assert repr(session) == f"<Session of Sequential: {words}>"
    assert repr(session) == "<Session of Sequential, closed>"
    resident = lowtide.make_plan(model, weights="resident", update="device")
    assert repr(resident).endswith("(3 resident), chunks updated: 3 device, deferred, no device budget>")


def test_printed_statistics_are_some_ten_lines() -> None:
    stats = stats_of(Streaming().timeline(is_emulated=True))
    lines = str(stats).splitlines()
    assert lines[0] == "3 steps on an emulated device, 1.1 s, 367.4 ms a step"
    assert [line.split()[0] for line in lines[1:7]] == ["forward", "backward", "update", "rest", "waiting", "host"]
    assert lines[1].split() == ["forward", "118.8", "ms", "a", "step", "32.3%"]
    assert lines[7].startswith("copied a step: ")
    assert lines[8] == "device peak: 576.0 MiB of 1.0 GiB"
    assert lines[-1] == "26 chunks, 2 of them resident"
    assert len(lines) == 12
    assert repr(stats).startswith("SessionStats(num_steps=3,")
    tier = replace(stats.tiers[0], peak_bytes=2**31)
    assert "device peak: 2.0 GiB of 1.0 GiB, OVER THE BUDGET" in str(replace(stats, tiers=(tier,)))


def test_statistics_before_the_first_step_can_be_printed() -> None:
    stats = SessionStats(
        num_steps=0, moved=(), exposed_copy_s=0.0, seconds=PhaseSeconds(), chunks=(), cache=CacheRow(), tiers=()
    )
    assert str(stats).splitlines()[0] == "0 steps, 0 s, 0 s a step"
