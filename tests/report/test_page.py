"""The page in a real browser: what it draws, says and does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from lowtide.planning.what_if import WhatIfRow
from lowtide.report.html import Section, render_page
from lowtide.tracing.step_trace import Category, StepTrace
from lowtide.units import GiB, format_bytes
from tests.report.browser import Browser, Page
from tests.tracing.samples import TARGET, TraceBuilder, observed_like, tiny_trace, transformer_trace

TRACE = transformer_trace(layers=12)
OBSERVED = observed_like(TRACE)
WHAT_IF = (WhatIfRow(technique="recompute", before_bytes=3 * GiB, after_bytes=GiB, reason="Layers keep their input."),)


def write(folder: Path, trace: StepTrace, *others: StepTrace, observed: StepTrace | None = None) -> Path:
    path = folder / "report.html"
    first = Section(trace=trace, observed=observed, explanation="Because.", what_if=WHAT_IF)
    path.write_text(render_page([first, *(Section(trace=other) for other in others)], title="Report"), encoding="utf-8")
    return path


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Iterator[Page]:
    """A prediction with its observation, checked afterwards for complaints and requests."""
    opened = browser.open(write(tmp_path, TRACE, observed=OBSERVED))
    yield opened
    assert opened.complaints() == []
    assert opened.requests() == []
    opened.close()


def view(page: Page) -> tuple[float, float]:
    start, stop = page.run("(({from, to}) => [Number(from), Number(to)])(document.querySelector('.chart').dataset)")
    return start, stop


def tick_labels(page: Page, kind: str = "tick-x") -> list[str]:
    labels: list[str] = page.run(f"[...document.querySelectorAll('.{kind}')].map(node => node.textContent)")
    return labels


def point(page: Page, position: int, num_bytes: int) -> tuple[float, float]:
    """Where on the screen a position and a height of the curve lie."""
    script = (
        "((t, r) => [r.left + t.px(t.place(%d)), r.top + t.py(%d)])"
        "(document.querySelector('figure').timeline, document.querySelector('.chart').getBoundingClientRect())"
    )
    x, y = page.run(script % (position, num_bytes))
    return x, y


def readout(page: Page) -> dict[str, Any] | None:
    """What the readout says, in exact bytes; None while it is hidden."""
    shown: dict[str, Any] | None = page.run(
        """(box => box.hidden ? null : {
            total: Number(box.querySelector('h4').dataset.bytes),
            event: Number(box.querySelector('h4').dataset.event),
            head: box.querySelector('h4').textContent,
            rows: Object.fromEntries([...box.querySelectorAll('dd')].map(
                dd => [dd.dataset.name, [Number(dd.dataset.bytes), dd.textContent]])),
            instant: box.querySelector('.instant')?.textContent,
            change: box.querySelector('.change')?.textContent,
        })(document.querySelector('.readout'))"""
    )
    return shown


def expected_rows(trace: StepTrace, position: int) -> dict[str, int]:
    sizes = {category.value: int(trace.stacked[category][position]) for category in Category}
    return {name: size for name, size in sizes.items() if size}


def test_the_page_draws_a_path_for_each_category_and_marks_the_peak(page: Page) -> None:
    drawn = page.run("[...document.querySelectorAll('path[data-category]')].map(node => node.dataset.category)")
    assert sorted(drawn) == sorted(category.value for category in Category)
    label = page.run("(node => [node.textContent, node.dataset.bytes])(document.querySelector('.peak-name'))")
    assert label == [f"Peak {format_bytes(TRACE.peak_bytes)} in loss", str(TRACE.peak_bytes)]
    assert page.run("document.querySelector('.peak-place').textContent") == "(outside the model) aten._log_softmax"
    x, y = point(page, TRACE.peak_event + 1, TRACE.peak_bytes)
    dot = page.run(
        "(r => [r.left + r.width / 2, r.top + r.height / 2])"
        "(document.querySelector('.peak-dot').getBoundingClientRect())"
    )
    assert dot == pytest.approx([x, y], abs=1.0)


def test_phases_are_named_below_the_curve(page: Page) -> None:
    spans = page.run(
        "[...document.querySelectorAll('[data-phase]')].map(n => [n.dataset.phase, n.getBoundingClientRect().width])"
    )
    assert [name for name, _ in spans] == ["forward", "loss", "backward", "update"]
    whole = sum(width for _, width in spans)
    assert all(width >= 0.099 * whole for _, width in spans)
    texts = page.run("[...document.querySelectorAll('.chart svg text')].map(node => node.textContent)")
    assert {"forward", "loss", "backward", "update"} <= set(texts)


def test_hovering_the_peak_shows_it_exactly(page: Page) -> None:
    position = TRACE.peak_event + 1
    page.hover(*point(page, position, TRACE.peak_bytes // 2))
    shown = readout(page)
    assert shown is not None
    assert (shown["total"], shown["event"]) == (TRACE.peak_bytes, position)
    assert shown["head"] == f"{format_bytes(TRACE.peak_bytes)}loss, event {position:,}"
    sizes = {name: size for name, (size, _) in shown["rows"].items()}
    assert {k: v for k, v in sizes.items() if k not in ("reserved", "observed here")} == expected_rows(TRACE, position)
    assert sizes["reserved"] == TRACE.events[position - 1].reserved_bytes
    assert sizes["observed here"] == OBSERVED.peak_bytes
    assert all(text == format_bytes(size) for size, text in shown["rows"].values())
    assert shown["instant"] == "aten._log_softmax (outside the model) loss.py:13"
    assert shown["change"] == "allocates 1.5 GiB of activations, [8192, 50257] float32"


@pytest.mark.parametrize("share", [0.05, 0.3, 0.8, 0.97])
def test_hovering_anywhere_shows_a_state_of_the_step(page: Page, share: float) -> None:
    position = round(share * len(TRACE.events))
    page.hover(*point(page, position, TRACE.peak_bytes // 4))
    shown = readout(page)
    assert shown is not None
    assert abs(shown["event"] - position) < 8  # the highest point within a few pixels
    event = shown["event"]
    assert shown["total"] == TRACE.curve[event]
    sizes = {name: size for name, (size, _) in shown["rows"].items()}
    assert {k: v for k, v in sizes.items() if k not in ("reserved", "observed here")} == expected_rows(TRACE, event)
    op = TRACE.ops[TRACE.events[event - 1].op]
    assert shown["instant"] == f"{op.name} {op.module or '(outside the model)'} {op.source}"


def test_leaving_the_chart_hides_the_readout(page: Page) -> None:
    page.hover(*point(page, 50, TRACE.peak_bytes // 4))
    assert readout(page) is not None
    page.hover(5, 5)
    assert readout(page) is None


def test_dragging_zooms_and_reset_shows_all(page: Page) -> None:
    before = tick_labels(page)
    height = TRACE.peak_bytes // 4
    page.drag(point(page, 100, height), point(page, 200, height))
    assert view(page) == pytest.approx((100, 200), abs=1.5)
    assert tick_labels(page) != before
    assert all(100 <= int(label.replace(",", "")) <= 200 for label in tick_labels(page))
    page.run("document.querySelector('[aria-label=\"Show the whole step\"]').click()")
    page.settle()
    assert view(page) == (0, len(TRACE.events))
    assert tick_labels(page) == before


def test_a_short_drag_is_a_click_not_a_zoom(page: Page) -> None:
    x, y = point(page, 100, TRACE.peak_bytes // 4)
    page.drag((x, y), (x + 3, y))
    assert view(page) == (0, len(TRACE.events))


def test_the_wheel_zooms_once_the_chart_was_clicked(page: Page) -> None:
    x, y = point(page, 150, TRACE.peak_bytes // 4)
    page.wheel(x, y, -240)
    assert view(page) == (0, len(TRACE.events)), "a page that scrolls by must not zoom"
    page.run("window.scrollTo(0, 0)")
    x, y = point(page, 150, TRACE.peak_bytes // 4)
    page.click(x, y)
    page.wheel(x, y, -240)
    start, stop = view(page)
    assert stop - start < 0.7 * len(TRACE.events)
    assert start < 150 < stop
    assert point(page, 150, TRACE.peak_bytes // 4)[0] == pytest.approx(x, abs=1.0)  # what is under the pointer stays
    page.click(x, y, count=2)
    assert view(page) == (0, len(TRACE.events))


def test_the_keyboard_walks_zooms_and_speaks(page: Page) -> None:
    page.run("document.querySelector('.chart').focus()")
    for _ in range(3):
        page.press("ArrowRight")
    shown = readout(page)
    assert shown is not None
    assert (shown["event"], shown["total"]) == (3, int(TRACE.curve[3]))
    spoken = page.run("document.querySelector('[aria-live]').textContent")
    assert (
        spoken
        == f"Event 3, forward: {format_bytes(int(TRACE.curve[3]))} allocated, aten.native_layer_norm layers.0.norm1"
    )
    page.press("+")
    start, stop = view(page)
    assert stop - start < len(TRACE.events)
    page.press("p")
    shown = readout(page)
    assert shown is not None
    assert shown["total"] == TRACE.peak_bytes
    start, stop = view(page)
    assert start < TRACE.peak_event + 1 < stop
    page.press("0")
    assert view(page) == (0, len(TRACE.events))
    page.press("Escape")
    assert readout(page) is None


def test_zooming_in_stops_before_nothing_is_left(page: Page) -> None:
    page.run("document.querySelector('.chart').focus()")
    for _ in range(30):
        page.press("+")
    start, stop = view(page)
    assert stop - start == pytest.approx(4, abs=0.1)
    assert page.run("document.querySelector('[aria-label=\"Zoom in\"]').disabled") is True


def test_a_peak_outside_the_view_is_pointed_at(page: Page) -> None:
    height = TRACE.peak_bytes // 4
    page.drag(point(page, 10, height), point(page, 60, height))
    assert page.run("document.querySelector('.peak-dot')") is None
    assert page.run("document.querySelector('.peak-name').textContent").startswith("▸ Peak")


def test_the_chart_has_a_name_for_screen_readers(page: Page) -> None:
    label = page.run("document.querySelector('.chart').getAttribute('aria-label')")
    assert f"highest at {format_bytes(TRACE.peak_bytes)} in loss, at (outside the model) aten._log_softmax" in label
    assert page.run(
        "[...document.querySelectorAll('table')].every(table => table.caption && table.caption.textContent)"
    )
    assert page.run("[...document.querySelectorAll('button')].every(button => button.getAttribute('aria-label'))")
    assert page.run("document.documentElement.lang") == "en"


def test_bytes_read_the_same_on_the_page_as_in_the_terminal(page: Page) -> None:
    random = Random(3)
    sizes = [round(2 ** random.uniform(0, 45)) for _ in range(500)]
    # Exact halves and the edges of units, where rounding differs between languages.
    sizes += [quarter * 2**power // 4 for power in (10, 20, 30, 40) for quarter in range(1, 80)]
    sizes += [0, 1, 511, 1023, 1024, 2**20 - 1, 2**30 - 1, 2**40 - 1, 53_687_091, -5 * GiB // 4]
    sizes += [973, 972, 996_147, 996_148]
    texts = page.run(f"{json.dumps(sizes)}.map(formatBytes)")
    assert texts == [format_bytes(size) for size in sizes]


def test_a_large_step_is_drawn_from_few_points_and_keeps_its_peak(browser: Browser, tmp_path: Path) -> None:
    trace = transformer_trace(layers=620, tokens=512)
    page = browser.open(write(tmp_path, trace))
    points = page.run("document.querySelector('figure').timeline.x.length")
    assert points <= 4000
    assert page.run("document.querySelector('.peak-name').dataset.bytes") == str(trace.peak_bytes)
    position = trace.peak_event + 1
    page.hover(*point(page, position, trace.peak_bytes // 2))
    shown = readout(page)
    assert shown is not None
    assert (shown["total"], shown["event"]) == (trace.peak_bytes, position)
    took = page.run(
        "(t => { const start = performance.now(); t.draw(); return performance.now() - start; })"
        "(document.querySelector('figure').timeline)"
    )
    assert took < 250  # a zoom must follow the wheel; about 20 ms when the machine is free
    assert page.complaints() == []
    page.close()


@pytest.mark.parametrize(("width", "dark"), [(1280, True), (390, False), (320, True)])
def test_nothing_overflows_and_text_has_contrast(browser: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    page = browser.open(write(tmp_path, TRACE, tiny_trace(), observed=OBSERVED), width=width, dark=dark)
    assert page.run("document.documentElement.scrollWidth") <= width
    colours = page.run("(style => [style.color, style.backgroundColor])(getComputedStyle(document.body))")
    ink, ground = (sum(int(part) for part in colour[4:-1].split(",")) for colour in colours)
    assert (ink > ground) == dark
    assert abs(ink - ground) > 400
    assert page.complaints() == []
    assert page.requests() == []
    page.close()


def test_on_a_phone_a_touch_shows_the_readout_below_the_chart(browser: Browser, tmp_path: Path) -> None:
    page = browser.open(write(tmp_path, TRACE), width=390, height=844)
    page.call("Emulation.setTouchEmulationEnabled", enabled=True)
    page.run("document.querySelector('.chart').scrollIntoView()")
    x, y = point(page, 100, TRACE.peak_bytes // 8)
    page.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
    page.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    page.settle()
    shown = readout(page)
    assert shown is not None
    assert shown["total"] == TRACE.curve[shown["event"]]
    below = page.run(
        "document.querySelector('.readout').getBoundingClientRect().top"
        " >= document.querySelector('.chart svg').getBoundingClientRect().bottom"
    )
    assert below
    page.close()


def test_pinching_zooms(browser: Browser, tmp_path: Path) -> None:
    page = browser.open(write(tmp_path, TRACE), width=390, height=844)
    page.call("Emulation.setTouchEmulationEnabled", enabled=True)
    page.run("document.querySelector('.chart').scrollIntoView()")
    x, y = point(page, 100, TRACE.peak_bytes // 8)
    spread = lambda gap: [{"x": x - gap, "y": y, "id": 1}, {"x": x + gap, "y": y, "id": 2}]  # noqa: E731
    page.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=spread(20))
    for gap in (25, 30, 40):
        page.call("Input.dispatchTouchEvent", type="touchMove", touchPoints=spread(gap))
    page.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    page.settle()
    start, stop = view(page)
    assert start < 100 < stop
    assert stop - start < 0.75 * len(TRACE.events)
    page.close()


def test_a_card_that_is_too_small_has_its_line(browser: Browser, tmp_path: Path) -> None:
    card = replace(TARGET, capacity_bytes=TRACE.peak_bytes)
    page = browser.open(write(tmp_path, replace(TRACE, target=card)))
    assert page.run("document.querySelector('line.capacity') !== null")
    assert "does not fit" in page.run("document.querySelector('.figures').textContent")
    page.close()


def test_steps_without_events_or_change_are_drawn(browser: Browser, tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.allocate(GiB, Category.WEIGHTS)
    page = browser.open(write(tmp_path, builder.build(), TraceBuilder().build()))
    assert page.run("document.querySelector('.peak-name').textContent") == "Peak 1.0 GiB"
    assert page.complaints() == []
    page.close()


def test_hostile_names_run_nothing(browser: Browser, tmp_path: Path) -> None:
    evil = "</script><script>window.hurt = true</script><img src=x onerror='window.hurt = true'>"
    op = replace(TRACE.ops[0], name=evil, module=evil, source=evil)
    trace = replace(TRACE, model=evil, ops=tuple(replace(op, phase=old.phase) for old in TRACE.ops), notes=(evil,))
    page = browser.open(write(tmp_path, trace))
    page.hover(*point(page, 60, trace.peak_bytes // 4))
    shown = readout(page)
    assert shown is not None
    assert evil in shown["instant"]
    assert page.run("window.hurt") is None
    assert page.requests() == []
    page.close()
