"""What a person sees of a run, on a terminal of eighty columns and in a pipe."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from lowtide.runtime.statistics.session_stats import CacheRow, PhaseSeconds, PlanRow, SessionStats, TierRow
from lowtide.train.progress import Meter, RunStatus, TierStatus, bound_by
from lowtide.train.view import RunView, checkpoint_words, curve, plain_line, words_of_time
from lowtide.units import GiB, MiB

STATUS = RunStatus(
    words="training",
    step=1240,
    steps=10_000,
    loss=2.34567,
    losses=(4.0, 3.5, 3.0, 2.5, 2.3),
    tokens_per_s=12_345.0,
    step_s=0.664,
    left_s=5820.0,
    bound_by="updates on the host",
    tiers=(
        TierStatus(name="device", peak_bytes=23 * GiB, budget_bytes=24 * GiB),
        TierStatus(name="host", peak_bytes=31 * GiB, budget_bytes=None),
    ),
    evaluation=(1200, 2.5),
    saved_step=1200,
    saved_at_s=0.0,
)


def drawn(view: RunView, width: int = 80) -> list[str]:
    console = Console(width=width, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(view)
    return [line.rstrip() for line in capture.get().splitlines()]


def test_the_view_fits_eighty_columns() -> None:
    view = RunView("hf:/home/somebody/models/a-model-with-a-long-name → /scratch/somebody/runs/a-run-with-a-long-name")
    view.show(STATUS)
    lines = drawn(view)
    assert len(lines) == 9
    assert max(map(len, lines)) <= 80
    assert lines[0].endswith("…")
    assert lines[1].startswith("training, step 1,240 of 10,000  ━")
    assert lines[1].endswith("12%")
    assert lines[3].split() == ["loss", "2.3457", "█▆▄▂▁", "held", "out", "2.5000", "at", "step", "1,200"]
    assert lines[4] == "speed       12.3K tokens/s  664.0 ms a step, bound by updates on the host"
    assert lines[5].endswith("23.0 GiB of 24.0 GiB")
    assert lines[6] == "host        31.0 GiB"
    assert lines[7] == "time left   about 97 min"
    assert lines[8].startswith("checkpoint  step 1,200, ")


def test_the_view_of_a_run_that_begins_and_of_what_is_done_before() -> None:
    view = RunView("gpt-tiny → out")
    assert drawn(view) == ["gpt-tiny → out", "starting"]
    view.say("searching the fastest plan")
    assert drawn(view)[1] == "searching the fastest plan"
    view.show(RunStatus(words="training", step=0, steps=10))
    lines = drawn(view)
    assert lines[1].startswith("training, step 0 of 10")
    assert "none yet" in lines[-1]
    view.show(replace(STATUS, is_saving=True))
    view.end()
    lines = drawn(view)
    assert lines[1].startswith("ended, step 1,240 of 10,000")
    assert lines[3].startswith("loss        2.3457"), "the last figures stay"
    assert lines[7:] == ["time left", lines[8]]
    assert "writing the next one" not in lines[8]


def test_a_checkpoint_that_is_written_shows() -> None:
    words = checkpoint_words(replace(STATUS, is_saving=True), 250.0).plain
    assert words == "step 1,200, 4 min ago  writing the next one"
    assert checkpoint_words(replace(STATUS, saved_at_s=None), 250.0).plain == "step 1,200"


def test_the_same_in_one_line() -> None:
    assert plain_line(STATUS) == (
        "step 1,240 of 10,000, loss 2.3457, 12.3K tokens/s, device 23.0 GiB of 24.0 GiB, host 31.0 GiB, bound by updates on "
        "the host, 97 min left, saved step 1,200"
    )
    assert plain_line(RunStatus(words="evaluating", step=2, steps=9)) == "step 2 of 9, evaluating"


def test_curves_are_as_wide_as_they_may_be() -> None:
    assert curve(()) == ""
    assert curve((2.0, 2.0)) == "▁▁"
    assert len(curve(tuple(float(number) for number in range(50)))) == 17
    assert curve(tuple(float(number) for number in range(50)))[-1] == "█"


def test_times_are_said_as_people_do() -> None:
    assert [words_of_time(seconds) for seconds in (0.2, 99, 101, 5999, 6001, 172_000, 180_000)] == [
        "0 s", "99 s", "2 min", "100 min", "1.7 h", "47.8 h", "2.1 days",
    ]  # fmt: skip


def stats(total_s: float, *, waiting_s: float = 0.0, rest_s: float = 0.0, host_s: float = 0.0) -> SessionStats:
    return SessionStats(
        num_steps=1,
        moved=(),
        exposed_copy_s=waiting_s,
        seconds=PhaseSeconds(forward_s=total_s - rest_s, rest_s=rest_s),
        chunks=(),
        cache=CacheRow(),
        tiers=(TierRow(tier="device", peak_bytes=MiB, budget_bytes=2 * MiB), TierRow(tier="pinned", peak_bytes=1)),
        host_update_s=host_s,
        plans=(PlanRow(step=1, reason="a larger batch"),),
    )


def test_what_bounds_a_step_is_what_it_waits_for() -> None:
    before = stats(10.0, waiting_s=5.0, host_s=5.0)
    assert bound_by(before, stats(20.0, waiting_s=6.0, host_s=14.0)) == "computation"
    assert bound_by(before, stats(20.0, waiting_s=9.0, host_s=14.0)) == "updates on the host"
    assert bound_by(before, stats(20.0, waiting_s=9.0, host_s=5.0)) == "copies between host and device"
    assert bound_by(before, stats(20.0, waiting_s=5.0, rest_s=6.0)) == "data and the rest of the loop"
    assert bound_by(before, stats(10.0)) is None


class Asked:
    """Stands for a session whose statistics are asked for."""

    def __init__(self) -> None:
        self.num_asked = 0

    def stats(self) -> SessionStats:
        self.num_asked += 1
        return stats(10.0 * self.num_asked)


def test_a_meter_asks_a_session_seldom_and_tells_the_pace() -> None:
    now, session = [100.0], Asked()
    meter = Meter(session, tokens_per_step=1000, steps=100, clock=lambda: now[0])  # type: ignore[arg-type]
    told = {"evaluation": None, "saved_step": None, "saved_at_s": None, "is_saving": False}
    for number in range(10):
        now[0] += 0.5
        meter.step_ended(0.25, 4.0 - number / 10, is_last=False)
    assert session.num_asked == 3, "in the first step, and then every two seconds"
    status = meter.status("training", step=10, **told)  # type: ignore[arg-type]
    assert (status.tokens_per_s, status.step_s, status.left_s) == (4000.0, 0.25, 45.0)
    assert status.tiers == (TierStatus(name="device", peak_bytes=MiB, budget_bytes=2 * MiB),)
    assert meter.row() == {"tokens_per_s": 4000.0, "step_s": 0.25, "device_peak_bytes": MiB}
    assert (meter.new_plans(), meter.new_plans()) == (["a larger batch"], [])
    meter.step_ended(0.25, float("nan"), is_last=True)
    assert meter.status("training", step=11, **told).loss == 3.1  # type: ignore[arg-type]


def test_the_first_steps_promise_nothing() -> None:
    meter = Meter(Asked(), tokens_per_step=1, steps=100)  # type: ignore[arg-type]
    meter.step_ended(5.0, 1.0, is_last=False)
    status = meter.status("training", step=1, evaluation=None, saved_step=None, saved_at_s=None, is_saving=False)
    assert status.left_s is None
