"""Activation policies under a plan: the same bits as plain torch, inside the same books."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.activations import Keep, Offload, Policy, Recompute, Selective
from lowtide.errors import BudgetError, ConfigError, UnknownNameError
from lowtide.memory.chunk import lay_out
from lowtide.memory.groups import find_groups
from lowtide.planning.plan import plan_from_json, plan_to_json
from lowtide.planning.timeline import Reason
from lowtide.runtime.parameters.group import ManagedGroup
from lowtide.runtime.updates.updater import Finisher
from tests.zoo import ZOO, assert_same, train, zoo

POLICIES: dict[str, Policy] = {
    "selective": Selective(),
    "recompute": Recompute(),
    "segments": Recompute(segment=2),
    "offload": Offload(min_bytes=0),
    "offload all": Offload(recompute=False, min_bytes=0),
}


@pytest.mark.slow
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


# Shared blocks


class Thrice(nn.Module):
    """Calls one block three times."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.block = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 16))
        self.head = nn.Linear(16, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for _ in range(3):
            x = x + self.block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def _albert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.AlbertForMaskedLM(  # type: ignore[no-any-return]  # imported where it is there
        transformers.AlbertConfig(
            vocab_size=50,
            embedding_size=16,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=16,
            hidden_dropout_prob=0.1,
        )
    )


def _funnel() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.FunnelForMaskedLM(  # type: ignore[no-any-return]  # imported where it is there
        transformers.FunnelConfig(
            vocab_size=50,
            block_sizes=[1, 1],
            block_repeats=[2, 2],
            num_decoder_layers=1,
            d_model=32,
            n_head=2,
            d_head=16,
            d_inner=64,
        )
    )


SHARED: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "thrice": (Thrice, ["block"]),
    "albert": (_albert, ["albert.encoder.albert_layer_groups.0"]),
    "funnel": (_funnel, ["funnel.encoder.blocks.0.0", "funnel.encoder.blocks.1.0", "funnel.decoder.layers.0"]),
}


def _train_shared(name: str, plan: Callable[[nn.Module], lowtide.Plan] | None) -> tuple[nn.Module, list[float]]:
    torch.manual_seed(3)
    model = SHARED[name][0]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(1))

    def loss(network: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        output = network(batch["tokens"])
        logits = output if isinstance(output, torch.Tensor) else output.logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["tokens"].flatten())

    session = None if plan is None else lowtide.manage(model, optimizer, plan(model), device="cpu")
    losses = train(model, optimizer, [{"tokens": tokens.roll(step)} for step in range(2)], loss=loss, seed=7)
    if session is not None:
        session.close()
    return model, losses


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("thrice", {"update": "host"}),
        ("thrice", {"update": "host", "schedule": "in_backward"}),
        ("albert", {"update": "host", "schedule": "in_backward"}),
        ("funnel", {"update": "device", "schedule": "in_backward"}),
    ],
)
def test_a_shared_block_is_a_group_and_has_each_policy(name: str, place: dict[str, str]) -> None:
    expected = _train_shared(name, None)
    for policy in POLICIES.values():
        if name == "funnel" and isinstance(policy, Selective):
            continue  # its attention writes to what Selective keeps, and is refused with that reason

        def plan(model: nn.Module, policy: Policy = policy) -> lowtide.Plan:
            made = lowtide.make_plan(model, activations=policy, **place)  # type: ignore[arg-type]  # words
            assert [group.name for group in made.groups if group.activation == policy] == SHARED[name][1]
            return made

        found = _train_shared(name, plan)
        assert_same(expected[0], found[0], expected[1], found[1])


def test_a_group_that_is_used_three_times_is_updated_once_when_its_gradient_is_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    updated: list[str] = []
    finish = Finisher._update_chunk

    def watched(self: Finisher, group: ManagedGroup, *rest: Any) -> None:
        updated.append(group.name)
        finish(self, group, *rest)

    monkeypatch.setattr(Finisher, "_update_chunk", watched)
    for policy in ("keep", "recompute"):

        def plan(model: nn.Module, policy: str = policy) -> lowtide.Plan:
            return lowtide.make_plan(model, activations=policy, schedule="in_backward")

        updated.clear()
        _train_shared("thrice", plan)
        assert updated == ["head", "block", "embedding"] * 2


# Caches


def _gpt2(use_cache: bool) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=use_cache, attn_implementation="eager"
    )
    torch.manual_seed(3)
    model: nn.Module = transformers.GPT2LMHeadModel(config).train()
    return model


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.inner(input_ids=tokens, labels=tokens).loss
        return loss


def _gpt2_losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    torch.manual_seed(0)
    losses = []
    for _ in range(3):
        loss = model(torch.arange(24).reshape(2, 12))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("words", ["recompute", "selective", "offload"])
def test_a_cache_that_is_switched_off_is_said_once(words: str) -> None:
    plain = Wrapper(_gpt2(use_cache=False))
    expected = _gpt2_losses(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    model = Wrapper(_gpt2(use_cache=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plan = lowtide.make_plan(model, activations=words, weights="streamed")
    with pytest.warns(UserWarning, match="blocks of GPT2LMHeadModel again .* use_cache=False to the bit") as said:
        session = lowtide.manage(model, optimizer, plan, device="cpu")
    assert len(said) == 1
    assert said[0].filename == __file__
    with session:
        assert _gpt2_losses(model, optimizer) == expected
    assert model.inner.config.use_cache is True  # type: ignore[union-attr]


@pytest.mark.parametrize("policy", ["keep", "offload/all", "recompute"])
def test_nothing_is_said_where_no_cache_is_switched_off(policy: str) -> None:
    model = _gpt2(use_cache=policy != "recompute")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    lowtide.manage(model, optimizer, lowtide.make_plan(model, activations=policy), device="cpu").close()


def test_nothing_is_said_of_a_model_that_has_no_cache() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    assert config.use_cache
    model = transformers.BertForMaskedLM(config)
    plan = lowtide.make_plan(model, activations="recompute")
    lowtide.manage(model, torch.optim.AdamW(model.parameters(), lr=1e-2), plan, device="cpu").close()
