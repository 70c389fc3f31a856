"""Leaks: memory that survives from step to step, and who holds it."""

from __future__ import annotations
