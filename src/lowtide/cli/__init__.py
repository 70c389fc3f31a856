"""The command line: thin commands over the library, and the only place that prints."""
