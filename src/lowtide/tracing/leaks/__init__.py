"""Leaks: memory that survives from step to step, and who holds it."""
