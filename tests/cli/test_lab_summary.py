"""What `lowtide lab report` says on the terminal."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console

from lowtide.cli.lab_summary import summary_of
from lowtide.lab.record import MemoryFigures, Outcome, RunRecord, SpeedFigures
from lowtide.lab.report.comparison import make_comparisons
from lowtide.units import GiB
from tests.lab.report.samples import experiment, record


def said(records: Sequence[RunRecord]) -> list[str]:
    (comparison,) = make_comparisons(records)
    console = Console(width=80, file=io.StringIO())
    console.print(*summary_of(comparison), sep="\n")
    return console.file.getvalue().splitlines()


def test_peaks_speeds_and_the_fastest_within_a_budget() -> None:
    speed = SpeedFigures(step_s=(0.5,) * 4, samples_per_step=1)
    lines = said(
        [
            record("x/control", peak_bytes=8 * GiB, speed=speed, evaluation_loss=0.0),
            record("x/large", peak_bytes=None, outcome=Outcome.OUT_OF_MEMORY),
            record("x/half", peak_bytes=4 * GiB, speed=speed, evaluation_loss=0.0),
        ]
    )
    assert lines[0] == "x on NVIDIA H200"
    assert lines[2].split() == ["configuration", "GiB", "reduction", "at", "samples/s", "perplexity"]
    assert lines[3].split() == ["control", "8.000", "forward", "2.000", "1.00"]
    assert lines[4].split() == ["half", "4.000", "50.0%", "forward", "2.000", "1.00"]
    assert [line.strip() for line in lines[5:7]] == ["large", str(Outcome.OUT_OF_MEMORY)]
    assert lines[7] == "Fastest within a budget, by peak: from 4.000 GiB half (2.000 samples/s)."


def test_different_numbers_of_steps_and_remarks_are_said() -> None:
    def made(name: str, num_steps: int, *remarks: str) -> RunRecord:
        speed = SpeedFigures(step_s=(0.5,) * num_steps, samples_per_step=1)
        return record(name, speed=speed, evaluation_loss=0.0, remarks=remarks)

    assert "steps" not in said([made("x/control", 4), made("x/other", 4)])[2]
    lines = said([made("x/control", 4), made("x/other", 3, "evaluated on 3 samples")])
    assert lines[2].split()[-3:] == ["steps", "samples/s", "perplexity"]
    assert [line.split()[-3] for line in lines[3:5]] == ["4", "3"]
    assert lines[-2] == "Note: other: evaluated on 3 samples"


def test_perplexities_on_the_way_are_a_sentence() -> None:
    run = record("x/control", losses=(5.0,) * 4, evaluation_loss=0.0, evaluations=((1, 5.0), (2, 1.0)))
    assert "control: perplexity 148.4, 2.72, 1.00 after 1, 2, 4 steps" in said([run])


def test_why_a_run_did_not_finish_is_said_once_for_all_seeds() -> None:
    message = 'KeyError: 3\nlast heard: training\n  File "a.py", line 3, in run'
    failed = [record("x/own", seed=seed, peak_bytes=None, outcome=Outcome.FAILED, message=message) for seed in (1, 2)]
    lines = said(
        [*failed, record("x/large", peak_bytes=None, outcome=Outcome.OUT_OF_MEMORY, message="needs " + "x" * 999)]
    )
    assert lines.count("own: KeyError: 3") == 1
    assert not any("a.py" in line for line in lines)
    assert "large: needs …" in lines


def test_long_settings_are_letters_beside_the_names() -> None:
    def made(name: str, steps: int) -> RunRecord:
        speed = SpeedFigures(step_s=(0.5,) * steps, samples_per_step=1)
        settings = {"steps": steps, "data": {"kind": f"a-long-name-of-data-{steps}"}}
        return record(name, recipe=settings, speed=speed, evaluation_loss=0.0)

    lines = said([made("x/a_name_of_some_length", steps) for steps in (3, 4)] + [made("x/control", 4)])
    names = [line.split()[:2] for line in lines[3:6]]
    assert names[0][0] == "control"
    assert names[1:] == [["a_name_of_some_length", "[a]"], ["a_name_of_some_length", "[b]"]]
    assert "[b] steps=4, data.kind=a-long-name-of-data-4" in lines


def test_columns_make_room_for_names() -> None:
    def made(name: str) -> RunRecord:
        memory = MemoryFigures(peak_bytes=GiB, by_phase={"forward": GiB}, reserved_bytes=2 * GiB)
        return record(name, memory=memory, evaluation_loss=0.0)

    assert "reserved" in " ".join(said([made("x/control"), made("x/short")]))
    lines = said([made("x/control"), made(f"x/{'long_name_' * 4}")])
    assert "reserved" not in " ".join(lines)
    assert any(line.startswith("long_name_" * 4) for line in lines)


def test_a_whole_experiment_fits_a_terminal() -> None:
    lines = said([*experiment(), *experiment(seed=1)])
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
