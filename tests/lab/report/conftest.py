from __future__ import annotations

from tests.report.conftest import browser

__all__ = ["browser"]
