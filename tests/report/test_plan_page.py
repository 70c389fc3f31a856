"""The page of a plan: its tables add up to what the replay says, and it draws in a real browser without the network."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lowtide
from lowtide.models import resolve_model
from lowtide.models.gpt import GPT, GPTConfig
from lowtide.planning.timeline import Lane, lanes_that_work
from lowtide.report.html import ComparisonSection, PlanSection, render_page
from lowtide.report.plan_tables import budget_table, group_runs, lane_table, placement_table
from lowtide.report.table import Value
from lowtide.units import format_bytes, format_seconds
from tests.report.browser import Browser
from tests.report.test_html import Outline, table_with
from tests.runtime.session_samples import Streaming


@pytest.fixture(scope="module")
def section() -> PlanSection:
    config = GPTConfig(vocab_size=512, context_length=128, num_layers=8, hidden_size=512, num_heads=8)
    with torch.device("meta"):
        model = GPT(config).to(torch.bfloat16)
    ids = torch.zeros(4, 128, dtype=torch.int64)
    found = lowtide.plan(
        model,
        {"input_ids": ids, "labels": ids},
        optimizer=torch.optim.AdamW,
        device_memory="200MiB",
        host_memory="4GiB",
        hardware="rtx-4090",
    )
    return PlanSection(found=found, name="GPT", points=found.by_budget(), code="lowtide.prepare(<model>)")


def test_what_is_where_adds_up_to_the_predicted_bytes(section: PlanSection) -> None:
    found = section.found
    runs = group_runs(found)
    assert [name for run in runs for name in run.names] == [group.name for group in found.plan.groups]
    assert {run.weights.value for run in runs} == {"resident", "streamed"}
    assert found.trace.host_bytes is not None
    held = sum(run.host_bytes for run in runs)
    # At least the staging of two chunks comes to the groups' own bytes.
    two_chunks = 2 * found.plan.chunk_bytes
    assert held < found.trace.host_bytes <= held + max(two_chunks, found.source.best.placement.staging_bytes)
    assert sum(run.device_bytes for run in runs) < found.trace.peak_bytes
    sums = placement_table(found).rows[-1][-2:]
    assert [cell.num_bytes for cell in sums if isinstance(cell, Value)] == [
        sum(run.device_bytes for run in runs),
        held,
    ]


def test_when_all_is_on_the_device_its_bytes_are_those_of_the_trace() -> None:
    source = resolve_model("gpt-tiny")
    model, batch = source.build(torch.bfloat16), source.make_batch("2x64")
    found = lowtide.plan(model, batch, optimizer=torch.optim.AdamW, hardware="rtx-4090")
    weights = sum(parameter.nbytes for parameter in model.parameters())
    # Weights, gradients and two moments in bf16; chunks begin at multiples of 512 bytes.
    assert sum(run.device_bytes for run in group_runs(found)) == pytest.approx(4 * weights, rel=0.02)
    assert sum(run.host_bytes for run in group_runs(found)) == 0
    assert [run.name for run in group_runs(found)][1] == "layers.0–3"


def test_the_tables_say_which_bytes_were_replayed(section: PlanSection) -> None:
    rows = budget_table(section.points, section.found.num_tokens).rows
    assert len(rows) >= 4
    said = [row[3].text for row in rows if isinstance(row[3], Value)]
    assert said == ["replayed" if point.is_replayed else "estimated" for point in section.points]
    assert said[0] == "replayed"
    lanes = {row[0].text: row[1] for row in lane_table(section.found.simulated).rows if isinstance(row[0], Value)}
    busy_s = section.found.simulated.busy_s[Lane.HOST_UPDATE]
    assert lanes["updates on the host"] == Value(format_seconds(busy_s))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_draws_without_the_network(
    section: PlanSection, browser: Browser, tmp_path: Path, *, dark: bool
) -> None:
    observed = Streaming().timeline(is_emulated=True)
    comparison = ComparisonSection(simulated=section.found.simulated, observed=observed)
    path = tmp_path / "plan.html"
    path.write_text(render_page([section, comparison], title="A plan"), encoding="utf-8")
    page = browser.open(path, dark=dark)
    assert page.run("document.querySelectorAll('figure.gantt canvas').length") == 3
    assert page.run("document.querySelectorAll('figure[data-timeline] svg').length") >= 1
    assert page.run("document.querySelectorAll('.curve .mark').length") == len(section.points)
    assert page.run("document.querySelectorAll('.curve .mark.estimated').length") == sum(
        not point.is_replayed for point in section.points
    )
    spans = page.run("document.querySelector('figure.gantt').gantt.rows.map(row => [row.label, row.from.length])")
    timeline = section.found.simulated.timeline
    assert dict(spans) == {
        str(lane): sum(span.lane is lane for span in timeline.spans) for lane in lanes_that_work(timeline.lanes)
    }
    page.run("document.querySelector('.curve .mark').dispatchEvent(new Event('focus'))")
    said = page.run("document.querySelector('.curve .hint').textContent")
    assert said.startswith(f"{format_bytes(section.points[0].budget_bytes)} (replayed): ")
    assert page.run("document.querySelector('pre.code').textContent") == "lowtide.prepare(<model>)"
    # Nothing is wider than the page, marks and labels lie inside the chart.
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    assert page.run(
        """[...document.querySelectorAll('.curve-chart .dot')].every((dot) => {
            const [inner, outer] = [dot.getBoundingClientRect(), dot.ownerSVGElement.getBoundingClientRect()];
            return inner.left >= outer.left && inner.right <= outer.right && inner.top >= outer.top;
        })"""
    )
    assert page.complaints() == []
    assert page.requests() == []
    page.close()


def test_the_tables_are_there_without_a_script(section: PlanSection) -> None:
    outline = Outline(render_page([section], title="A plan"))
    where = table_with(outline, "on the host")
    assert where[-1][0] == "sum"
    assert len(table_with(outline, "bytes are")) == len(section.points) + 1
    assert table_with(outline, "lane")[1][0] == "computation"
