"""What a report says of a run that ended with an error."""

from __future__ import annotations

from lowtide import errors

_PLAIN = frozenset(
    kind.__name__
    for kind in (
        errors.ConfigError,
        errors.UnknownNameError,
        errors.PlanError,
        errors.BadRecordError,
        errors.MissingExtraError,
        errors.HardwareError,
        errors.UnsupportedOptimizerError,
        errors.UnsupportedHeadError,
        errors.BatchMismatchError,
    )
)
"""Errors about what was asked for, whose words say what to change: a traceback adds nothing for whoever reads a report."""
_ENDS = ("last heard: ", "nothing was heard of it", '  File "')
"""How the lines begin that follow an error's own words in a record."""


def error_words(message: str) -> str:
    r"""A record's message as it is; of a plain user error its own words alone, on one line.

    Example:
        >>> error_words('PlanError: too small\nlast heard: training\n  File "a.py", line 3, in run')
        'PlanError: too small'
        >>> error_words('KeyError: 3\nlast heard: training\n  File "a.py", line 3, in run').count("\n")
        2
    """
    return error_line(message) if message.partition(":")[0] in _PLAIN else message


def error_line(message: str) -> str:
    r"""A record's message without the traceback, on one line, whatever the error.

    Example:
        >>> error_line('KeyError: 3\nlast heard: training\n  File "a.py", line 3, in run')
        'KeyError: 3'
    """
    lines = message.splitlines()
    end = next((number for number, line in enumerate(lines) if number and line.startswith(_ENDS)), len(lines))
    return " ".join(" ".join(lines[:end]).split())
