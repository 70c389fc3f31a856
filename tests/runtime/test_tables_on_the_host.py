"""Embeddings that stay on the host: same numbers, and the device never holds the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import ConfigError, PlanError
from lowtide.planning.plan import load_plan, save_plan
from tests.runtime.side_by_side import assert_same_values
from tests.zoo import assert_same_tensors

ROWS, WIDTH = 4000, 32


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.blocks = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.blocks(self.table(ids))))  # type: ignore[no-any-return]  # untyped calls


def trained(plan_words: dict[str, Any] | None, *, steps: int = 8, clip: bool = False) -> tuple[Tagger, list[float]]:
    torch.manual_seed(0)
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    session = None
    if plan_words is not None:
        session = lowtide.manage(model, optimizer, lowtide.make_plan(model, **plan_words), device="cpu")
    losses = []
    for step in range(steps):
        ids = torch.randint(ROWS, (4, 6), generator=torch.Generator().manual_seed(step % 4))
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten() % 7)
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if session is not None:
        session.close()
    return model, losses


@pytest.mark.parametrize(
    "words",
    [
        {"weights": {"*": "streamed", "table": "host"}},
        {"weights": {"*": "resident", "table": "host"}, "update": "device"},
        {"weights": {"*": "streamed", "table": "host"}, "schedule": "in_backward"},
    ],
    ids=["streamed", "resident", "in backward"],
)
@pytest.mark.parametrize("clip", [False, True])
def test_same_as_plain(words: dict[str, Any], clip: bool) -> None:
    if clip and words.get("schedule"):
        pytest.skip("nothing to clip in backward")
    plain, managed = trained(None, clip=clip), trained(words, clip=clip)
    assert plain[1] == managed[1]
    for (name, one), other in zip(plain[0].named_parameters(), managed[0].parameters(), strict=True):
        assert torch.equal(one, other), name


def test_the_device_never_holds_it() -> None:
    torch.manual_seed(0)
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters())
    table_bytes = model.table.weight.nbytes
    plan = lowtide.make_plan(model, weights={"*": "streamed", "table": "host"}, device_memory=table_bytes // 4)
    assert plan.groups[[group.name for group in plan.groups].index("table")].weights == "host"
    with lowtide.manage(model, optimizer, plan, device="cpu") as session:
        for _ in range(3):
            model(torch.randint(ROWS, (4, 6))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        tiers = {row.tier: row for row in session.stats().tiers}
    assert tiers["device"].peak_bytes < table_bytes // 4
    # Table, gradient and AdamW's two moments.
    assert tiers["host"].peak_bytes > 4 * table_bytes


def test_only_an_embedding_can() -> None:
    model = Tagger()
    with pytest.raises(PlanError, match="only an embedding, one table in one call"):
        lowtide.make_plan(model, weights={"": "host"})
    tower = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    plan = lowtide.make_plan(tower, weights={"0": "host"})
    with pytest.raises(ConfigError, match="is a Linear; give the path of an nn.Embedding"):
        lowtide.manage(tower, None, plan, device="cpu")
    assert type(tower[0].weight) is nn.Parameter
    assert tower(torch.ones(1, 4)).shape == (1, 4)


class Deep(nn.Module):
    """Blocks beside which the tables are too small for groups of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(10, 16)
        self.pos = nn.Embedding(4, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(12))
        self.head = nn.Linear(16, 10)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)  # type: ignore[no-any-return]  # untyped calls


def trained_deep(plan: lowtide.Plan | None) -> tuple[Deep, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = Deep()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = None if plan is None else lowtide.manage(model, optimizer, plan, device="cpu")
    losses = []
    for step in range(4):
        ids = torch.randint(10, (3, 4), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    if session is not None:
        session.close()
    return model, losses


@pytest.mark.parametrize("schedule", ["deferred", "in_backward"])
def test_a_small_table_and_a_part_of_a_block_by_name(schedule: str, tmp_path: Path) -> None:
    """Which have groups because they are named: the session finds them again from the plan, read from a file too."""
    plan = lowtide.make_plan(
        Deep(),
        weights={"*": "streamed", "tok": "host", "blocks.3.2": "resident", "blocks.1?": "resident"},
        update={"pos": "device"},
        activations={"blocks.5.0": "recompute"},
        schedule=schedule,
    )
    assert {"tok", "pos", "blocks.3", "blocks.3.2", "blocks.5.0"} <= {group.name for group in plan.groups}
    save_plan(plan, tmp_path / "plan.json")
    plain, expected = trained_deep(None)
    managed, losses = trained_deep(load_plan(tmp_path / "plan.json"))
    assert_same_values(expected, losses)
    assert_same_tensors(plain.state_dict(), managed.state_dict())
