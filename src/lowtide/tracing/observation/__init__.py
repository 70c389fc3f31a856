"""Observation: what a real step or a whole run did to memory."""
