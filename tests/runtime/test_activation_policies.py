"""Activation policies under a plan: the same bits as plain torch, inside the same books."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowtide
from lowtide.activations import Keep, Offload, Policy, Recompute, Selective
from lowtide.errors import BudgetError, ConfigError, UnknownNameError
from lowtide.memory.groups import find_groups
from lowtide.memory.layout import lay_out
from lowtide.planning.plan_json import plan_from_json, plan_to_json
from lowtide.runtime.timeline import Reason
from tests.zoo import ZOO, assert_same, train, zoo

POLICIES: dict[str, Policy] = {
    "selective": Selective(),
    "recompute": Recompute(),
    "segments": Recompute(segment=2),
    "offload": Offload(min_bytes=0),
    "offload all": Offload(recompute=False, min_bytes=0),
}


@pytest.mark.filterwarnings("ignore:.*use_cache.*")
@pytest.mark.parametrize(
    "place",
    [{"weights": "streamed", "update": "host"}, {"weights": "streamed", "update": "device", "schedule": "in_backward"}],
    ids=["deferred", "in_backward"],
)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", tuple(ZOO))
def test_identity(name: str, policy: str, place: dict[str, str]) -> None:
    results = []
    for is_managed in (False, True):
        model = zoo(name)
        network = model.build(True, torch.float32)
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
        session = None
        if is_managed:
            layout = lay_out(find_groups(network), chunk_bytes=8192)
            plan = lowtide.make_plan(layout, activations=POLICIES[policy], **place)  # type: ignore[arg-type]  # words
            session = lowtide.manage(network, optimizer, plan, device="cpu")
        losses = train(network, optimizer, model.batches(4), loss=model.loss, seed=7)
        if session is not None:
            session.close()
        results.append((network, losses))
    assert_same(results[0][0], results[1][0], results[0][1], results[1][1])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]  # a module's call has no type


def stack(num_blocks: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(num_blocks)))


def peak_bytes(activations: Policy | str) -> int:
    model = stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lowtide.manage(model, optimizer, lowtide.make_plan(model, activations=activations), device="cpu") as session:
        for _ in range(2):
            model(torch.randn(512, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return session.stats().tiers[0].peak_bytes


def test_what_each_policy_leaves_on_the_device() -> None:
    """Per block: an input of 128 KiB, kept by all but offload, and two inner tensors of 512 KiB each."""
    keep, recompute, segments, offload = map(
        peak_bytes, (Keep(), Recompute(), Recompute(segment=3), Offload(min_bytes=0))
    )
    assert offload < segments < recompute < keep
    assert keep - recompute > 6 * 512 * 1024
    assert recompute - offload > 4 * 128 * 1024


def test_offloaded_bytes_are_on_the_hosts_books() -> None:
    model = stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    need = lowtide.make_plan(model)
    with lowtide.manage(model, optimizer, need, device="cpu") as session:
        host = next(row for row in session.stats().tiers if row.tier == "host").peak_bytes
    plan = lowtide.make_plan(model, activations=Offload(min_bytes=0), host_memory=host + 3 * 128 * 1024)
    with lowtide.manage(model, optimizer, plan, device="cpu"), pytest.raises(BudgetError, match="activations"):
        model(torch.randn(512, 64)).square().mean().backward()
    plan = lowtide.make_plan(model, activations=Offload(min_bytes=0), host_memory=host + 9 * 128 * 1024)
    with lowtide.manage(model, optimizer, plan, device="cpu") as session:
        model(torch.randn(512, 64)).square().mean().backward()
        stats = session.stats()
        assert stats.activations is not None
        assert stats.activations.offloaded_bytes == 8 * 128 * 1024
        assert stats.moved_bytes("to host", Reason.OFFLOAD) == 8 * 128 * 1024
        assert stats.moved_bytes("to device", Reason.BRING_BACK) == stats.activations.brought_bytes > 0
        assert next(row for row in stats.tiers if row.tier == "host").peak_bytes == host + 8 * 128 * 1024
    assert lowtide.make_plan(model).groups[0].activation == Keep()


def test_a_plan_with_policies_is_a_file() -> None:
    plan = lowtide.make_plan(stack(4), activations={"*": "recompute", "1": Offload(depth=2), "2": "selective"})
    assert [type(group.activation) for group in plan.groups] == [Recompute, Offload, Selective, Recompute]
    assert plan_from_json(plan_to_json(plan)) == plan


def test_wrong_names_and_words() -> None:
    with pytest.raises(UnknownNameError, match="group"):
        lowtide.make_plan(stack(2), activations={"7": "recompute"})
    with pytest.raises(UnknownNameError, match="recompute"):
        lowtide.make_plan(stack(2), activations="recompte")

    class WithLoose(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = stack(2)
            self.scale = nn.Parameter(torch.ones(1))

    with pytest.raises(ConfigError, match="rest of the model"):
        lowtide.make_plan(WithLoose(), activations={"": "recompute"})
