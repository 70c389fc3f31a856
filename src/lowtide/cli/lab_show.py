"""`lowtide lab show`: a recipe as it would be run, where its settings come from, and what it is predicted to need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from lowtide import config
from lowtide.cli.console import friendly_errors, progress
from lowtide.errors import ConfigError
from lowtide.lab.catalogue import choose_recipes, known_recipes
from lowtide.lab.prediction import UnpredictedError, predict_recipe
from lowtide.lab.recipe import Recipe
from lowtide.lab.recipe_file import resolve_recipe
from lowtide.lab.record import PredictedFigures
from lowtide.lab.shown_recipe import annotated_yaml
from lowtide.lab.so_far import shown_bytes


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
        predicted, why_not = _prediction(resolved.recipe, gpu) if predict else (None, "")
        if json_:
            shown = {
                "schema": "lowtide.lab_recipe/1",
                "name": found,
                "path": str(path),
                "recipe": plain,
                "sources": resolved.sources,
                "predicted": None if predicted is None else {"gpu": gpu, **config.to_plain(predicted)},
                "not_predicted": why_not or None,
            }
            print(json.dumps(shown, indent=2))
            return
        # Comments, so that the whole of it is a recipe: `lab show NAME > mine.yaml`.
        print(f"# {found}")
        if predict:
            print(f"# {_words(predicted, gpu) if predicted is not None else f'no prediction: {why_not}'}")
        print(annotated_yaml(plain, resolved.sources), end="")


def _one_recipe(name: str, folders: list[Path]) -> tuple[str, Path]:
    chosen = choose_recipes([name], known_recipes(folders))
    if len(chosen) > 1:
        raise ConfigError(f"{name!r} stands for {len(chosen)} recipes: {', '.join(chosen)}; give one of these")
    return next(iter(chosen.items()))


def _prediction(recipe: Recipe, gpu: str) -> tuple[PredictedFigures | None, str]:
    try:
        with progress("predicting") as say:
            return predict_recipe(recipe, hardware=gpu, say=say), ""
    except UnpredictedError as error:
        return None, str(error)


def _words(predicted: PredictedFigures, gpu: str) -> str:
    parts = sorted(predicted.at_peak.items(), key=lambda part: -part[1])
    made_of = ", ".join(f"{category} {shown_bytes(num_bytes)}" for category, num_bytes in parts if num_bytes)
    return f"predicted peak on {gpu}: {shown_bytes(predicted.peak_bytes)} in {predicted.peak_phase} ({made_of})"
