"""On a GPU: the bits of plain torch under deterministic algorithms and poisoned buffers, and bytes that leave the device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from lowtide.activations import CompileBudget, Keep, Offload, Policies, Recompute, Selective, apply
from tests.activations.measured import Stack, assert_equal, gradients
from tests.activations.test_policies_identity import DTYPES, POLICIES, run
from tests.zoo import ZOO, assert_same

pytestmark = pytest.mark.gpu

ROWS, WIDTH, NUM_BLOCKS = 16384, 512, 12
INPUT_BYTES = ROWS * WIDTH * 4


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ZOO)
def test_same_bits_as_plain_torch(name: str, policy: str, dtype: str) -> None:
    plain, plain_losses, _ = run(ZOO[name], None, dtype=DTYPES[dtype], device="cuda")
    other, losses, applied = run(ZOO[name], POLICIES[policy], dtype=DTYPES[dtype], device="cuda")
    assert_same(plain, other, plain_losses, losses)
    assert applied is not None
    if policy.startswith("offload"):
        assert applied.stats().brought_bytes > 0
        assert applied.stats().host_bytes == 0


def large(num_blocks: int = NUM_BLOCKS) -> tuple[Stack, Tensor]:
    torch.manual_seed(3)
    return Stack(num_blocks, WIDTH).cuda(), torch.randn(ROWS, WIDTH, device="cuda")


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_large_tensors_keep_their_bits_while_copies_run(policy: Policies) -> None:
    model, x = large()
    expected = gradients(model, x)
    with apply(model, policy, poison=True):
        for _ in range(3):
            assert_equal(expected, gradients(model, x))


def kept_and_peak(policies: Policies) -> tuple[int, int]:
    """Bytes of the allocator after the forward and at most, above what was there before."""
    model, x = large()
    with apply(model, policies):
        gradients(model, x)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        before_bytes = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss = model(x)
        kept_bytes = torch.cuda.memory_allocated() - before_bytes
        loss.backward()
        return kept_bytes, torch.cuda.max_memory_allocated() - before_bytes


def test_device_bytes_of_each_policy() -> None:
    plain = kept_and_peak(Keep())
    selective = kept_and_peak(Selective())
    recompute = kept_and_peak(Recompute())
    segments = kept_and_peak(Recompute(segment=3))
    offload = kept_and_peak(Offload(min_bytes=0))
    offload_all = kept_and_peak(Offload(recompute=False, min_bytes=1 << 20))
    assert plain[0] > selective[0] > recompute[0] > segments[0]
    assert plain[1] > selective[1] > recompute[1] > segments[1]
    slack_bytes = 2 * INPUT_BYTES
    assert recompute[0] <= NUM_BLOCKS * INPUT_BYTES + slack_bytes
    assert segments[0] <= NUM_BLOCKS // 3 * INPUT_BYTES + slack_bytes
    # Two inputs wait for their copies; in the backward another one comes ahead.
    assert recompute[0] - offload[0] == (NUM_BLOCKS - 2) * INPUT_BYTES
    assert recompute[1] - offload[1] >= (NUM_BLOCKS - 4) * INPUT_BYTES
    assert offload_all[0] < plain[0] / 3


def test_device_bytes_do_not_depend_on_the_speed_of_the_host() -> None:
    def peak(pause: int) -> int:
        torch.cuda._sleep(pause)
        return kept_and_peak(Offload(min_bytes=0))[1]

    assert peak(0) == peak(200_000_000) == peak(0)


def test_attention_with_dropout_stays_in_step_under_selective() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            query, key, value = self.project(x).view(2, 128, 3, 2, 32).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=0.2)
            return x + nn.functional.dropout(self.out(mixed.transpose(1, 2).reshape(2, 128, 64)), 0.3)

    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.float().square().mean()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(*(Attention() for _ in range(3))), Mean()).to("cuda", torch.bfloat16)
    x = torch.randn(2, 128, 64, device="cuda", dtype=torch.bfloat16)
    # One sequence of 128 is one tile of the kernel: its backward adds in one order.
    expected = gradients(model, x)
    again = gradients(model, x)
    assert_equal(expected, again)
    for policy in POLICIES.values():
        with apply(model, policy, poison=True):
            assert_equal(expected, gradients(model, x))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_compile_budget_saves_less() -> None:
    torch.compiler.reset()
    plain = kept_and_peak(CompileBudget(share=1.0))
    small = kept_and_peak(CompileBudget(share=0.0))
    assert small[0] < plain[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["recompute", "segments", "offload", "offload-all"])
def test_policies_around_compiled_blocks(name: str) -> None:
    torch.compiler.reset()
    model, x = large(6)
    for block in model.blocks:
        block.compile()
    expected = gradients(model, x)
    with apply(model, POLICIES[name], poison=True):
        for _ in range(2):
            assert_equal(expected, gradients(model, x))
