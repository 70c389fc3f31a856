from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from lowtide.planning.what_if import WhatIfRow
from lowtide.report import terminal, trace_tables
from lowtide.report.trace_tables import Fit, circumstances, fit_of, saving
from lowtide.tracing.explanation.compare import Difference, compare_traces
from lowtide.tracing.step_trace import Category, Phase, StepTrace, Target
from lowtide.units import GiB, MiB, format_bytes
from tests.tracing.samples import TARGET, TraceBuilder, observed_like, tiny_trace, transformer_trace


def test_fit_counts_reserved_memory_and_the_context() -> None:
    trace = tiny_trace()  # 20 MiB reserved
    context, least = 520 * MiB, tiny_trace().peak_bytes + 520 * MiB
    assert least < 540 * MiB
    for capacity, fits, tightly, spare in (
        (540 * MiB, True, False, 0),
        (
            540 * MiB - 1,
            False,
            True,
            540 * MiB - 1 - least,
        ),  # with cached blocks given back, only what is in use counts
        (least, False, True, 0),
        (least - 1, False, False, least - 1 - 540 * MiB),
    ):
        fit = fit_of(replace(trace, target=replace(TARGET, context_bytes=context, capacity_bytes=capacity)))
        expected = Fit(needed_bytes=540 * MiB, least_bytes=least, capacity_bytes=capacity)
        assert fit == expected
        assert (fit.fits, fit.fits_tightly, fit.spare_bytes) == (fits, tightly, spare)
    assert fit_of(replace(trace, target=replace(TARGET, capacity_bytes=0))) is None


def test_the_verdict_says_how_much_and_what_is_not_known() -> None:
    fit = Fit(needed_bytes=30 * GiB, least_bytes=20 * GiB, capacity_bytes=24 * GiB)
    assert fit.verdict == "fits only if cached blocks are given back, 4.0 GiB to spare then"
    assert replace(fit, capacity_bytes=10 * GiB).verdict == "does not fit, 10.0 GiB too much"
    assert replace(fit, capacity_bytes=32 * GiB).verdict == "fits, 2.0 GiB to spare"


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (replace(TARGET, capacity_bytes=540 * MiB), "fits, 0 B to spare"),
        (
            replace(TARGET, capacity_bytes=540 * MiB, is_context_assumed=True),
            "fits, 0 B to spare (with 520.0 MiB assumed for the CUDA context)",
        ),
        (
            replace(TARGET, capacity_bytes=20 * MiB, context_bytes=0),
            "fits, 0 B to spare (CUDA context not known, not counted)",
        ),
    ],
    ids=["known", "assumed", "not known, as in old files"],
)
def test_the_verdict_says_where_the_context_comes_from(target: Target, said: str) -> None:
    fit = fit_of(replace(tiny_trace(), target=target))
    assert fit is not None
    assert fit.verdict == said


def test_circumstances_are_what_a_trace_knows_of_itself() -> None:
    trace = replace(tiny_trace(), target=replace(TARGET, card="h200", torch_version="2.11.0", capacity_bytes=140 * GiB))
    assert circumstances(trace) == [("hardware", "h200, 140.0 GiB"), ("versions", "torch 2.11.0")]
    about = {"batch": "ids 2x64 int64", "optimizer": "AdamW", "dtype": "float32", "torch": "2.11.0+cu130"}
    made = {"lowtide": "0.1.0", "python": "3.11.7", "commit": "0123456789abcdef+changes"}
    trace = replace(trace, about={**about, **made}, settings={"autocast": "bfloat16"})
    assert circumstances(trace) == [
        ("batch", "ids 2x64 int64"),
        ("optimizer", "AdamW"),
        ("weights", "float32 under autocast to bfloat16"),
        ("hardware", "h200, 140.0 GiB"),
        ("versions", "torch 2.11.0, lowtide 0.1.0, Python 3.11.7, commit 0123456789ab with changes"),
    ]
    elsewhere = replace(trace, about={"torch": "2.13.0+cpu"}, settings={})
    assert dict(circumstances(elsewhere))["versions"] == "torch 2.11.0 (traced with 2.13.0+cpu)"


def test_differences_are_relative_to_the_observation() -> None:
    predicted = transformer_trace(layers=2)
    observed = observed_like(predicted, scale=1.25)
    rows = {row.what: row for row in compare_traces(predicted, observed).differences}
    assert rows["peak allocated"].predicted_bytes == predicted.peak_bytes
    assert rows["peak allocated"].observed_bytes == observed.peak_bytes
    assert rows["peak allocated"].error == pytest.approx(1 / 1.25 - 1, abs=1e-4)
    assert rows["highest in backward"].observed_bytes == observed.phase_peaks()[Phase.BACKWARD]
    assert rows["activations at the peak"].predicted_bytes == predicted.at_peak[Category.ACTIVATIONS]
    assert "gradients at the peak" not in rows  # none in either


def test_an_error_against_nothing_is_no_number() -> None:
    assert Difference(what="x", predicted_bytes=5, observed_bytes=0).error is None


@pytest.mark.parametrize(
    ("after", "text"), [(GiB, "2.0 GiB"), (3 * GiB, "nothing"), (4 * GiB, "costs 1.0 GiB"), (3 * GiB - 512, "nothing")]
)
def test_savings_in_words(after: int, text: str) -> None:
    assert saving(WhatIfRow(technique="x", before_bytes=3 * GiB, after_bytes=after, reason="")) == text


def text_of(part: RenderableType, *, width: int = 140) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    with console.capture() as capture:
        console.print(part)
    return capture.get()


def row_of(text: str, start: str) -> list[str]:
    [line] = [line for line in text.splitlines() if line.lstrip("│ ").startswith(start)]
    return line.strip("│ ").split()


def test_the_headline_says_how_much_where_and_whether_it_fits() -> None:
    text = text_of(terminal.headline(tiny_trace()))
    assert row_of(text, "peak allocated") == ["peak", "allocated", "19.0", "MiB", "19,922,944", "bytes"]
    assert row_of(text, "peak reserved")[2:] == ["20.0", "MiB"]
    assert row_of(text, "context beside it")[3:] == ["520.0", "MiB"]
    assert "h200, 140.4 GiB: fits, 139.9 GiB to spare" in text
    assert row_of(text, "the peak is in")[-1] == "loss"
    assert "(outside the model) aten._log_softmax" in text
    assert row_of(text, "line")[1:] == ["tiny.py:20"]
    assert "tiny  1.05M parameters in float32, predicted" in text


def test_the_headline_of_a_step_that_does_not_fit() -> None:
    trace = replace(tiny_trace(), target=replace(TARGET, card="toy-card", capacity_bytes=500 * MiB))
    too_much = format_bytes(trace.peak_bytes + trace.target.context_bytes - 500 * MiB)
    assert f"toy-card, 500.0 MiB: does not fit, {too_much} too much" in text_of(terminal.headline(trace))


def test_the_headline_says_that_a_context_is_assumed() -> None:
    trace = replace(tiny_trace(), target=replace(TARGET, is_context_assumed=True))
    text = text_of(terminal.headline(trace))
    assert "520.0 MiB  assumed, as measured on an H200" in text
    assert "fits, 139.9 GiB to spare (with 520.0 MiB assumed for the CUDA context)" in text


def test_the_headline_without_a_known_card_or_context() -> None:
    trace = replace(tiny_trace(), target=replace(TARGET, card="cpu", capacity_bytes=0, context_bytes=0))
    text = text_of(terminal.headline(trace))
    assert "cpu, memory not known" in text
    assert "context" not in text


def test_the_headline_of_a_step_that_never_exceeds_its_start() -> None:
    builder = TraceBuilder()
    builder.allocate(MiB, Category.WEIGHTS)
    assert row_of(text_of(terminal.headline(builder.build())), "the peak is in")[4:] == [
        "before",
        "the",
        "step",
        "begins",
    ]


def test_categories_at_the_peak_sum_to_it() -> None:
    text = text_of(trace_tables.category_table(tiny_trace()))
    assert row_of(text, "■ weights")[1:5] == ["weights", "4.0", "MiB", "21.1%"]
    assert row_of(text, "■ optimizer")[1:5] == ["optimizer", "8.0", "MiB", "42.1%"]
    assert row_of(text, "■ gradients")[1:] == ["gradients", "0", "B", "0.0%"]
    assert row_of(text, "sum") == ["sum", "19.0", "MiB"]
    # 8 of 19 MiB on a bar 24 wide: ten full blocks.
    assert row_of(text, "■ optimizer")[5].count("█") == 10


def test_phases_with_the_peak_marked() -> None:
    text = text_of(trace_tables.phase_table(tiny_trace()))
    assert row_of(text, "forward")[1:4] == ["15.0", "MiB", "78.9%"]
    assert row_of(text, "loss ◀ peak")[3:6] == ["19.0", "MiB", "100.0%"]
    assert row_of(text, "update")[1:4] == ["12.0", "MiB", "63.2%"]
    assert text.count("◀ peak") == 1


def test_alive_rows_sum_to_the_peak() -> None:
    trace = transformer_trace(layers=3)
    text = text_of(trace_tables.alive_table(trace, limit=4))
    assert "smaller kinds" in text
    assert row_of(text_of(trace_tables.alive_table(tiny_trace())), "8.0 MiB") == [
        *("8.0", "MiB", "1", "■", "optimizer", "[2,", "1024,", "1024]", "float32", "head")
    ]
    assert "layers.*.mlp.up aten.addmm gpt.py:57" in text_of(trace_tables.alive_table(trace))


def test_largest_tensors_have_shape_type_and_origin() -> None:
    [head, *rows] = text_of(trace_tables.largest_table(tiny_trace(), limit=3)).splitlines()[1:]
    assert head.split() == ["bytes", "category", "tensor", "made", "by"]
    assert len(rows) == 3
    row = "4.0 MiB ■ temporaries [1024, 1024] float32 (outside the model) aten._log_softmax tiny.py:20"
    assert row in [" ".join(line.split()) for line in rows]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_wider_than_the_terminal_and_no_number_breaks(width: int) -> None:
    trace = transformer_trace(layers=2)
    text = text_of(terminal.trace_report(trace, observed=observed_like(trace)), width=width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "785.3 MiB" in text


def test_names_are_not_markup() -> None:
    builder = TraceBuilder(model="[red]model[/red]")
    builder.enter(Phase.FORWARD)
    builder.op("aten.mm", module="layers[0]", source="[bold].py:1")
    builder.allocate(MiB, Category.ACTIVATIONS)
    text = text_of(terminal.trace_report(builder.build(notes=("see [link]",))))
    for name in ("[red]model[/red]", "layers[0]", "[bold].py:1", "see [link]"):
        assert name in text


def test_predicted_against_observed() -> None:
    predicted = transformer_trace(layers=2)
    text = text_of(trace_tables.comparison_table(predicted, observed_like(predicted, scale=1.25)))
    assert row_of(text, "peak allocated")[-1] == "-20.00%"


def test_what_if() -> None:
    rows = [
        WhatIfRow(technique="recompute", before_bytes=3 * GiB, after_bytes=GiB, reason="Layers keep their input only."),
        WhatIfRow(technique="fused", before_bytes=3 * GiB, after_bytes=3 * GiB, reason="The peak is at the loss."),
    ]
    text = text_of(terminal.what_if_report(rows))
    assert row_of(text, "recompute ") == ["recompute", "1.0", "GiB", "2.0", "GiB"]
    assert row_of(text, "fused ")[3:] == ["nothing"]
    fitting = [
        replace(row, fits=row.technique == "recompute", host_bytes=GiB, step_s=1.5, reserved_bytes=2 * GiB)
        for row in rows
    ]
    told = text_of(terminal.what_if_report(fitting))
    assert row_of(told, "recompute ")[-5:] == ["1.0", "GiB", "1.5", "s", "yes"]
    assert row_of(told, "fused ")[-1] == "no"
    # Techniques with one reason share its sentence.
    alike = text_of(terminal.what_if_report([replace(row, reason="One reason.") for row in rows]))
    assert alike.count("One reason.") == 1
    assert "recompute, fused: One reason." in alike
    assert row_of(text, "fused:") == ["fused:", "The", "peak", "is", "at", "the", "loss."]


def test_the_report_has_every_part_once(capsys: pytest.CaptureFixture[str]) -> None:
    trace = tiny_trace()
    text = text_of(terminal.trace_report(trace, observed=replace_origin(trace)))
    for title in ("Predicted against observed", "At the peak, by category", "Highest in each phase", "Notes"):
        assert text.count(title) == 1
    assert "the head is not tied" in text
    assert capsys.readouterr().out == ""


def replace_origin(trace: StepTrace) -> StepTrace:
    return replace(trace, origin="observed")


def test_the_headline_names_the_attention_backends() -> None:
    builder = TraceBuilder()
    builder.enter(Phase.FORWARD)
    builder.op("aten._scaled_dot_product_cudnn_attention", module="layers.0")
    builder.op("aten._safe_softmax", module="layers.1")
    builder.op("aten._safe_softmax", module="layers.2")
    builder.allocate(MiB, Category.ACTIVATIONS)
    reason = "attention runs on the math backend (flash: it takes no mask)"
    warning = (
        "the attention in 'layers.1' (query [1] float32) falls back to the math backend: in bfloat16 it runs on cudnn"
    )
    text = text_of(terminal.trace_report(builder.build(notes=(reason, warning, "another note"))), width=200)
    assert "attention          math (2 calls; flash: it takes no mask)" in text
    assert "cudnn (1 call)" in text
    assert warning in text
    # Told once, where they are seen; the panel of notes holds the others.
    assert text.count(reason) == 0
    assert "• another note" in text
