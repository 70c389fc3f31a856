"""Attention: which backend a call takes, what that one allocates, and which of them a step used."""
