"""The forward and the backward of a managed model: windows, and what happens around them."""
