"""Checkpoints: what a session saves, as files that a killed process, a full disk or a flipped bit cannot turn into others."""
