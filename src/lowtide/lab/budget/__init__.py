"""What torch's activation memory budget does to the peak, read off the graph in seconds a point."""

from __future__ import annotations

from lowtide.lab.budget.points import BudgetPoint, Rise, not_monotone, pareto
from lowtide.lab.budget.sweep import BudgetSweep, read_sweep, run_sweep, sweep_data, write_sweep

__all__ = [
    "BudgetPoint",
    "BudgetSweep",
    "Rise",
    "not_monotone",
    "pareto",
    "read_sweep",
    "run_sweep",
    "sweep_data",
    "write_sweep",
]
