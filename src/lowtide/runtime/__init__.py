"""A model under management: the session, its windows, its updates, and what really happened."""
