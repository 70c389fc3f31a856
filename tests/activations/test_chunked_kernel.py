"""Which kernel a chunked loss takes, on tensors that say they are on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide import compat
from lowtide.activations import chunked_kernel
from lowtide.activations.chunked_kernel import find_kernel


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has warned of nothing."""
    monkeypatch.setattr(chunked_kernel, "has_triton", lambda: False)
    chunked_kernel._warn_once.cache_clear()
    yield
    chunked_kernel._warn_once.cache_clear()


WARNING = (
    r"^the chunked loss runs through torch's operators, slower than the Triton kernel .*: the package 'triton' is not "
    "installed; run: pip install triton$"
)


@pytest.mark.usefixtures("without_triton")
def test_a_gpu_without_triton_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        hidden = torch.empty(0, device="cuda")
    # A warning that is not expected would be an error here: where nothing would be launched there is none.
    assert find_kernel(hidden, torch.bfloat16) is chunked_kernel._predicted
    monkeypatch.setattr(compat, "has_no_values", lambda tensor: False)
    assert find_kernel(hidden, torch.float64) is None
    assert find_kernel(torch.empty(0), torch.bfloat16) is None
    with pytest.warns(RuntimeWarning, match=WARNING) as caught:
        assert find_kernel(hidden, torch.bfloat16) is None
    assert [warning.filename for warning in caught] == [__file__]
    assert find_kernel(hidden, torch.float32) is None
