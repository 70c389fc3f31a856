"""Checks that several parts of a recipe share."""

from __future__ import annotations

from lowtide.errors import ConfigError


def at_least(key: str, value: float, least: int) -> None:
    """Refuse a setting below its least value.

    Raises:
        ConfigError: It is below.
    """
    if value < least:
        raise ConfigError(f"{key} is {value}; give {least} or more", key=key)
