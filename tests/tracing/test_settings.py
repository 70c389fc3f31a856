"""StepSettings: what is refused, and with which words."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowtide import config
from lowtide.errors import ConfigError
from lowtide.tracing.settings import Implementation, StepSettings, UpdateSchedule


@pytest.mark.parametrize(
    ("settings", "key", "message"),
    [
        ({"accumulate": 0}, "accumulate", "at least 1, got 0"),
        ({"autocast": "float8"}, "autocast", "autocast is 'float8'; give float32, bfloat16 or float16"),
        ({"precision": "int8"}, "precision", "precision is 'int8'; give"),
        ({"attention": "Flash"}, "attention", "cudnn, flash, efficient, math, got 'Flash'"),
        ({"update": UpdateSchedule.IN_BACKWARD, "accumulate": 2}, "update", "excludes accumulate > 1"),
        ({"update": UpdateSchedule.IN_BACKWARD, "max_grad_norm": 1.0}, "update", "max_grad_norm"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as info:
        StepSettings(**settings)
    assert info.value.key == key


def test_the_default_changes_nothing() -> None:
    settings = StepSettings()
    assert (settings.autocast, settings.precision, settings.implementation, settings.attention) == (None,) * 4
    assert (settings.accumulate, settings.activations, settings.keep_gradients) == (1, None, False)


@pytest.mark.parametrize("word", ["bf16", "bfloat16", "torch.bfloat16", torch.bfloat16])
def test_a_type_has_one_name_however_it_is_written(word: Any) -> None:
    assert StepSettings(autocast=word, precision=word) == StepSettings(autocast="bfloat16", precision="bfloat16")
    assert config.override(StepSettings(), [f"autocast={word}"]).autocast == "bfloat16"


def test_in_backward_alone_is_fine() -> None:
    assert StepSettings(update=UpdateSchedule.IN_BACKWARD).update is UpdateSchedule.IN_BACKWARD


def test_as_plain_data() -> None:
    plain = config.to_plain(StepSettings(implementation=Implementation.FUSED, max_grad_norm=0.5))
    assert plain["implementation"] == "fused"
    assert plain["update"] == "deferred"
    assert plain["max_grad_norm"] == 0.5
