"""The text that the lab's `kind: stories` reads: a generator, and the command that writes its files."""
