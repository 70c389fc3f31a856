"""Recipes on the terminal: `lowtide lab ls`, `lowtide lab show`, and what the trace predicts for them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from lowtide import config
from lowtide.cli.console import Gpu, Json, Recipes, friendly_errors, progress
from lowtide.errors import ConfigError, LowtideError, PlanError
from lowtide.hardware import Hardware, find_hardware
from lowtide.lab.catalogue import annotated_yaml, choose_recipes, recipe_differences
from lowtide.lab.preflight import UnpredictedError, predict
from lowtide.lab.progress import shown_bytes
from lowtide.lab.recipe import Recipe
from lowtide.lab.recipe_file import known_recipes, read_recipe, resolve_recipe
from lowtide.lab.record import PredictedFigures
from lowtide.lab.records import folder_of
from lowtide.plain_text import Plain
from lowtide.report.table import Table, Tone, Value, make_table, number, words
from lowtide.units import format_bytes, parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What one recipe needs on some hardware, or why that is not known."""

    figures: PredictedFigures | None
    why_not: str = ""
    """Why there are no figures."""
    budget: str = ""
    """The recipe's own of the device, as it is written there; "" where it has none."""

    @property
    def is_over(self) -> bool:
        """Whether the step does not fit into that budget."""
        if self.figures is None or not self.budget:
            return False
        # A budget that holds the step was the allocator's, so that nothing beyond it was reserved.
        return (self.figures.reserved_bytes or self.figures.peak_bytes) > parse_bytes(self.budget)

    @property
    def words(self) -> str:
        """The peak, its phase and what it is made of, in a line."""
        if self.figures is None:
            return f"no prediction: {self.why_not}"
        parts = sorted(self.figures.at_peak.items(), key=lambda part: -part[1])
        made_of = ", ".join(f"{category} {shown_bytes(num_bytes)}" for category, num_bytes in parts if num_bytes)
        return f"{shown_bytes(self.figures.peak_bytes)} in {self.figures.peak_phase} ({made_of})"

    def plain(self, gpu: str) -> dict[str, Plain]:
        """The prediction for scripts."""
        figures: Plain = None
        if self.figures is not None:
            figures = {"gpu": gpu, **config.to_plain(self.figures), "fits_device_memory": not self.is_over}
        return {"predicted": figures, "not_predicted": self.why_not or None}


def _predict_for(recipe: Recipe, gpu: str, say: Callable[[str], None]) -> Prediction:
    """The figures; a budget that is too small, even for the weights alone, is an answer and no mistake.

    Raises:
        UnknownNameError: There is no such hardware.
        ConfigError: The recipe does not fit its model.
    """
    try:
        figures = predict(recipe, hardware=gpu, say=say)
    except UnpredictedError as error:
        return Prediction(figures=None, why_not=str(error))
    except PlanError as error:
        if error.needed_bytes is None:
            raise
        return Prediction(figures=None, why_not=str(error))
    budget = None if recipe.plan is None else recipe.plan.device_memory
    return Prediction(figures=figures, budget="" if budget is None else str(budget))


def predict_all(listed: Mapping[str, Path], gpu: str) -> dict[str, Prediction]:
    """Predict each recipe, in some seconds each; what is wrong with one does not hide the others.

    Raises:
        UnknownNameError: There is no such hardware.
    """
    find_hardware(gpu)  # before the first takes its seconds
    predictions: dict[str, Prediction] = {}
    with progress("predicting") as say:
        for number, (name, path) in enumerate(listed.items(), start=1):
            say(f"{name}, {number} of {len(listed)}")
            try:
                predictions[name] = _predict_for(read_recipe(path), gpu, lambda _: None)
            except LowtideError as error:
                predictions[name] = Prediction(figures=None, why_not=str(error))
    return predictions


def prediction_table(predictions: Mapping[str, Prediction], hardware: Hardware) -> Table:
    """What recipes need on some hardware, the smallest peak first; those that are not predicted are not in it."""
    predicted = [(name, each, each.figures) for name, each in predictions.items() if each.figures is not None]
    return make_table(
        f"predicted on {hardware.name}, {format_bytes(hardware.memory_bytes)}",
        sorted(predicted, key=lambda row: row[2].peak_bytes),
        words("recipe", lambda row: row[0], wraps=True),
        number("peak", lambda row: shown_bytes(row[2].peak_bytes)),
        number("reserved", lambda row: shown_bytes(row[2].reserved_bytes or row[2].peak_bytes)),
        words("in", lambda row: row[2].peak_phase),
        words("fits", lambda row: _fits(row[1], row[2], hardware)),
    )


def _fits(prediction: Prediction, figures: PredictedFigures, hardware: Hardware) -> Value:
    if prediction.is_over:
        return Value(f"not its {prediction.budget}", tone=Tone.BAD)
    if (figures.reserved_bytes or figures.peak_bytes) + hardware.context_bytes <= hardware.memory_bytes:
        return Value("yes", tone=Tone.GOOD)
    # What is cached can be given back, so that between the two it may.
    can_fit = figures.peak_bytes + hardware.context_bytes <= hardware.memory_bytes
    return Value("hardly", tone=Tone.STRONG) if can_fit else Value("no", tone=Tone.BAD)


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
        is_folded: Whether a folder that has the recipes of another once more, small, is one line that says how to list them.
    """
    groups: dict[str, list[dict[str, Plain]]] = {}
    for row in rows:
        groups.setdefault(folder_of(str(row["name"])), []).append(row)
    width = max((len(_last(row)) for row in rows), default=0)
    for folder, group in groups.items():
        if is_folded and _is_small_copy(folder, groups):
            words = f"the same {len(group)}, small: lowtide lab ls '{folder}/*'"
            yield Text.assemble((f"{folder}/", "bold"), f" {words}")
            continue
        models = ", ".join(dict.fromkeys(str(row["model"]) for row in group if "model" in row))
        if folder:
            yield Text.assemble((f"{folder}/", "bold"), (f" {models}", "dim"))
        yield from (_recipe_line(row, width, indent="  " if folder else "") for row in group)


def _is_small_copy(folder: str, groups: Mapping[str, Rows]) -> bool:
    if not folder.endswith(TINY):
        return False
    own, others = groups[folder], groups.get(folder.removesuffix(TINY), ())
    # A recipe that cannot be read is to be seen, and so is one that only the small folder has.
    return not any("error" in row for row in own) and {*map(_last, own)} <= {*map(_last, others)}


def _recipe_line(row: dict[str, Plain], width: int, *, indent: str) -> Text:
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


def show_command(
    name: Annotated[str, typer.Argument(help="a recipe: a name such as peak_memory/control, or FILE.yaml")],
    set_: Annotated[list[str] | None, typer.Option("--set", help="steps=5, dtype=bfloat16, ...")] = None,
    predict: Annotated[bool, typer.Option("--predict", help="also the peak that the trace predicts")] = False,
    gpu: Gpu = "h200",
    recipes: Recipes = None,
    json_: Json = False,
) -> None:
    """The recipe after everything that it extends and every --set, as YAML that can be run; comments say what set a key."""
    with friendly_errors():
        chosen = choose_recipes([name], known_recipes(recipes or []))
        if len(chosen) > 1:
            raise ConfigError(f"{name!r} stands for {len(chosen)} recipes: {', '.join(chosen)}; give one of these")
        ((found, path),) = chosen.items()
        resolved = resolve_recipe(path, set_ or [])
        plain = config.to_plain(resolved.recipe)
        predicted = None
        if predict:
            with progress("predicting") as say:
                predicted = _predict_for(resolved.recipe, gpu, say)
        if json_:
            shown = {
                "schema": "lowtide.lab_recipe/1",
                "name": found,
                "path": str(path),
                "recipe": plain,
                "sources": resolved.sources,
                **(predicted or Prediction(figures=None)).plain(gpu),
            }
            print(json.dumps(shown, indent=2))
            return
        # Comments, so that the whole of it is a recipe: `lab show NAME > mine.yaml`.
        print(f"# {found}")
        for line in [] if predicted is None else _prediction_lines(predicted, gpu):
            print(f"# {line}")
        # From what it descends from; from the defaults where it extends nothing.
        if differs := recipe_differences(path, resolved.recipe):
            print(f"# differs in {', '.join(differs)}")
        print(annotated_yaml(plain, resolved.sources), end="")


def _prediction_lines(predicted: Prediction, gpu: str) -> list[str]:
    if predicted.figures is None:
        return [predicted.words]
    lines = [f"predicted peak on {gpu}: {predicted.words}"]
    if predicted.is_over:
        reserved = predicted.figures.reserved_bytes or predicted.figures.peak_bytes
        lines.append(
            f"its device_memory of {predicted.budget} does not hold that step: it would be out of memory; without "
            f"the budget the allocator takes {shown_bytes(reserved)}"
        )
    return lines
