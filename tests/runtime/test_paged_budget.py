"""Optimizer state that visits the device: as much at once as the plan counts, and refused where a budget cannot hold it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import PlanError
from lowtide.memory.chunk import lay_out
from lowtide.memory.groups import find_groups
from lowtide.optim.update_types import numerics_of
from lowtide.planning.placement import visitor_bytes_on_device
from lowtide.planning.plan import Budgets
from lowtide.runtime.host_memory import state_bytes_per_parameter_byte
from lowtide.runtime.updates.paged_state import Pages
from tests.zoo import bf16_safe

VOCABULARY, WIDTH = 96, 64


@pytest.fixture(autouse=True)
def safe() -> Iterator[None]:
    with bf16_safe():
        yield


class Tied(nn.Module):
    """A table that the embedding and the head share, two blocks, and a norm that belongs to neither."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x * self.scale)  # type: ignore[no-any-return]  # a module's call has no type


@pytest.mark.parametrize("moments", ["fp32", "8bit"])
@pytest.mark.parametrize("weights", ["streamed", "resident"])
@pytest.mark.parametrize("schedule", ["deferred", "in_backward"])
def test_what_visits_is_what_was_counted(
    schedule: str, weights: str, moments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    take = Pages.take

    def watched(pages: Pages, state: Any) -> Any:
        visitor = take(pages, state)
        seen.append(sum(each.memory.nbytes for each in pages._visitors.values()))
        return visitor

    monkeypatch.setattr(Pages, "take", watched)
    torch.manual_seed(0)
    model = Tied().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    layout = lay_out(find_groups(model), chunk_bytes=1 << 13)
    plan = lowtide.make_plan(layout, weights=weights, update="paged", schedule=schedule)
    numerics = numerics_of("bf16 exact", moments)[1]
    ratio = state_bytes_per_parameter_byte(optimizer, numerics)
    counted = visitor_bytes_on_device(layout, plan, state_bytes_per_parameter_byte=ratio)
    with lowtide.manage(model, optimizer, plan, device="cpu", precision="bf16 exact", moments=moments):
        for step in range(3):
            ids = torch.randint(VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(step))
            model(ids).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    padding = 5 * 512 * len(list(model.parameters()))
    assert 0.9 * counted <= max(seen) <= counted + padding


def test_a_budget_that_cannot_hold_it_is_refused_with_the_bytes() -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    plan = lowtide.make_plan(model, update="paged", schedule="in_backward", prefetch_depth=0)
    weight = 2 * WIDTH * WIDTH
    # A remainder of 2 bytes and two moments of 4 beside each weight of 2.
    needed = weight + 5 * weight
    tight = replace(plan, budgets=Budgets(device_bytes=needed - 1))
    with pytest.raises(PlanError, match=rf"\({5 * weight:,} bytes\), {needed:,} bytes together") as caught:
        lowtide.manage(model, optimizer, tight, device="cpu", precision="bf16 exact")
    assert caught.value.needed_bytes == needed
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
