"""`lowtide lab show`: a recipe as it would be run, where its settings come from, and what it is predicted to need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from lowtide import config
from lowtide.cli.console import friendly_errors, progress
from lowtide.cli.lab_prediction import Prediction, predict_for
from lowtide.errors import ConfigError
from lowtide.lab.catalogue import annotated_yaml, choose_recipes, known_recipes, recipe_differences
from lowtide.lab.progress import shown_bytes
from lowtide.lab.recipe_file import resolve_recipe


def show_command(
    name: Annotated[str, typer.Argument(help="a recipe: a name such as peak_memory/control, or FILE.yaml")],
    set_: Annotated[list[str] | None, typer.Option("--set", help="steps=5, dtype=bfloat16, ...")] = None,
    predict: Annotated[bool, typer.Option("--predict", help="also the peak that the trace predicts")] = False,
    gpu: Annotated[str, typer.Option(help="the card to predict for")] = "h200",
    recipes: Annotated[list[Path] | None, typer.Option(help="a folder with more recipes; may be repeated")] = None,
    json_: Annotated[bool, typer.Option("--json", help="machine-readable on the standard output")] = False,
) -> None:
    """The recipe after everything that it extends and every --set, as YAML that can be run; comments say what set a key."""
    with friendly_errors():
        found, path = _one_recipe(name, recipes or [])
        resolved = resolve_recipe(path, set_ or [])
        plain = config.to_plain(resolved.recipe)
        predicted = None
        if predict:
            with progress("predicting") as say:
                predicted = predict_for(resolved.recipe, gpu, say)
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
        for line in [] if predicted is None else _lines(predicted, gpu):
            print(f"# {line}")
        # From what it descends from; from the defaults where it extends nothing.
        if differs := recipe_differences(path, resolved.recipe):
            print(f"# differs in {', '.join(differs)}")
        print(annotated_yaml(plain, resolved.sources), end="")


def _one_recipe(name: str, folders: list[Path]) -> tuple[str, Path]:
    chosen = choose_recipes([name], known_recipes(folders))
    if len(chosen) > 1:
        raise ConfigError(f"{name!r} stands for {len(chosen)} recipes: {', '.join(chosen)}; give one of these")
    return next(iter(chosen.items()))


def _lines(predicted: Prediction, gpu: str) -> list[str]:
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
