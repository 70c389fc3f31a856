"""CardAttention: attention takes the backend of a card while a graph is traced on tensors of the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from lowtide.tracing.ghost.attention import Attention


class CardAttention(TorchFunctionMode):
    """Attention takes the backend it would take on a card, whose kernels save other tensors than the host's."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self._attention = attention

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # whatever torch's function returns
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
