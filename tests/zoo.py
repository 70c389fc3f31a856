"""Small models of many architectures, each with batches and a loss, and the plain loop that trains them.

A test trains one of them plainly and again under management, by the same `train`, and asks `assert_same`. Building one
twice gives the same weights, and so does drawing the same batch twice, whatever was drawn in between.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.models.gpt import GPT, GPTConfig
from lowtide.models.resnet import ResNet, ResNetConfig

VOCAB = 64
LENGTH = 16
NUM_CLASSES = 10
NUM_BATCHES = 20
"""What `ZooModel.batches` gives unless told otherwise: the steps of an identity test."""

Batch = dict[str, Tensor]
LossFunction = Callable[[nn.Module, Batch], Tensor]


class Scheduler(Protocol):
    """The part of `torch.optim.lr_scheduler.LRScheduler` that a loop uses."""

    def step(self) -> None: ...


def output_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss that the model computes itself from the labels of the batch."""
    loss: Tensor = model(**batch).loss
    return loss


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooModel:
    """One architecture, small enough that twenty steps take a second or two at most."""

    name: str
    build: Callable[[bool, torch.dtype], nn.Module]
    """(dropout, dtype) to a model in training mode on the host. Its weights are the same each time."""
    make_batch: Callable[[int], Batch]
    """Seed to tensors on the host; floating point inputs are fp32, and the model casts them to its own dtype."""
    has_dropout: bool = True
    """False: `build` ignores the wish for dropout."""
    loss: LossFunction = output_loss

    def batches(self, num_batches: int = NUM_BATCHES, *, device: torch.device | str = "cpu") -> list[Batch]:
        """Different batches on a device, the same on each call."""
        return [{key: value.to(device) for key, value in self.make_batch(seed).items()} for seed in range(num_batches)]


def zoo(name: str) -> ZooModel:
    """One of the models of `ZOO`."""
    return ZOO[name]


# The loop and the comparison


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    *,
    accumulation: int = 1,
    clip: float | None = None,
    scheduler: Scheduler | None = None,
    loss: LossFunction = output_loss,
    set_to_none: bool = True,
    seed: int | None = 0,
) -> list[float]:
    """The plain PyTorch loop: the loss of each batch, as the exact float of its value.

    Args:
        model: Trained in place.
        optimizer: Stepped after each `accumulation` batches.
        batches: A multiple of `accumulation`.
        accumulation: Backward calls to a step; each loss is divided by it.
        clip: Maximum norm for torch's own `clip_grad_norm_`.
        scheduler: Stepped after the optimizer.
        loss: Gives the loss of a batch.
        set_to_none: Which form of `zero_grad` ends a step.
        seed: For the dropout masks; None leaves the generators where they are, to continue a run.
    """
    assert len(batches) % accumulation == 0, "the last step would lack batches"
    if seed is not None:
        torch.manual_seed(seed)
    losses = []
    for index, batch in enumerate(batches):
        value = loss(model, batch)
        (value / accumulation).backward()
        losses.append(value.detach().double().item())
        if (index + 1) % accumulation:
            continue
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return losses


def assert_same(
    plain_model: nn.Module, managed_model: nn.Module, plain_losses: Sequence[float], managed_losses: Sequence[float]
) -> None:
    """Fail unless both runs had the same finite losses and ended with the same bits in every parameter and buffer."""
    assert len(plain_losses) == len(managed_losses), f"{len(plain_losses)} losses against {len(managed_losses)}"
    assert plain_losses, "nothing was trained"
    assert all(math.isfinite(loss) for loss in plain_losses), f"the plain run diverged: {list(plain_losses)}"
    for index, (plain, managed) in enumerate(zip(plain_losses, managed_losses, strict=True)):
        assert plain == managed, f"loss {index} differs: {plain!r} against {managed!r}, by {abs(plain - managed):.3g}"
    assert_same_tensors(plain_model.state_dict(), managed_model.state_dict())


def assert_same_tensors(plain: Mapping[str, Tensor], managed: Mapping[str, Tensor]) -> None:
    """Fail on the first name whose tensors differ in dtype, shape or any bit."""
    assert list(plain) == list(managed), f"names differ: {sorted(set(plain) ^ set(managed)) or 'in their order'}"
    for name, tensor in plain.items():
        other = managed[name]
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), (
            f"{name}: {tensor.dtype} {tuple(tensor.shape)} against {other.dtype} {tuple(other.shape)}"
        )
        if not torch.equal(_bits(tensor), _bits(other)):
            # In double: a difference of bf16 values is rounded to bf16, and may read as 0.
            difference = (tensor.detach().double().cpu() - other.detach().double().cpu()).abs().max().item()
            raise AssertionError(f"{name} differs, by at most {difference:.3g}")


def _bits(tensor: Tensor) -> Tensor:
    # `torch.equal` on the values would take -0.0 for 0.0 and find NaN unequal to itself.
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


@contextlib.contextmanager
def bf16_safe() -> Iterator[None]:
    """Run bf16 on the host through torch's own kernels: oneDNN's use instructions that some processors lack."""
    # Not `mkldnn.flags`: it also sets the TF32 of Intel's cards, which warns where there is none.
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before


# Batches


def _ids(seed: int, *shape: int, limit: int = VOCAB) -> Tensor:
    return torch.randint(limit, shape, generator=torch.Generator().manual_seed(seed))


def _counting(seed: int, length: int) -> Tensor:
    # Each row counts up from a number of its own: soon learnt, so that a test can ask whether training works at all.
    return (_ids(seed, 4, 1) + torch.arange(length)) % VOCAB


def _images(seed: int, side: int) -> Tensor:
    return torch.randn(4, 3, side, side, generator=torch.Generator().manual_seed(seed))


def _text(seed: int) -> Batch:
    ids = _counting(seed, LENGTH)
    return {"input_ids": ids, "labels": ids.clone()}


def _pairs(seed: int) -> Batch:
    # Two lengths, so that a mix-up of encoder and decoder cannot go unnoticed.
    return {"input_ids": _counting(seed, LENGTH), "labels": _counting(seed + 1000, LENGTH // 2)}


def _masked_text(seed: int) -> Batch:
    ids = _counting(seed, LENGTH)
    mask = torch.ones_like(ids)
    mask[0, LENGTH // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}


def _classified(side: int) -> Callable[[int], Batch]:
    def make(seed: int) -> Batch:
        labels = _ids(seed, 4, limit=NUM_CLASSES)
        # The class is the brightness, which any of the models can learn.
        brightness = labels.view(-1, 1, 1, 1) / NUM_CLASSES
        return {"pixel_values": 4 * brightness + _images(seed, side), "labels": labels}

    return make


def _denoised(seed: int) -> Batch:
    images = _images(seed, 16)
    return {"images": images + 0.3 * _images(seed + 1000, 16), "targets": images}


# Models


def _seeded(make: Callable[[float], nn.Module]) -> Callable[[bool, torch.dtype], nn.Module]:
    def build(dropout: bool, dtype: torch.dtype) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1234)
            return make(0.1 if dropout else 0.0).to(dtype).train()

    return build


def _gpt(dropout: float) -> nn.Module:
    return GPT(
        GPTConfig(vocab_size=VOCAB, context_length=LENGTH, num_layers=3, hidden_size=32, num_heads=4, dropout=dropout)
    )


def _llama(dropout: float) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_decoder_sizes(dropout), intermediate_size=64))


def _mixtral(dropout: float) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            **_decoder_sizes(dropout),
            intermediate_size=32,
            num_local_experts=4,
            num_experts_per_tok=2,
            output_router_logits=True,
            router_jitter_noise=dropout,
        )
    )


def _decoder_sizes(dropout: float) -> dict[str, Any]:
    return dict(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        attention_dropout=dropout,
        use_cache=False,
    )


def _t5(dropout: float) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            dropout_rate=dropout,
            decoder_start_token_id=0,
            use_cache=False,
        )
    )


def _bert(dropout: float) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
    )


def _vit(dropout: float) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            image_size=16,
            patch_size=4,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=64,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            num_labels=NUM_CLASSES,
        )
    )


def _resnet(dropout: float) -> nn.Module:
    return ResNet(ResNetConfig(blocks=(1, 2, 1, 1), width=8, num_classes=NUM_CLASSES, image_size=32))


class ConvolutionBlock(nn.Module):
    """Twice convolution, group norm and SiLU."""

    def __init__(self, channels: int, width: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, width, kernel_size=3, padding=1),
            nn.GroupNorm(4, width),
            nn.SiLU(inplace=True),
            nn.Dropout2d(dropout),
            nn.Conv2d(width, width, kernel_size=3, padding=1),
            nn.GroupNorm(4, width),
            nn.SiLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class UNet(nn.Module):
    """Down by pooling, up by transposed convolution, each level's output joined to its mirror image's input."""

    def __init__(self, widths: Sequence[int], dropout: float) -> None:
        super().__init__()
        channels = [3, *widths]
        self.down = nn.ModuleList(
            ConvolutionBlock(before, after, dropout) for before, after in zip(channels, widths, strict=False)
        )
        mirrored = list(reversed(widths))
        pairs = list(itertools.pairwise(mirrored))
        self.raise_ = nn.ModuleList(nn.ConvTranspose2d(before, after, 2, stride=2) for before, after in pairs)
        self.up = nn.ModuleList(ConvolutionBlock(2 * after, after, dropout) for _, after in pairs)
        self.out = nn.Conv2d(widths[0], 3, kernel_size=1)

    def forward(self, images: Tensor) -> Tensor:
        x = images.to(self.out.weight.dtype)
        skips = []
        for index, block in enumerate(self.down):
            x = block(x if index == 0 else F.avg_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for enlarge, block in zip(self.raise_, self.up, strict=True):
            x = block(torch.cat([skips.pop(), enlarge(x)], dim=1))
        out: Tensor = self.out(x)
        return out


def _unet(dropout: float) -> nn.Module:
    return UNet((8, 16, 32), dropout)


def _unet_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["images"]).float(), batch["targets"])


class Translator(nn.Module):
    """`nn.Transformer` between two embeddings and a head."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.source = nn.Embedding(VOCAB, 32)
        self.target = nn.Embedding(VOCAB, 32)
        self.transformer = nn.Transformer(
            d_model=32,
            nhead=4,
            num_encoder_layers=2,
            num_decoder_layers=2,
            dim_feedforward=64,
            dropout=dropout,
            batch_first=True,
        )
        self.head = nn.Linear(32, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        inputs, targets = labels[:, :-1], labels[:, 1:]
        length = inputs.shape[1]
        hidden = self.target(inputs)
        # Our own mask: that of nn.Transformer is not of the model's dtype, which warns.
        mask = torch.full((length, length), -torch.inf, dtype=hidden.dtype, device=hidden.device).triu(1)
        hidden = self.transformer(self.source(input_ids), hidden, tgt_mask=mask, tgt_is_causal=True)
        return F.cross_entropy(self.head(hidden).flatten(0, 1).float(), targets.flatten())


def _translator_loss(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch)
    return loss


ZOO: dict[str, ZooModel] = {
    model.name: model
    for model in (
        ZooModel(name="gpt", build=_seeded(_gpt), make_batch=_text),
        ZooModel(name="llama", build=_seeded(_llama), make_batch=_text),
        ZooModel(name="t5", build=_seeded(_t5), make_batch=_pairs),
        ZooModel(name="bert", build=_seeded(_bert), make_batch=_masked_text),
        ZooModel(name="mixtral", build=_seeded(_mixtral), make_batch=_text),
        ZooModel(name="vit", build=_seeded(_vit), make_batch=_classified(16)),
        ZooModel(name="resnet", build=_seeded(_resnet), make_batch=_classified(32), has_dropout=False),
        ZooModel(name="unet", build=_seeded(_unet), make_batch=_denoised, loss=_unet_loss),
        ZooModel(name="transformer", build=_seeded(Translator), make_batch=_pairs, loss=_translator_loss),
    )
}
