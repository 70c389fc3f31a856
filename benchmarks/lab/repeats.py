"""Whether one backward gives the same bits each time, alone on a GPU and beside other work.

python -m benchmarks.lab.repeats --out FOLDER --commit 0123abc [--seconds 15] [--beside 4]

Torch says of its memory-efficient attention that its backward is not deterministic. Two runs of Deep One differed from their
repetitions, both beside others (docs/lab.md); this asks whether attention by itself does, and whether anything else in a layer.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.records import machine
from lowtide.lab.record import write_json
from lowtide.models.deep_one import AttentionKind, Block, DeepOneConfig, alibi_slopes
from lowtide.models.registry import BUILT_INS

SCHEMA = "lowtide.repeats/1"
BATCH = 4
MODEL = "deep-one-1.6b-fused-norm"

Backward = Callable[[], Sequence[Tensor]]
"""Makes gradients anew from the same inputs."""


def count_different(backward: Backward, seconds: float) -> tuple[int, int]:
    """Repetitions within the time, at least one, and how many of them differ in a bit from the first call."""
    first = [gradient.clone() for gradient in backward()]
    repeats = different = 0
    ends_s = time.perf_counter() + seconds
    while repeats == 0 or time.perf_counter() < ends_s:
        again = backward()
        repeats += 1
        different += not all(map(torch.equal, first, again))
    return repeats, different


def backward_of(module: nn.Module, inputs: Tensor) -> Backward:
    """The backward from the sum of the squares of what a module makes of its inputs, to all parameters and the inputs."""
    tensors = [inputs, *module.parameters()]

    def backward() -> Sequence[Tensor]:
        return torch.autograd.grad(module(inputs).float().square().sum(), tensors)

    return backward


def config_of(name: str) -> DeepOneConfig:
    """The config of a built-in Deep One."""
    config = BUILT_INS[name].config
    assert isinstance(config, DeepOneConfig), name
    return config


def layer_with(config: DeepOneConfig, device: torch.device) -> Backward:
    """A layer of Deep One in bf16."""
    torch.manual_seed(0)
    block = Block(config)
    with torch.no_grad():
        block.attention.slopes.copy_(alibi_slopes(block.attention.slopes))
    inputs = torch.randn(BATCH, config.context_length, config.hidden_size)
    return backward_of(block.to(device, torch.bfloat16), _leaf(inputs, device))


def attention_alone(config: DeepOneConfig, device: torch.device) -> Backward:
    """The kernel with a bias that has a gradient, as in such a layer."""
    torch.manual_seed(0)
    length = config.context_length
    shape = (BATCH, config.num_heads, length, config.hidden_size // config.num_heads)
    query, key, value = (_leaf(torch.randn(shape), device) for _ in range(3))
    bias = _leaf(torch.randn(config.num_heads, length, length), device)

    def backward() -> Sequence[Tensor]:
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return torch.autograd.grad(mixed.float().square().sum(), [query, key, value, bias])

    return backward


def _leaf(values: Tensor, device: torch.device) -> Tensor:
    return values.to(device, torch.bfloat16).requires_grad_()


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Torch takes the version of an operator that is, where it has one."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def beside(num_others: int) -> Iterator[None]:
    """So many processes that keep the GPU busy."""
    spawn = multiprocessing.get_context("spawn")
    others = [spawn.Process(target=_keep_busy, daemon=True) for _ in range(num_others)]
    for other in others:
        other.start()
    try:
        # Imports, a context on the GPU and the first kernels.
        time.sleep(20 if others else 0)
        yield
    finally:
        for other in others:
            other.terminate()
            other.join()


def _keep_busy() -> None:
    backward = layer_with(config_of(MODEL), torch.device("cuda"))
    while True:
        backward()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--beside", type=int, default=4)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("whether a GPU repeats itself is asked of a GPU, and torch sees no CUDA device here")
    device, config = torch.device("cuda"), config_of(MODEL)
    cases: list[tuple[str, Callable[[], Backward], Callable[[], contextlib.AbstractContextManager[None]]]] = [
        ("layer", lambda: layer_with(config, device), contextlib.nullcontext),
        (
            "layer, math attention",
            lambda: layer_with(replace(config, attention=AttentionKind.MATH), device),
            contextlib.nullcontext,
        ),
        ("attention", lambda: attention_alone(config, device), contextlib.nullcontext),
        ("attention, deterministic", lambda: attention_alone(config, device), deterministic),
    ]
    rows = []
    for num_others in (0, arguments.beside):
        with beside(num_others):
            for name, make, setting in cases:
                with setting():
                    repeats, different = count_different(make(), arguments.seconds)
                print(f"{name}, beside {num_others}: {different} of {repeats} differ", flush=True)
                rows.append({"name": name, "beside": num_others, "repeats": repeats, "different": different})
    record = {
        "schema": SCHEMA,
        "commit": arguments.commit,
        "hardware": torch.cuda.get_device_name(),
        "machine": machine(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "rows": rows,
    }
    write_json(arguments.out / f"repeats_{arguments.commit}.json", record)


if __name__ == "__main__":
    main()
