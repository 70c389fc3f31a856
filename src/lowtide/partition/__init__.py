"""A forward and backward that torch has parted under a memory budget, read as steps, buffers and lifetimes."""
