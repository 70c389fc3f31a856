"""Chunked linear + cross entropy against plain torch: losses, gradients, errors, and what is done and not done."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide import compat
from lowtide.activations.losses import chunks
from lowtide.activations.losses.chunked_loss import ChunkedHead, linear_cross_entropy
from lowtide.activations.losses.chunks import find_kernel, loss_in_place
from lowtide.activations.losses.settings import LossSettings
from lowtide.errors import ChunkedBackwardError, ConfigError, TargetRangeError
from tests.zoo import bf16_safe

HAS_TORCH_CHUNKS = hasattr(F, "linear_cross_entropy")


def plain_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    logit_scale: float | None = None,
) -> Tensor:
    """The reference: all logits, scaled, capped and then upcast as Hugging Face does it, and torch's cross entropy."""
    logits = F.linear(hidden, weight, bias).reshape(-1, len(weight))
    if logit_scale is not None:
        logits = logits * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    flat = target.reshape(-1)
    loss = F.cross_entropy(logits, flat, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none")
    loss = loss + z_loss * logits.logsumexp(-1).square() * (flat != ignore_index)
    if reduction == "none":
        return loss.reshape(target.shape)
    return loss.sum() / (flat != ignore_index).sum() if reduction == "mean" else loss.sum()


def inputs(
    num_tokens: int = 37,
    features: int = 16,
    vocab_size: int = 53,
    *,
    dtype: torch.dtype = torch.float32,
    bias: bool = False,
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    made: dict[str, Tensor] = {
        "hidden": torch.randn(num_tokens, features, generator=generator).to(dtype).requires_grad_(),
        "weight": torch.randn(vocab_size, features, generator=generator).to(dtype).requires_grad_(),
        "target": torch.randint(0, vocab_size, (num_tokens,), generator=generator),
    }
    made["target"][::5] = -100
    if bias:
        made["bias"] = torch.randn(vocab_size, generator=generator).to(dtype).requires_grad_()
    return made


def results(function: Any, tensors: dict[str, Tensor], **settings: Any) -> dict[str, Tensor]:
    """Loss and gradients, of a loss that is weighted as a user might."""
    leaves = {key: value.detach().clone().requires_grad_(value.requires_grad) for key, value in tensors.items()}
    loss = function(**leaves, **settings)
    weights = torch.linspace(0.5, 1.5, loss.numel(), dtype=loss.dtype).reshape(loss.shape)
    (loss * weights).sum().backward()
    found = {f"gradient of {key}": leaf.grad for key, leaf in leaves.items() if leaf.grad is not None}
    return {"loss": loss.detach(), **found}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], *, relative: float) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype, key
        assert torch.isfinite(found[key]).all(), key
        distance = (found[key].double() - value.double()).norm() / value.double().norm().clamp(min=1e-12)
        assert distance <= relative, f"{key}: {distance}"


FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 1e-2},
    "softcap": {"softcap": 5.0},
    "scale": {"logit_scale": 0.25},
    "all": {"label_smoothing": 0.2, "z_loss": 1e-3, "softcap": 8.0, "logit_scale": 0.5},
}


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("form", FORMS)
def test_same_as_plain(form: str, reduction: str, bias: bool) -> None:
    for dtype, relative in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        tensors = inputs(dtype=dtype, bias=bias)
        expected = results(plain_loss, tensors, reduction=reduction, **FORMS[form])
        found = results(linear_cross_entropy, tensors, reduction=reduction, chunk_tokens=8, **FORMS[form])
        assert_close(found, expected, relative=relative)


@given(
    num_tokens=st.integers(1, 20),
    features=st.integers(1, 9),
    vocab_size=st.integers(2, 30),
    chunk_tokens=st.none() | st.integers(1, 25),
    label_smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    z_loss=st.sampled_from([0.0, 0.05]),
    softcap=st.sampled_from([None, 3.0]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    ignore_index=st.sampled_from([-100, 0, 1]),
    seed=st.integers(0, 1000),
)
def test_any_shape(
    num_tokens: int, features: int, vocab_size: int, seed: int, ignore_index: int, **settings: Any
) -> None:
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(0, vocab_size, (num_tokens,), generator=generator)
    ignored = torch.rand(num_tokens, generator=generator) < 0.3
    ignored[0] = False
    target[0] = vocab_size - 1 if ignore_index != vocab_size - 1 else 0
    tensors = {
        "hidden": torch.randn(num_tokens, features, generator=generator, dtype=torch.float64).requires_grad_(),
        "weight": torch.randn(vocab_size, features, generator=generator, dtype=torch.float64).requires_grad_(),
        "target": torch.where(ignored, ignore_index, target),
    }
    settings["ignore_index"] = ignore_index
    chunk_tokens = settings.pop("chunk_tokens")
    expected = results(plain_loss, tensors, **settings)
    assert_close(
        results(linear_cross_entropy, tensors, chunk_tokens=chunk_tokens, **settings), expected, relative=1e-10
    )


def test_finite_differences() -> None:
    tensors = inputs(5, 3, 7, dtype=torch.float64, bias=True)

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(
            hidden, weight, tensors["target"], bias=bias, chunk_tokens=2, z_loss=0.1, softcap=2.0, label_smoothing=0.1
        )

    assert torch.autograd.gradcheck(loss, (tensors["hidden"], tensors["weight"], tensors["bias"]))


def error_against_fp64(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    return {key: float((found[key].double() - exact[key]).norm() / exact[key].norm()) for key in exact}


@pytest.mark.parametrize(("accumulation", "factor"), [("float32", 1.01), ("weight", 1.1)])
@pytest.mark.parametrize("form", ["plain", "softcap"])
def test_bf16_is_as_exact_as_plain(form: str, accumulation: str, factor: float) -> None:
    """Eight sums in bf16 cost some percent more error than plain torch's one; in fp32 nothing."""
    with bf16_safe():
        tensors = inputs(512, 64, 500, dtype=torch.bfloat16)
        wide = {key: value.detach().double() for key, value in tensors.items()}
        wide = {key: value.requires_grad_() if key != "target" else tensors["target"] for key, value in wide.items()}
        exact = results(plain_loss, wide, **FORMS[form])
        plain = error_against_fp64(results(plain_loss, tensors, **FORMS[form]), exact)
        chunked = error_against_fp64(
            results(linear_cross_entropy, tensors, chunk_tokens=64, accumulation=accumulation, **FORMS[form]), exact
        )
    assert plain["gradient of weight"] > 1e-4, "the reference rounds"
    for key, error in plain.items():
        if key == "loss":
            assert chunked[key] < 1e-4, "errors of the tokens cancel in a mean: which way is less off is chance"
            continue
        allowed = factor if key == "gradient of weight" else 1.02
        assert chunked[key] <= allowed * error + 1e-6, (key, chunked[key], error)


def test_fp16_needs_no_scale_in_the_forward() -> None:
    """A mean over many tokens makes gradients that fp16 cannot hold; the loss scale arrives in the backward only."""
    scale = 65536.0
    tensors = inputs(2048, 8, 64)
    tensors["hidden"] = (tensors["hidden"].detach() * 0.1).requires_grad_()
    exact = results(lambda **given: plain_loss(**given) * scale, tensors)
    half = {key: value.detach().half() if value.is_floating_point() else value for key, value in tensors.items()}
    half = {key: value.requires_grad_(value.is_floating_point()) for key, value in half.items()}
    found = results(lambda **given: linear_cross_entropy(**given, chunk_tokens=256) * scale, half)
    errors = error_against_fp64(found, {key: value.double() for key, value in exact.items()})
    assert max(errors.values()) < 3e-3, errors


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_all_tokens_ignored(reduction: str) -> None:
    tensors = inputs(6)
    tensors["target"] = torch.full((6,), -100)
    for function in (plain_loss, linear_cross_entropy):
        hidden = tensors["hidden"].detach().clone().requires_grad_()
        loss = function(hidden, tensors["weight"], tensors["target"], reduction=reduction)
        loss.backward()
        assert math.isnan(loss.item()) == (reduction == "mean")
        if function is linear_cross_entropy:
            assert hidden.grad is not None
            assert hidden.grad.abs().max() == 0


def test_no_tokens() -> None:
    tensors = inputs(0)
    loss = linear_cross_entropy(**tensors)
    loss.backward()
    assert math.isnan(loss.item()), "as torch's mean of nothing"
    assert tensors["weight"].grad is not None
    assert tensors["weight"].grad.abs().max() == 0


def test_targets_out_of_range_are_refused() -> None:
    tensors = inputs()
    tensors["target"][3] = 53
    with pytest.raises(IndexError):
        plain_loss(**tensors)
    with pytest.raises(TargetRangeError, match="1 of 37 targets are out of range: the first is 53.*53 entries"):
        linear_cross_entropy(**tensors)
    tensors["target"][3] = -1
    with pytest.raises(TargetRangeError, match="the first is -1"):
        linear_cross_entropy(**tensors)


def test_batch_dimensions() -> None:
    tensors = inputs(24)
    shaped = dict(
        tensors, hidden=tensors["hidden"].detach().reshape(2, 3, 4, 16), target=tensors["target"].reshape(2, 3, 4)
    )
    losses = linear_cross_entropy(**shaped, reduction="none", chunk_tokens=5)
    assert losses.shape == (2, 3, 4)
    torch.testing.assert_close(losses, plain_loss(**shaped, reduction="none"))


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    tensors = inputs(bias=True)
    tensors[frozen].requires_grad_(False)
    assert_close(results(linear_cross_entropy, tensors, chunk_tokens=8), results(plain_loss, tensors), relative=1e-5)


class Products(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("wanted", "per_chunk"), [("hidden weight", 3), ("hidden", 2), ("weight", 2), ("", 1)])
def test_unwanted_gradients_cost_nothing(wanted: str, per_chunk: int) -> None:
    tensors = inputs(32)
    for key in ("hidden", "weight"):
        tensors[key].requires_grad_(key in wanted)
    with Products() as products:
        linear_cross_entropy(**tensors, chunk_tokens=8)
    assert products.count == 4 * per_chunk
    with torch.no_grad(), Products() as products:
        linear_cross_entropy(**tensors, chunk_tokens=8)
    assert products.count == 4, "no gradients without a graph"


def test_one_accumulation_per_backward() -> None:
    tensors = inputs()
    seen: list[int] = []
    tensors["weight"].register_post_accumulate_grad_hook(lambda leaf: seen.append(1))
    linear_cross_entropy(**tensors, chunk_tokens=4).backward()
    assert seen == [1]


def test_second_backward() -> None:
    tensors = inputs()
    loss = linear_cross_entropy(**tensors, chunk_tokens=8)
    loss.backward(retain_graph=True)
    once = tensors["weight"].grad.clone()
    loss.backward()
    torch.testing.assert_close(tensors["weight"].grad, 2 * once)
    with pytest.raises(ChunkedBackwardError, match="retain_graph=True"):
        loss.backward()
    with pytest.raises(ChunkedBackwardError, match="create_graph=True"):
        torch.autograd.grad(linear_cross_entropy(**tensors), tensors["hidden"], create_graph=True)


def test_gradient_of_the_weight_is_no_ones_buffer() -> None:
    """Autograd may make it a parameter's `.grad`, which is changed in place."""
    tensors = inputs()
    loss = linear_cross_entropy(**tensors, chunk_tokens=8)
    loss.backward(retain_graph=True)
    once = tensors["weight"].grad.clone()
    tensors["weight"].grad.zero_()
    loss.backward()
    torch.testing.assert_close(tensors["weight"].grad, once)


def test_autocast() -> None:
    tensors = inputs(bias=True)
    with bf16_safe(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = results(plain_loss, tensors)
        found = results(linear_cross_entropy, tensors, chunk_tokens=8)
    assert_close(found, expected, relative=1e-2)
    assert found["gradient of weight"].dtype == torch.float32


def test_inside_a_checkpoint() -> None:
    tensors = inputs()
    expected = results(linear_cross_entropy, tensors, chunk_tokens=8)

    def checkpointed(**given: Any) -> Tensor:
        loss: Tensor = torch.utils.checkpoint.checkpoint(linear_cross_entropy, **given, use_reentrant=False)
        return loss

    assert_close(results(checkpointed, tensors, chunk_tokens=8), expected, relative=0.0)


def test_head_is_a_linear_layer() -> None:
    linear = nn.Linear(16, 53)
    head = ChunkedHead.of(linear, settings=LossSettings(chunk_tokens=8))
    assert head.weight is linear.weight
    assert head.state_dict().keys() == linear.state_dict().keys()
    tensors = inputs(bias=True)
    assert torch.equal(head(tensors["hidden"]), linear(tensors["hidden"]))
    head(tensors["hidden"], tensors["target"]).backward()
    found = linear.weight.grad
    linear.weight.grad = None
    plain_loss(tensors["hidden"], linear.weight, tensors["target"], bias=linear.bias).backward()
    torch.testing.assert_close(found, linear.weight.grad)
    assert copy.deepcopy(head).settings == head.settings
    assert ChunkedHead(4, 8).settings == LossSettings()


@pytest.mark.skipif(not HAS_TORCH_CHUNKS, reason="torch has its own from 2.13 on")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_torchs_own(reduction: str) -> None:
    tensors = inputs(bias=True)
    expected = results(plain_loss, tensors, reduction=reduction)
    found = results(linear_cross_entropy, tensors, reduction=reduction, implementation="torch", chunk_tokens=8)
    assert_close(found, expected, relative=1e-5)
    with pytest.raises(ConfigError, match=r"cannot be used with z_loss=0.1, softcap=2.0; leave implementation at"):
        linear_cross_entropy(**tensors, implementation="torch", z_loss=0.1, softcap=2.0)


def test_torchs_own_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(F, "linear_cross_entropy", raising=False)
    with pytest.raises(ConfigError, match="which does not have it"):
        linear_cross_entropy(**inputs(), implementation="torch")


def test_shapes_that_do_not_fit() -> None:
    tensors = inputs()
    with pytest.raises(ConfigError, match=r"hidden \(37, 16\), weight \(53, 16\), target \(36,\) do not belong"):
        linear_cross_entropy(tensors["hidden"], tensors["weight"], tensors["target"][1:])
    with pytest.raises(ConfigError, match="hidden is torch.float64 and weight is torch.float32"):
        linear_cross_entropy(tensors["hidden"].double(), tensors["weight"], tensors["target"])


@pytest.mark.parametrize("implementation", ["auto", "torch"])
@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.bool, torch.float32, torch.complex64], ids=str
)
def test_targets_of_other_types_are_refused(dtype: torch.dtype, implementation: Any) -> None:
    tensors = inputs()
    target = tensors["target"].clamp(min=0).to(dtype)
    with pytest.raises(ConfigError, match=f"target is {dtype}; give indices into the vocabulary, as torch.long"):
        linear_cross_entropy(tensors["hidden"], tensors["weight"], target, implementation=implementation)


def test_targets_of_32_bits_are_as_those_of_64() -> None:
    tensors = inputs()
    expected = linear_cross_entropy(**tensors)
    assert torch.equal(linear_cross_entropy(**{**tensors, "target": tensors["target"].int()}), expected)


def scattered_loss(**given: Any) -> Tensor:
    """The same values with gaps between them, as a column of labels has."""
    for key, value in given.items():
        if isinstance(value, Tensor):
            given[key] = torch.stack([value, torch.zeros_like(value)], dim=-1)[..., 0]
            assert not given[key].is_contiguous()
    return linear_cross_entropy(**given)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_kernel_is_given_contiguous_tensors(monkeypatch: pytest.MonkeyPatch, reduction: str) -> None:
    """One that reads as Triton's does: a pointer, and one element after the other."""
    num_calls = 0

    def kernel(
        logits: Tensor, target: Tensor, row_scale: Tensor | None, losses: Tensor, settings: LossSettings
    ) -> None:
        nonlocal num_calls
        num_calls += 1
        assert logits.stride(1) == 1
        given = [tensor for tensor in (target, row_scale, losses) if tensor is not None]
        assert all(tensor.is_contiguous() for tensor in given)
        safe = torch.as_strided(target, (len(target),), (1,)).clamp(min=0)
        losses.copy_(loss_in_place(logits, logits, safe, row_scale, settings))

    monkeypatch.setattr(chunks, "find_kernel", lambda hidden, dtype: kernel)
    tensors = inputs(bias=True)
    expected = results(plain_loss, tensors, reduction=reduction)
    found = results(scattered_loss, tensors, reduction=reduction, chunk_tokens=8)
    assert_close(found, expected, relative=1e-5)
    assert num_calls >= 5


@pytest.mark.parametrize(
    ("key", "value"), [("chunk_tokens", 2.5), ("ignore_index", None), ("label_smoothing", "a"), ("softcap", "a")]
)
def test_settings_of_other_types(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{key} is {value!r}; give a"):
        LossSettings(**{key: value})  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize(
    ("key", "values", "advice"),
    [
        ("z_loss", (math.nan, math.inf, -math.inf, -0.1), "give a finite number, 0 or more"),
        ("softcap", (math.nan, math.inf, -math.inf, 0.0), "give a finite number above 0, or None for no cap"),
        ("logit_scale", (math.nan, math.inf, -math.inf), "give a finite number, or None for no scale"),
        ("label_smoothing", (math.nan, math.inf, -0.1), "give a number from 0 to 1"),
    ],
)
def test_settings_out_of_range(key: str, values: tuple[float, ...], advice: str) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=f"{key} is {value}; {advice}"):
            linear_cross_entropy(**inputs(), **{key: value})  # type: ignore[arg-type]  # a setting by its name


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has warned of nothing."""
    monkeypatch.setattr(compat, "has_triton", lambda: False)
    chunks._warn_once.cache_clear()
    yield
    chunks._warn_once.cache_clear()


WARNING = (
    r"^the chunked loss runs through torch's operators, slower than the Triton kernel .*: the package 'triton' is not "
    "installed; run: pip install triton$"
)


@pytest.mark.usefixtures("without_triton")
def test_a_gpu_without_triton_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        hidden = torch.empty(0, device="cuda")
    # A warning that is not expected would be an error here: where nothing would be launched there is none.
    assert find_kernel(hidden, torch.bfloat16) is chunks._predicted
    monkeypatch.setattr(compat, "has_no_values", lambda tensor: False)
    assert find_kernel(hidden, torch.float64) is None
    assert find_kernel(torch.empty(0), torch.bfloat16) is None
    with pytest.warns(RuntimeWarning, match=WARNING) as caught:
        assert find_kernel(hidden, torch.bfloat16) is None
    assert [warning.filename for warning in caught] == [__file__]
    assert find_kernel(hidden, torch.float32) is None
