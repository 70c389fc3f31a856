"""WhatIfRow: one line of the what-if table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfRow:
    """One technique, or several together, tried on top of what is already on."""

    technique: str
    before_bytes: int
    after_bytes: int
    reason: str
    """One sentence: why it saves what it saves."""

    @property
    def saved_bytes(self) -> int:
        """Negative when the technique raises the peak."""
        return self.before_bytes - self.after_bytes
