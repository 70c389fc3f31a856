"""Which step torch's own optimizer takes on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import UnsupportedOptimizerError
from lowtide.memory.chunk import lay_out
from lowtide.memory.groups import find_groups
from lowtide.runtime.manage import _warn_of_slow_updates
from lowtide.runtime.updates.chunk_optimizer import ChunkOptimizer, Update, takes_fused_step

F32, BF16 = torch.float32, torch.bfloat16
Make = Callable[..., torch.optim.Optimizer]


class Own(torch.optim.AdamW):
    """A subclass, whose step may be anything."""


def settings_of(make: Make, **settings: Any) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    optimizer = make([nn.Parameter(torch.zeros(2))], **settings)
    return type(optimizer), optimizer.param_groups[0]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16, torch.float64], ids=str)
def test_the_fused_step_where_the_choice_is_torchs(kind: Make, dtype: torch.dtype) -> None:
    assert takes_fused_step(*settings_of(kind), [dtype])


@pytest.mark.parametrize(
    ("kind", "settings", "dtypes"),
    [
        (torch.optim.AdamW, {"fused": False}, [F32]),
        (torch.optim.AdamW, {"foreach": False}, [F32]),
        (torch.optim.AdamW, {"foreach": True}, [F32]),
        (torch.optim.AdamW, {"capturable": True}, [F32]),
        (torch.optim.AdamW, {"differentiable": True}, [F32]),
        (torch.optim.AdamW, {"lr": torch.tensor(0.1)}, [F32]),
        (torch.optim.AdamW, {}, [F32, torch.complex64]),
        (torch.optim.SGD, {}, [F32]),
        (torch.optim.RMSprop, {}, [F32]),
        (Own, {}, [F32]),
    ],
)
def test_torchs_own_choice_everywhere_else(kind: Make, settings: dict[str, Any], dtypes: list[torch.dtype]) -> None:
    assert not takes_fused_step(*settings_of(kind, **settings), dtypes)


def _stepped(make: Make, dtype: torch.dtype, *, fuses_on_host: bool | None, is_on_host: bool = True) -> torch.Tensor:
    """After three steps: by a runner, or, where `fuses_on_host` is None, by the optimizer itself."""
    weight = nn.Parameter(torch.randn(1037, generator=torch.Generator().manual_seed(9)).to(dtype))
    optimizer = make([weight])
    runner = None if fuses_on_host is None else ChunkOptimizer(optimizer, fuses_on_host=fuses_on_host)
    for step in range(3):
        weight.grad = torch.randn(1037, generator=torch.Generator().manual_seed(step)).to(dtype)
        if runner is None:
            optimizer.step()
        else:
            settings = runner.settings()
            runner.run([Update(weight, weight)], settings.on_host() if is_on_host else settings)
    return weight.detach()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_it_is_cpu_torchs_fused_step_bit_for_bit(kind: Any, dtype: torch.dtype) -> None:
    fused = _stepped(lambda p: kind(p, lr=1e-2, fused=True), dtype, fuses_on_host=None)
    loop = _stepped(lambda p: kind(p, lr=1e-2), dtype, fuses_on_host=None)
    assert not torch.equal(fused, loop), "or this test shows nothing"
    assert torch.equal(_stepped(lambda p: kind(p, lr=1e-2), dtype, fuses_on_host=True), fused)
    for other in (
        _stepped(lambda p: kind(p, lr=1e-2), dtype, fuses_on_host=False),
        _stepped(lambda p: kind(p, lr=1e-2), dtype, fuses_on_host=True, is_on_host=False),
        _stepped(lambda p: kind(p, lr=1e-2, foreach=False), dtype, fuses_on_host=True),
    ):
        assert torch.equal(other, loop)


def test_counts_in_fp64_are_not_for_the_fused_kernel() -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([weight])
    runner = ChunkOptimizer(optimizer, fuses_on_host=True)
    for _ in range(2):
        weight.grad = torch.ones(4)
        runner.run([Update(weight, weight)], runner.settings().on_host())
        optimizer.state[weight]["step"] = optimizer.state[weight]["step"].double()
    assert optimizer.state[weight]["step"] == 2
    assert optimizer.param_groups[0]["fused"] is None


def test_a_slow_update_on_the_host_is_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    def warn(model: nn.Module, kind: Any = torch.optim.AdamW, **plan: Any) -> None:
        layout = lay_out(find_groups(model))
        _warn_of_slow_updates(layout, lowtide.make_plan(layout, **plan), kind(model.parameters(), lr=0.1))

    with pytest.warns(
        UserWarning,
        match=r"the host updates 8\.1 KiB of weights in bfloat16 by torch's own AdamW, which is slow; "
        "precision='bf16 exact' updates them",
    ):
        warn(nn.Linear(64, 64).to(BF16))
    with pytest.warns(UserWarning, match="precision='fp16 exact'"):
        warn(nn.Linear(64, 64).to(torch.float16))
    warn(nn.Linear(64, 64))
    warn(nn.Linear(64, 64).to(BF16), update="device")
    warn(nn.Linear(64, 64).to(BF16), torch.optim.RMSprop)  # no kernel for it
    warn(nn.Linear(64, 64).to(BF16).requires_grad_(False))
    assert not recwarn.list


@pytest.mark.parametrize(("dtype", "word"), [(BF16, "bf16"), (torch.float16, "fp16")], ids=str)
def test_a_fused_sgd_that_would_move_nothing_is_refused(dtype: torch.dtype, word: str) -> None:
    weight = nn.Parameter(torch.ones(64, dtype=dtype))
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.5, fused=True).step()
    if not weight.eq(1).all():
        pytest.skip("this torch has no such fault")
    model = nn.Linear(64, 64).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
    with pytest.raises(
        UnsupportedOptimizerError, match=f"SGD with fused=True would leave weights in .* precision='{word} exact'"
    ):
        lowtide.manage(model, optimizer, lowtide.make_plan(model), device="cpu")
    lowtide.manage(model, optimizer, lowtide.make_plan(model, update="device"), device="cpu").close()
    model.float()
    lowtide.manage(model, optimizer, lowtide.make_plan(model), device="cpu").close()
