"""What `lowtide trace` and `lowtide explain` are asked, and what they say: a request as data, every field of which can be
set with `--set`, headline figures for scripts, and the explanation with what each technique would save.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text
from torch import Tensor, nn

from lowtide import config
from lowtide.cli.console import OUT, progress, require_reports, write_reports
from lowtide.errors import BatchMismatchError, ConfigError, TooLargeError, UnknownNameError
from lowtide.hardware import find_hardware, known_hardware
from lowtide.lab.recipe_parts import OPTIMIZERS as OPTIMIZERS_OF_RECIPES
from lowtide.lab.recipe_parts import PlanRecipe, plan_of
from lowtide.models import ModelSource, built_in_names, resolve_model
from lowtide.planning.techniques import Problem
from lowtide.planning.what_if import WhatIf, WhatIfRow, what_if
from lowtide.report.html import Section
from lowtide.report.terminal import headline, notes, trace_report, what_if_report
from lowtide.report.trace_tables import alive_table, category_table, fit_of, what_if_table
from lowtide.runtime.prediction.trace import trace
from lowtide.tracing.attention.use import attention_use, fallbacks, is_on_attention
from lowtide.tracing.explanation.explain import explain
from lowtide.tracing.prediction.sandbox import shared_sandbox
from lowtide.tracing.settings import StepSettings
from lowtide.tracing.step_trace import StepTrace, step_time
from lowtide.units import format_bytes, format_seconds, parse_dtype

_NUM_SENTENCES, _NUM_ROWS = 3, 16
"""Sentences and rows of an explanation that fit one screen."""
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    **{name: OPTIMIZERS_OF_RECIPES[name] for name in ("adamw", "adam", "sgd", "adafactor", "rmsprop", "adagrad")},
    "deep-one-adafactor": OPTIMIZERS_OF_RECIPES["deep-one-adafactor"],
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One step of one model on some hardware."""

    model: str
    """A built-in name, `hf:FOLDER_OR_CONFIG` or `package.module:factory`."""
    batch: str | None = None
    """`8x2048` (sequences x tokens) or `64x3x224x224` (images); the model's default where it is left out."""
    gpu: str = "h200"
    """The hardware to predict for: a name, or a capacity such as 24GiB."""
    torch: str | None = None
    """The torch version to predict for; the installed one where it is left out."""
    dtype: str | None = None
    """Type of the weights, and of everything computed from them without autocast: bfloat16, float16 or float32, or bf16 and so on.
    Left out: a factory's model as the factory makes it, all others in bfloat16."""
    optimizer: str = "adamw"
    """One of `OPTIMIZERS`, or none for forward and backward alone."""
    step: StepSettings = field(default_factory=StepSettings)
    """How the step is run."""
    plan: PlanRecipe | None = None
    """The words of `lowtide.make_plan`: the step as a session runs it. None: plain torch."""
    precision: str | None = None
    """With a plan, as for `lowtide.manage`."""
    moments: str = "fp32"
    """With a precision."""

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS and self.optimizer != "none":
            raise UnknownNameError("optimizer", self.optimizer, [*OPTIMIZERS, "none"])
        if self.dtype is not None:
            # Frozen, so set past the guard.
            object.__setattr__(self, "dtype", parse_dtype(self.dtype, key="dtype"))

    def problem(self) -> Problem:
        """The step to trace: the model is built on the meta device, whatever its size."""
        source = resolve_model(self.model)
        is_as_made = self.dtype is None and source.family == "factory"
        model = source.build(None if is_as_made else getattr(torch, self.dtype or "bfloat16"))
        return Problem(
            model=model,
            batch=self._make_batch(source, model),
            optimizer=OPTIMIZERS.get(self.optimizer),
            loss=source.loss,
            settings=self.step,
            plan=None if self.plan is None else plan_of(self.plan, model),
            precision=self.precision,
            moments=self.moments,
            trace_session=trace,
            hardware=find_hardware(self.gpu),
            torch_version=self.torch,
            name=source.name,
        )

    def run(self, on_progress: Callable[[str], None]) -> StepTrace:
        """Trace the step."""
        shared_sandbox().warm()
        on_progress(f"building {self.model}")
        return self.problem().trace(on_progress)

    def _make_batch(self, source: ModelSource, model: nn.Module) -> dict[str, Tensor]:
        """The batch, floating point inputs in the model's type."""
        try:
            batch = source.make_batch(self.batch or source.default_batch)
        except (BatchMismatchError, TooLargeError) as error:
            # To a caller of the library it is an error of the step; here it was typed.
            raise ConfigError(f"--batch: {error}", key="batch") from error
        dtype = next((weight.dtype for weight in model.parameters() if weight.is_floating_point()), torch.float32)
        return {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}


def settable() -> str:
    """What `--set` takes, for the help text."""
    own = [f.name for f in fields(TraceRequest) if f.name not in ("model", "step", "batch", "gpu", "plan")]
    keys = [*own, *(f"step.{f.name}" for f in fields(StepSettings)), *(f"plan.{f.name}" for f in fields(PlanRecipe))]
    lines = [
        f"**--set** takes {', '.join(f'`{key}`' for key in keys)}.",
        f"Models: {', '.join(built_in_names())}.",
        f"Hardware: {', '.join(known.name for known in known_hardware())}, a capacity such as 24GiB, or this (`lowtide hardware`).",
        f"Optimizers: {', '.join(OPTIMIZERS)}, none.",
    ]
    return "\n\n".join(lines)


def make_request(model: str, batch: str | None, gpu: str, overrides: list[str]) -> TraceRequest:
    """The request of a command line: its flags, then its `--set` overrides on the same fields."""
    return config.override(TraceRequest(model=model, batch=batch, gpu=gpu), overrides)


def summarise(trace: StepTrace) -> dict[str, Any]:
    """The figures of a trace; the whole trace goes to a file with `--report FILE.json`."""
    event = trace.events[trace.peak_event] if trace.peak_event >= 0 else None
    op = trace.ops[event.op] if event is not None else None
    time = step_time(trace)
    return {
        "schema": "lowtide.summary/1",
        "model": trace.model,
        "origin": trace.origin,
        "card": trace.target.card,
        "torch": trace.target.torch_version,
        "settings": trace.settings,
        "batch": trace.about.get("batch"),
        "optimizer": trace.about.get("optimizer"),
        "dtype": trace.about.get("dtype"),
        "made_with": {key: trace.about[key] for key in ("torch", "lowtide", "python", "commit") if key in trace.about},
        "num_parameters": trace.num_parameters,
        "peak_bytes": trace.peak_bytes,
        "peak_reserved_bytes": trace.peak_reserved_bytes,
        "context_bytes": trace.target.context_bytes,
        "is_context_assumed": trace.target.is_context_assumed,
        "capacity_bytes": trace.target.capacity_bytes,
        "host_bytes": trace.host_bytes,
        "pinned_bytes": trace.pinned_bytes,
        "step_s": None if time is None else time.step_s,
        "bound_by": None if time is None else time.bound_by,
        "peak_phase": str(trace.peak_phase),
        "peak_module": op.module if op else "",
        "peak_op": op.name if op else "",
        "peak_source": op.source if op else "",
        "at_peak": {str(category): nbytes for category, nbytes in trace.at_peak.items()},
        "phase_peaks": {str(phase): nbytes for phase, nbytes in trace.phase_peaks().items()},
        "attention": [
            {"backend": use.backend, "num_calls": use.num_calls, "reason": use.reason} for use in attention_use(trace)
        ],
        "notes": list(trace.notes),
    }


def run_trace(request: TraceRequest, *, as_json: bool, reports: list[Path], is_full: bool = False) -> None:
    """Trace, and show the peak by category and phase; in full also the tensors at the peak."""
    require_reports(reports)
    with progress("tracing") as on_progress:
        result = request.run(on_progress)
    if as_json:
        print(json.dumps(summarise(result), indent=2))
    else:
        num_rows = 10 if is_full else 0
        OUT.print(trace_report(result, num_largest=num_rows, num_groups=num_rows))
        _say_there_is_more(is_full, "the tensors at the peak")
    write_reports(reports, Section(trace=result))


def run_explain(request: TraceRequest, *, as_json: bool, reports: list[Path], is_full: bool = False) -> None:
    """Trace, explain, trace again with each technique, and show what is found on one screen, or all of it."""
    require_reports(reports)
    shared_sandbox().warm()
    with progress("tracing") as on_progress:
        problem = request.problem()
        base = problem.trace(on_progress)
    explanation = explain(base)
    with progress("what if") as on_progress:
        answer = what_if(
            problem, base, on_progress=lambda step: on_progress(f"{step.technique} ({step.number} of {step.total})")
        )
    if as_json:
        tried = [{**asdict(row), "saved_bytes": row.saved_bytes} for row in answer.rows]
        skipped = [asdict(each) for each in answer.skipped]
        said = {
            "explanation": list(explanation.sentences),
            "what_if": tried,
            "not_tried": skipped,
            "verdict": answer.verdict,
        }
        print(json.dumps({**summarise(base), **said}, indent=2))
    else:
        if is_full:
            _say_all(base, explanation.sentences, answer)
        else:
            OUT.print(Text(_in_a_line(base), style="bold"))
            for sentence in explanation.sentences[:_NUM_SENTENCES]:
                OUT.print(escape(sentence), highlight=False)
            for note in (*fallbacks(base), *(note for note in base.notes if not is_on_attention(note))):
                OUT.print(Text(note, style="dim"))
            OUT.print(what_if_table(_most_saving(answer.rows)))
        say_what_fits(answer)
        _say_there_is_more(is_full, "the tensors at the peak, and why each technique saves what it saves")
    write_reports(reports, Section(trace=base, explanation=explanation.text, what_if=answer.rows))


def _say_all(base: StepTrace, sentences: Sequence[str], answer: WhatIf) -> None:
    OUT.print(headline(base), category_table(base), alive_table(base, limit=10))
    if told := [note for note in base.notes if not is_on_attention(note)]:
        OUT.print(notes(told))
    for sentence in sentences:
        OUT.print(Padding(escape(sentence), (0, 0, 1, 0)), highlight=False)
    OUT.print(what_if_report(answer.rows))
    for other in answer.skipped:
        OUT.print(f"[dim]not tried: {escape(other.technique)}: {escape(other.reason)}[/]", highlight=False)


def _in_a_line(base: StepTrace) -> str:
    """The model, its peak, whether that fits, and how long a step takes."""
    fit, time = fit_of(base), step_time(base)
    verdict = "" if fit is None else f"; {format_bytes(fit.capacity_bytes)}: {fit.verdict}"
    reserved = f"{format_bytes(base.peak_bytes)} allocated, {format_bytes(base.peak_reserved_bytes)} reserved"
    timed = "" if time is None else f"; {format_seconds(time.step_s)} a step"
    return f"{base.model} on {base.target.card}: {reserved}{verdict}{timed}"


def _most_saving(rows: Sequence[WhatIfRow]) -> list[WhatIfRow]:
    """Those that save most, in the order of the table."""
    best = sorted(rows, key=lambda row: row.after_bytes)[:_NUM_ROWS]
    return [row for row in rows if row in best]


def _say_there_is_more(is_full: bool, what: str) -> None:
    if not is_full:
        OUT.print(Text(f"--full lists {what}", style="dim"))


def say_what_fits(answer: WhatIf) -> None:
    """What it takes to fit, and how that is turned on, where the step does not fit as it is."""
    if answer.verdict:
        OUT.print(Padding(Text(answer.verdict, style="bold"), (1, 0, 0, 0)))
    least = answer.least_that_fits
    if answer.base_fits is False and least is not None:
        OUT.print(Text(f"to trace it: {' '.join(f'--set {each}' for each in least.set_)}", style="dim"))
        if least.code:
            OUT.print(Text(f"in your script: {least.code}", style="dim"))
