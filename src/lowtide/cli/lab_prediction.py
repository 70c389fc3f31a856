"""What the trace predicts for recipes, or why it does not, for the commands that show it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lowtide.errors import PlanError
from lowtide.lab.prediction import UnpredictedError, predict_recipe
from lowtide.lab.recipe import Recipe
from lowtide.lab.record import PredictedFigures
from lowtide.lab.so_far import shown_bytes
from lowtide.units import parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Of one recipe on one card."""

    figures: PredictedFigures | None
    why_not: str = ""
    """Where there are no figures."""
    too_small: str = ""
    """The recipe's own budget of the device, as it is written there, where the step does not fit into it."""

    @property
    def words(self) -> str:
        """The peak, its phase and what it is made of, in a line."""
        if self.figures is None:
            return f"no prediction: {self.why_not}"
        parts = sorted(self.figures.at_peak.items(), key=lambda part: -part[1])
        made_of = ", ".join(f"{category} {shown_bytes(num_bytes)}" for category, num_bytes in parts if num_bytes)
        return f"{shown_bytes(self.figures.peak_bytes)} in {self.figures.peak_phase} ({made_of})"


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
    # A budget that holds the step was the allocator's, so that nothing beyond it was reserved.
    if budget is None or (figures.reserved_bytes or figures.peak_bytes) <= parse_bytes(budget):
        return Prediction(figures=figures)
    return Prediction(figures=figures, too_small=str(budget))
