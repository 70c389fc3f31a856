"""Tables of predictions, made on a machine without a GPU, beside what a GPU measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.records import Record, gib, newest, percent, sources, table
from lowtide.errors import BadRecordError

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
    header = ["error of", "worst case", "cases", "median error", "95th percentile", "worst error"]
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
