"""Ghost tensors: shapes, types and lifetimes of a CUDA training step on a machine that has no CUDA."""

from __future__ import annotations
