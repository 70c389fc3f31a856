"""A trace's headline figures as plain data, for `--json`: small, stable, and enough for a script to decide on."""

from __future__ import annotations

from typing import Any

from lowtide.tracing.attention.use import attention_use
from lowtide.tracing.step_trace import StepTrace


def summarise(trace: StepTrace) -> dict[str, Any]:
    """The figures of a trace; the whole trace goes to a file with `--report FILE.json`."""
    event = trace.events[trace.peak_event] if trace.peak_event >= 0 else None
    op = trace.ops[event.op] if event is not None else None
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
        "capacity_bytes": trace.target.capacity_bytes,
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
