"""Identical layers traced once: the very trace of the full run, for models that repeat and for those that only seem to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowtide.models.gpt import GPT, GPTConfig
from lowtide.models.llama import Llama, LlamaConfig
from lowtide.tracing.settings import StepSettings, UpdateSchedule
from tests.tracing.ghost.ghost_process import GhostProcess, Lab

LAYERS = 9
STANDING_IN = LAYERS - 5
WIDTH = 16


@pytest.fixture(scope="module")
def ghosts() -> Iterator[GhostProcess]:
    process = GhostProcess()
    yield process
    process.close()


def compare(lab: Lab, build: Callable[[], tuple[nn.Module, Any]], fields: dict[str, Any]) -> tuple[int, list[str]]:
    """How many calls stood in for a block, and the fields in which the trace differs from the full one."""
    from lowtide.hardware import find_hardware
    from lowtide.tracing import repeat
    from lowtide.tracing.allocator import AllocatorSettings
    from lowtide.tracing.predict import Contents, Job, predict
    from lowtide.tracing.transport import pack

    torch.manual_seed(0)
    model, batch = build()
    job = Job(
        name="model",
        payload=pack(Contents(model, batch, torch.optim.AdamW, None)),
        settings=StepSettings(**fields),
        hardware=find_hardware("h200"),
        torch_version=torch.__version__.split("+")[0],
        allocator=AllocatorSettings(),
    )
    counts: list[int] = []
    original = repeat.RepeatedBlocks.unroll

    def unroll(self: Any, *args: int) -> Any:
        result = original(self, *args)
        counts.append(len(self.windows))
        return result

    repeat.RepeatedBlocks.unroll = unroll  # type: ignore[method-assign]
    try:
        once = predict(job)
    finally:
        repeat.RepeatedBlocks.unroll = original  # type: ignore[method-assign]
    full = predict(dataclasses.replace(job, repeat_blocks=False))
    different = [f.name for f in dataclasses.fields(full) if getattr(once, f.name) != getattr(full, f.name)]
    return counts[-1], different


def run(ghosts: GhostProcess, build: Callable[[], tuple[nn.Module, Any]], **fields: Any) -> int:
    """The number of stand-ins, for a trace that is the same as the full one."""
    num_stand_ins, different = ghosts(lambda lab: compare(lab, build, fields))
    assert different == []
    return int(num_stand_ins)


def tokens() -> dict[str, Tensor]:
    ids = torch.arange(32).view(2, 16)
    return {"input_ids": ids, "labels": ids}


def llama(dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, Any]:
    config = LlamaConfig(
        vocab_size=64,
        context_length=16,
        num_layers=LAYERS,
        hidden_size=32,
        intermediate_size=64,
        num_heads=4,
        num_kv_heads=2,
    )
    return Llama(config).to(dtype), tokens()


def gpt(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    return GPT(GPTConfig(vocab_size=64, context_length=16, num_layers=LAYERS, hidden_size=32, num_heads=4)).to(
        dtype
    ), tokens()


class TestRealModels:
    """Four windows for each layer between the real ones: forward and backward, of the first step and of the steady one."""

    @pytest.mark.parametrize("build", [llama, gpt])
    @pytest.mark.parametrize(
        "fields",
        [
            {},
            {"activations": "recompute"},
            {"activations": "selective"},
            {"activations": "compile-budget/0.5"},
            {"update": UpdateSchedule.IN_BACKWARD},
            {"keep_gradients": True, "max_grad_norm": 1.0},
            {"attention": "math"},
        ],
        ids=str,
    )
    def test_same_trace(self, ghosts: GhostProcess, build: Any, fields: dict[str, Any]) -> None:
        assert run(ghosts, build, **fields) == 4 * STANDING_IN

    @pytest.mark.parametrize("word", ["recompute/3", "offload", "offload/all"])
    def test_policies_that_connect_blocks_are_traced_in_full(self, ghosts: GhostProcess, word: str) -> None:
        assert run(ghosts, llama, activations=word) == 0

    @pytest.mark.parametrize("word", ["recompute", "recompute/3", "offload"])
    def test_the_first_trace_of_a_process_is_that_of_any_later_one(self, word: str) -> None:
        """What a backward runs again is numbered in its own thread, from 0 in a new process."""
        process = GhostProcess()
        try:
            run(process, llama, activations=word)
        finally:
            process.close()

    @pytest.mark.parametrize("build", [llama, gpt])
    def test_accumulation(self, ghosts: GhostProcess, build: Any) -> None:
        assert run(ghosts, build, accumulate=2) == 8 * STANDING_IN

    @pytest.mark.parametrize("build", [llama, gpt])
    @pytest.mark.parametrize("recompute", [False, True])
    def test_autocast(self, ghosts: GhostProcess, build: Any, recompute: bool) -> None:
        """The casts of weights are let go when autocast ends, block after block."""
        make = lambda: build(torch.float32)  # noqa: E731
        assert run(ghosts, make, autocast="bfloat16", activations="recompute" if recompute else None) == 4 * STANDING_IN


TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": LAYERS,
    "vocab_size": 64,
}


def hugging_face(kind: str, **fields: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{kind.split('For')[0].removesuffix('LMHeadModel')}Config")(**fields)
    model: nn.Module = getattr(transformers, kind)(config)
    return model.train()


def hf_llama() -> tuple[nn.Module, Any]:
    return hugging_face("LlamaForCausalLM", **TINY, num_key_value_heads=2), tokens()


def hf_llama_checkpointed() -> tuple[nn.Module, Any]:
    model, batch = hf_llama()
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    return model, batch


def hf_bert() -> tuple[nn.Module, Any]:
    return hugging_face("BertForMaskedLM", **TINY), tokens()


def hf_mixtral() -> tuple[nn.Module, Any]:
    return hugging_face("MixtralForCausalLM", **TINY, num_key_value_heads=2, num_local_experts=4), tokens()


def hf_t5() -> tuple[nn.Module, Any]:
    fields = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 8, "num_heads": 4, "vocab_size": 64}
    return hugging_face("T5ForConditionalGeneration", **fields, decoder_start_token_id=0), tokens()


def hf_mixtral_with_router_loss() -> tuple[nn.Module, Any]:
    fields = {"num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True}
    return hugging_face("MixtralForCausalLM", **TINY, **fields), tokens()


class TestHuggingFace:
    @pytest.mark.parametrize("build", [hf_llama, hf_llama_checkpointed, hf_bert, hf_mixtral])
    def test_repeats(self, ghosts: GhostProcess, build: Any) -> None:
        """Llama and Mixtral hand a cache of keys and values from layer to layer, which lets go of them afterwards."""
        pytest.importorskip("transformers")
        assert run(ghosts, build) == 4 * STANDING_IN

    @pytest.mark.parametrize("build", [hf_t5, hf_mixtral_with_router_loss])
    def test_is_traced_in_full(self, ghosts: GhostProcess, build: Any) -> None:
        """Position biases and router logits that need gradients connect all layers with each other."""
        pytest.importorskip("transformers")
        assert run(ghosts, build) == 0


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(self.up(x).relu())


class Stack(nn.Module):
    """Runs its layers in order; the subclasses below each have one peculiarity."""

    layer: type[nn.Module] = Layer
    num_layers = LAYERS

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(self.layer(number) for number in range(self.num_layers))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.stack(self.first(x))).sum()

    def stack(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Pair(Layer):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


class Pairs(Stack):
    layer = Pair

    def stack(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return x


class FrozenStart(Stack):
    """Two runs: layers that need no gradient at all, and layers that do."""

    num_layers = 2 * LAYERS

    def __init__(self) -> None:
        super().__init__()
        for module in (self.first, *self.layers[:LAYERS]):
            module.requires_grad_(False)


class Twice(Stack):
    """Two forwards, then one backward through both."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + super().forward(x * 2)


class Reentrant(Stack):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.forward = Recomputed(layer.forward)  # type: ignore[method-assign]


class Recomputed:
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function

    def __call__(self, x: Tensor) -> Any:
        return checkpoint(self.function, x, use_reentrant=True)


class TestStacks:
    @pytest.mark.parametrize(
        ("kind", "num_stand_ins"),
        [
            (Stack, 4 * STANDING_IN),
            (Pairs, 4 * STANDING_IN),
            (FrozenStart, (2 + 4) * STANDING_IN),
            (Twice, 8 * STANDING_IN),
        ],
    )
    def test_repeats(self, ghosts: GhostProcess, kind: type[Stack], num_stand_ins: int) -> None:
        assert run(ghosts, lambda: (kind(), (torch.randn(4, WIDTH),))) == num_stand_ins


# -- Models that only look like repetitions ------------------------------------------------------------------------------


class Numbered(Layer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class DecidesByNumber(Numbered):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x.exp() if self.number == 4 else x)


class HandsNumberOn(Numbered):
    def forward(self, x: Tensor) -> Any:
        return super().forward(bend(x, self.number))


class IsLookedAt(Numbered):
    def forward(self, x: Tensor) -> Any:
        return super().forward(bend_for(self, x))


def bend(x: Tensor, number: int) -> Tensor:
    return x.exp() if number == 4 else x


def bend_for(layer: Any, x: Tensor) -> Tensor:
    return bend(x, layer.number)


class RemembersCalls(Layer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.num_calls = 0

    def forward(self, x: Tensor) -> Any:
        self.num_calls += 1
        return super().forward(x)


class LeavesNote(Layer):
    """Keeps a tensor that the model reads afterwards."""

    note: Tensor

    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        self.note = out.square().mean()
        return out


class Deciding(Stack):
    layer = DecidesByNumber


class HandingOn(Stack):
    layer = HandsNumberOn


class LookedAt(Stack):
    layer = IsLookedAt


class Remembering(Stack):
    layer = RemembersCalls


class Noting(Stack):
    layer = LeavesNote

    def stack(self, x: Tensor) -> Tensor:
        x = super().stack(x)
        return x + torch.stack([layer.note for layer in self.layers]).sum()  # type: ignore[misc]


class BranchesOff(Stack):
    """One layer's output is used once more, at the end."""

    def stack(self, x: Tensor) -> Tensor:
        branch = x
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == 3:
                branch = x
        return x + branch


class WorksBetween(Stack):
    def stack(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).sin()
        return x


class CutsOnce(Stack):
    def stack(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x.detach() if number == 4 else x)
        return x


class LeavesEarly(Stack):
    """The loss does not depend on the last layers."""

    def stack(self, x: Tensor) -> Tensor:
        early = x
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == 5:
                early = x
        return early


class SharesWeights(Stack):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.up.weight = self.layers[0].up.weight  # type: ignore[union-attr]


class Widens(Stack):
    """One layer gets a larger batch."""

    def stack(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(torch.cat([x, x]) if number == 4 else x)
        return x


class OneInEval(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers[4].eval()


class UserHook(Stack):
    def __init__(self) -> None:
        super().__init__()
        for parameter in self.layers.parameters():
            parameter.register_post_accumulate_grad_hook(forget)


def forget(parameter: Tensor) -> None:
    parameter.grad = None


@pytest.mark.parametrize(
    "kind",
    [
        Deciding, HandingOn, LookedAt, Remembering, Noting, BranchesOff, WorksBetween, CutsOnce, LeavesEarly, SharesWeights,
        Widens, OneInEval, UserHook, Reentrant,
    ],
)  # fmt: skip
def test_is_traced_in_full(ghosts: GhostProcess, kind: type[Stack]) -> None:
    assert run(ghosts, lambda: (kind(), (torch.randn(4, WIDTH),))) == 0
