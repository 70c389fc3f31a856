"""A whole training run from a recipe: what it trains on, the loop, its folder, and what a person sees of it."""

from __future__ import annotations
