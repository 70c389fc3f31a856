"""Rows run in this process here, and change settings of torch that other tests look at."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_kernels_afterwards() -> Iterator[None]:
    """Rows on the CPU switch oneDNN off, with which an LSTM takes other memory."""
    before = torch.backends.mkldnn.enabled
    yield
    torch.backends.mkldnn.enabled = before
