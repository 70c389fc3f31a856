"""Reference models, and any other model by name."""

from __future__ import annotations

from lowtide.models.registry import built_in_names, resolve_model
from lowtide.models.source import ModelSource

__all__ = ["ModelSource", "built_in_names", "resolve_model"]
