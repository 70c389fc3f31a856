"""Parameters under management: their groups, where their bytes are, pending values, gradients on the host."""
