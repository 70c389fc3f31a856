from __future__ import annotations

from typing import Any

import pytest
import torch

from lowtide.errors import ConfigError, UnsupportedOptimizerError
from lowtide.optim import Adafactor
from lowtide.optim import Lion as LionOptimizer
from lowtide.optim.rules import Adafactor as AdafactorRule
from lowtide.optim.rules import Adam, Lion, Sgd, reason_without_rule, require_rule


def parameter(dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(4, 4, dtype=dtype))


def test_each_group_has_its_own_live_settings() -> None:
    groups = [{"params": [parameter()]}, {"params": [parameter()], "weight_decay": 0.0, "lr": torch.tensor(0.25)}]
    optimizer = torch.optim.AdamW(groups, lr=0.5, betas=(0.8, 0.9), eps=1e-6, foreach=False)
    first, second = (require_rule(optimizer, group) for group in optimizer.param_groups)
    assert first == Adam(lr=0.5, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.01)
    assert second == Adam(lr=0.25, beta1=0.8, beta2=0.9, eps=1e-6)
    optimizer.param_groups[0]["lr"] = 0.125
    changed = require_rule(optimizer, optimizer.param_groups[0])
    assert changed is not None
    assert changed.lr == 0.125


def test_all_options_arrive() -> None:
    adam = torch.optim.Adam([parameter()], weight_decay=0.1, amsgrad=True, maximize=True)
    assert require_rule(adam, adam.param_groups[0]) == Adam(
        lr=1e-3, weight_decay=0.1, is_decoupled=False, amsgrad=True, maximize=True
    )
    sgd = torch.optim.SGD([parameter()], lr=0.1, momentum=0.9, dampening=0.0, nesterov=True, weight_decay=0.2)
    assert require_rule(sgd, sgd.param_groups[0]) == Sgd(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.2)
    lion = LionOptimizer([parameter()], lr=0.1, betas=(0.7, 0.8), weight_decay=0.3)
    assert require_rule(lion, lion.param_groups[0]) == Lion(lr=0.1, beta1=0.7, beta2=0.8, weight_decay=0.3)


def test_adafactors_settings_arrive() -> None:
    groups = [{"params": [parameter()], "clip_threshold": 0.5}, {"params": [parameter()], "lr": torch.tensor(0.25)}]
    optimizer = Adafactor(groups, lr=0.5, weight_decay=0.1, eps=1e-20, decay_rate=-0.7, max_beta2=0.9)
    first, second = (require_rule(optimizer, group) for group in optimizer.param_groups)
    settings: dict[str, Any] = {"weight_decay": 0.1, "eps": 1e-20, "decay_rate": -0.7, "max_beta2": 0.9}
    assert first == AdafactorRule(lr=0.5, clip_threshold=0.5, **settings)
    assert second == AdafactorRule(lr=0.25, **settings)
    optimizer.param_groups[0]["max_beta2"] = float("nan")
    with pytest.raises(ConfigError, match="max_beta2 of a param group is nan"):
        require_rule(optimizer, optimizer.param_groups[0])


def test_betas_may_be_tensors() -> None:
    betas = (torch.tensor(0.5), torch.tensor(0.75))
    optimizer = torch.optim.Adam([parameter()], lr=torch.tensor(0.5), betas=betas, foreach=False)
    assert require_rule(optimizer, optimizer.param_groups[0]) == Adam(lr=0.5, beta1=0.5, beta2=0.75, is_decoupled=False)


class OwnAdam(torch.optim.Adam):
    """Whatever it does."""


class OwnAdafactor(Adafactor):
    """Likewise."""


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: torch.optim.RMSprop(p), "RMSprop is none of the rules"),
        (lambda p: OwnAdam(p), "OwnAdam is none of the rules"),
        (lambda p: torch.optim.Adam(p, capturable=True), "capturable=True"),
        (lambda p: torch.optim.SGD(p, differentiable=True), "differentiable=True"),
        (lambda p: torch.optim.Adafactor(p), "torch.optim.Adafactor looks at whole matrices"),
        (lambda p: torch.optim.Muon(p), "torch.optim.Muon looks at whole matrices"),
        (lambda p: OwnAdafactor(p), "OwnAdafactor is none of the rules"),
    ],
)
def test_no_rule_and_why(make: Any, reason: str) -> None:
    optimizer = make([parameter()])
    group = optimizer.param_groups[0]
    assert reason in str(reason_without_rule(optimizer, group))
    with pytest.raises(UnsupportedOptimizerError, match=f"{reason}.*lowtide.optim.Lion or lowtide.optim.Adafactor"):
        require_rule(optimizer, group)


def test_weights_of_other_types_have_no_kernel() -> None:
    optimizer = torch.optim.Adam([parameter(), parameter(torch.float64)])
    assert "(4, 4) is torch.float64" in str(reason_without_rule(optimizer, optimizer.param_groups[0]))


def test_weights_with_gaps_have_no_kernel() -> None:
    sliced = torch.nn.Parameter(torch.zeros(6, 8)[:, ::2])
    optimizer = torch.optim.Adam([parameter(), torch.nn.Parameter(torch.zeros(3, 0)), sliced])
    reason = str(reason_without_rule(optimizer, optimizer.param_groups[0]))
    assert "shape (6, 4) and stride (8, 2) has elements that overlap or have gaps" in reason
    sliced.data = sliced.data.contiguous()
    assert reason_without_rule(optimizer, optimizer.param_groups[0]) is None


@pytest.mark.parametrize("value", [None, (0.9,), (1.0, 0.999), (0.9, 1.5), (-0.1, 0.9), 0.9])
def test_betas_that_are_none(value: object) -> None:
    optimizer = torch.optim.AdamW([parameter()])
    optimizer.param_groups[0]["betas"] = value
    with pytest.raises(ConfigError, match="betas of a param group are .* before the next step") as caught:
        require_rule(optimizer, optimizer.param_groups[0])
    assert caught.value.key == "betas"


def test_a_setting_that_is_gone() -> None:
    optimizer = torch.optim.AdamW([parameter()])
    del optimizer.param_groups[0]["eps"]
    with pytest.raises(ConfigError, match="eps of a param group is None"):
        require_rule(optimizer, optimizer.param_groups[0])


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), 1e39, "0.1", True, torch.ones(2)])
def test_a_rate_that_is_no_number(value: object) -> None:
    optimizer = torch.optim.AdamW([parameter()])
    optimizer.param_groups[0]["lr"] = value
    with pytest.raises(ConfigError, match="lr of a param group is .*set a finite number") as caught:
        require_rule(optimizer, optimizer.param_groups[0])
    assert caught.value.key == "lr"
