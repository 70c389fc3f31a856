"""Compiled recipes: torch's activation budget swept and checked on the host, and what is alive at the peak on a GPU."""
