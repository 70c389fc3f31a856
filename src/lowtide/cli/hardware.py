"""`lowtide hardware`: what this machine reached when it was measured, beside what the data sheet promises."""

from __future__ import annotations

from rich.panel import Panel
from rich.table import Table as RichTable
from rich.text import Text

from lowtide import plain_text
from lowtide.cli.console import OUT, progress
from lowtide.config import to_plain
from lowtide.hardware import Hardware, UpdateKind, find_hardware
from lowtide.hardware.calibration import Calibration, calibration_path
from lowtide.hardware.rates import UpdateRates
from lowtide.units import format_bytes, format_seconds


def run_hardware(*, again: bool, as_json: bool) -> None:
    """Measure the machine where that was not done yet, and show what was found."""
    from lowtide.lab.calibration.calibrate import calibrate  # other commands need none of what it imports

    with progress("measuring") as on_progress:
        found = calibrate(again=again, on_progress=on_progress)
    if as_json:
        print(plain_text.render(to_plain(found), "json"), end="")
        return
    OUT.print(calibration_panel(found, find_hardware("this")))


def calibration_panel(found: Calibration, hardware: Hardware) -> Panel:
    """Rates beside what the data sheet promises, and what they are good for."""
    facts = RichTable.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    setting = found.setting
    if found.device is not None:
        rates = found.device.rates
        for name, rate, promised in (
            ("bf16 products", rates.bf16, hardware.bf16_flops),
            ("fp16 products", rates.fp16, hardware.fp16_flops),
            ("fp32 products", rates.fp32, hardware.fp32_flops),
        ):
            if rate is not None:
                facts.add_row(name, f"{rate.per_s / 1e12:.1f} TFLOP/s{_share(rate.per_s, promised)}")
        facts.add_row(
            "attention",
            f"{rates.attention.share:.0%} of products in the forward, {rates.attention_backward.share:.0%} in the backward",
        )
        facts.add_row(
            "device memory",
            f"{_per_s(rates.memory.per_s)} in a step{_share(rates.memory.per_s, hardware.memory_bytes_per_s)}",
        )
        facts.add_row(
            "copies",
            f"{_per_s(rates.to_device_bytes_per_s)} to the device and {_per_s(rates.to_host_bytes_per_s)} back, at once",
        )
        facts.add_row("updates there", _updates(rates.updates))
    host = found.host
    facts.add_row("updates on the host", _updates(host.updates))
    if found.device is not None:
        facts.add_row("  beside copies", _updates(host.updates_beside_copies))
    if host.memory_bytes_per_s is not None:
        facts.add_row("host memory", _per_s(host.memory_bytes_per_s))
    facts.add_row(
        "Python",
        f"{format_seconds(host.launch_s)} an operator, {format_seconds(host.window_s)} a window, "
        f"{format_seconds(host.finished_s)} a gradient, {format_seconds(host.watched_s)} an operator watched",
    )
    facts.add_row("measured", f"{found.measured_at}, in {format_seconds(found.took_s)}, torch {setting.torch}")
    facts.add_row("kept in", str(calibration_path(setting.device)))
    for note in found.notes:
        facts.add_row("note", Text(note))
    title = f"{setting.device or 'no GPU'}, {setting.processor}"
    return Panel(facts, title=title, title_align="left", expand=False, padding=(1, 2))


def _per_s(rate: float) -> str:
    return f"{format_bytes(rate)}/s"


def _share(rate: float, promised: float | None) -> str:
    return "" if promised is None else f", {rate / promised:.0%} of the data sheet"


def _updates(rates: UpdateRates) -> str:
    return ", ".join(f"{kind} {_per_s(rates.of(kind))}" for kind in UpdateKind)
