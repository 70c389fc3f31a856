"""How much room gradients have that wait for the host, against a step that is played through chunk by chunk."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.errors import PlanError
from lowtide.memory.tier import HostMemory
from lowtide.planning.placement import ENOUGH_BYTES, SHARE_OF_REST, granted_staging_bytes, staging_for
from lowtide.planning.plan import Budgets
from lowtide.runtime.host_memory import HostNeed, charged_tiers
from lowtide.units import GiB

ROUNDING = 4096 + 512
CHUNKS = 200
RECORDS = Path(__file__).parents[2] / "benchmarks/results/session"
WITH_LITTLE = RECORDS / "host_share_8b_2026-11-16T1138_h200_93a108e.json"
"""2 GiB, whatever the share."""
WITH_MORE = RECORDS / "host_share_8b_2026-11-16T1433_h200_b9ecfc3.json"
"""What the plan takes now, on a host that has it."""


def step_s(
    host_chunks: int, room_bytes: int, *, chunk_bytes: int, host_s: float, device_s: float, update_s: float = 0.0
) -> float:
    """A step in the steady state: the device goes forward and back through all chunks, and needs `device_s` for a chunk in
    a forward and twice that in a backward. The host updates the first ones of the backward, in `host_s` each, and the
    device the others, in `update_s`."""
    now = host_is_free = last = 0.0
    ready = [0.0] * CHUNKS
    waiting: list[float] = []
    for _ in range(8):
        began = now
        for chunk in reversed(range(CHUNKS)):
            now = max(now, ready[chunk]) + device_s
        for chunk in range(CHUNKS):
            now += 2 * device_s
            if chunk >= host_chunks:
                now += update_s
                continue
            waiting = [ended for ended in waiting if ended > now]
            too_many = len(waiting) - max(1, room_bytes // chunk_bytes) + 1
            if too_many > 0:
                now = sorted(waiting)[too_many - 1]
            host_is_free = max(now, host_is_free) + host_s
            ready[chunk] = host_is_free
            waiting.append(host_is_free)
        last = now - began
    return last


@given(host_chunks=st.integers(1, CHUNKS), chunk_mib=st.integers(64, 512), pace=st.floats(0.5, 6.0))
@settings(max_examples=300)
def test_more_than_what_is_called_useful_makes_no_step_faster(host_chunks: int, chunk_mib: int, pace: float) -> None:
    """`pace` is how much longer the host needs for a chunk than the backward."""
    chunk_bytes = chunk_mib << 20
    _, useful = staging_for(
        None,
        least=2 * chunk_bytes,
        on_host=host_chunks * chunk_bytes,
        on_device=(CHUNKS - host_chunks) * chunk_bytes,
        waits=True,
    )
    times = {"chunk_bytes": chunk_bytes, "host_s": 2 * pace, "device_s": 1.0}
    best = step_s(host_chunks, CHUNKS * chunk_bytes, **times)
    # In a chunk's time host and device may miss each other.
    assert step_s(host_chunks, useful, **times) <= best + times["host_s"]


def played(record: Path, percent: int, room_bytes: int) -> tuple[float, float]:
    """Seconds of a step of 8B, played through with the times of a record, and as it was measured."""
    rows = {row["name"]: row for row in json.loads(record.read_text(encoding="utf-8"))["rows"]}
    row = rows[f"8b, {percent}% on the host"]
    plain_s, all_on_device_s = (rows[f"8b, {what}"]["median_s"] for what in ("forward and backward", "0% on the host"))
    host_chunks = round(percent / 100 * CHUNKS)
    played_s = step_s(
        host_chunks,
        room_bytes,
        chunk_bytes=2 * row["parameters"] // CHUNKS,
        host_s=row["stats"]["host_update_s"] / row["stats"]["num_steps"] / host_chunks,
        device_s=plain_s / 3 / CHUNKS,
        update_s=(all_on_device_s - plain_s) / CHUNKS,
    )
    return played_s, row["median_s"]


SHARES = (30, 40, 50, 60)
TEXT = " ".join((Path(__file__).parents[2] / "docs/speed.md").read_text(encoding="utf-8").split())


def row(words: str, seconds: Iterable[float]) -> str:
    """A row of the page's table."""
    return f"| {words} | {' | '.join(f'{each:.2f}' for each in seconds)} |"


def test_a_step_that_is_played_through_is_the_one_that_was_measured() -> None:
    """And what docs/speed.md says of more room."""
    with_little, measured = zip(*(played(WITH_LITTLE, percent, ENOUGH_BYTES) for percent in SHARES), strict=True)
    assert with_little == pytest.approx(measured, rel=0.06)
    with_all = [played(WITH_LITTLE, percent, 32 * GiB)[0] for percent in SHARES]
    assert row("93a108e, measured with 2 GiB", measured) in TEXT
    assert row("simulated with 2 GiB", with_little) in TEXT
    assert row("simulated with room for all of the host's gradients", with_all) in TEXT


def test_the_room_that_is_taken_makes_the_steps_that_were_measured_with_it() -> None:
    rows = json.loads(WITH_MORE.read_text(encoding="utf-8"))["rows"]
    gradient_bytes = 2 * next(row["parameters"] for row in rows if row["name"] == "8b, 30% on the host")
    rooms, steps = [], []
    for percent in SHARES:
        on_host = gradient_bytes * percent // 100
        _, room = staging_for(None, least=1, on_host=on_host, on_device=gradient_bytes - on_host, waits=True)
        rooms.append(room)
        steps.append(played(WITH_MORE, percent, room))
    measured_with = f"b9ecfc3, measured with {min(rooms) / GiB:.1f} to {max(rooms) / GiB:.0f} GiB"
    assert row(measured_with, [measured for _, measured in steps]) in TEXT
    with_little = [played(WITH_MORE, percent, ENOUGH_BYTES)[0] for percent in SHARES]
    assert row("simulated on this host with 2 GiB", with_little) in TEXT
    assert row("simulated with the room that was taken", [as_played for as_played, _ in steps]) in TEXT
    for percent, (as_played, measured) in zip(SHARES, steps, strict=True):
        # Beyond 40% the steps were faster than the play has them, and nobody knows why.
        assert measured == pytest.approx(as_played, rel=0.06) if percent <= 40 else 0.85 < measured / as_played < 1


@pytest.mark.parametrize(
    ("on_host", "on_device", "needed", "useful"),
    [
        (1 * GiB, 1 * GiB, 1 * GiB, 1 * GiB),
        (6 * GiB, 0, 2 * GiB, 2 * GiB),
        (6 * GiB, 1 * GiB, 2 * GiB, 3 * GiB),
        (6 * GiB, 9 * GiB, 2 * GiB, 6 * GiB),
    ],
)
def test_what_the_device_updates_makes_more_room_useful(on_host: int, on_device: int, needed: int, useful: int) -> None:
    found = staging_for(None, least=1 << 20, on_host=on_host, on_device=on_device, waits=True)
    assert found == tuple(pytest.approx(num_bytes + ROUNDING / 2, abs=ROUNDING / 2) for num_bytes in (needed, useful))


def test_what_the_plan_says_is_taken_as_it_is() -> None:
    assert staging_for(8192, least=4096, on_host=6 * GiB, on_device=6 * GiB, waits=True) == (12288, 12288)
    with pytest.raises(PlanError, match="staging_memory is 4.0 KiB"):
        staging_for(4096, least=8192, on_host=6 * GiB, on_device=0, waits=True)
    assert staging_for(None, least=0, on_host=0, on_device=6 * GiB, waits=True) == (0, 0)
    # Deferred, or without state: nothing waits for long.
    assert staging_for(None, least=4096, on_host=6 * GiB, on_device=6 * GiB, waits=False) == (8192, 8192)


def test_more_room_comes_out_of_what_is_left() -> None:
    assert granted_staging_bytes(2 * GiB, useful=8 * GiB, rest_bytes=100 * GiB) == 8 * GiB
    assert granted_staging_bytes(2 * GiB, useful=8 * GiB, rest_bytes=8 * GiB) == 2 * GiB + SHARE_OF_REST * 8 * GiB
    assert granted_staging_bytes(2 * GiB, useful=8 * GiB, rest_bytes=-1) == 2 * GiB


def test_the_scarcer_of_host_and_locked_memory_decides() -> None:
    need = HostNeed(
        weight_bytes=8 * GiB,
        gradient_bytes=0,
        staging_bytes=2 * GiB,
        useful_staging_bytes=8 * GiB,
        state_bytes=40 * GiB,
        paged_bytes=2 * GiB,
        table_bytes=4 * GiB,
    )
    assert need.with_room(125 * GiB, 90 * GiB) == replace(need, staging_bytes=8 * GiB)
    assert need.with_room(64 * GiB, 46 * GiB) == replace(need, staging_bytes=4 * GiB)
    assert need.with_room(125 * GiB, 16 * GiB) == replace(need, staging_bytes=3 * GiB)
    assert need.with_room(50 * GiB, 46 * GiB) == need  # which is refused then


def test_what_others_have_taken_of_the_machine_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    need = HostNeed(
        weight_bytes=GiB // 2,
        gradient_bytes=0,
        staging_bytes=GiB // 8,
        useful_staging_bytes=GiB,
        state_bytes=0,
        paged_bytes=0,
        table_bytes=0,
    )
    budgets = Budgets(host_bytes=4 * GiB, pinned_bytes=4 * GiB)
    for available_bytes, staging_bytes in (
        (100 * GiB, int(SHARE_OF_REST * 3.375 * GiB) + GiB // 8),
        (GiB // 2, GiB // 8),
    ):
        monkeypatch.setattr(HostMemory, "available_bytes", lambda self, found=available_bytes: found)
        tiers = charged_tiers(budgets, need)
        assert tiers.need.staging_bytes == staging_bytes
        assert tiers.host.used_bytes == tiers.pinned.used_bytes == tiers.need.total_bytes
