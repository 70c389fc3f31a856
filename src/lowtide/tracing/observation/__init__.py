"""Observation: what a real step or a whole run did to memory."""

from __future__ import annotations
