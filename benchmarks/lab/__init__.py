"""The lab's recipes: tables of their runs, predictions, and whether a run repeats itself."""
