"""Compiled code: what a compiler makes of a forward and backward under a memory budget, as steps, buffers and lifetimes."""
