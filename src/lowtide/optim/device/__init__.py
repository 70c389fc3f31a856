"""The update on a GPU: Triton kernels, and the tables that tell them of their pieces."""
