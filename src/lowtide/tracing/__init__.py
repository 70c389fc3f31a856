"""What one training step allocates: predicted on ghost tensors, or observed on real ones."""

from __future__ import annotations
