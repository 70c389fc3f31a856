"""The page of a session: its HTML by itself, and what it draws and says in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lowtide.planning.timeline import Lane, Timeline
from lowtide.report.html import Section, SessionSection, render_page, render_session_page
from lowtide.runtime.statistics.session_stats import CacheRow, PhaseSeconds, SessionStats
from lowtide.units import GiB, format_bytes
from tests.report.browser import Browser, Page
from tests.report.test_html import Outline, table_with
from tests.runtime.session_samples import CHUNK_BYTES, Streaming, stats_of
from tests.tracing.samples import tiny_trace

TIMELINE = Streaming().timeline(is_emulated=True)
STATS = stats_of(TIMELINE)
EMPTY = Timeline(spans=(), residency=(), is_emulated=False)
EVIL = "</script><script>window.hurt = true</script><img src=x onerror='window.hurt = true'>"

SPAN_POINT = """((g, label, nth) => {
    const box = g.canvas.getBoundingClientRect(), row = g.rows.find((row) => row.label === label);
    return [box.left + g.px((row.from[nth] + row.to[nth]) / 2), box.top + row.top + row.height / 2];
})(document.querySelector('figure.gantt').gantt, %s, %d)"""


def write(folder: Path, text: str) -> Path:
    path = folder / "session.html"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Iterator[Page]:
    """The sample session, checked afterwards for complaints and requests."""
    opened = browser.open(write(tmp_path, render_session_page(STATS, TIMELINE, title="Streamed")))
    yield opened
    assert opened.complaints() == []
    assert opened.requests() == []
    opened.close()


def point(page: Page, label: str, nth: int) -> tuple[float, float]:
    x, y = page.run(SPAN_POINT % (json.dumps(label), nth))
    return x, y


def readout(page: Page) -> dict[str, str] | None:
    shown: dict[str, str] | None = page.run(
        """(box => box.hidden ? null : {
            name: box.querySelector('h4').firstChild.textContent, kind: box.querySelector('h4').dataset.kind,
            ...Object.fromEntries([...box.querySelectorAll('dd')].map(dd => [dd.dataset.name, dd.textContent])),
        })(document.querySelector('.readout'))"""
    )
    return shown


def view(page: Page) -> list[float]:
    found: list[float] = page.run("document.querySelector('figure.gantt').gantt.view")
    return found


def test_the_tables_hold_the_numbers_without_a_script() -> None:
    outline = Outline(render_session_page(STATS, TIMELINE, title="Streamed", notes=("Warm-up is not counted.",)))
    moved = table_with(outline, "reason")
    assert [row[:2] for row in moved[1:]] == [[row.direction, row.reason.value] for row in STATS.moved]
    assert [row[2] for row in moved[1:]] == [format_bytes(row.num_bytes) for row in STATS.moved]
    assert moved[1][3:] == [format_bytes(STATS.moved[0].num_bytes / 3), "144"]
    times = table_with(outline, "phase")
    assert [row[0] for row in times[1:]] == [
        "forward",
        "backward",
        "update",
        "rest",
        "waiting, in these",
        "host updates, beside",
    ]
    assert times[1][1:4] == ["118.8 ms", "356.4 ms", "32.3%"]
    tiers = table_with(outline, "tier")
    assert tiers[1] == ["device", "576.0 MiB", "1.0 GiB", "520.0 MiB", "-9.7%"]
    assert tiers[3] == ["pinned", "2.0 GiB", "–", "–", ""]
    chunks = table_with(outline, "chunks")
    assert [row[:3] for row in chunks[1:]] == [
        ["embed/0", "1", "96.0 MiB"],
        ["layers.*/*", "24", format_bytes(24 * CHUNK_BYTES)],
        ["head/0", "1", "96.0 MiB"],
    ]
    assert len(table_with(outline, "chunk")) == 1 + 26
    assert "fetches began" not in outline.text  # emulated copies run as late as they may
    real = Streaming().timeline(is_emulated=False)
    page = Outline(render_session_page(stats_of(real), real, title="Streamed"))
    assert "All 72 fetches began before the computation ahead of them had ended" in page.text
    assert "The buffer cache served 66 of 72 requests (92%) and holds 192.0 MiB." in outline.text
    assert "Warm-up is not counted." in outline.text


def test_emulation_is_said_and_a_gpu_is_not_called_emulated() -> None:
    emulated = Outline(render_session_page(STATS, TIMELINE, title="Streamed"))
    assert "emulated device" in emulated.text
    real = Streaming().timeline()
    assert "mulated" not in Outline(render_session_page(stats_of(real), real, title="Streamed")).text


def test_late_copies_and_a_broken_budget_are_said() -> None:
    late = Streaming(prefetch=False).timeline()
    stats = stats_of(late)
    tier = replace(stats.tiers[0], budget_bytes=100)
    outline = Outline(render_session_page(replace(stats, tiers=(tier,)), late, title="Late"))
    assert "72 of 72 fetches were late: that of layers.0 began only when embed had ended." in outline.text
    assert "over the budget of 100 B" in outline.text


def test_a_session_without_steps_has_a_page() -> None:
    stats = SessionStats(
        num_steps=0, moved=(), exposed_copy_s=0.0, seconds=PhaseSeconds(), chunks=(), cache=CacheRow(), tiers=()
    )
    outline = Outline(render_session_page(stats, EMPTY, title="Nothing yet"))
    assert "nothing was copied" in outline.text
    assert "The buffer cache was not asked for anything." in outline.text
    assert not [value for name, value in outline.attributes if name == "data-gantt"]


def test_a_page_may_hold_traces_and_sessions() -> None:
    session = SessionSection(stats=STATS, timeline=TIMELINE, name="GPT & friends")
    text = render_page([Section(trace=tiny_trace()), session], title="Both")
    outline = Outline(text)
    assert ("href", "#trace-1") in outline.attributes
    assert ("data-timeline", "0") in outline.attributes
    assert ("data-gantt", "1") in outline.attributes
    assert "GPT & friends" in outline.text
    data = json.loads(outline.data)
    assert [sorted(part)[0] for part in data] == [sorted(data[0])[0], "curve"]
    assert "class Timeline" in text
    assert "class Gantt" in text


def test_a_page_carries_only_the_scripts_it_uses() -> None:
    session = render_session_page(STATS, TIMELINE, title="Session")
    assert "class GanttInput" in session
    assert "class TimelineInput" not in session
    trace = render_page([Section(trace=tiny_trace())], title="Trace")
    assert "class GanttInput" not in trace
    assert "--kind-forward" not in trace


def test_names_are_escaped() -> None:
    stats = replace(STATS, chunks=tuple(replace(chunk, name=EVIL, group=EVIL) for chunk in STATS.chunks))
    spans = tuple(replace(span, name=EVIL) for span in TIMELINE.spans)
    residency = tuple(replace(span, chunk=EVIL, group=EVIL, state=EVIL) for span in TIMELINE.residency)
    timeline = replace(TIMELINE, spans=spans, residency=residency)
    text = render_session_page(stats, timeline, title=EVIL, notes=(EVIL,))
    assert EVIL not in text
    assert "<img" not in text
    assert len(re.findall("<script", text)) == 2


def test_hostile_names_run_nothing(browser: Browser, tmp_path: Path) -> None:
    spans = tuple(replace(span, name=EVIL) for span in TIMELINE.spans)
    residency = tuple(replace(span, chunk=EVIL, group=EVIL, state=EVIL) for span in TIMELINE.residency)
    timeline = replace(TIMELINE, spans=spans, residency=residency)
    page = browser.open(write(tmp_path, render_session_page(STATS, timeline, title="Evil", notes=(EVIL,))))
    page.hover(*point(page, "compute", 4))
    shown = readout(page)
    assert shown is not None
    assert shown["name"] == EVIL
    assert page.run("window.hurt") is None
    assert page.requests() == []
    page.close()


def test_hovering_a_copy_says_what_it_is(page: Page) -> None:
    page.run("window.scrollTo(0, 250)")
    nth = 30
    lane = sorted((span for span in TIMELINE.spans if span.lane == "to device"), key=lambda span: span.start_s)
    page.hover(*point(page, "to device", nth))
    assert readout(page) == {
        "name": lane[nth].name,
        "kind": str(lane[nth].reason),
        "took": "3.9 ms",
        "from": f"{lane[nth].start_s * 1e3:.1f} ms",
        "bytes": "96.0 MiB",
        "rate": "24.0 GiB/s",
        "lane": "to device",
        "phase": lane[nth].phase,
        "step": str(lane[nth].step),
    }
    tag = page.run("document.querySelector('.cursor span').textContent")
    assert tag.endswith(" ms")
    page.hover(5, 5)
    assert readout(page) is None


def test_hovering_a_chunk_says_its_state(page: Page) -> None:
    page.hover(*point(page, "layers.5", 1))
    shown = readout(page)
    assert shown is not None
    assert (shown["name"], shown["group"], shown["bytes"]) == ("layers.5/0", "layers.5", "96.0 MiB")
    assert shown["kind"] == "in use"
    assert shown["took"] == "9.0 ms"


def test_the_legend_names_each_kind_that_occurs(page: Page) -> None:
    kinds = page.run("[...document.querySelectorAll('.gantt .legend [data-kind]')].map(node => node.dataset.kind)")
    chunks, lanes = ["resident", "fetched", "in use"], ["forward", "backward", "update", "waiting"]
    assert kinds == [*chunks, *lanes, "fetch weights", "upload", "gradients", "write back"]
    colours = page.run(
        "[...document.querySelectorAll('.gantt .legend .swatch')].map(node => getComputedStyle(node).backgroundColor)"
    )
    # A fetched chunk has the colour of the copy that fetched it, an uploaded one that of a chunk in use.
    assert len(set(colours)) == len(colours) - 2


def test_spans_are_drawn_in_the_colour_of_their_kind(page: Page) -> None:
    def colour(label: str, nth: int) -> list[int]:
        script = """((g, [x, y]) => {
            const box = g.canvas.getBoundingClientRect(), scale = devicePixelRatio;
            const place = [(x - box.left) * scale, (y - box.top - 7) * scale];
            const copy = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
            copy.drawImage(g.canvas, ...place, 1, 1, 0, 0, 1, 1);
            return [...copy.getImageData(0, 0, 1, 1).data].slice(0, 3);
        })(document.querySelector('figure.gantt').gantt, %s)"""
        found: list[int] = page.run(script % json.dumps(point(page, label, nth)))
        return found

    page.run("(g => g.showLastStep())(document.querySelector('figure.gantt').gantt)")
    lane = sorted((span for span in TIMELINE.spans if span.lane == "compute"), key=lambda span: span.start_s)
    forward = next(n for n, span in enumerate(lane) if (span.step, span.name) == (2, "layers.4"))
    wait = max(range(len(lane)), key=lambda n: (lane[n].step == 2 and lane[n].waits_for is not None, n))
    assert colour("compute", forward) == [0xE6, 0x9F, 0x00]
    assert colour("compute", wait) == [0xD5, 0x5E, 0x00]


@pytest.mark.parametrize(("width", "blocks"), [(1280, 12), (1280, 90), (390, 12), (320, 40)])
def test_no_label_lies_on_another_and_nothing_overflows(
    browser: Browser, tmp_path: Path, width: int, blocks: int
) -> None:
    timeline = Streaming(num_blocks=blocks, num_steps=2).timeline()
    page = browser.open(write(tmp_path, render_session_page(stats_of(timeline), timeline, title="A")), width=width)
    assert page.run("document.documentElement.scrollWidth") <= width
    for share in (1.0, 0.3, 0.02):
        page.run(f"(g => g.setView(0, g.end * {share}))(document.querySelector('figure.gantt').gantt)")
        labels: list[dict[str, Any]] = page.run("document.querySelector('figure.gantt').gantt.labels")
        assert {label["place"] for label in labels} >= {"gutter", "axis", "steps", "curve"}
        assert all(label["left"] >= 0 and label["right"] <= width for label in labels)
        for number, one in enumerate(labels):
            for other in labels[number + 1 :]:
                apart_x = one["right"] <= other["left"] or other["right"] <= one["left"]
                apart_y = one["bottom"] <= other["top"] + 1 or other["bottom"] <= one["top"] + 1
                assert apart_x or apart_y, (one, other)
    assert page.complaints() == []
    page.close()


def test_a_span_that_others_are_drawn_over_has_no_name(browser: Browser, tmp_path: Path) -> None:
    timeline = Streaming(num_blocks=4, num_steps=1).timeline()
    work = [span for span in timeline.spans if span.lane is Lane.COMPUTE and span.phase == "forward"]
    around = replace(work[0], name="the whole model", end_s=work[-1].end_s)
    timeline = replace(timeline, spans=tuple(sorted([*timeline.spans, around], key=lambda s: (s.start_s, -s.end_s))))
    page = browser.open(write(tmp_path, render_session_page(stats_of(timeline), timeline, title="A")), width=1280)
    labels: list[dict[str, Any]] = page.run("document.querySelector('figure.gantt').gantt.labels")
    names = {label["words"] for label in labels if label["place"] == "bar"}
    assert names
    assert "the whole model" not in names
    page.close()


def test_dragging_zooms_and_buttons_go_back(page: Page) -> None:
    x, y = point(page, "layers.3", 0)
    page.drag((x, y), (x + 200, y))
    start, stop = view(page)
    assert stop - start == pytest.approx(200 / 1088 * TIMELINE.end_s * 1e6, rel=0.02)
    page.run("document.querySelector('[aria-label=\"Show all recorded steps\"]').click()")
    assert view(page) == [0, pytest.approx(TIMELINE.end_s * 1e6, abs=0.1)]
    page.run("document.querySelector('[aria-label=\"Show the last step\"]').click()")
    assert view(page)[0] == pytest.approx(TIMELINE.last_steps(1).residency[-1].start_s * 1e6, abs=1)


def test_the_wheel_zooms_once_the_chart_was_clicked(page: Page) -> None:
    x, y = point(page, "layers.3", 2)
    whole = view(page)
    page.wheel(x, y, -240)
    assert view(page) == whole, "a page that scrolls by must not zoom"
    page.run("window.scrollTo(0, 0)")
    x, y = point(page, "layers.3", 2)
    page.click(x, y)
    page.wheel(x, y, -240)
    start, stop = view(page)
    assert stop - start < 0.7 * (whole[1] - whole[0])
    assert point(page, "layers.3", 2)[0] == pytest.approx(x, abs=1.0)
    page.click(x, y, count=2)
    assert view(page) == whole


def test_the_keyboard_walks_and_speaks(page: Page) -> None:
    page.run("document.querySelector('.gantt .chart').focus()")
    for _ in range(2):
        page.press("ArrowRight")
    shown = readout(page)
    assert shown is not None
    assert (shown["lane"], shown["name"], shown["kind"]) == ("compute", "layers.0", "waiting")
    spoken = page.run("document.querySelector('.gantt [aria-live]').textContent")
    assert spoken == "compute layers.0, waiting: from 5.4 ms for 2.4 ms"
    page.press("ArrowDown")
    shown = readout(page)
    assert shown is not None
    assert (shown["lane"], shown["name"]) == ("to device", "layers.0/1")
    page.press("+")
    assert view(page)[1] - view(page)[0] < TIMELINE.end_s * 0.6e6
    page.press("Escape")
    assert readout(page) is None
    assert view(page)[0] == 0


def test_twenty_thousand_spans_are_drawn_while_the_wheel_turns(browser: Browser, tmp_path: Path) -> None:
    timeline = Streaming(num_blocks=300, num_steps=4).timeline()
    assert len(timeline.spans) + len(timeline.residency) > 20_000
    page = browser.open(write(tmp_path, render_session_page(stats_of(timeline), timeline, title="Large")))
    took, spans = page.run(
        "(g => { const start = performance.now(); g.draw(); g.context.getImageData(0, 0, 1, 1);"
        " return [performance.now() - start, g.rows.reduce((sum, row) => sum + row.from.length, 0)]; })"
        "(document.querySelector('figure.gantt').gantt)"
    )
    assert 10_000 < spans <= 20_000
    assert took < 400  # about 40 ms when the machine is free
    assert "The last 3 of 4 recorded steps." in page.run("document.querySelector('.gantt .hint').textContent")
    page.close()


def test_dark_pages_use_the_dark_colours(browser: Browser, tmp_path: Path) -> None:
    page = browser.open(write(tmp_path, render_session_page(STATS, TIMELINE, title="Dark")), dark=True)
    assert page.run("document.querySelector('figure.gantt').gantt.paintOf('forward').fill") == "#efb034"
    assert page.complaints() == []
    page.close()


def test_a_state_of_another_name_has_a_colour_and_a_legend(browser: Browser, tmp_path: Path) -> None:
    residency = tuple(replace(span, state="leaving") for span in TIMELINE.residency)
    timeline = replace(TIMELINE, residency=residency)
    page = browser.open(write(tmp_path, render_session_page(STATS, timeline, title="Words")))
    assert "leaving" in page.run("document.querySelector('.gantt .legend').textContent")
    assert page.run("document.querySelector('figure.gantt').gantt.paintOf('leaving').fill") == "#8a929c"
    page.close()


def test_a_timeline_of_lanes_alone_is_drawn(browser: Browser, tmp_path: Path) -> None:
    timeline = replace(TIMELINE, residency=())
    page = browser.open(write(tmp_path, render_session_page(STATS, timeline, title="Lanes")))
    assert page.run("document.querySelector('figure.gantt').gantt.rows.length") == 4
    assert page.complaints() == []
    page.close()


def test_a_tier_without_a_budget_says_so() -> None:
    tier = replace(STATS.tiers[0], budget_bytes=None, peak_bytes=GiB)
    outline = Outline(render_session_page(replace(STATS, tiers=(tier,)), TIMELINE, title="Free"))
    assert "no budget was set" in outline.text
