"""Table: the same cells in the terminal, on the page and in Markdown."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from lowtide.report.table import (
    Bar,
    Column,
    Table,
    Tone,
    Value,
    bar,
    byte_unit,
    escape_markdown,
    make_table,
    number,
    size,
    to_html,
    to_markdown,
    words,
)
from lowtide.units import GiB, KiB, MiB

TABLE = make_table(
    "What is <there>",
    [[Value("[red]a_b", tone=Tone.STRONG, badge="front"), size(3 * GiB), bar("weights", 0.5), "because"]],
    words("name", lambda row: row[0], wraps=True),
    number("bytes", lambda row: row[1], "of *all*"),
    number("", lambda row: row[2]),
    words("why", lambda row: row[3], is_for_page=True),
).with_row(Value("c|d", detail="x.py:3", swatch="weights"), None, bar("plain", 0.0), "")


def shown(table: Table, width: int = 60) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as capture:
        console.print(table)
    return [line.rstrip() for line in capture.get().splitlines()]


def test_the_terminal_leaves_out_what_is_for_the_page() -> None:
    lines = shown(TABLE)
    assert lines[0] == "What is <there>"
    assert lines[1].split() == ["name", "bytes"]
    assert lines[2].split() == ["[red]a_b", "◀", "front", "3.0", "GiB", "████████████"]
    assert lines[3].split() == ["■", "c|d", "x.py:3"]
    assert len(lines) == 4


def test_the_page_has_everything_escaped() -> None:
    html = to_html(TABLE)
    assert "<caption>What is &lt;there&gt;</caption>" in html
    assert re.findall(r'<th scope="col"([^>]*)>([^<]*)<', html) == [
        ("", "name"),
        (' class="number"', "bytes"),
        (' class="bars" aria-hidden="true"', ""),
        ("", "why"),
    ]
    assert '<b class="strong">[red]a_<wbr>b</b> <em class="front">front</em>' in html
    assert 'title="3,221,225,472 bytes" data-bytes="3221225472">3.0 GiB<' in html
    assert '<i class="bar weights" style="width:50.00%"></i>' in html
    assert '<span class="quiet">–</span>' in html, "what is not known"
    assert '<i class="swatch weights"></i>c|d <small>x.py:3</small>' in html
    assert "<dt>bytes</dt><dd>of *all*</dd>" in html


def test_markdown_has_no_bars_and_a_legend() -> None:
    assert to_markdown(TABLE) == (
        "| name | bytes | why |\n| --- | ---: | --- |\n| **\\[red\\]a_b** | 3.0 GiB | because |\n"
        "| c\\|d (x.py:3) |  |  |\n\n- bytes: of \\*all\\*"
    )


def test_a_bar_of_several_kinds_is_a_stack() -> None:
    table = Table(caption="", columns=(Column(head="", values=(Bar((("weights", 0.25), ("plain", 0.5))),)),))
    assert '<span class="stack"><i class="bar weights" style="width:25.00%"></i><i class="bar plain"' in to_html(table)


def test_sorting_goes_by_the_order_behind_the_text() -> None:
    table = make_table("", [Value("1,250.0", 1250.0)], number("speed", lambda cell: cell), kind="sortable")
    html = to_html(table)
    assert '<span data-value="1250.0">1,250.0</span>' in html
    assert html.startswith('<div class="table sortable"')


def test_rows_that_do_not_fit_the_columns_are_refused() -> None:
    for row in (["1"], ["1", "2", "3"]):
        with pytest.raises(ValueError, match="argument 2"):
            make_table("", ["x"], number("a", str), number("b", str)).with_row(*row)


def test_unknown_sizes_are_a_dash() -> None:
    assert size(None).text == "–"
    assert byte_unit(5 * MiB).value(None) is None


@pytest.mark.parametrize(("largest", "name"), [(0, "GiB"), (GiB, "GiB"), (GiB - 1, "MiB"), (KiB, "KiB"), (3, "KiB")])
def test_one_unit_for_a_table(largest: int, name: str) -> None:
    assert byte_unit(largest).name == name


def test_markdown_takes_text_as_it_is() -> None:
    assert escape_markdown("a|b *c*\n bf16_fused _d_") == r"a\|b \*c\* bf16_fused \_d\_"
