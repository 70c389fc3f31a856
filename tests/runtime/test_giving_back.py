"""What a closed session leaves: optimizer state where a plain step expects it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lowtide.runtime.hand_over import bring_state_to_parameters


@pytest.mark.parametrize(
    ("settings", "device_of_step"),
    [({"foreach": True}, "cpu"), ({"fused": True}, "meta"), ({"capturable": True}, "meta")],
)
def test_state_goes_to_its_parameter_and_the_count_where_the_kernel_reads_it(
    settings: dict[str, Any], device_of_step: str
) -> None:
    weight = nn.Parameter(torch.empty(4, device="meta"))  # stands for a device that is not the host
    optimizer = torch.optim.AdamW([weight], **settings)
    optimizer.state[weight] = {"step": torch.tensor(3.0), "exp_avg": torch.ones(4), "exp_avg_sq": torch.ones(4)}
    bring_state_to_parameters(optimizer)
    found = {name: value.device.type for name, value in optimizer.state[weight].items()}
    assert found == {"step": device_of_step, "exp_avg": "meta", "exp_avg_sq": "meta"}
