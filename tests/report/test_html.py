from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from lowtide.errors import ConfigError
from lowtide.planning.what_if import WhatIfRow
from lowtide.report.html import Section, render_page
from lowtide.report.page import prose
from lowtide.tracing.step_trace import Category, Phase, StepTrace
from lowtide.units import GiB, MiB
from tests.tracing.samples import TraceBuilder, observed_like, tiny_trace, transformer_trace

VOID = {"meta", "link", "wbr"}


class Outline(HTMLParser):
    """Checks that elements nest, and collects text, tables, attributes and the embedded data."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.data = ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag in VOID:
            return
        self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.data = self.data or data
        elif self.open and self.open[-1] != "style":
            self.text += data
            if "td" in self.open or "th" in self.open:
                self.tables[-1][-1][-1] += data


def table_with(outline: Outline, head: str) -> list[list[str]]:
    [table] = [table for table in outline.tables if head in table[0]]
    return table


def page_of(*traces: StepTrace, **more: object) -> str:
    return render_page([Section(trace=trace, **more) for trace in traces], title="A step")


def test_the_page_is_whole_and_asks_for_nothing() -> None:
    trace = transformer_trace(layers=2)
    page = page_of(trace, observed=observed_like(trace))
    outline = Outline(page)
    assert any("default-src 'none'" in value for name, value in outline.attributes if name == "content")
    links = [value for name, value in outline.attributes if name in ("src", "href", "srcset", "action")]
    assert all(link.startswith(("#", "data:")) for link in links)
    # The only address in the whole page is the name of the SVG namespace, which is never fetched.
    assert set(re.findall(r"https?://[^\s\"'<)]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "@import" not in page
    assert "$" not in page.replace("${", ""), "a placeholder was left open"


def test_tables_hold_the_numbers_without_the_script() -> None:
    trace = tiny_trace()
    outline = Outline(page_of(trace))
    assert "Peak allocated19.0 MiB19,922,944 bytes" in outline.text
    assert "in loss, at (outside the model) aten._log_softmax tiny.py:20" in outline.text
    [by_category] = [table for table in outline.tables if table[0][:2] == ["category", "bytes"]]
    assert {row[0]: row[1] for row in by_category[1:]} == {
        "weights": "4.0 MiB",
        "optimizer": "8.0 MiB",
        "workspace": "0 B",
        "gradients": "0 B",
        "activations": "3.0 MiB",
        "temporaries": "4.0 MiB",
        "sum": "19.0 MiB",
    }
    [by_phase] = [table for table in outline.tables if table[0][:2] == ["phase", "bytes"]]
    assert [row[:3] for row in by_phase[1:]] == [
        ["forward", "15.0 MiB", "78.9%"],
        ["loss peak", "19.0 MiB", "100.0%"],
        ["backward", "18.0 MiB", "94.7%"],
        ["update", "12.0 MiB", "63.2%"],
    ]
    instants = table_with(outline, "instant")
    assert [row[1:4] for row in instants[4:7]] == [
        ["start", "2", "19.0 MiB"],
        ["highest", "2", "19.0 MiB"],
        ["end", "3", "15.0 MiB"],
    ]


def test_what_is_alive_sums_to_the_peak() -> None:
    trace = transformer_trace(layers=2)
    page = page_of(trace)
    table = re.search(r'aria-label="Alive at the peak.*?</table>', page, re.DOTALL)
    assert table is not None
    assert sum(int(size) for size in re.findall(r'data-bytes="(\d+)"', table[0])) == trace.peak_bytes


def test_many_kinds_of_tensors_still_sum_to_the_peak() -> None:
    builder = TraceBuilder()
    for size in range(1, 60):
        builder.allocate(512 * size, Category.WEIGHTS, module=f"part_{size}")
    trace = builder.build()
    page = page_of(trace)
    assert "35 smaller kinds" in page
    table = re.search(r'aria-label="Alive at the peak.*?</table>', page, re.DOTALL)
    assert table is not None
    assert sum(int(size) for size in re.findall(r'data-bytes="(\d+)"', table[0])) == trace.peak_bytes


def test_an_observation_is_laid_over_its_prediction() -> None:
    tiny = tiny_trace()
    for observed in (None, observed_like(tiny)):
        outline = Outline(page_of(tiny, observed=observed))
        [data] = json.loads(outline.data)
        assert (data["observed"] is not None) == (observed is not None)
        assert ("Predicted against observed" in outline.text) == (observed is not None)


def test_the_comparison_says_the_error() -> None:
    trace = transformer_trace(layers=2)
    outline = Outline(page_of(trace, observed=observed_like(trace, scale=1.25)))
    assert table_with(outline, "observed")[1][3] == "-20.00%"


def test_explanation_and_techniques() -> None:
    row = WhatIfRow(technique="bf16 <fast>", before_bytes=3 * GiB, after_bytes=GiB, reason="Half the bytes & more.")
    page = page_of(tiny_trace(), explanation="Why.\n\nSo.", what_if=(row,))
    assert "<p>Why.</p><p>So.</p>" in page
    assert table_with(Outline(page), "technique")[1] == [
        *("bf16 <fast>", "3.0 GiB", "1.0 GiB", "2.0 GiB", "Half the bytes & more.")
    ]


def test_sections_put_together_by_hand_have_their_own_words() -> None:
    sections = [Section(trace=tiny_trace(), explanation=word) for word in ("First words", "Second words")]
    first, second = re.split(r'(?=<section class="trace")', render_page(sections, title="t"))[1:]
    assert "First words" in first
    assert "Second words" in second
    assert "Second words" not in first


def test_hostile_names_stay_text() -> None:
    evil = '</script><script>alert(1)</script><img src=x onerror="alert(2)">\u2028'
    builder = TraceBuilder(model=evil)
    builder.enter(Phase.FORWARD)
    builder.op(evil, module=evil, source=evil)
    builder.allocate(MiB, Category.ACTIVATIONS, dtype=evil)
    trace = builder.build(notes=(evil,))
    row = WhatIfRow(technique=evil, before_bytes=1, after_bytes=1, reason=evil)
    page = render_page([Section(trace=trace, explanation=evil, what_if=(row,))], title=evil)
    outline = Outline(page)
    assert not [name for name, _ in outline.attributes if name.startswith("on")]
    assert page.count("<script") == 2
    assert json.loads(outline.data)[0]["instants"][1] == [evil, evil, evil]
    assert outline.text.count(evil) >= 8


def test_a_page_needs_a_trace() -> None:
    with pytest.raises(ConfigError, match=r"needs at least one trace, got none; pass what lowtide\.trace or observe"):
        render_page([], title="t")


def test_settings_and_notes_are_shown() -> None:
    outline = Outline(page_of(tiny_trace()))
    settings = dict(table_with(outline, "setting")[1:])
    assert settings["optimizer.name"] == "AdamW"
    assert settings["parameters"] == "1.05M (1,048,576)"
    assert "the head is not tied" in outline.text


def test_paragraphs() -> None:
    assert prose("a\nb\n\n\n c<d \n\n") == "<p>a\nb</p><p>c&lt;d</p>"


def test_contents_link_to_sections_when_there_are_several() -> None:
    page = page_of(tiny_trace(), transformer_trace(layers=1))
    links = [value for name, value in Outline(page).attributes if name == "href" and value.startswith("#")]
    assert links == ["#trace-0", "#trace-1"]
    assert all(f'id="{link[1:]}"' in page for link in links)
    assert "<nav" not in page_of(tiny_trace())


def test_the_page_names_the_attention_backends() -> None:
    builder = TraceBuilder()
    builder.enter(Phase.FORWARD)
    builder.op("aten._safe_softmax", module="layers.1")
    builder.allocate(MiB, Category.ACTIVATIONS)
    warning = "the attention in 'layers.1' (query [1] <f>) falls back to the math backend: in bfloat16 it runs on cudnn"
    outline = Outline(page_of(builder.build(notes=(warning,))))
    assert f"Attention: math (1 call). {warning}." in outline.text
    assert "Attention:" not in Outline(page_of(tiny_trace())).text
