"""Deferred weights: every bit as the plain constructor has it, with a few parameters in memory at a time."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import lowtide
from lowtide import compat
from lowtide.errors import SessionError
from lowtide.memory.chunk import ParameterSpec, lay_out, view_of
from lowtide.memory.groups import find_groups
from lowtide.memory.parts import equal_parts
from lowtide.models.deep_one import DeepOne, DeepOneConfig
from lowtide.models.gpt import GPT, GPTConfig
from lowtide.models.llama import Llama, LlamaConfig
from lowtide.models.resnet import ResNet, ResNetConfig
from lowtide.runtime.parameters.deferred_weights import DeferredWeights
from tests.ranks import on_ranks
from tests.runtime.side_by_side import Tower, adamw, in_all_places, inputs, manage, plan_for, seeded
from tests.zoo import ZOO, assert_same_tensors, zoo

SEED = 11
Build = Callable[[], nn.Module]


@pytest.fixture(autouse=True)
def deferring_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models have small parameters; with the limit of 64 KiB most would keep their values."""
    monkeypatch.setattr("lowtide.runtime.parameters.deferred_weights.LEAST_DEFERRED_BYTES", 1)


def built(build: Build) -> tuple[nn.Module, DeferredWeights]:
    torch.manual_seed(SEED)
    with lowtide.deferred_weights() as weights:
        model = build()
    return model, weights


def assert_as_plain(build: Build, *, least_share: float = 1.0) -> None:
    """The same parameters, buffers and generator; at least this share of the parameters' bytes was deferred."""
    torch.manual_seed(SEED)
    plain = build()
    state = torch.get_rng_state()
    model, weights = built(build)
    assert torch.equal(torch.get_rng_state(), state)
    num_bytes = {id(each): each.numel() * each.element_size() for each in model.parameters()}
    deferred = sum(num_bytes[id(each)] for each in model.parameters() if each.is_meta)
    assert deferred >= least_share * sum(num_bytes.values())
    before = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    weights.materialize(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)} == before
    assert_same_model(plain, model)


def assert_same_model(plain: nn.Module, model: nn.Module) -> None:
    for one, other in (
        (plain.named_parameters(remove_duplicate=False), model.named_parameters(remove_duplicate=False)),
        (plain.named_buffers(remove_duplicate=False), model.named_buffers(remove_duplicate=False)),
    ):
        one, other = dict(one), dict(other)
        assert_same_tensors(one, other)
        for name, tensor in one.items():
            assert tensor.stride() == other[name].stride(), name
            assert tensor.requires_grad == other[name].requires_grad, name
            assert tensor.device == other[name].device, name


# Models


@pytest.mark.parametrize("name", ZOO)
def test_the_zoo(name: str) -> None:
    assert_as_plain(lambda: zoo(name).build(False, torch.float32))


OWN: dict[str, Build] = {
    "gpt": lambda: GPT(GPTConfig(vocab_size=50, context_length=16, num_layers=2, hidden_size=32, num_heads=2)),
    "llama": lambda: Llama(
        LlamaConfig(
            vocab_size=50,
            context_length=16,
            num_layers=2,
            hidden_size=32,
            intermediate_size=48,
            num_heads=2,
            num_kv_heads=1,
            tied=True,
        )
    ),
    "resnet": lambda: ResNet(ResNetConfig(blocks=(1, 1, 1, 1), width=8, num_classes=10, image_size=32)),
    "deep one": lambda: DeepOne(
        DeepOneConfig(vocab_size=50, context_length=16, num_layers=2, hidden_size=32, intermediate_size=48, num_heads=2)
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_own_models(name: str) -> None:
    assert_as_plain(OWN[name])


class Mixed(nn.Module):
    """A large weight that depends on small draws, which keep their values and no operators."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(128))
        self.layer = nn.Linear(128, 128)
        with torch.no_grad():
            self.layer.weight.mul_(self.scale).add_(torch.randn(128, 1))
            self.scale.normal_()
            self.layer.weight.sub_(self.scale)
            self.scale.mul_(self.layer.weight.mean())


def test_the_usual_limit_keeps_small_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for build in (OWN["gpt"], Mixed):
        assert_as_plain(build, least_share=0.0)
    model, _ = built(lambda: nn.Linear(128, 128))
    assert (model.weight.is_meta, model.bias.is_meta) == (True, False)


LAYERS: dict[str, Build] = {
    "linear": lambda: nn.Linear(20, 30),
    "bilinear": lambda: nn.Bilinear(4, 5, 6),
    "convolution": lambda: nn.Conv2d(4, 6, 3),
    "transposed convolution": lambda: nn.ConvTranspose1d(4, 6, 3),
    "embedding with padding": lambda: nn.Embedding(20, 8, padding_idx=3),
    "bag of embeddings": lambda: nn.EmbeddingBag(20, 8),
    "lstm": lambda: nn.LSTM(8, 16, 2, bidirectional=True),
    "gru": lambda: nn.GRU(8, 16),
    "lstm cell": lambda: nn.LSTMCell(8, 16),
    "attention": lambda: nn.MultiheadAttention(16, 4, add_bias_kv=True),
    "attention of other sizes": lambda: nn.MultiheadAttention(16, 4, kdim=6, vdim=10),
    "batch norm": lambda: nn.BatchNorm2d(16),
    "group norm": lambda: nn.GroupNorm(2, 16),
    "prelu": lambda: nn.PReLU(16),
    "transformer": lambda: nn.Transformer(16, 2, 2, 2, 32, batch_first=True),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(20, 30)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(20, 30)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(20, 20)),
    "list of parameters": lambda: nn.ParameterList(
        [torch.randn(6, 7), nn.Parameter(torch.rand(5), requires_grad=False)]
    ),
    "bf16": lambda: nn.Linear(20, 30, dtype=torch.bfloat16),
    "converted": lambda: nn.Linear(20, 30).to(torch.bfloat16),
    "converted to fp64": lambda: nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30)).double(),
    "channels last": lambda: nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last),
    "complex": lambda: nn.Linear(6, 8, dtype=torch.complex64),
    "tied": lambda: tied(nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)),
    "frozen": lambda: nn.Linear(20, 30).requires_grad_(False),
}


def tied(table: nn.Embedding, head: nn.Linear) -> nn.Module:
    head.weight = table.weight
    return nn.Sequential(table, head)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_torch(name: str) -> None:
    assert_as_plain(LAYERS[name])


def test_initialisers_of_torch() -> None:
    def build() -> nn.Module:
        layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(9))
        init: list[Callable[[Tensor], object]] = [
            lambda weight: nn.init.trunc_normal_(weight, std=0.02),
            nn.init.orthogonal_,
            nn.init.xavier_normal_,
            lambda weight: nn.init.kaiming_normal_(weight, mode="fan_out"),
            lambda weight: nn.init.sparse_(weight, 0.3),
            nn.init.eye_,
            lambda weight: nn.init.constant_(weight, 0.5),
            lambda weight: nn.init.uniform_(weight, -0.1, 0.1),
            lambda weight: nn.init.normal_(weight.view(2, -1)[1:]),
        ]
        for layer, each in zip(layers, init, strict=True):
            each(layer.weight)
        convolution = nn.Conv2d(6, 6, 3)
        nn.init.dirac_(convolution.weight)
        return layers.append(convolution)

    assert_as_plain(build)


HUGGING_FACE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {"num_key_value_heads": 1}),
    "bert": ("BertForMaskedLM", "BertConfig", {}),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2},
    ),
    "vit": ("ViTForImageClassification", "ViTConfig", {"image_size": 16, "patch_size": 8}),
}
HF_SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face(name: str, dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers")
    model, config, sizes = HUGGING_FACE[name]
    words = {} if name == "vit" else {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if name not in ("gpt2", "t5"):
        sizes = HF_SIZES | sizes
    made = getattr(transformers, config)(**words, **sizes)
    assert_as_plain(lambda: getattr(transformers, model)._from_config(made, dtype=dtype))


# What constructors do


class Written(nn.Module):
    """A weight, and a function that initialises it in its own way."""

    def __init__(self, write: Callable[[Written], object]) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)
        self.other = nn.Linear(12, 12)
        with torch.no_grad():
            write(self)


def by_its_largest(model: Written) -> None:
    if model.layer.weight.abs().max().item() > 0.1:
        model.layer.weight.mul_(0.1 / model.layer.weight.abs().max())


def rescale_residuals(model: Written) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("weight"):
            parameter.normal_(0, 0.02).div_(2**0.5)


def from_numpy(model: Written) -> None:
    values = np.random.default_rng(0).normal(size=(12, 12)).astype(np.float32)
    model.layer.weight.copy_(torch.from_numpy(values))
    values[:] = 7  # after it was read
    model.other.weight.copy_(torch.from_numpy(values))


def through_numpy(model: Written) -> None:
    model.layer.weight.numpy()[2:4] = 5
    model.layer.weight.add_(1)


def a_buffer_of_a_weight(model: Written) -> None:
    model.register_buffer("average", model.layer.weight.clone())
    model.layer.weight.mul_(2)


def into_a_buffer(model: Written) -> None:
    model.register_buffer("average", torch.zeros(12, 12))
    model.average.lerp_(model.layer.weight, 0.3)


def with_own_generator(model: Written) -> None:
    generator = torch.Generator().manual_seed(5)
    model.layer.weight.normal_(generator=generator)
    model.other.weight.uniform_(generator=generator)
    model.register_buffer("next", torch.rand(3, generator=generator))


def by_chance_of_a_weight(model: Written) -> None:
    model.other.weight.bernoulli_(model.layer.weight.abs().clamp(0, 1))
    model.layer.weight.copy_(torch.bernoulli(model.layer.weight.abs().clamp(0, 1)))


def by_data(model: Written) -> None:
    model.layer.weight.data = torch.randn(5, 12) @ model.other.weight.data
    model.other.weight = nn.Parameter(model.other.weight.data.t().contiguous())


def by_index(model: Written) -> None:
    model.layer.weight[model.layer.weight > 0.2] = 0.2
    model.layer.weight[torch.tensor([1, 3])] += 1
    model.other.weight.index_fill_(0, torch.tensor([2]), 0.0)
    model.other.weight[model.other.weight.nonzero()[0, 0]] = 9


def among_themselves(model: Written) -> None:
    model.layer.weight.copy_(model.other.weight.t())
    model.other.weight.sub_(model.layer.weight @ model.layer.weight)


def by_lists(model: Written) -> None:
    model.layer.weight.copy_(torch.tensor([[float(row + column) for column in range(12)] for row in range(12)]))
    model.other.weight.copy_(torch.linalg.svd(model.other.weight)[0])


def under_another_default_type(model: Written) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        model.layer.weight.copy_(torch.ones(12, 12) / 3 + torch.rand(12))
    finally:
        torch.set_default_dtype(torch.float32)


def under_autocast(model: Written) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.layer.weight.copy_(model.other.weight @ model.layer.weight)


def with_other_draws_between(model: Written) -> None:
    torch.randn(3), torch.randperm(5), torch.rand_like(model.layer.weight), torch.nn.functional.dropout(torch.ones(5))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model.layer.weight.normal_()
    model.other.weight.normal_()


def into_an_argument(model: Written) -> None:
    torch.add(model.layer.weight, model.other.weight, out=model.other.weight.data)
    torch.mul(torch.ones(12, 12), 3, out=model.layer.weight.data)


def in_many_at_once(model: Written) -> None:
    torch._foreach_mul_([model.layer.weight, model.other.weight], 0.5)


WRITERS = (
    by_its_largest, rescale_residuals, from_numpy, through_numpy, a_buffer_of_a_weight, into_a_buffer, with_own_generator,
    by_chance_of_a_weight, by_data, by_index, among_themselves, by_lists, under_another_default_type, under_autocast,
    with_other_draws_between, into_an_argument, in_many_at_once,
)  # fmt: skip


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_initialised_in_its_own_way(write: Callable[[Written], None]) -> None:
    # What numpy has seen keeps its memory.
    assert_as_plain(lambda: Written(write), least_share=0.4)


class RandomProgram(nn.Module):
    """Operators drawn from a seed, on weights, views of them, and temporaries."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(4, 6)) for _ in range(3))
        self.register_buffer("seen", torch.zeros(4, 6))
        with torch.no_grad():
            for _ in range(30):
                self.write(draw)

    def write(self, draw: random.Random) -> None:
        tensors: list[Tensor] = [*self.weights, self.seen, torch.rand(4, 6)]
        target, other = draw.choice(tensors), draw.choice(tensors)
        start = draw.randrange(3)
        draw.choice([
            lambda: target.normal_(),
            lambda: target[start:].uniform_(),
            lambda: target.t()[start].zero_(),
            lambda: target.copy_(other),
            lambda: target.mul_(0.5).add_(other, alpha=0.3),
            lambda: target.sub_(target.mean()),
            lambda: target[:, start].copy_(other[:, start + 1]),
            lambda: target.clamp_(-1, float(other.max())),
            lambda: self.weights[start].set_(torch.randn(4, 6) + other),
            lambda: setattr(self.weights[start], "data", other.clone() * 2),
            lambda: target.erfinv_().nan_to_num_(0.1, 0.2, 0.3),
            lambda: target.copy_((other @ other.t()) @ target),
            lambda: target.masked_fill_(other > 0, 0.7),
        ])()  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_random_programs(seed: int) -> None:
    assert_as_plain(lambda: RandomProgram(seed), least_share=0.3)


def test_operations_that_nothing_needs_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each draw over the whole weight makes the one before worthless."""
    monkeypatch.setattr("lowtide.runtime.parameters.recorded_operators._LEAST_PRUNED", 10)

    def build() -> nn.Module:
        layer = nn.Linear(8, 8, bias=False)
        for _ in range(50):
            nn.init.normal_(layer.weight)
        with torch.no_grad():
            layer.weight.mul_(2)
        return layer

    assert_as_plain(build)
    _, weights = built(build)
    assert len(weights._log) == 2


# What is held, shared or hooked keeps its values


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.row = [self.layer.weight.data[3]]


def test_a_view_that_is_held_sees_later_writes() -> None:
    torch.manual_seed(SEED)
    plain = Holding()
    model, weights = built(Holding)
    assert not model.layer.weight.is_meta
    assert torch.equal(model.row[0], plain.row[0])
    model.layer.weight.data[3] = 5
    assert model.row[0].eq(5).all()
    weights.materialize(model)
    assert torch.equal(model.layer.bias, plain.layer.bias)


def test_two_parameters_of_one_storage_go_on_sharing_it() -> None:
    def build() -> nn.Module:
        whole = torch.randn(6, 8)
        return nn.ParameterList([nn.Parameter(whole[:3]), nn.Parameter(whole[3:])])

    assert_as_plain(build, least_share=0.0)
    model, _ = built(build)
    assert model[0].untyped_storage().data_ptr() == model[1].untyped_storage().data_ptr()


def test_hooks_stay() -> None:
    seen: list[Tensor] = []

    def build() -> nn.Module:
        layer = nn.Linear(8, 8)
        layer.weight.register_post_accumulate_grad_hook(seen.append)
        return layer

    model, weights = built(build)
    weights.materialize(model)
    model(torch.ones(1, 8)).sum().backward()
    assert len(seen) == 1


class WithGraph(nn.Module):
    """Computes a penalty as it is built, and keeps its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.penalty = (self.layer.weight.square() * self.layer.weight).sum()


def test_a_graph_stays() -> None:
    torch.manual_seed(SEED)
    plain = WithGraph()
    model, weights = built(WithGraph)
    weights.materialize(model)
    for each in (plain, model):
        each.penalty.backward()
    assert plain.layer.weight.grad is not None
    assert model.layer.weight.grad is not None
    assert torch.equal(model.layer.weight.grad, plain.layer.weight.grad)


def test_weights_may_outlive_the_model() -> None:
    model, weights = built(lambda: nn.Linear(8, 8))
    weights.materialize(model)
    memory = weakref.ref(model.weight.untyped_storage())
    del model
    gc.collect()
    assert memory() is None
    assert weights.nbytes == 4 * 72


def test_weights_that_keep_their_memory_are_named() -> None:
    def build() -> nn.Module:
        layer = nn.Linear(600, 600)
        layer.held = [layer.weight.data]
        return layer

    with pytest.warns(
        UserWarning, match=r"1 parameters, 1.4 MiB, were not deferred .* weight of a Linear, which shares its memory"
    ):
        built(build)
    table = torch.from_numpy(np.zeros((600, 600), dtype=np.float32))
    with pytest.warns(UserWarning, match="0 of a ParameterList, which has values that no operator of torch made"):
        built(lambda: nn.ParameterList([nn.Parameter(table)]))

    class Own(nn.Parameter):
        pass

    with pytest.warns(UserWarning, match="0 of a ParameterList, which is a Own, not a plain Parameter"):
        built(lambda: nn.ParameterList([Own(torch.zeros(600, 600))]))

    def with_hook() -> nn.Module:
        layer = nn.Linear(600, 600)
        layer.weight.register_hook(lambda gradient: gradient)
        return layer

    with pytest.warns(UserWarning, match="weight of a Linear, which has a gradient, or hooks for one"):
        built(with_hook)


def test_a_module_that_was_dropped_needs_nothing() -> None:
    def build() -> nn.Module:
        kept = nn.Linear(8, 8)
        dropped = nn.Linear(8, 8)
        dropped.itself = dropped  # only the collector frees it
        kept.weight.data.copy_(dropped.weight.data)
        return kept

    assert_as_plain(build)


# After the block


def test_torch_is_as_before_even_after_an_error() -> None:
    before = nn.Module.register_parameter, nn.Module.__setstate__
    layers: list[nn.Linear] = []

    def break_off() -> None:
        with lowtide.deferred_weights():
            layers.append(nn.Linear(8, 8))
            assert nn.Module.register_parameter is not before[0]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        break_off()
    assert (nn.Module.register_parameter, nn.Module.__setstate__) == before
    assert layers[0].weight.is_meta
    assert not nn.Linear(8, 8).weight.is_meta


def test_one_block_at_a_time() -> None:
    with (
        lowtide.deferred_weights(),
        pytest.raises(SessionError, match="is entered already, here or in another thread"),
        lowtide.deferred_weights(),
    ):
        pass


def test_a_weight_that_was_changed_since() -> None:
    model, weights = built(lambda: nn.Linear(8, 8))
    nn.init.zeros_(model.bias)
    with pytest.raises(SessionError, match=r"bias was changed after deferred_weights\(\) had ended"):
        weights.materialize(model)
    assert model.weight.is_meta


def test_a_weight_of_another_block() -> None:
    _, weights = built(lambda: nn.Linear(8, 8))
    other, _ = built(lambda: nn.Linear(8, 8))
    with pytest.raises(
        SessionError, match="weight is on the meta device and was not built under this deferred_weights"
    ):
        manage(other, adamw(other), "streamed-host", weights=weights)


def test_an_operator_that_cannot_be_repeated() -> None:
    """Plain torch raises this while the model is built; here it is only seen when the weight is made."""

    def build() -> nn.Module:
        layer = nn.Linear(8, 8)
        layer.weight.data.index_fill_(0, torch.tensor([80]), 1.0)
        return layer

    model, weights = built(build)
    with pytest.raises(
        SessionError, match=r"the values of weight cannot be made: .*index_fill_ raised IndexError: index 80"
    ) as caught:
        weights.materialize(model)
    assert "without deferred_weights" in str(caught.value)


def test_converted_after_the_block() -> None:
    torch.manual_seed(SEED)
    plain = nn.Linear(12, 12).to(torch.bfloat16)
    model, weights = built(lambda: nn.Linear(12, 12))
    model.to(torch.bfloat16)
    weights.materialize(model)
    assert_same_model(plain, model)


# Under a session


def session_values(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@in_all_places
@pytest.mark.parametrize("least_bytes", [1, 1024])
def test_manage_fills_group_by_group(place: str, least_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where small parameters have their values already."""
    monkeypatch.setattr("lowtide.runtime.parameters.deferred_weights.LEAST_DEFERRED_BYTES", least_bytes)
    plain = seeded(Tower)
    with lowtide.deferred_weights() as weights:
        model = seeded(Tower)
    assert 0 < sum(each.is_meta for each in model.parameters()) <= len([*model.parameters()])
    plain_optimizer, optimizer = adamw(plain), adamw(model)
    with manage(model, optimizer, place, weights=weights):
        assert_same_tensors(plain.state_dict(), session_values(model))
        for step in range(3):
            for each, its_optimizer in ((plain, plain_optimizer), (model, optimizer)):
                each(inputs(step)).square().mean().backward()
                its_optimizer.step()
                its_optimizer.zero_grad()
        assert_same_tensors(plain.state_dict(), session_values(model))
    assert_same_tensors(plain.state_dict(), model.state_dict())


class Recurrent(nn.Module):
    """Keeps weak references to its weights, and has a table that no session moves."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8, sparse=True)
        self.lstm = nn.LSTM(8, 16, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.lstm(self.table(ids))[0]
        return out


def test_recurrent_layers_and_unmanaged_tables() -> None:
    plain = seeded(Recurrent)
    with lowtide.deferred_weights() as weights:
        model = seeded(Recurrent)
    ids = torch.arange(6).reshape(2, 3)
    with manage(model, None, "streamed-host", weights=weights):
        assert torch.equal(model(ids), plain(ids))
    assert torch.equal(model(ids), plain(ids))


def test_prepare_takes_them() -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))

    plain = seeded(build)
    with lowtide.deferred_weights() as weights:
        model = seeded(build)
    batch = torch.ones(4, 64)
    with lowtide.prepare(
        model, adamw(model), batch, loss=lambda m, x: m(x).sum(), device="cpu", device_memory="1MiB", weights=weights
    ):
        assert torch.equal(model(batch), plain(batch))


def refuse(management: object) -> None:
    del management
    raise ZeroDivisionError


def test_a_refused_session_leaves_them_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = seeded(Tower)
    with lowtide.deferred_weights() as weights:
        model = seeded(Tower)
    optimizer = adamw(model)
    plan = lowtide.make_plan(model, weights="resident", update="device", device_memory="1MiB")
    with monkeypatch.context() as patched:
        patched.setattr("lowtide.runtime.manage.Session", refuse)  # all weights are there by then
        with pytest.raises(ZeroDivisionError):
            lowtide.manage(model, optimizer, plan, device="cpu", weights=weights)
    assert all(parameter.is_meta for parameter in model.parameters())
    with manage(model, optimizer, "streamed-host", weights=weights):
        assert_same_tensors(plain.state_dict(), session_values(model))


def test_without_them_a_session_asks_for_them() -> None:
    model, _ = built(lambda: Tower())
    with pytest.raises(SessionError, match=r"or the deferred_weights\(\) that it was built under"):
        manage(model, adamw(model), "streamed-host")


@pytest.mark.parametrize("shards", [2, 3])
def test_a_rank_keeps_its_part_of_a_chunk(shards: int) -> None:
    """One chunk in memory at a time, from the last to the first; the parts together are the plain model."""
    plain = dict(seeded(Tower).named_parameters())
    with lowtide.deferred_weights() as weights:
        model = seeded(Tower)
    parameters = dict(model.named_parameters())
    for chunk in reversed(lay_out(find_groups(model), chunk_bytes=None, shards=shards).chunks):
        flat, expected = torch.zeros(chunk.nbytes, dtype=torch.uint8), torch.zeros(chunk.nbytes, dtype=torch.uint8)
        for span in chunk.spans:
            name = span.parameter.name
            weights.fill(span.parameter, parameters[name], view_of(flat, span.offset_bytes, span.parameter))
            view_of(expected, span.offset_bytes, span.parameter).copy_(plain[name].detach())
        for part in equal_parts(chunk, shards):
            assert torch.equal(flat[part.begin : part.end], expected[part.begin : part.end])
    assert all(parameter.is_meta for parameter in model.parameters())


def managed_on_a_rank(rank: int) -> dict[str, Tensor]:
    del rank
    with lowtide.deferred_weights() as weights:
        model = seeded(lambda: Tower([nn.Linear(16, 16), nn.Linear(16, 16)]))
    plan = plan_for(model, "streamed-host", "deferred")
    with lowtide.manage(
        model, adamw(model), plan, device="cpu", weights=weights, ranks=torch.distributed.group.WORLD
    ) as session:
        assert session.plan == plan
        return session_values(model)


def test_ranks_draw_the_same_weights() -> None:
    expected = seeded(lambda: Tower([nn.Linear(16, 16), nn.Linear(16, 16)])).state_dict()
    for found in on_ranks(managed_on_a_rank, 2):
        assert_same_tensors(expected, found)


# Memory


class LiveBytes(compat.WatchingMode):
    """The most bytes that tensors had on the host at one time, as far as operators have seen them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in compat.tensors_in((args, kwargs, out)):
            if tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self._seen[storage._cdata] = weakref.ref(storage)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes())
        return out

    def live_bytes(self) -> int:
        alive = [storage for reference in self._seen.values() if (storage := reference()) is not None]
        # A session's storages lie over one another: each byte counts once.
        end = total = 0
        for start, nbytes in sorted((storage.data_ptr(), storage.nbytes()) for storage in alive):
            total += max(0, start + nbytes - max(start, end))
            end = max(end, start + nbytes)
        return total


WIDE = 256
LINEAR_BYTES = 4 * WIDE * WIDE
NUM_WIDE = 24


def wide() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDE, WIDE, bias=False) for _ in range(NUM_WIDE)))


@pytest.fixture
def live() -> Iterator[LiveBytes]:
    gc.collect()
    with LiveBytes() as mode:
        yield mode


def test_building_holds_two_weights_at_a_time(live: LiveBytes) -> None:
    """One that was just made, before its module has it or as scratch for a draw, and one for what torch does in between."""
    model = wide()
    assert live.peak_bytes >= NUM_WIDE * LINEAR_BYTES  # the plain one, so that the measure measures
    del model
    live.peak_bytes = 0
    _, weights = built(wide)
    assert weights.nbytes == NUM_WIDE * LINEAR_BYTES
    assert live.peak_bytes <= 2 * LINEAR_BYTES + 64 * 1024  # generator states and buffers of other sizes


def test_filling_holds_one_weight_beside_what_it_fills(live: LiveBytes) -> None:
    model, weights = built(wide)
    live.peak_bytes = 0
    target = torch.empty(WIDE, WIDE)
    for name, parameter in model.named_parameters():
        spec = ParameterSpec(
            name=name,
            shape=(WIDE, WIDE),
            stride=(WIDE, 1),
            dtype=torch.float32,
            requires_grad=True,
            nbytes=LINEAR_BYTES,
        )
        weights.fill(spec, parameter, target)
    assert live.peak_bytes <= 2 * LINEAR_BYTES + NUM_WIDE * 6 * 1024  # the target, one weight, generator states
    torch.manual_seed(SEED)
    assert torch.equal(target, [*wide().parameters()][-1])


def test_managing_holds_one_weight_beside_the_session(live: LiveBytes) -> None:
    """Streamed weights are on the host once; the window is one group; beside these, the weight that is being made."""
    model, weights = built(wide)
    live.peak_bytes = 0
    with manage(model, None, "streamed-host", weights=weights):
        own_bytes = NUM_WIDE * LINEAR_BYTES
        assert own_bytes <= live.peak_bytes <= own_bytes + 2 * LINEAR_BYTES + NUM_WIDE * 6 * 1024


def process_memory(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


def grown_bytes(rank: int) -> int:
    """By how much the process's peak grows while 192 MiB of weights are built."""
    del rank
    with lowtide.deferred_weights():
        nn.Linear(8, 8)  # what the first use imports
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = process_memory("VmRSS")
    with lowtide.deferred_weights() as weights:
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(48)))
    assert weights.nbytes >= 192 << 20
    assert model[0].weight.is_meta
    return process_memory("VmHWM") - before


def test_the_process_does_not_grow_with_the_model() -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("needs Linux")
    (grown,) = on_ranks(grown_bytes, 1)
    assert grown <= 4 * (4 << 20)  # four weights; the model has 48
