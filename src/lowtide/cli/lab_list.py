"""The recipes of `lowtide lab ls`: plain rows for scripts, a line each for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.text import Text

from lowtide.errors import ConfigError
from lowtide.lab.catalogue import recipe_differences
from lowtide.lab.recipe_file import read_recipe
from lowtide.lab.records import folder_of
from lowtide.plain_text import Plain

Rows = Sequence[dict[str, Plain]]
TINY = "_tiny"
"""Ends the name of a folder that has the recipes of another one once more, small."""


def recipe_row(name: str, path: Path) -> dict[str, Plain]:
    """What a recipe is about; of one that cannot be read, why."""
    row: dict[str, Plain] = {"name": name, "path": str(path)}
    try:
        recipe = read_recipe(path)
    except ConfigError as error:
        # One bad file of a folder must not hide the others.
        return row | {"error": str(error)}
    published = None if recipe.published is None else recipe.published.peak_gib
    return row | {
        "about": recipe.about,
        "model": recipe.model,
        "differs": list(recipe_differences(path, recipe)),
        "published_peak_gib": published,
    }


def recipe_lines(rows: Rows, *, is_folded: bool) -> Iterator[Text]:
    """The rows by folder, a line each; of one that cannot be read all of the error.

    Args:
        rows: In the order of their folders.
        is_folded: Whether a folder of small twins is one line that says how to list them.
    """
    groups: dict[str, list[dict[str, Plain]]] = {}
    for row in rows:
        groups.setdefault(folder_of(str(row["name"])), []).append(row)
    width = max((len(_last(row)) for row in rows), default=0)
    for folder, group in groups.items():
        if is_folded and _is_twin(folder, groups):
            words = f"the same {len(group)}, small: lowtide lab ls '{folder}/*'"
            yield Text.assemble((f"{folder}/", "bold"), f" {words}")
            continue
        models = ", ".join(dict.fromkeys(str(row["model"]) for row in group if "model" in row))
        if folder:
            yield Text.assemble((f"{folder}/", "bold"), (f" {models}", "dim"))
        yield from (_line(row, width, indent="  " if folder else "") for row in group)


def _is_twin(folder: str, groups: Mapping[str, Rows]) -> bool:
    if not folder.endswith(TINY):
        return False
    own, others = groups[folder], groups.get(folder.removesuffix(TINY), ())
    # A recipe that cannot be read is to be seen, and so is one that only the small folder has.
    return not any("error" in row for row in own) and {*map(_last, own)} <= {*map(_last, others)}


def _line(row: dict[str, Plain], width: int, *, indent: str) -> Text:
    name = f"{indent}{_last(row):{width}}  "
    if "error" in row:
        return Text.assemble(name, (f"cannot be read: {row['error']}", "bold red"))
    differs = row["differs"]
    assert isinstance(differs, list)
    # Without a note its settings have to do.
    note = str(row["about"]) if row["about"] else ", ".join(map(str, differs))
    return Text.assemble(name, note, no_wrap=True, overflow="ellipsis")


def _last(row: dict[str, Plain]) -> str:
    return str(row["name"]).rpartition("/")[2]
