"""Explanation: why the peak of a trace is where it is, and how far two traces are apart."""
