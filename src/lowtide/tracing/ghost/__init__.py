"""Ghost tensors: shapes, types and lifetimes of a CUDA training step on a machine that has no CUDA."""
