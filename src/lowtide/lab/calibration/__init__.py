"""Measures this machine: kernels, copies, updates, and what the host's Python needs for a step."""
