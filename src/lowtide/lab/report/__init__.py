"""Records of runs for people: a table, memory against speed, and memory through time, as HTML, markdown and a picture.

Records become rows, rows comparisons, and everything that is drawn or written is a pure function of those.
"""

from __future__ import annotations

from lowtide.lab.report.write import write_report

__all__ = ["write_report"]
