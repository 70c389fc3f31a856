"""What reports and their parts are called: experiments by their folders, recipes without a folder by their names."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.lab.report.rows import Row

MOST_NAMES = 3
"""In a title; of more the rest is counted."""


def group_words(rows: Sequence[Row]) -> str:
    """The rows of one folder: its name, or where there is none those of the recipes."""
    return rows[0].folder or _listed(list(dict.fromkeys(row.name for row in rows)), "recipe")


def report_title(rows: Sequence[Row], swept: Sequence[str] = ()) -> str:
    """A report over all rows, whatever folders they are of; without rows, over the models whose budget was swept.

    Example:
        >>> rows = [Row(name=name, device="", model="", seeds=(0,), by_phase={}) for name in ("a/b", "mine", "a/c", "own")]
        >>> report_title(rows)
        'Lab report: a, mine, own'
    """
    if not rows:
        return f"Lab report: memory budget of {_listed(list(dict.fromkeys(swept)), 'model')}"
    # A recipe without a folder stands for itself.
    groups = list(dict.fromkeys(row.folder or row.name for row in rows))
    with_folder = any(row.folder for row in rows)
    return f"Lab report: {_listed(groups, 'group' if with_folder else 'recipe')}"


def _listed(names: Sequence[str], noun: str) -> str:
    if len(names) <= MOST_NAMES:
        return ", ".join(names)
    shown = names[: MOST_NAMES - 1]
    return f"{', '.join(shown)} and {len(names) - len(shown)} other {noun}s"
