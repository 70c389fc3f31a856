"""Layers and sequences in tiles: what is too large for the device at once is computed piece by piece."""
