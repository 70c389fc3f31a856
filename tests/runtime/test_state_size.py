"""How much state an optimizer keeps: asked of the optimizer itself, and the same that it keeps after a real step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lowtide.errors import UnsupportedOptimizerError
from lowtide.optim.update_types import numerics_of
from lowtide.runtime.host_memory import state_bytes_per_parameter_byte

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda parameters: torch.optim.AdamW(parameters), 2.0),
        (lambda parameters: torch.optim.Adam(parameters, amsgrad=True), 3.0),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1), 0.0),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), 1.0),
        (lambda parameters: torch.optim.Adagrad(parameters), 1.0),
        (lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.1), foreach=False), 2.0),
    ],
    ids=["adamw", "amsgrad", "sgd", "momentum", "adagrad", "tensor-lr"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_it_is_what_a_real_step_keeps(make: Make, expected: float, dtype: torch.dtype) -> None:
    parameters = [nn.Parameter(torch.ones(48, 40, dtype=dtype)), nn.Parameter(torch.ones(40, dtype=dtype))]
    optimizer = make(parameters)
    found = state_bytes_per_parameter_byte(optimizer)
    assert found == expected
    assert all(not optimizer.state[parameter].get("exp_avg", torch.zeros(1)).any() for parameter in parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = sum(
        value.nbytes
        for parameter in parameters
        for key, value in optimizer.state[parameter].items()
        if isinstance(value, torch.Tensor) and key != "step"
    )
    assert kept == found * sum(parameter.nbytes for parameter in parameters)


def test_the_group_with_most_counts() -> None:
    first, second = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))
    groups = [{"params": [first]}, {"params": [second], "momentum": 0.9}]
    assert state_bytes_per_parameter_byte(torch.optim.SGD(groups, lr=0.1)) == 1.0


def test_frozen_parameters_do_not_count() -> None:
    frozen = nn.Parameter(torch.ones(4, 4), requires_grad=False)
    assert state_bytes_per_parameter_byte(torch.optim.AdamW([frozen])) == 0.0
    assert state_bytes_per_parameter_byte(None) == 0.0


def test_an_optimizer_that_cannot_be_asked() -> None:
    class Picky(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            if self.param_groups[0]["params"][0].shape == (32, 32):
                raise RuntimeError("not like this")

    # No chunk would be refused for it; where one would, the message says that.
    with pytest.raises(
        UnsupportedOptimizerError, match=r"Picky could not take a step .*\(32, 32\) alone.*not like this"
    ):
        state_bytes_per_parameter_byte(Picky([nn.Parameter(torch.ones(200, 200))], lr=0.1))
    with pytest.raises(
        UnsupportedOptimizerError, match=r"Picky could not take a step without a closure.*not like this"
    ):
        state_bytes_per_parameter_byte(Picky([nn.Parameter(torch.ones(32, 32))], lr=0.1))


def test_an_optimizer_that_no_chunk_can_use() -> None:
    with pytest.raises(UnsupportedOptimizerError, match="LBFGS takes its step over all parameters at once"):
        state_bytes_per_parameter_byte(torch.optim.LBFGS([nn.Parameter(torch.ones(4, 4))]))


@pytest.mark.parametrize(
    ("precision", "moments", "expected"),
    [("bf16 exact", "fp32", 5.0), ("bf16 stochastic", "bf16", 2.0), ("bf16 stochastic", "8bit", 1 + 4 / 128)],
)
def test_own_kernels_keep_what_their_formats_take(precision: str, moments: str, expected: float) -> None:
    numerics = numerics_of(precision, moments)[1]
    parameters = [nn.Parameter(torch.ones(64, 128, dtype=torch.bfloat16)), nn.Parameter(torch.ones(128).bfloat16())]
    assert state_bytes_per_parameter_byte(torch.optim.AdamW(parameters), numerics) == expected


def test_a_single_number_is_not_taken_for_the_whole_model() -> None:
    numerics = numerics_of("bf16 stochastic", "8bit")[1]
    parameters = [nn.Parameter(torch.ones(1 << 16).bfloat16()), nn.Parameter(torch.ones(1).bfloat16())]
    assert state_bytes_per_parameter_byte(torch.optim.AdamW(parameters), numerics) < 1.04
