from __future__ import annotations

import re

from lowtide.lab.record import Outcome
from lowtide.lab.report.comparison import make_report
from lowtide.lab.report.html import render_html
from lowtide.lab.report.write import render_markdown
from lowtide.report.table import escape_markdown as escape
from lowtide.units import GiB
from tests.lab.report.samples import budget_sweep, experiment, record


def tables(text: str) -> list[list[list[str]]]:
    found: list[list[list[str]]] = []
    is_within = False
    for line in text.splitlines():
        if line.startswith("|"):
            if not is_within:
                found.append([])
            found[-1].append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
        is_within = line.startswith("|")
    return found


def render(*records: object, **more: object) -> str:
    return render_markdown(make_report(records, **more))


def test_the_whole_experiment() -> None:
    text = render(*experiment(), skipped=["runs/a|b.json: no JSON"], sweeps=[budget_sweep()])
    results, published, breakdown, sweep = tables(text)
    assert all(len({len(row) for row in table}) == 1 for table in (results, published, breakdown, sweep))
    assert len(results) == 2 + 16
    assert len(published) == 2 + 11
    assert results[2][0] == "control"
    assert "**streamed**" in {row[0] for row in results}
    assert "- peak, GiB: most bytes of tensors" in text
    assert "- control_batch_64, seed 0: out of memory: CUDA out of memory." in text
    assert "- commit: cad574b" in text
    assert "- torch: 2.13.0" in text
    assert "- date: 2026-03-01T10:00:00+00:00" in text
    assert "- runs/a\\|b.json: no JSON" in text
    assert "Budget 0.05 has a larger peak, 13.561 GiB, than budget 0.1" in text


def test_of_a_run_that_failed_only_the_words_of_its_error_are_shown() -> None:
    message = (
        "EmulatedOutOfMemoryError: the emulated device is out of memory: aten.addmm asked for 64.0 KiB\n"
        'last heard: step 0 of 5\n  File "linear.py", line 134, in forward\n    return F.linear(input)'
    )
    text = render(record("x/a", outcome=Outcome.OUT_OF_MEMORY, message=message))
    [line] = [line for line in text.splitlines() if line.startswith("- a, seed 0")]
    assert line == (
        "- a, seed 0: out of memory: EmulatedOutOfMemoryError: the emulated device is out of memory: "
        "aten.addmm asked for 64.0 KiB"
    )
    assert "linear.py" not in text
    assert "last heard" not in text


def test_seeds_that_ended_alike_are_said_once() -> None:
    records = [
        *(record("x/small", seed=seed, outcome=Outcome.FAILED, message="PlanError: too small") for seed in (0, 1)),
        record("x/small", seed=2, outcome=Outcome.KILLED, message="after 3 s"),
    ]
    text = render(*records)
    assert "- small, seeds 0, 1: failed: PlanError: too small\n- small, seed 2: killed: after 3 s" in text
    assert render_html(make_report(records)).count("<pre>PlanError: too small</pre>") == 1


def test_a_table_by_hand() -> None:
    text = render(
        record("x/control", peak_bytes=4 * GiB),
        record("x/a", peak_bytes=GiB, outcome=Outcome.KILLED, message="sig|nal"),
    )
    [table] = tables(text)
    assert table == [
        ["configuration", "outcome", "peak, GiB", "at"],
        ["---", "---", "---:", "---"],
        ["control", "finished", "4.000", "forward"],
        ["a", "killed (sig\\|nal)", "≥ 1.000", "forward"],
    ]
    assert "No finished row has both a peak and a speed" in text


def test_perplexities_on_the_way_have_a_table() -> None:
    text = render(record(losses=(5.0,) * 4, evaluation_loss=0.0, evaluations=((2, 1.0),)))
    assert "### Perplexity after so many steps\n\n| configuration | after 2 | after 4 |" in text
    assert "| 2.72 | 1.00 |" in text


def test_names_cannot_break_the_table() -> None:
    text = render(record("x/a|b *c* <script> `d` [e](f)\nnext"))
    [table] = tables(text)
    assert table[2][0] == r"a\|b \*c\* \<script\> \`d\` \[e\](f) next"


def test_escaping_leaves_names_readable() -> None:
    assert escape("bf16_fused_chkpt") == "bf16_fused_chkpt"
    assert escape("_a_ $1 & ~~x~~") == r"\_a\_ \$1 \& \~\~x\~\~"


def test_two_devices_are_two_sections() -> None:
    text = render(record(), record(device="cpu, emulated"))
    assert "## peak_memory on NVIDIA H200" in text
    assert "## peak_memory on cpu, emulated" in text
    assert "times say nothing about a GPU" in text
    assert "- device: NVIDIA H200; cpu, emulated" in text


def test_remarks_name_who_made_them() -> None:
    text = render(record(remarks=("Odd.",)), record("peak_memory/a"))
    assert "- control: Odd." in text
    assert "- Odd." in render(record(remarks=("Odd.",)), record("peak_memory/a", remarks=("Odd.",)))


def test_a_killed_run_has_no_device_of_its_own() -> None:
    records = [record(device="cpu, emulated"), record(seed=1, peak_bytes=None, device="cpu", outcome=Outcome.KILLED)]
    assert "\n- device: cpu, emulated\n" in render(*records)


def test_older_runs_are_said() -> None:
    assert "control: an older run with the same seeds left out" in render(record(), record())


def test_a_monotone_sweep_is_said_to_be() -> None:
    assert "No smaller budget has a larger peak." in render(record(), sweeps=[budget_sweep(is_monotone=True)])
