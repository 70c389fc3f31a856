"""What `print(session.stats())` shows: a handful of lines. The tables of `lowtide.report` say more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowtide.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lowtide.runtime.session_stats import SessionStats, TierRow


def stats_text(stats: SessionStats) -> str:
    """Plain text, about ten lines."""
    steps = max(stats.num_steps, 1)
    whole_s = stats.seconds.total_s
    emulated = " on an emulated device" if stats.is_emulated else ""
    lines = [
        f"{stats.num_steps:,} steps{emulated}, {format_seconds(whole_s)}, {format_seconds(whole_s / steps)} a step"
    ]
    for name in ("forward", "backward", "update", "rest"):
        seconds = getattr(stats.seconds, f"{name}_s")
        share = seconds / whole_s if whole_s else 0.0
        lines.append(f"  {name:<12}{format_seconds(seconds / steps):>10} a step {share:>6.1%}")
    lines.append(f"  waiting     {format_seconds(stats.exposed_copy_s / steps):>10} a step, inside of these")
    if stats.host_update_s:
        lines.append(f"  host updates{format_seconds(stats.host_update_s / steps):>10} a step, beside these")
    to_device, to_host = (format_bytes(stats.moved_bytes(way) / steps) for way in ("to device", "to host"))
    lines.append(f"copied a step: {to_device} to the device, {to_host} to the host")
    lines += [_tier(row) for row in stats.tiers]
    resident = sum(chunk.weights == "resident" for chunk in stats.chunks)
    lines.append(f"{len(stats.chunks):,} chunks, {resident:,} of them resident")
    return "\n".join(lines)


def _tier(row: TierRow) -> str:
    words = f"{row.tier} peak: {format_bytes(row.peak_bytes)}"
    if row.budget_bytes is not None:
        words += f" of {format_bytes(row.budget_bytes)}"
        words += "" if row.is_within_budget else ", OVER THE BUDGET"
    return words
