"""Chunked heads of Hugging Face models: same loss and gradients as the model's own code, and no logits."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.activations import apply
from lowtide.activations.losses.deferred_logits import DeferredLogits
from lowtide.activations.losses.huggingface import ChunkedHeadWarning, chunked_head
from lowtide.activations.losses.settings import LossSettings
from lowtide.errors import LogitsNotMadeError, UnsupportedHeadError
from lowtide.memory.groups import find_groups
from lowtide.units import MiB
from tests.activations.losses.test_memory import LiveBytes
from tests.zoo import bf16_safe

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::lowtide.activations.losses.huggingface.ChunkedHeadWarning")

VOCAB = 99
SMALL: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
)


def make(name: str, **settings: Any) -> nn.Module:
    """A tiny model of an architecture, in training mode, the same each time."""
    t = transformers
    sizes = {**SMALL, **settings}
    gpt2 = dict(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    t5 = dict(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0)
    t5 |= dict(decoder_start_token_id=0, pad_token_id=0)
    makers: dict[str, Callable[[], nn.Module]] = {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**sizes)),
        "tied llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**sizes, tie_word_embeddings=True)),
        "gemma2": lambda: t.Gemma2ForCausalLM(
            t.Gemma2Config(**sizes, head_dim=8, final_logit_softcapping=3.0, attn_implementation="eager")
        ),
        "granite": lambda: t.GraniteForCausalLM(t.GraniteConfig(**sizes, logits_scaling=4.0)),
        "cohere": lambda: t.CohereForCausalLM(t.CohereConfig(**sizes, logit_scale=0.5)),
        "mixtral": lambda: t.MixtralForCausalLM(
            t.MixtralConfig(**sizes, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5)
        ),
        "phi": lambda: t.PhiForCausalLM(t.PhiConfig(**sizes)),
        "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(**gpt2)),
        "t5": lambda: t.T5ForConditionalGeneration(t.T5Config(**t5)),
        "bert": lambda: t.BertForMaskedLM(
            t.BertConfig(
                **{key: value for key, value in sizes.items() if key != "num_key_value_heads"},
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        ),
    }
    torch.manual_seed(0)
    model = makers[name]()
    head = model.get_output_embeddings()
    with torch.no_grad():
        head.weight.mul_(8.0)  # far from uniform, so that caps and scales show
        if head.bias is not None:
            head.bias.normal_()
    return model.train()


MODELS = ["llama", "tied llama", "gemma2", "granite", "cohere", "mixtral", "phi", "gpt2", "t5", "bert"]


def batch(**more: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCAB, (3, 10), generator=generator)
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels, **more}


def run(model: nn.Module, given: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss: Tensor = model(**given).loss
    loss.backward()
    return loss.detach(), {
        name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None
    }


def assert_same(found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        # The gradient of a key's bias is 0 but for rounding: softmax does not see it.
        distance = (found[1][name] - gradient).norm() / gradient.norm().clamp(min=1e-4)
        assert distance < 1e-5, f"{name}: {distance}"


@pytest.mark.parametrize("name", MODELS)
def test_same_loss_and_gradients(name: str) -> None:
    model = make(name)
    before = list(model.state_dict())
    expected = run(model, batch())
    handle = chunked_head(model, settings=LossSettings(chunk_tokens=7))
    assert_same(run(model, batch()), expected)
    assert isinstance(model(**batch()).logits, DeferredLogits)
    assert list(model.state_dict()) == before
    handle.remove()
    assert isinstance(model(**batch()).logits, Tensor)
    assert "forward" not in vars(model)


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral"])
@pytest.mark.parametrize("more", [{"num_items_in_batch": 17}, {"num_items_in_batch": torch.tensor(11)}], ids=str)
def test_num_items_in_batch(name: str, more: dict[str, Any]) -> None:
    model = make(name)
    expected = run(model, batch(**more))
    plain = run(model, batch())
    assert abs(plain[0] - expected[0]) > 1e-3, "the reference honours it"
    with chunked_head(model):
        assert_same(run(model, batch(**more)), expected)


def test_shift_labels_and_logits_to_keep() -> None:
    model = make("llama")
    ids = batch()["input_ids"]
    cases: list[dict[str, Any]] = [
        {"input_ids": ids, "labels": ids, "shift_labels": torch.roll(ids, -1, 1)},
        {"input_ids": ids, "labels": ids[:, -4:], "logits_to_keep": 4},
    ]
    for given in cases:
        expected = run(model, given)
        with chunked_head(model):
            assert_same(run(model, given), expected)


def test_labels_by_position() -> None:
    model = make("llama")
    with chunked_head(model):
        ids = batch()["input_ids"]
        parameters = list(inspect.signature(model.forward).parameters)
        given = [
            ids if name in ("input_ids", "labels") else None for name in parameters[: parameters.index("labels") + 1]
        ]
        output = model(*given)
        assert isinstance(output.logits, DeferredLogits)
        assert isinstance(model(ids).logits, Tensor)


def test_only_training_with_labels_goes_without_logits() -> None:
    model = make("llama")
    plain = model(**batch()).logits
    with chunked_head(model):
        assert isinstance(model(input_ids=batch()["input_ids"]).logits, Tensor)
        model.eval()
        output = model(**batch())
        torch.testing.assert_close(output.logits, plain)
        assert output.loss is not None


def test_tuples() -> None:
    model = make("llama")
    expected = model(**batch(), return_dict=False)[0]
    with chunked_head(model):
        loss, logits = model(**batch(), return_dict=False)[:2]
    torch.testing.assert_close(loss, expected)
    assert isinstance(logits, DeferredLogits)


@pytest.mark.filterwarnings("default")
def test_says_once_what_becomes_of_logits() -> None:
    model = make("llama")
    chunked_head(model)
    with pytest.warns(ChunkedHeadWarning, match="output.logits has a shape and no values"):
        output = model(**batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**batch())
    assert output.logits.shape == (3, 10, VOCAB)
    assert output.logits.dtype == torch.float32
    assert output.logits.dim() == output.logits.ndim == 3
    assert output.logits.size(-1) == VOCAB
    assert "never made" in repr(output.logits)


TOUCHES: dict[str, Callable[[Any], object]] = {
    "argmax": lambda logits: logits.argmax(-1),
    "softmax": lambda logits: torch.softmax(logits, -1),
    "add": lambda logits: torch.add(logits, 1),
    "float": lambda logits: logits.float(),
    "index": lambda logits: logits[:, -1],
    "view": lambda logits: logits.view(-1, VOCAB),
    "cat": lambda logits: torch.cat([logits, logits]),
    "plus": lambda logits: logits + 1,
    "minus": lambda logits: 1 - logits,
    "negative": lambda logits: -logits,
    "equal": lambda logits: logits == 1,
    "greater": lambda logits: logits > 1,
    "matmul": lambda logits: logits @ torch.zeros(VOCAB, 2),
    "truth": bool,
    "write": lambda logits: logits.__setitem__(0, 1.0),
    "loss": lambda logits: F.cross_entropy(logits, torch.zeros(3, 10, dtype=torch.long)),
}


@pytest.mark.parametrize("touch", TOUCHES)
def test_touching_logits_raises(touch: str) -> None:
    model = make("llama")
    with chunked_head(model):
        logits = model(**batch()).logits
    with pytest.raises(LogitsNotMadeError, match="never made.*call the model without labels or in eval mode"):
        TOUCHES[touch](logits)
    assert not hasattr(logits, "numpy")


def test_hidden_states_are_let_go() -> None:
    model = make("llama")
    with chunked_head(model):
        output = model(**batch())
        held = [value for value in vars(output.logits).values() if isinstance(value, Tensor)]
    assert not held


class Custom(nn.Module):
    """As much of a Hugging Face model as is needed."""

    def __init__(self, after: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.lm_head = nn.Linear(8, VOCAB, bias=False)
        self.after = after

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        assert labels is not None
        return self.after(self.lm_head(self.embed(input_ids)), labels)


@pytest.mark.parametrize(
    ("after", "message"),
    [
        (lambda logits, labels: logits.logsumexp(-1), "read .logsumexp"),
        (lambda logits, labels: logits * torch.ones(VOCAB), "multiply them by a Tensor"),
        (lambda logits, labels: logits / None, "divide them by a NoneType"),
        (lambda logits, labels: logits.tanh().tanh(), "second tanh"),
        (lambda logits, labels: logits[..., :50], "along the vocabulary"),
        (lambda logits, labels: logits[:, :, 3], "along the vocabulary"),
        (lambda logits, labels: logits.view(-1, 11), "divides the 99 logits"),
        (
            lambda logits, labels: F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1), weight=torch.ones(VOCAB)),
            "weigh",
        ),
        (lambda logits, labels: F.cross_entropy(logits, labels), "take a loss of them with targets"),
        (lambda logits, labels: F.cross_entropy(logits, labels.float()), "probabilities"),
        (lambda logits, labels: torch.relu(logits), "call relu"),
        (lambda logits, labels: None, "took no cross entropy"),
    ],
)
def test_what_models_cannot_do(after: Callable[[Any, Tensor], Any], message: str) -> None:
    model = Custom(after).train()
    given = batch()
    if "take a loss" in message:
        given["labels"] = given["labels"][:, 1:]
    with chunked_head(model), pytest.raises(LogitsNotMadeError, match=message):
        model(**given)
    assert isinstance(model.lm_head, nn.Linear), "the head is back after a failure"


@pytest.mark.parametrize(
    "after",
    [
        lambda logits, labels: F.cross_entropy(
            logits[..., :-1, :].contiguous().view(-1, logits.size(-1)), labels[:, 1:].reshape(-1)
        ),
        lambda logits, labels: F.cross_entropy(logits[labels > 50], labels[labels > 50], reduction="sum"),
        lambda logits, labels: F.cross_entropy(
            (3 * torch.tanh(0.5 * logits / 2) * 2).float().reshape((30, -1)), labels.view(-1)
        ),
        lambda logits, labels: F.cross_entropy(
            logits[:, 2:].to(torch.float64).view(-1, VOCAB), labels[:, 2:].reshape(-1), label_smoothing=0.1
        ),
        lambda logits, labels: nn.CrossEntropyLoss(ignore_index=7)(
            logits.view(-1, VOCAB), labels.clamp(min=7).view(-1)
        ),
    ],
    ids=["shifted", "masked", "capped", "cast", "module"],
)
def test_what_models_can_do(after: Callable[[Any, Tensor], Any]) -> None:
    model = Custom(after).train()

    def gradients() -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        loss = model(**batch())
        loss.backward()
        return loss.detach(), {name: value.grad.clone() for name, value in model.named_parameters()}

    expected = gradients()
    with chunked_head(model):
        assert_same(gradients(), expected)


def test_z_loss_of_a_head() -> None:
    model = make("llama")
    plain = model(**batch())
    labels = F.pad(batch()["labels"], (0, 1), value=-100)[:, 1:]
    expected = plain.loss + 0.01 * plain.logits.logsumexp(-1).square()[labels != -100].mean()
    with chunked_head(model, settings=LossSettings(z_loss=0.01)):
        torch.testing.assert_close(model(**batch()).loss, expected)


def test_bf16_and_autocast() -> None:
    with bf16_safe():
        for make_dtype, autocast in ((torch.bfloat16, False), (torch.float32, True)):
            model = make("llama").to(make_dtype)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                expected, plain = run(model, batch())
                with chunked_head(model):
                    found, gradients = run(model, batch())
            assert found.dtype == expected.dtype == torch.float32
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
            for name, gradient in plain.items():
                assert (gradients[name] - gradient).norm() < 0.05 * gradient.norm(), name


def test_loss_of_bf16_logits_keeps_their_dtype() -> None:
    """T5 takes the cross entropy of its logits as they are."""
    with bf16_safe():
        model = make("t5").bfloat16()
        expected = model(**batch()).loss
        with chunked_head(model):
            assert model(**batch()).loss.dtype == expected.dtype == torch.bfloat16


def test_copies_run_themselves() -> None:
    model = make("llama")
    chunked_head(model)
    model(**batch())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        expected = run(model, batch())
        assert_same(run(twin, batch()), expected)
        model.zero_grad()
        twin(**batch()).loss.backward()
        assert all(parameter.grad is None for parameter in model.parameters())


def test_signature_is_the_models() -> None:
    model = make("llama")
    expected = inspect.signature(model.forward)
    with chunked_head(model):
        assert inspect.signature(model.forward) == expected, "trainers read the names of a batch's columns from it"


def test_forward_of_somebody_else_is_put_back() -> None:
    model = make("llama")
    own = model.forward
    theirs = lambda *args, **kwargs: own(*args, **kwargs)  # noqa: E731
    theirs.__signature__ = inspect.signature(own)  # type: ignore[attr-defined]
    model.forward = theirs  # type: ignore[method-assign]
    handle = chunked_head(model)
    assert isinstance(model(**batch()).logits, DeferredLogits)
    handle.remove()
    handle.remove()
    assert model.forward is theirs


def test_refusals() -> None:
    t = transformers
    with pytest.raises(UnsupportedHeadError, match="Sequential cannot be chunked: it has no get_output_embeddings"):
        chunked_head(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(UnsupportedHeadError, match="its head is missing"):
        chunked_head(t.LlamaForSequenceClassification(t.LlamaConfig(**SMALL)))
    with pytest.raises(UnsupportedHeadError, match="takes no labels"):
        chunked_head(t.LlamaModel(t.LlamaConfig(**SMALL)))
    sizes = {"vocab_size": 97, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
    with pytest.raises(UnsupportedHeadError, match="adds final_logits_bias to the logits"):
        chunked_head(t.BartForConditionalGeneration(t.BartConfig(**sizes)))
    model = make("llama")
    with pytest.raises(UnsupportedHeadError, match="softcap=2.0 is what LlamaForCausalLM decides itself"):
        chunked_head(model, settings=LossSettings(softcap=2.0))
    with chunked_head(model), pytest.raises(UnsupportedHeadError, match="it is already"):
        chunked_head(model)
    model.lm_head.forward = lambda hidden: hidden
    with pytest.raises(UnsupportedHeadError, match="replaced the forward of the head"):
        chunked_head(model)
    del model.lm_head.forward
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(UnsupportedHeadError, match="its head is Sequential, not a linear layer"):
        chunked_head(model)
    other = make("llama")
    other.get_output_embeddings = lambda: nn.Linear(2, 2)
    with pytest.raises(UnsupportedHeadError, match="not part of it"):
        chunked_head(other)


def test_peak_of_a_step() -> None:
    """Without logits the step of a small model with a large vocabulary holds a fraction of what it did."""
    model = make("llama", vocab_size=20000, num_hidden_layers=1)
    given = {"input_ids": torch.arange(256).reshape(2, 128) % 63}
    given["labels"] = given["input_ids"]
    peaks = []
    for settings in (None, LossSettings(chunk_tokens=8)):
        model.zero_grad()
        handle = None if settings is None else chunked_head(model, settings=settings)
        with LiveBytes(*model.parameters()) as live:
            output = model(**given)
            output.loss.backward()
        peaks.append(live.peak)
        del output
        if handle is not None:
            handle.remove()
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    logits_bytes = 256 * 20000 * 4
    assert peaks[0] > gradients + 2 * logits_bytes, "the reference holds logits more than once"
    assert peaks[1] < gradients + 0.2 * logits_bytes


def test_predicted_peak_is_one_chunk_of_bf16_logits() -> None:
    """On a GPU the kernel works in place, in the logits' own dtype, and so does the prediction for one."""
    ids = torch.zeros(2, 512, dtype=torch.long)

    def peak_bytes(chunk_tokens: int | None) -> int:
        with torch.device("meta"):
            sizes = {**SMALL, "vocab_size": 20000, "num_hidden_layers": 1, "max_position_embeddings": 512}
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).bfloat16().train()
        if chunk_tokens is not None:
            chunked_head(model, settings=LossSettings(chunk_tokens=chunk_tokens))
        return lowtide.trace(model, {"input_ids": ids, "labels": ids}).peak_bytes

    num_logits = 1024 * 20000
    plain, half, quarter = peak_bytes(None), peak_bytes(512), peak_bytes(256)
    assert plain - half > 8 * num_logits
    # Blocks of the allocator are multiples of 2 MiB.
    assert abs((half - quarter) - 256 * 20000 * 2) <= 2 * MiB


@pytest.mark.parametrize("name", ["llama", "tied llama"])
def test_in_a_session_with_streamed_weights(name: str) -> None:
    """The head's weight comes for its own call and leaves again; training goes the same way."""

    device = "cuda" if torch.cuda.is_available() else "cpu"
    given = {key: value.to(device) for key, value in batch().items()}

    def train(*, managed: bool) -> list[float]:
        model = make(name, hidden_size=64, vocab_size=4500).to("cpu" if managed else device)
        chunked_head(model, settings=LossSettings(chunk_tokens=7))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        session = None
        if managed:
            assert any("lm_head" in window for group in find_groups(model) for window in group.modules)
            plan = lowtide.make_plan(model, weights="streamed", update="device")
            session = lowtide.manage(model, optimizer, plan)
            optimizer = session.optimizer
        losses = []
        for _ in range(4):
            loss = model(**given).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if session is not None:
            session.close()
        return losses

    plain = train(managed=False)
    assert plain[-1] < plain[0]
    # The backward of an embedding sums in any order on a GPU.
    assert train(managed=True) == (plain if device == "cpu" else pytest.approx(plain, rel=1e-4))


class Losses(Custom):
    """One loss for each token."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.lm_head(self.embed(ids))
        return (
            F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1), reduction="none") if labels is not None else None
        )


@pytest.mark.parametrize("policy", ["recompute", "offload"])
def test_a_head_with_a_policy_and_a_loss_for_each_token(policy: str) -> None:
    torch.manual_seed(0)
    model = Losses(lambda logits, labels: logits)
    plain, ids = copy.deepcopy(model), torch.randint(0, VOCAB, (2, 8))
    handle = chunked_head(model)
    with apply(model, {"lm_head": policy}):
        for network in (plain, model):
            (network(ids, ids) * torch.linspace(1, 2, 16)).sum().backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert "forward" in vars(model.lm_head)
    handle.remove()
    assert "forward" not in vars(model.lm_head)
