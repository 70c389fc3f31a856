from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from lowtide.planning.timeline import Timeline
from lowtide.report.session_tables import chunk_summaries, overlap_line, per_step
from lowtide.report.terminal import session_report
from lowtide.runtime.statistics.session_stats import CacheRow, ChunkRow, PhaseSeconds, SessionStats
from tests.runtime.session_samples import CHUNK_BYTES, Streaming, stats_of

TIMELINE = Streaming().timeline(is_emulated=True)
STATS = stats_of(TIMELINE)


def shown(stats: SessionStats, width: int = 100) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(session_report(stats))
    return capture.get()


def line_with(text: str, word: str) -> list[str]:
    [line] = [line for line in text.splitlines() if line.startswith(word)]
    return line.split()


def test_the_terminal_shows_time_copies_peaks_chunks_and_cache() -> None:
    text = shown(STATS)
    assert "3 steps, 1.1 s  emulated device  18.1 ms of copy time not hidden" in text
    assert line_with(text, "forward")[:6] == ["forward", "118.8", "ms", "356.4", "ms", "32.3%"]
    assert line_with(text, "to host    gradients")[-1] == "63"
    assert line_with(text, "device")[1:] == ["576.0", "MiB", "1.0", "GiB", "520.0", "MiB", "-9.7%"]
    assert line_with(text, "layers.*/*") == ["layers.*/*", "24", "2.2", "GiB", "streamed", "host", "144", "12–15%"]
    assert "The buffer cache served 66 of 72 requests (92%) and holds 192.0 MiB." in text


def test_a_session_without_steps_is_shown() -> None:
    stats = SessionStats(
        num_steps=0, moved=(), exposed_copy_s=0.0, seconds=PhaseSeconds(), chunks=(), cache=CacheRow(), tiers=()
    )
    text = shown(stats)
    assert "nothing was copied" in text
    assert "0 steps, 0 s" in text
    assert "emulated" not in text


def test_names_are_not_markup() -> None:
    chunk = replace(STATS.chunks[0], name="[bold]x[/bold]/0")
    assert "[bold]x[/bold]/0" in shown(replace(STATS, chunks=(chunk,)))


def test_the_rest_of_many_chunks_is_one_line() -> None:
    chunks = tuple(replace(STATS.chunks[0], name="x" * length) for length in range(1, 21))
    text = shown(replace(STATS, chunks=chunks))
    assert line_with(text, "others") == ["others", "4", "384.0", "MiB"]


def row(name: str, *, site: str = "host", share: float = 0.5) -> ChunkRow:
    return ChunkRow(
        name=name,
        group=name.rpartition("/")[0],
        num_bytes=CHUNK_BYTES,
        weights="streamed",
        site=site,
        num_fetches=2,
        resident_share=share,
    )


def test_chunks_of_the_same_lot_share_a_row() -> None:
    rows = [row("h.0.e.0/0", share=0.1), row("h.1.e.0/0", share=0.25), row("h.2.e.0/0", site="device"), row("tied")]
    summaries = chunk_summaries(rows)
    assert [(item.name, item.count, item.num_bytes, item.num_fetches) for item in summaries] == [
        ("h.*.e.0/0", 2, 2 * CHUNK_BYTES, 4),
        ("h.2.e.0/0", 1, CHUNK_BYTES, 2),
        ("tied", 1, CHUNK_BYTES, 2),
    ]
    assert [item.share_text for item in summaries] == ["10–25%", "50%", "50%"]


def test_sentences() -> None:
    assert per_step(10, 0) == "–"
    assert overlap_line(Timeline(spans=(), residency=(), is_emulated=False)) == ""
    assert overlap_line(TIMELINE).endswith("4.2 ms before it at the least (layers.10).")
