from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from lowtide.lab.record import MemoryFigures, Outcome, PredictedFigures, SpeedFigures
from lowtide.lab.report.comparison import make_report
from lowtide.lab.report.html import render_html
from lowtide.units import GiB
from tests.lab.report.samples import budget_sweep, experiment, record

VOID = {"meta", "link", "wbr", "input"}
HOSTILE = "x/</script><script>alert(1)</script>\"'&$title"


class Outline(HTMLParser):
    """Checks that elements nest, and collects text and attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data


def render(*records: object, **more: object) -> str:
    return render_html(make_report(records, **more))


def test_the_page_is_whole_and_asks_for_nothing() -> None:
    page = render(*experiment(), skipped=["a: b"], sweeps=[budget_sweep()])
    outline = Outline(page)
    assert any("default-src 'none'" in value for name, value in outline.attributes if name == "content")
    links = [value for name, value in outline.attributes if name in ("src", "href", "srcset", "action")]
    assert all(link.startswith(("#", "data:")) for link in links)
    targets = {value for name, value in outline.attributes if name == "id"}
    assert {link[1:] for link in links if link.startswith("#")} <= targets
    # The only address in the whole page is the name of the SVG namespace, which is never fetched.
    assert set(re.findall(r"https?://[^\s\"'<)]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "$" not in page.replace("${", ""), "a placeholder was left open"
    assert not [name for name, _ in outline.attributes if name.startswith("on")]


def test_numbers_are_there_without_the_script() -> None:
    text = Outline(render(*experiment())).text
    for said in (
        "21.173",
        "97.3%",
        "151.2 ± 0.2",
        "out of memory",
        "killed",
        "+0.04%",
        "Reductions are against control.",
    ):
        assert said in text


def test_hostile_names_stay_text() -> None:
    name, message = HOSTILE, "<img src=x onerror=alert(1)>"
    memory = MemoryFigures(peak_bytes=GiB, by_phase={"<i>": GiB}, at_peak={'"><b>': 5}, timeline=(("<u>", 3), ("x", 1)))
    speed = SpeedFigures(step_s=(1.0,) * 20, samples_per_step=1)
    published = {"source": "<em>us</em>", "peak_gib": 1.0, "samples_per_s": 1.0, "steps_10_to_100_s": 1.0}
    predicted = PredictedFigures(peak_bytes=GiB, peak_phase="<s>", at_peak={})
    hostile = record(
        name, memory=memory, speed=speed, predicted=predicted, remarks=(message,), recipe={"published": published}
    )
    lost = record(name + "2", outcome=Outcome.FAILED, message=message)
    page = render(hostile, lost, skipped=[message], sweeps=[budget_sweep(model=message)])
    outline = Outline(page)
    assert "img" not in outline.tags
    assert outline.tags.count("script") == 2
    assert not {"u", "s"} & set(outline.tags)
    assert message in outline.text
    assert outline.text.count("alert(1)") > 3


@pytest.mark.parametrize(
    "lone",
    [
        record(peak_bytes=None),
        record(),
        record(peak_bytes=None, outcome=Outcome.KILLED),
        record(peak_bytes=None, speed=SpeedFigures(step_s=(1.0,), samples_per_step=1)),
        record(speed=SpeedFigures(step_s=(1.0,), samples_per_step=1)),
        record(memory=MemoryFigures(peak_bytes=0, by_phase={})),
        record(memory=MemoryFigures(peak_bytes=0, by_phase={}), speed=SpeedFigures(step_s=(1.0,), samples_per_step=1)),
        record(memory=MemoryFigures(peak_bytes=5, by_phase={}, timeline=(("forward", 0),), at_peak={"weights": 0})),
        record(evaluation_loss=float("nan")),
    ],
)
def test_a_lone_record_with_little_in_it(lone: object) -> None:
    outline = Outline(render(lone))
    assert "control" in outline.text
    assert "1 configurations" not in outline.text


def test_the_readout_has_the_rows_of_the_table() -> None:
    page = render(*experiment())
    [data] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    [marks] = [each["details"] for each in json.loads(data)["comparisons"]]
    assert len(marks) == 14 + 11
    name, facts = marks[0]
    assert name == "control"
    assert ["peak, GiB", "21.173"] in facts
    assert marks[14] == [
        "control, published",
        [["peak, GiB", "21.165"], ["samples/s", "2.518"], ["steps 10 to 100, s", "100.0"], ["perplexity", "152.1"]],
    ]


def test_perplexities_on_the_way_have_a_table() -> None:
    page = render(record(losses=(5.0,) * 4, evaluation_loss=0.0, evaluations=((2, 1.0),)))
    assert "Perplexity after so many steps" in page
    assert "after 2" in page
    assert "Perplexity after so many steps" not in render(record(losses=(5.0,) * 4, evaluation_loss=0.0))


def test_sweeps_say_where_they_are_not_monotone() -> None:
    text = Outline(render(record(), sweeps=[budget_sweep()])).text
    assert "Memory budget sweep" in text
    assert "Not monotone." in text
    assert "Budget 0.05 has a larger peak, 13.561 GiB, than budget 0.1 with 13.100 GiB" in text
    text = Outline(render(record(), sweeps=[budget_sweep(is_monotone=True)])).text
    assert "Monotone: no smaller budget has a larger peak." in text
    assert "Memory budget sweep" not in Outline(render(record())).text


def test_emulated_devices_are_marked() -> None:
    text = Outline(render(record(device="cpu, emulated"))).text
    assert "emulated device" in text
    assert "times say nothing about a GPU" in text
