"""`torch.cuda` in a trace: the target card's answers, and the old ones afterwards."""

from __future__ import annotations

import pytest
import torch

from lowtide.hardware import find_hardware
from lowtide.tracing.ghost.cuda_module import cuda_functions


def test_it_answers_for_the_card() -> None:
    card = find_hardware("rtx-4090")
    with cuda_functions(card):
        assert torch.cuda.is_available()
        assert (torch.cuda.device_count(), torch.cuda.current_device()) == (1, 0)
        assert torch.cuda.get_device_capability() == card.compute_capability
        assert torch.cuda.get_device_properties(0).total_memory == card.memory_bytes
        assert torch.cuda.mem_get_info() == (card.memory_bytes, card.memory_bytes)
        assert torch.cuda.memory_allocated() == 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.manual_seed_all(3)
        torch.cuda.nvtx.range_push("block")
        torch.cuda.nvtx.range_pop()


def test_everything_is_put_back() -> None:
    before = dict(vars(torch.cuda)), dict(vars(torch.cuda.nvtx))
    with pytest.raises(KeyError), cuda_functions(find_hardware("h200")):
        raise KeyError
    assert (dict(vars(torch.cuda)), dict(vars(torch.cuda.nvtx))) == before
