"""Groups: what is found in many architectures, and that a group's windows are open whenever its weights are read."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lowtide.activations.policy import KEEP
from lowtide.errors import ConfigError, UnknownNameError
from lowtide.memory.chunk import GroupSpec, lay_out
from lowtide.memory.groups import find_groups, find_named_groups, is_called, repeated_blocks
from lowtide.planning.hand_plan import make_plan
from tests.zoo import ZOO, ZooModel

ARCHITECTURES = pytest.mark.parametrize("zoo_model", ZOO.values(), ids=list(ZOO))


def windows_of(model: nn.Module, given: dict[str, list[str]] | None = None) -> dict[str, tuple[str, ...]]:
    return {group.name: group.modules for group in find_groups(model, given)}


def members_of(model: nn.Module, given: dict[str, list[str]] | None = None) -> dict[str, list[str]]:
    return {group.name: [p.name for p in group.parameters] for group in find_groups(model, given)}


class Shut:
    """Keeps each group's weights at NaN except while one of its windows runs."""

    def __init__(self, model: nn.Module, groups: tuple[GroupSpec, ...]) -> None:
        parameters = dict(model.named_parameters())
        self.num_calls: Counter[str] = Counter()
        self.open: Counter[str] = Counter()
        self.weights = {g.name: [parameters[p.name] for p in g.parameters] for g in groups}
        self.values = {name: [weight.detach().clone() for weight in group] for name, group in self.weights.items()}
        for group in groups:
            self._poison(group.name)
            for window in group.modules:
                module = model.get_submodule(window)
                module.register_forward_pre_hook(lambda *_, g=group.name, w=window: self._enter(g, w))
                module.register_forward_hook(lambda *_, g=group.name: self._leave(g))

    def _poison(self, name: str) -> None:
        with torch.no_grad():
            for weight in self.weights[name]:
                weight.fill_(math.nan)

    def _enter(self, name: str, window: str) -> None:
        self.num_calls[window] += 1
        self.open[name] += 1
        with torch.no_grad():
            for weight, value in zip(self.weights[name], self.values[name], strict=True):
                weight.copy_(value)

    def _leave(self, name: str) -> None:
        self.open[name] -= 1
        if not self.open[name]:
            self._poison(name)


@ARCHITECTURES
class TestArchitectures:
    def test_each_parameter_is_in_one_group(self, zoo_model: ZooModel) -> None:
        model = zoo_model.build(False, torch.float32)
        groups = find_groups(model)
        named = dict(model.named_parameters())
        assert sorted(p.name for group in groups for p in group.parameters) == sorted(named)
        assert all(p.nbytes == named[p.name].nbytes for group in groups for p in group.parameters)
        assert len({group.name for group in groups}) == len(groups)
        assert [group.name for group in groups][-1] == "", "the rest comes last"

    @pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
    def test_windows_are_called_and_open_whenever_weights_are_read(self, zoo_model: ZooModel, training: bool) -> None:
        # eval too: there torch's encoder layers read their children's weights without calling them.
        model = zoo_model.build(False, torch.float32).train(training)
        (batch,) = zoo_model.batches(1)
        groups = find_groups(model)
        with torch.no_grad():
            before = zoo_model.loss(model, batch)
            shut = Shut(model, groups)
            after = zoo_model.loss(model, batch)
        assert torch.equal(before, after)
        never = {window for group in groups for window in group.modules} - set(shut.num_calls)
        assert never <= ({"shared"} if zoo_model.name == "t5" else set()), "T5's own table stands for the tied ones"

    def test_most_bytes_can_be_streamed(self, zoo_model: ZooModel) -> None:
        groups = find_groups(zoo_model.build(False, torch.float32))
        assert groups[-1].nbytes < 0.07 * sum(group.nbytes for group in groups)
        assert len(groups) >= 5

    def test_the_same_on_meta(self, zoo_model: ZooModel) -> None:
        with torch.device("meta"):
            model = zoo_model.build(False, torch.float32)
        assert next(model.parameters()).is_meta
        assert find_groups(model) == find_groups(zoo_model.build(False, torch.float32))


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("gpt", "layers.0", "layers.2"),
        ("llama", "model.layers.0", "lm_head"),
        ("t5", "encoder.block.0", "decoder.block.1"),
        ("mixtral", "model.layers.0", "lm_head"),
        ("transformer", "source", "head"),
        ("unet", "down.0", "up.1"),
    ],
)
def test_groups_follow_the_order_of_the_modules(name: str, first: str, last: str) -> None:
    found = [group.name for group in find_groups(ZOO[name].build(False, torch.float32))]
    assert found.index(first) < found.index(last) == len(found) - 2


def test_a_tied_embedding_is_a_group_of_both_its_modules() -> None:
    assert windows_of(ZOO["gpt"].build(False, torch.float32))["token_embedding.weight"] == ("token_embedding", "head")


def test_experts_stay_in_their_layer() -> None:
    names = windows_of(ZOO["mixtral"].build(False, torch.float32))
    assert not [name for name in names if "expert" in name]


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x).tanh()


class Net(nn.Module):
    """An embedding, blocks, a norm and a head, with a scale of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(16)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(16, 32)


BLOCKS = ["layers.0", "layers.1", "layers.2"]


def test_small_modules_and_a_models_own_parameters_are_the_rest() -> None:
    assert list(windows_of(Net())) == ["embedding", *BLOCKS, "head", ""]
    assert members_of(Net())[""] == ["scale", "norm.weight", "norm.bias"]


def test_a_megabyte_is_a_group_in_a_model_of_any_size() -> None:
    model = nn.ModuleDict({
        "huge": nn.Linear(8192, 8192, bias=False, device="meta"),
        "mebibyte": nn.Linear(512, 512, bias=False, device="meta"),
        "less": nn.Linear(512, 511, bias=False, device="meta"),
    })  # fmt: skip
    assert list(windows_of(model)) == ["huge", "mebibyte", ""]


def test_many_small_blocks_are_groups_all_the_same() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList(torch.compile(Block()) for _ in range(100))})
    assert len(find_groups(model)) == 100


def test_a_norm_among_the_blocks_joins_the_rest() -> None:
    model = nn.Sequential(nn.Embedding(32, 16), Block(), Block(), nn.LayerNorm(16), nn.Linear(16, 32))
    assert list(windows_of(model)) == ["0", "1", "2", "4", ""]


def test_lists_in_lists_are_walked_through() -> None:
    layers = nn.ModuleList(nn.ModuleList([Block(), nn.ModuleDict({"inner": Block()})]) for _ in range(2))
    assert list(windows_of(nn.ModuleDict({"layers": layers}))) == [
        "layers.0.0",
        "layers.0.1.inner",
        "layers.1.0",
        "layers.1.1.inner",
    ]


def test_only_called_modules_are_windows() -> None:
    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2)
            self.encoder_layer = nn.TransformerEncoderLayer(16, 2, 32)
            self.lstm = nn.LSTM(16, 16, num_layers=2)
            self.tables = nn.ParameterList(nn.Parameter(torch.zeros(16, 16)) for _ in range(2))
            self.pair = Pair()

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.halves = nn.ParameterList(nn.Parameter(torch.zeros(16, 16)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.halves[0] @ self.halves[1]

    model = Outside()
    assert list(windows_of(model)) == ["attention", "encoder_layer", "lstm", "pair", ""]
    assert members_of(model)[""] == ["tables.0", "tables.1"]
    assert all(is_called(model.get_submodule(window)) for window in windows_of(model) if window)


def test_the_wrapper_of_a_compiled_module_is_the_window() -> None:
    model = Net()
    model.head = torch.compile(model.head)  # type: ignore[assignment]
    model.layers[1] = torch.compile(model.layers[1])  # type: ignore[assignment]
    found = members_of(model)
    assert list(found) == ["embedding", *BLOCKS, "head", ""]
    assert found["head"] == ["head._orig_mod.weight", "head._orig_mod.bias"]
    assert found["layers.1"] == ["layers.1._orig_mod.layer.weight", "layers.1._orig_mod.layer.bias"]


def test_a_compiled_stack_is_one_window() -> None:
    model = nn.ModuleDict({"body": torch.compile(nn.Sequential(Block(), Block())), "head": nn.Linear(16, 16)})
    assert windows_of(model) == {"body": ("body",), "head": ("head",)}


def test_a_parametrized_module_is_the_window_of_what_computes_its_weight() -> None:
    model = Net()
    parametrize.register_parametrization(model.head, "weight", nn.Tanh())
    assert members_of(model)["head"] == ["head.bias", "head.parametrizations.weight.original"]
    assert windows_of(model)["head"] == ("head",)


class TestTies:
    def test_between_blocks(self) -> None:
        model = Net()
        model.layers[2].layer.weight = model.layers[0].layer.weight
        found = {group.name: group for group in find_groups(model)}
        assert found["layers.0.layer.weight"].modules == ("layers.0", "layers.2")
        assert [p.name for p in found["layers.2"].parameters] == ["layers.2.layer.bias"]

    def test_with_a_parameter_of_the_rest(self) -> None:
        model = Net()
        model.register_parameter("table", model.embedding.weight)
        assert windows_of(model)["table"] == ("", "embedding")
        assert next(iter(windows_of(model))) == "table"

    def test_several_with_the_same_windows_are_one_group(self) -> None:
        model = Net()
        model.layers[2].layer = model.layers[0].layer
        found = members_of(model)
        assert found["layers.0.layer.weight"] == ["layers.0.layer.weight", "layers.0.layer.bias"]
        assert list(found) == ["embedding", "layers.0.layer.weight", "layers.1", "head", ""]

    def test_inside_one_block_change_nothing(self) -> None:
        model = Net()
        model.layers[0].register_parameter("again", model.layers[0].layer.weight)
        assert windows_of(model)["layers.0"] == ("layers.0",)

    def test_a_module_at_two_places_is_one_window(self) -> None:
        model = Net()
        model.same_head = model.head
        assert windows_of(model)["head"] == ("head",)

    def test_what_is_too_small_joins_the_rest(self) -> None:
        model = Net()
        model.layers[2].layer.bias = model.layers[0].layer.bias
        assert "layers.0.layer.bias" in members_of(model)[""]


class TestGiven:
    def test_replaces_the_automatic_choice(self) -> None:
        found = members_of(Net(), {"norm": ["norm"], "layers.0.layer": ["layers.0.layer.weight"]})
        assert found["norm"] == ["norm.weight", "norm.bias"]
        assert found["layers.0.layer"] == ["layers.0.layer.weight"]
        assert found["layers.0"] == ["layers.0.layer.bias"]
        assert found[""] == ["scale"]

    def test_the_whole_model_can_be_one_group(self) -> None:
        assert windows_of(Net(), {"": [""]}) == {"": ("",)}

    def test_a_tie_keeps_all_its_windows(self) -> None:
        model = Net()
        model.head.weight = model.embedding.weight
        assert windows_of(model, {"norm": ["head.weight"]})["embedding.weight"] == ("embedding", "norm")

    def test_unknown_names(self) -> None:
        with pytest.raises(UnknownNameError, match="no module named 'haed'; did you mean 'head'"):
            find_groups(Net(), {"haed": ["head"]})
        with pytest.raises(UnknownNameError, match="no parameter or module with parameters named 'head.wieght'"):
            find_groups(Net(), {"head": ["head.wieght"]})

    def test_a_parameter_given_twice(self) -> None:
        with pytest.raises(ConfigError, match="'head.weight' is given to two groups, 'head' and 'norm'"):
            find_groups(Net(), {"head": ["head"], "norm": ["head.weight"]})

    def test_a_window_that_never_opens(self) -> None:
        with pytest.raises(ConfigError, match="'layers' would never open: ModuleList has no forward"):
            find_groups(Net(), {"layers": ["layers"]})

    def test_a_parameter_that_cannot_be_managed(self) -> None:
        model = Net()
        model.embedding = nn.Embedding(32, 16, sparse=True)
        with pytest.raises(
            ConfigError, match="'embedding' of the group 'embedding' cannot be managed: its gradient is"
        ):
            find_groups(model, {"embedding": ["embedding"]})


def test_parameters_that_cannot_be_managed_are_in_no_group() -> None:
    model = Net()
    model.embedding = nn.Embedding(32, 16, sparse=True)
    assert "embedding.weight" not in [name for names in members_of(model).values() for name in names]


def test_a_model_without_parameters_has_no_groups() -> None:
    assert find_groups(nn.Tanh()) == ()


def test_a_single_layer_is_its_own_rest() -> None:
    assert windows_of(nn.Linear(4, 4)) == {"": ("",)}


def test_strides_are_kept() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3)).to(memory_format=torch.channels_last)
    (group,) = find_groups(model)
    assert group.parameters[0].stride == (36, 1, 12, 4)


class NamedNet(nn.Module):
    """Small tables beside blocks that grow with the depth; the head may share the first table."""

    def __init__(self, depth: int, *, is_tied: bool = False) -> None:
        super().__init__()
        self.tok = nn.Embedding(10, 16)
        self.pos = nn.Embedding(4, 16)
        self.start = nn.Parameter(torch.zeros(16))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(depth)
        )
        self.attention = nn.MultiheadAttention(16, 2)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 10, bias=False)
        if is_tied:
            self.head.weight = self.tok.weight


def names_with(model: nn.Module, *named: str) -> list[str]:
    return [group.name for group in find_named_groups(model, named)]


@pytest.mark.parametrize("depth", [2, 8, 32])
def test_a_named_module_has_a_group_at_any_depth(depth: int) -> None:
    model = NamedNet(depth)
    for name in ("tok", "pos", "norm", "head", "blocks.1", "blocks.1.2", "attention"):
        (group,) = [group for group in find_named_groups(model, [name]) if group.name == name]
        assert group.modules == (name,)
        assert all(parameter.name.startswith(f"{name}.") for parameter in group.parameters)
    assert "tok" not in [group.name for group in find_groups(NamedNet(32))], "or this test shows nothing"


@pytest.mark.parametrize("name", ["", "*", "blocks", "start", "tokk", "attention.out_proj", "blocks.1.1"])
def test_what_cannot_be_a_group_is_passed_over(name: str) -> None:
    assert find_named_groups(NamedNet(8), [name]) == find_groups(NamedNet(8))


@pytest.mark.parametrize("depth", [2, 32])
@pytest.mark.parametrize("is_tied", [False, True])
def test_the_names_of_groups_find_them_again(depth: int, is_tied: bool) -> None:
    for named in ("tok", "head", "pos", "norm", "blocks.0.0"):
        groups = find_named_groups(NamedNet(depth, is_tied=is_tied), [named])
        again = find_named_groups(NamedNet(depth, is_tied=is_tied), [group.name for group in groups])
        assert lay_out(again).fingerprint == lay_out(groups).fingerprint


@pytest.mark.parametrize("named", ["tok", "head", "tok.weight"])
def test_a_tied_table_has_one_group_that_both_open(named: str) -> None:
    assert "tok.weight" not in names_with(NamedNet(32, is_tied=True)), "or this test shows nothing"
    (group,) = [group for group in find_named_groups(NamedNet(32, is_tied=True), [named]) if group.name == "tok.weight"]
    assert group.modules == ("tok", "head")


class Encoder(nn.Module):
    """Made of plain layers, and no block by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(16, 64)
        self.narrow = nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.narrow(self.wide(x).tanh())
        return out


def test_a_named_module_that_is_made_of_others_is_one_group() -> None:
    model = nn.Sequential(nn.Linear(8, 16), Encoder(), nn.Linear(16, 8))
    assert names_with(model) == ["0", "1.wide", "1.narrow", "2"]
    assert names_with(model, "1") == ["0", "1", "2"]
    assert names_with(model, "1.wide") == ["0", "1.wide", "1.narrow", "2"]
    plan = make_plan(model, activations={"1": "recompute"})
    assert [group.name for group in plan.groups if group.activation != KEEP] == ["1"]


def test_a_named_module_that_holds_blocks_is_passed_over() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Sequential(Encoder(), Encoder()))
    assert names_with(model, "1") == ["0", "1.0", "1.1"]


class InnerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x).tanh()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, 4)
        self.layers = nn.ModuleList(InnerBlock() for _ in range(3))
        self.head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def block_names(model: nn.Module) -> list[str]:
    return [name for name, _ in repeated_blocks(model)]


def test_layers_of_a_list_in_order() -> None:
    assert block_names(Stack()) == ["layers.0", "layers.1", "layers.2"]


def test_a_chain_of_plain_layers_is_no_stack() -> None:
    assert block_names(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == []
    assert block_names(nn.ModuleDict({"a": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])})) == []


def test_only_the_outermost_of_nested_stacks() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList(InnerBlock() for _ in range(2))

    model = nn.ModuleDict({"stages": nn.ModuleList(Outer() for _ in range(2))})
    assert block_names(model) == ["stages.0", "stages.1"]


def test_stacks_side_by_side() -> None:
    model = nn.ModuleDict({side: nn.ModuleList(InnerBlock() for _ in range(2)) for side in ("encoder", "decoder")})
    assert block_names(model) == ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]


def test_members_without_weights_are_passed_over() -> None:
    model = nn.ModuleDict({"body": nn.Sequential(InnerBlock(), nn.ReLU(), InnerBlock())})
    assert block_names(model) == ["body.0", "body.2"]


def test_the_model_itself_may_be_the_container() -> None:
    assert block_names(nn.Sequential(nn.Linear(4, 4), InnerBlock(), InnerBlock())) == ["0", "1", "2"]


@pytest.mark.parametrize(("kind", "found"), [(InnerBlock, ["body.0", "body.1"]), (lambda: nn.Linear(4, 4), [])])
def test_compiled_members_count_as_what_they_were(kind: type[nn.Module], found: list[str]) -> None:
    members = [torch.compile(kind()), torch.compile(kind())]
    assert block_names(nn.ModuleDict({"body": nn.Sequential(*members)})) == found


def test_a_list_of_lists_is_one_list() -> None:
    """As of Funnel, whose stages are lists of layers."""
    model = nn.ModuleDict(
        {"stages": nn.ModuleList([nn.ModuleList([InnerBlock()]), nn.ModuleList([InnerBlock(), InnerBlock()])])}
    )
    assert block_names(model) == ["stages.0.0", "stages.1.0", "stages.1.1"]


def test_the_only_member_of_a_list_may_be_called_many_times() -> None:
    """As of ALBERT, whose one group of layers is run as often as there are layers."""
    assert block_names(
        nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"inner": nn.ModuleList([InnerBlock()])})])})
    ) == ["layers.0"]
    assert block_names(nn.ModuleDict({"layers": nn.ModuleList([Stack()])})) == [
        f"layers.0.layers.{n}" for n in range(3)
    ]
    assert block_names(nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4)])})) == []
    assert block_names(nn.Sequential(Stack())) == ["0.layers.0", "0.layers.1", "0.layers.2"]


def test_one_module_at_several_places_of_a_list() -> None:
    block = InnerBlock()
    assert block_names(nn.ModuleDict({"body": nn.ModuleList([block, block])})) == ["body.0"]
    assert block_names(nn.Sequential(nn.Linear(4, 4), block, block)) == ["0", "1"]


def test_a_block_outside_of_any_list_is_known_by_its_name_or_that_of_its_class() -> None:
    parts = {"embedding": nn.Embedding(4, 4), "head": nn.Sequential(nn.Linear(4, 4))}
    assert block_names(nn.ModuleDict({**parts, "shared": InnerBlock()})) == ["shared"]
    named = nn.ModuleDict({**parts, "block1": nn.Sequential(nn.Linear(4, 4)), "layer": nn.Linear(4, 4)})
    assert block_names(named) == ["block1"], "a layer that is made of nothing else is none"
    assert block_names(nn.ModuleDict({**parts, "shared": InnerBlock(), "stack": Stack()})) == [
        f"stack.layers.{n}" for n in range(3)
    ]
    assert block_names(nn.ModuleDict({"layer": nn.ModuleDict(parts)})) == [], "never called"
