"""What is kept of generated code."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from lowtide.errors import BadRecordError
from lowtide.lab.recipe import Recipe
from lowtide.lab.record import read_json, write_json

SCHEMA = "lowtide.inductor_code/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeRecord:
    """The code of one recipe's backward, by one torch."""

    name: str
    budget: float
    torch: str
    commit: str
    date: str
    backward_bytes: int
    all_reused_bytes: int
    """If each dead buffer were kept for the next one of its size."""

    @property
    def version(self) -> str:
        """Such as 2.8."""
        return ".".join(self.torch.partition("+")[0].split(".")[:2])


def budget_of(recipe: Recipe) -> float | None:
    """The activation budget that a recipe is compiled under; None where it is not compiled."""
    if recipe.compile is None:
        return None
    return 1.0 if recipe.compile.activation_budget is None else recipe.compile.activation_budget


def write(record: CodeRecord, folder: Path) -> Path:
    """One file for a recipe, a budget and a torch."""
    release = record.torch.partition("+")[0]
    path = folder / f"{record.name.rpartition('/')[2]}_{record.budget:g}_torch-{release}.json"
    write_json(path, {"schema": SCHEMA, **asdict(record)})
    return path


def read_all(folder: Path) -> list[CodeRecord]:
    """All of a folder, the oldest first.

    Raises:
        BadRecordError: There is none, or one of them is no such record.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            found.append(CodeRecord(**read_json(path, SCHEMA)))
        except TypeError as error:
            raise BadRecordError(f"{path}: {error}; run benchmarks.inductor.run again") from error
    if not found:
        raise BadRecordError(
            f"there are no records in {folder}; run benchmarks.inductor.run before the table is rendered"
        )
    return sorted(found, key=lambda record: record.date)
