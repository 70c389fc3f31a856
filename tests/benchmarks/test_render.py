"""Documents are filled between their markers, and told when they are out of date."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import render
from lowtide.errors import UnknownNameError


def test_fill_replaces_only_what_is_between_markers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(render.RENDERERS, "one", lambda results: f"| {results.name} |")
    opening, end = "<!-- rendered: one -->\n", "<!-- end -->\n"
    text = f"before\n{opening}old\nolder\n{end}between\n{opening}{end}after\n"
    filled = render.fill(text, tmp_path)
    table = f"{opening}| {tmp_path.name} |\n{end}"
    assert filled == f"before\n{table}between\n{table}after\n"
    assert render.fill(filled, tmp_path) == filled


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- rendered: accuracy -->\n", "'accuracy' is never closed"),
        ("<!-- end -->\n", "line 1: <!-- end --> without"),
        ("<!-- rendered: accuracy -->\n<!-- rendered: accuracy -->\n<!-- end -->", "line 2: 'accuracy' is still open"),
    ],
)
def test_unbalanced_markers_are_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        render.fill(text, tmp_path)


def test_unknown_renderer_suggests_a_near_one(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="no renderer named 'acuracy'; did you mean 'accuracy'"):
        render.fill("<!-- rendered: acuracy -->\n<!-- end -->\n", tmp_path)


def test_check_names_stale_files_and_rendering_heals_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("<!-- rendered: accuracy-summary -->\nold\n<!-- end -->\n", encoding="utf-8")
    monkeypatch.setattr(render, "REPO", tmp_path)
    assert render.main(["--check"]) == 1
    assert "README.md: out of date" in capsys.readouterr().out
    assert render.main([]) == 0
    assert render.main(["--check"]) == 0
    assert "peak allocated" in readme.read_text(encoding="utf-8")
