"""The order and the colours of the categories, the same in the terminal, on the page and in figures.

The colours are those of Okabe and Ito, which people with any of the common colour-vision deficiencies can tell apart,
and a grey dark enough to keep away from them. What stays for the whole step is cool, what comes and goes is warm, and
vermilion is kept for the peak itself.
"""

from __future__ import annotations

from lowtide.tracing.step_trace import Category

STACK_ORDER = (
    Category.WEIGHTS,
    Category.OPTIMIZER,
    Category.WORKSPACE,
    Category.GRADIENTS,
    Category.ACTIVATIONS,
    Category.TEMPORARIES,
)
"""From the bottom of the stack up: first what never changes, so that the moving parts sit on a level base."""

COLOURS = {
    Category.WEIGHTS: "#0072b2",
    Category.OPTIMIZER: "#56b4e9",
    Category.WORKSPACE: "#59616c",
    Category.GRADIENTS: "#009e73",
    Category.ACTIVATIONS: "#e69f00",
    Category.TEMPORARIES: "#cc79a7",
}

DARK_COLOURS = {
    Category.WEIGHTS: "#2f86c4",
    Category.OPTIMIZER: "#79c4f1",
    Category.WORKSPACE: "#7d848f",
    Category.GRADIENTS: "#2fb58d",
    Category.ACTIVATIONS: "#efb034",
    Category.TEMPORARIES: "#d88db8",
}
"""The same hues, a little lighter, for a dark background."""

PEAK_COLOUR = "#d55e00"

INK, QUIET, LINE = "#1b2028", "#5c6673", "#dfe3e8"
"""The colours of text, of what stands back and of rules, in figures: those of the light page."""
