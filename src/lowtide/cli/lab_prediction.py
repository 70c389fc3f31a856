"""What the trace predicts for recipes, or why it does not, for the commands that show it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lowtide import config
from lowtide.cli.console import progress
from lowtide.errors import LowtideError, PlanError
from lowtide.hardware import find_hardware
from lowtide.lab.prediction import UnpredictedError, predict_recipe
from lowtide.lab.progress import shown_bytes
from lowtide.lab.recipe import Recipe
from lowtide.lab.recipe_file import read_recipe
from lowtide.lab.record import PredictedFigures
from lowtide.plain_text import Plain
from lowtide.units import parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Of one recipe on one card."""

    figures: PredictedFigures | None
    why_not: str = ""
    """Where there are no figures."""
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
        """For scripts."""
        figures: Plain = None
        if self.figures is not None:
            figures = {"gpu": gpu, **config.to_plain(self.figures), "fits_device_memory": not self.is_over}
        return {"predicted": figures, "not_predicted": self.why_not or None}


def predict_for(recipe: Recipe, gpu: str, say: Callable[[str], None]) -> Prediction:
    """The figures; a budget that is too small, even for the weights alone, is an answer and no mistake.

    Raises:
        UnknownNameError: There is no such card.
        ConfigError: The recipe does not fit its model.
    """
    try:
        figures = predict_recipe(recipe, hardware=gpu, say=say)
    except UnpredictedError as error:
        return Prediction(figures=None, why_not=str(error))
    except PlanError as error:
        if error.needed_bytes is None:
            raise
        return Prediction(figures=None, why_not=str(error))
    budget = None if recipe.plan is None else recipe.plan.device_memory
    return Prediction(figures=figures, budget="" if budget is None else str(budget))


def predict_all(listed: Mapping[str, Path], gpu: str) -> dict[str, Prediction]:
    """Of each recipe, some seconds each; what is wrong with one does not hide the others.

    Raises:
        UnknownNameError: There is no such card.
    """
    find_hardware(gpu)  # before the first takes its seconds
    predictions: dict[str, Prediction] = {}
    with progress("predicting") as say:
        for number, (name, path) in enumerate(listed.items(), start=1):
            say(f"{name}, {number} of {len(listed)}")
            try:
                predictions[name] = predict_for(read_recipe(path), gpu, lambda _: None)
            except LowtideError as error:
                predictions[name] = Prediction(figures=None, why_not=str(error))
    return predictions
