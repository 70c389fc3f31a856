"""Measure managed training on a GPU beside plain torch, one process a row."""
