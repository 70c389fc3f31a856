"""`optimizer.state` while a session is open: what is read there is the state of the last step, or an error says where it is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from typing import Any

import torch

from lowtide.errors import OptimizerStateError

Entries = dict[str, Any]


class LiveState(defaultdict[torch.Tensor, Entries]):
    """The states of an optimizer whose own step runs on the chunks: reading waits for the updates under way.

    The session itself, whose worker makes them, goes past this by `dict`'s own methods.
    """

    def __init__(self, settle: Callable[[], None], entries: Mapping[torch.Tensor, Entries]) -> None:
        super().__init__(dict, entries)
        self._settle = settle

    def __getitem__(self, key: torch.Tensor) -> Entries:
        self._settle()
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[torch.Tensor]:
        self._settle()
        return super().__iter__()

    def get(self, key: torch.Tensor, default: Any = None) -> Any:
        """As a dictionary's."""
        self._settle()
        return super().get(key, default)

    def items(self) -> ItemsView[torch.Tensor, Entries]:  # type: ignore[override]  # of a dictionary it is its own class
        """As a dictionary's."""
        self._settle()
        return super().items()

    def values(self) -> ValuesView[Entries]:  # type: ignore[override]  # of a dictionary it is its own class
        """As a dictionary's."""
        self._settle()
        return super().values()

    def copy(self) -> defaultdict[torch.Tensor, Entries]:  # type: ignore[override]  # not of this class
        """A copy is torch's own kind of dictionary."""
        self._settle()
        return defaultdict(dict, dict.items(self))

    def __copy__(self) -> defaultdict[torch.Tensor, Entries]:  # type: ignore[override]  # not of this class
        return self.copy()

    def __reduce__(self) -> tuple[Any, ...]:
        self._settle()
        return defaultdict, (dict, dict(dict.items(self)))


class AbsentState(defaultdict[torch.Tensor, Entries]):
    """Empty: the states are the session's, in its own formats."""

    def __init__(self) -> None:
        super().__init__(dict)

    def __missing__(self, key: torch.Tensor) -> Entries:
        raise OptimizerStateError(
            "optimizer.state is empty while a session with precision= is open: the states are the session's, in its own formats; "
            "read them with optimizer.state_dict(), and write them with optimizer.load_state_dict()"
        )

    def get(self, key: torch.Tensor, default: Any = None) -> Any:
        """Refused, as reading is: what is not here is not absent."""
        del default
        return self[key]

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is torch's own kind of dictionary."""
        return defaultdict, (dict, dict(dict.items(self)))
