"""The table of generated code, over records of two compilers."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.inductor import record, run
from benchmarks.inductor.record import CodeRecord, budget_of
from benchmarks.inductor.tables import generated
from benchmarks.records import RESULTS
from lowtide.errors import BadRecordError
from lowtide.lab.recipe_file import find_recipe, read_recipe
from lowtide.lab.record import write_json, write_record
from lowtide.units import GiB, KiB
from tests.lab.report.samples import record as run_record

NAME = "peak_memory/memory_budget_60"
OLDER = CodeRecord(
    name=NAME, budget=0.6, torch="2.8.0+cu12.8", commit="aaa", date="1", backward_bytes=3 * GiB, all_reused_bytes=0
)
NEWER = replace(OLDER, torch="2.11.0", commit="bbb", backward_bytes=2 * GiB, all_reused_bytes=4 * GiB)


def write(results: Path, *records: CodeRecord) -> Path:
    for each in records:
        record.write(each, results / "inductor_code")
    write_record(run_record(name=NAME, peak_bytes=15 * GiB), results / "lab" / "0.json")
    return results


def test_both_compilers_beside_what_was_published_and_measured(tmp_path: Path) -> None:
    other = replace(NEWER, budget=0.065, backward_bytes=GiB)
    older_run = replace(OLDER, torch="2.8.1", date="0", backward_bytes=9 * GiB)
    text = generated(write(tmp_path, older_run, OLDER, NEWER, other, replace(OLDER, budget=0.065, backward_bytes=GiB)))
    first, second = text.splitlines()[2:4]
    assert first == "| memory_budget_60 | 0.6 | 3.000 | 2.000 | +1,024 | 4.000 | 15.636 | 15.000 | +651 |"
    # What was published is of the recipe's own budget, and nobody ran another one.
    assert second == "| memory_budget_60 | 0.065 | 1.000 | 1.000 | +0 | 4.000 | - | - | - |"
    assert " ".join(text.split()).endswith("torch 2.11.0, 2.8.0+cu12.8, commit aaa, bbb.</sub>")


def test_what_is_missing_or_wrong_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadRecordError, match="there are no records in .*run benchmarks.inductor.run"):
        generated(tmp_path)
    with pytest.raises(BadRecordError, match=r"no record of peak_memory/memory_budget_60 at 0.6 by torch 2\.8"):
        generated(write(tmp_path, NEWER))
    write_json(tmp_path / "inductor_code" / "a.json", {"schema": record.SCHEMA, "name": NAME})
    with pytest.raises(BadRecordError, match=r"a\.json: .*missing 6 required"):
        generated(tmp_path)


def test_the_older_compiler_reuses_all_that_it_can() -> None:
    """So the rule that is played on the newer one's code is the older one's."""
    records = record.read_all(RESULTS / "inductor_code")
    older, newer = (
        {(each.name, each.budget): each for each in records if each.version == version} for version in ("2.8", "2.11")
    )
    assert older.keys() == newer.keys()
    assert all(each.backward_bytes == each.all_reused_bytes for each in older.values())
    off = max(abs(older[key].backward_bytes - newer[key].all_reused_bytes) for key in older)
    page = " ".join((Path(__file__).parents[3] / "docs" / "peak_memory.md").read_text(encoding="utf-8").split())
    assert f"in all rows, within {off // KiB} KiB" in page


def test_budgets_of_recipes() -> None:
    names = ("control", "compile", "memory_budget_60")
    assert [budget_of(read_recipe(find_recipe(f"peak_memory/{name}"))) for name in names] == [None, 1.0, 0.6]


@pytest.mark.parametrize(
    ("names", "cuda", "message"),
    [
        (["peak_memory/compile"], None, "is a build without CUDA"),
        (["peak_memory/compile", "peak_memory/control"], "13.0", "peak_memory/control is not compiled as one graph"),
        (
            ["peak_memory/compile_per_layer_fused"],
            "13.0",
            "peak_memory/compile_per_layer_fused is not compiled as one graph",
        ),
        (["peak_memory/compil"], "13.0", "peak_memory/compile"),
    ],
)
def test_mistakes_end_before_anything_is_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, names: list[str], cuda: str | None, message: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(run, "generate_backward", lambda *words: pytest.fail("something was compiled"))
    monkeypatch.setattr(sys, "argv", ["run", *names, "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match=message):
        run.main()
    assert not (tmp_path / "out").exists()
