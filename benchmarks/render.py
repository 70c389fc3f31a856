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

import numpy as np

from benchmarks import chart
from benchmarks.activations.tables import chunked_loss, embedding, policies
from benchmarks.budget_tables import check, sweep
from benchmarks.inductor.tables import generated
from benchmarks.lab_tables import batches, compiled, curve, memory, moments, other_budgets, phases, predicted, quality
from benchmarks.optim.tables import beside_peers, classes, host_kernel, readme, refused_classes, scale, shares, steps
from benchmarks.records import Record, gib, newest, percent, sources, table
from benchmarks.session.tables import budgets, start_up, streaming
from lowtide.errors import BadRecordError, UnknownNameError
from lowtide.units import GiB

REPO = Path(__file__).resolve().parent.parent
RESULTS = REPO / "benchmarks" / "results"

Renderer = Callable[[Path], str]


# The accuracy suite: predicted on a machine without a GPU, measured on the card

_ACCURACY_SCHEMA = "lowtide.accuracy/1"
_SIDES = ("allocated", "reserved")
_CASE_TEXT = ("name", "family", "precision", "technique", "optimizer")
_CASE_FIELDS = (
    *_CASE_TEXT,
    *(f"{origin}_{side}_bytes" for side in _SIDES for origin in ("measured", "predicted")),
    "predicted_peak_phase",
    "measured_peak_phase",
)


def _cases(results: Path, folder: str) -> tuple[Record, list[dict[str, object]]]:
    record = newest(results / folder, _ACCURACY_SCHEMA)
    return record, record.rows("cases", _CASE_FIELDS)


def _pair(case: dict[str, object], side: str) -> tuple[int, int] | None:
    """(measured, predicted) bytes, or None for a case that did not run to its end."""
    measured, predicted = case[f"measured_{side}_bytes"], case[f"predicted_{side}_bytes"]
    if not isinstance(measured, int) or not isinstance(predicted, int) or measured <= 0:
        return None
    return measured, predicted


def _side_cells(case: dict[str, object], side: str) -> list[str]:
    pair = _pair(case, side)
    if pair is None:
        return ["-", "-", "failed"]
    measured, predicted = pair
    return [gib(measured), gib(predicted), percent(predicted / measured - 1)]


def _phase_cell(case: dict[str, object]) -> str:
    predicted, measured = case["predicted_peak_phase"], case["measured_peak_phase"]
    return str(predicted) if predicted == measured else f"{predicted} (measured: {measured})"


def accuracy(results: Path, folder: str = "accuracy") -> str:
    """Every case of the newest run of the suite, or of another folder of cases."""
    record, cases = _cases(results, folder)
    header = ["case", "family", "precision", "technique", "optimizer", "peak in"]
    header += ["allocated GiB", "predicted GiB", "error", "reserved GiB", "predicted GiB", "error"]
    rows = [
        [
            *(str(case[field]) for field in _CASE_TEXT),
            _phase_cell(case),
            *(cell for side in _SIDES for cell in _side_cells(case, side)),
        ]
        for case in cases
    ]
    return table(header, rows, num_text=6) + f"\n\n{sources([record])}"


def accuracy_summary(results: Path, folder: str = "accuracy") -> str:
    """How far the newest run is off: count, median, 95th percentile, worst."""
    record, cases = _cases(results, folder)
    rows = []
    for side in _SIDES:
        pairs = [(pair, str(case["name"])) for case in cases if (pair := _pair(case, side))]
        errors = [(abs(predicted / measured - 1), name) for (measured, predicted), name in pairs]
        if not errors:
            rows.append([f"peak {side}", "-", "0", "-", "-", "-"])
            continue
        worst, name = max(errors)
        # numpy's default: linear between the two nearest cases.
        median, high = np.percentile([error for error, _ in errors], [50, 95])
        shares = [f"{100 * share:.2f}%" for share in (median, high, worst)]
        rows.append([f"peak {side}", name, str(len(errors)), *shares])
    header = ["error of", "worst case", "cases", "median", "95th percentile", "worst"]
    failed = sum(any(_pair(case, side) is None for side in _SIDES) for case in cases)
    remark = f"{failed} of {len(cases)} cases did not run to their end and are not counted." if failed else ""
    return table(header, rows, num_text=2) + f"\n\n{sources([record], remark)}"


def fresh(results: Path, name: str = "fresh") -> str:
    """Steps in fresh processes: the prediction made before the measurement, and that of the rules fixed after it."""
    measured = newest(results / "fresh", "lowtide.fresh/1", f"{name}_measured_*")
    sides = {side: f"{side}_life" for side in _SIDES}
    rows = [
        row for row in measured.rows("rows", ("name",)) if all(isinstance(row.get(key), int) for key in sides.values())
    ]
    predictions = [newest(results / "fresh", "lowtide.fresh_predicted/1", f"{name}_{kind}_*") for kind in _FRESH]
    guesses = [{str(row["name"]): row for row in each.rows("rows", ("name",))} for each in predictions]
    cells: list[list[str]] = []
    errors: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        cells.append([str(row["name"])])
        for side, key in sides.items():
            truth = row[key]
            assert isinstance(truth, int)
            cells[-1].append(gib(truth))
            for number, guess in enumerate(guesses):
                predicted = _get_int(guess[str(row["name"])], side, predictions[number])
                errors.setdefault((side, number), []).append(abs(predicted / truth - 1))
                cells[-1].append(percent(predicted / truth - 1))
    for words, share in (("median", 50), ("95th percentile", 95), ("worst", 100)):
        figures = [[f"{100 * float(np.percentile(errors[side, n], share)):.2f}%" for n in (0, 1)] for side in _SIDES]
        cells.append([f"**{words}**", *(cell for figure in figures for cell in ("", *figure))])
    header = ["case", "allocated GiB", "blind", "after", "reserved GiB", "blind", "after"]
    return table(header, cells, num_text=1) + f"\n\n{sources([measured, *predictions])}"


_FRESH = ("predicted", "repredicted")
_ATTENTION = frozenset(
    {"GPT-2", "Llama", "T5", "BERT", "Mixtral", "ViT", "Swin", "nn.Transformer", "Whisper"}
    | {"OPT", "Qwen2", "RoBERTa", "BART", "DeiT"}
)
"""Families of attention models; not those behind a stack of convolutions (Speech transformer, MobileViT)."""


def fresh_summary(results: Path) -> str:
    """Both lists of fresh processes, each blind and after the fixes, and the attention models among them."""
    errors: dict[tuple[str, str, str], list[float]] = {}
    records = []
    for name, words in (("fresh", "first list"), ("fresh2", "second list")):
        measured = newest(results / "fresh", "lowtide.fresh/1", f"{name}_measured_*")
        truths = {str(row["name"]): row for row in measured.rows("rows", ("name", "family"))}
        records.append(measured)
        for kind in _FRESH:
            predicted = newest(results / "fresh", "lowtide.fresh_predicted/1", f"{name}_{kind}_*")
            records.append(predicted)
            for row in predicted.rows("rows", ("name",)):
                truth = truths[str(row["name"])]
                groups = [words, "both lists", *(["attention models of both"] if truth["family"] in _ATTENTION else [])]
                for side in _SIDES if "failed" not in truth else ():
                    error = abs(_get_int(row, side, predicted) / _get_int(truth, f"{side}_life", measured) - 1)
                    for group in groups:
                        errors.setdefault((group, kind, side), []).append(error)
    cells = []
    for group in ("first list", "second list", "both lists", "attention models of both"):
        for kind, blind in zip(_FRESH, ("blind", "after the fixes, not blind"), strict=True):
            figures = [np.percentile(errors[group, kind, side], [50, 95, 100]) for side in _SIDES]
            shares = [f"{100 * float(share):.2f}%" for figure in figures for share in figure]
            cells.append([group, blind, str(len(errors[group, kind, "reserved"])), *shares])
    header = ["steps", "predicted", "number"]
    header += [f"{side} {words}" for side in _SIDES for words in ("median", "95th percentile", "worst")]
    return table(header, cells, num_text=2) + f"\n\n{sources(records)}"


def _get_int(row: dict[str, object], key: str, record: Record) -> int:
    value = row.get(key)
    if not isinstance(value, int):
        raise BadRecordError(f"{record.path}: {row['name']!r} needs a number in {key}; predict it again")
    return value


def peak_memory(results: Path) -> str:
    """The rows of the published Peak Memory table, predicted."""
    record = newest(results / "peak_memory", "lowtide.peak_memory/1")
    rows = []
    for row in record.rows("rows", ("name", "published_gib", "predicted_bytes", "peak_phase")):
        published, predicted = row["published_gib"], row["predicted_bytes"]
        if not isinstance(published, int | float) or not isinstance(predicted, int) or published <= 0:
            raise BadRecordError(f"{record.path}: {row['name']!r} needs numbers in published_gib and predicted_bytes")
        error = percent(predicted / GiB / published - 1)
        rows.append([str(row["name"]), str(row["peak_phase"]), f"{published:.3f}", gib(predicted), error])
    header = ["configuration", "peak in", "published GiB", "predicted GiB", "error"]
    return table(header, rows, num_text=2) + f"\n\n{sources([record])}"


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
    "host-embedding": embedding,
    "host-kernel": host_kernel,
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
    "session-budgets": budgets,
    "session-start-up": start_up,
    "session-streaming": streaming,
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
