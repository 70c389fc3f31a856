"""Prediction: a training step on tensors without memory, in a process of its own."""
