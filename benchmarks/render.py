"""Fills the tables in README.md and docs/ from the records in benchmarks/results, or checks that they are up to date.

    python -m benchmarks.render            # rewrite the tables, and draw the README's chart
    python -m benchmarks.render --check    # exit with 1 and name the files when one is out of date

A table stands between `<!-- rendered: NAME -->` and `<!-- end -->`, and NAME is a key of `RENDERERS`. Text is only ever
made from records, never read back: what is between the markers is thrown away.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import chart
from benchmarks.accuracy.tables import accuracy, accuracy_summary, fresh, fresh_summary
from benchmarks.activations.tables import chunked_loss, embedding, policies
from benchmarks.compiled.tables import check, sweep
from benchmarks.hardware import reached
from benchmarks.inductor.tables import generated
from benchmarks.lab.tables import (
    batches,
    compiled,
    curve,
    memory,
    moments,
    other_budgets,
    peak_memory,
    phases,
    predicted,
    quality,
)
from benchmarks.optim.tables import beside_peers, classes, host_kernel, readme, refused_classes, scale, shares, steps
from benchmarks.ranks.tables import beside_peers as ranks_beside_peers
from benchmarks.records import RESULTS
from benchmarks.session.fault_tables import kill_phases, kills, soak
from benchmarks.session.tables import budgets, saves, start_up, streaming
from lowtide.errors import UnknownNameError

REPO = Path(__file__).resolve().parent.parent

Renderer = Callable[[Path], str]


RENDERERS: dict[str, Renderer] = {
    "accuracy": accuracy,
    "activation-policies": policies,
    "activation-policies-long": functools.partial(policies, suite="policies_long"),
    "budget-check": check,
    "budget-sweep": sweep,
    "budget-sweep-bf16": functools.partial(sweep, dtype="bfloat16"),
    "chunked-loss": chunked_loss,
    "fresh": fresh,
    "fresh2": functools.partial(fresh, name="fresh2"),
    "fresh-summary": fresh_summary,
    "hardware-reached": reached,
    "host-embedding": embedding,
    "host-kernel": host_kernel,
    "kill-phases": kill_phases,
    "kills": kills,
    "lab-batches": batches,
    "lab-budgets": other_budgets,
    "lab-compiled": compiled,
    "lab-curve": curve,
    "lab-generated": generated,
    "lab-memory": memory,
    "lab-moments": moments,
    "lab-phases": phases,
    "lab-predicted": predicted,
    "lab-quality": quality,
    "optimizer": steps,
    "optimizer-beside-peers": beside_peers,
    "optimizer-classes": classes,
    "optimizer-classes-refused": refused_classes,
    "optimizer-long": functools.partial(steps, suite="optimizer_long"),
    "optimizer-readme": readme,
    "optimizer-scale": scale,
    "optimizer-shares": shares,
    "optimizer-short": functools.partial(steps, suite="optimizer_short"),
    "accuracy-summary": accuracy_summary,
    "held-out": functools.partial(accuracy, folder="held_out"),
    "held-out-summary": functools.partial(accuracy_summary, folder="held_out"),
    "peak-memory": peak_memory,
    "ranks-bf16": functools.partial(ranks_beside_peers, precision="bf16"),
    "ranks-fp32": functools.partial(ranks_beside_peers, precision="fp32"),
    "saves": saves,
    "session-budgets": budgets,
    "session-start-up": start_up,
    "session-streaming": streaming,
    "soak": soak,
}

_MARKER = re.compile(r"^[ \t]*<!--[ \t]*(?:rendered:[ \t]*(?P<name>\S+)|(?P<end>end))[ \t]*-->[ \t]*$", re.MULTILINE)


def fill(text: str, results: Path) -> str:
    """The text with every marked place rendered anew.

    Raises:
        UnknownNameError: A marker names no renderer.
        ValueError: A marker is not closed, or closed without being open.
        BadRecordError: The records behind a table are missing or bad.
    """
    pieces: list[str] = []
    position, opened = 0, ""
    for marker in _MARKER.finditer(text):
        line = text.count("\n", 0, marker.start()) + 1
        if marker["name"] and opened:
            raise ValueError(f"line {line}: {opened!r} is still open; close it with <!-- end -->")
        if marker["end"] and not opened:
            raise ValueError(f"line {line}: <!-- end --> without <!-- rendered: NAME --> before it")
        if marker["name"]:
            opened = marker["name"]
            if opened not in RENDERERS:
                raise UnknownNameError("renderer", opened, RENDERERS)
            pieces.append(text[position : marker.end()])
        else:
            pieces.append(f"\n{RENDERERS[opened](results)}\n")
            position, opened = marker.start(), ""
    if opened:
        raise ValueError(f"{opened!r} is never closed; add <!-- end --> after its table")
    return "".join([*pieces, text[position:]])


def documents(repo: Path) -> list[Path]:
    """The files that may hold rendered tables and runnable examples: README.md and everything in docs."""
    return [path for path in [repo / "README.md", *sorted((repo / "docs").rglob("*.md"))] if path.exists()]


CHART = "docs/step_time.svg"
"""Drawn where a document shows it."""


def stale(repo: Path, results: Path) -> dict[Path, str]:
    """The documents, and the chart, that are out of date, with the text they should have."""
    texts = {path: path.read_text(encoding="utf-8") for path in documents(repo)}
    changed = {path: new for path, text in texts.items() if (new := fill(text, results)) != text}
    if any(CHART in text for text in texts.values()):
        path = repo / CHART
        drawn = path.read_text(encoding="utf-8") if path.exists() else ""
        # By what it shows: another matplotlib draws other bytes of the same figures.
        if chart.description(drawn) != chart.describe(results):
            changed[path] = chart.draw(results)
    return changed


def main(arguments: Sequence[str] | None = None) -> int:
    """Render, or with --check only compare; the exit code."""
    parser = argparse.ArgumentParser(
        description="Fill the documentation's tables and draw its chart from the benchmark records."
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 when a table is out of date")
    check = parser.parse_args(arguments).check
    changed = stale(REPO, RESULTS)
    for path, text in changed.items():
        if not check:
            path.write_text(text, encoding="utf-8")
        print(f"{path.relative_to(REPO)}: {'out of date; run python -m benchmarks.render' if check else 'rendered'}")
    return 1 if check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
