"""What torch's activation memory budget does to the peak, read off the graph in seconds a point."""

from __future__ import annotations

from lowtide.lab.budget.points import BudgetPoint, Reversal, Rise, not_monotone, pareto, reversals
from lowtide.lab.budget.sweep import BudgetSweep, read_sweep, run_sweep, sweep_data, write_sweep

__all__ = [
    "BudgetPoint",
    "BudgetSweep",
    "Reversal",
    "Rise",
    "not_monotone",
    "pareto",
    "read_sweep",
    "reversals",
    "run_sweep",
    "sweep_data",
    "write_sweep",
]
