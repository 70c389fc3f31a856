"""Row: what the seeds of one configuration say together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lowtide import config, errors
from lowtide.errors import ConfigError
from lowtide.lab.recipe import PublishedFigures
from lowtide.lab.record import Outcome, PredictedFigures, RunRecord, perplexity
from lowtide.lab.records import by_configuration, flat_settings, folder_of, generations, seed_of, settings_apart
from lowtide.plain_text import Plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Mean and range of some values; their standard deviation where there are at least two."""

    mean: float
    least: float
    largest: float
    deviation: float | None
    """The sample's standard deviation, divided by one less than the count; None for a single value, or one not finite."""
    count: int


def spread_of(values: Iterable[float | None]) -> Spread | None:
    """The spread of the values that are there; None without any.

    Example:
        >>> spread_of([1.0, None, 3.0])
        Spread(mean=2.0, least=1.0, largest=3.0, deviation=1.4142135623730951, count=2)
    """
    known = [value for value in values if value is not None]
    if not known:
        return None
    is_finite = all(map(math.isfinite, known))
    return Spread(
        mean=statistics.fmean(known),
        least=min(known),
        largest=max(known),
        deviation=statistics.stdev(known) if len(known) > 1 and is_finite else None,
        count=len(known),
    )


_PLAIN = frozenset(
    kind.__name__
    for kind in (
        errors.ConfigError,
        errors.UnknownNameError,
        errors.PlanError,
        errors.BadRecordError,
        errors.MissingExtraError,
        errors.HardwareError,
        errors.UnsupportedOptimizerError,
        errors.UnsupportedHeadError,
        errors.BatchMismatchError,
    )
)
"""Errors about what was asked for, whose words say what to change: a traceback adds nothing to them in a report."""
_ENDS = ("last heard: ", "nothing was heard of it", '  File "')
"""How the lines begin that follow an error's own words in a record."""


def _error_words(message: str) -> str:
    r"""A record's message as it is; of a plain user error its own words alone, on one line.

    Example:
        >>> _error_words('PlanError: too small\nlast heard: training\n  File "a.py", line 3, in run')
        'PlanError: too small'
        >>> _error_words('KeyError: 3\nlast heard: training\n  File "a.py", line 3, in run').count("\n")
        2
    """
    return error_line(message) if message.partition(":")[0] in _PLAIN else message


def error_line(message: str) -> str:
    r"""A record's message without the traceback, on one line, whatever the error.

    Example:
        >>> error_line('KeyError: 3\nlast heard: training\n  File "a.py", line 3, in run')
        'KeyError: 3'
    """
    lines = message.splitlines()
    end = next((number for number, line in enumerate(lines) if number and line.startswith(_ENDS)), len(lines))
    return " ".join(" ".join(lines[:end]).split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """A run that did not finish."""

    seed: int
    outcome: Outcome
    message: str
    """The words of a plain user error without the traceback, which the record has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One configuration on one device, over its seeds."""

    name: str
    """The recipe's name, such as `peak_memory/control`."""
    settings: str = ""
    """All that it has otherwise than others of the same name, such as `steps=3, optimizer.name=lion`."""
    device: str
    model: str
    seeds: tuple[int, ...]
    """The seed of each run, finished or not."""
    num_older: int = 0
    """Runs of the same seeds that were made before, and do not count."""
    is_older: bool = False
    """Whether the row is of such older runs."""
    unfinished: tuple[Ending, ...] = ()
    peak_bytes: int | None = None
    """The largest peak of all seeds."""
    training_peak_bytes: int | None = None
    """The largest peak of all seeds without the evaluation; None where phases are not known."""
    peak_phase: str | None = None
    """The phase of the peak in the run that needed most, which the following about memory are from too."""
    by_phase: Mapping[str, int]
    by_category: Mapping[str, int]
    """The peak by category; empty where it is not known."""
    is_breakdown_predicted: bool = False
    """Whether the trace said it, because no step was watched for it."""
    timeline: tuple[tuple[str, int], ...] = ()
    reserved_bytes: int | None = None
    """The largest of all seeds, as the host's bytes are."""
    host_bytes: int | None = None
    samples_per_s: Spread | None = None
    """The speed of runs that finished, as all figures below are; with first allocations, and compilation where there is any."""
    warm_samples_per_s: Spread | None = None
    steps_10_to_100_s: Spread | None = None
    samples_per_s_with_evaluation: Spread | None = None
    """Samples of all steps over the time of the steps and of the evaluation."""
    samples_per_step: int | None = None
    steps: int | None = None
    """How many steps were made."""
    perplexity: Spread | None = None
    perplexities: Mapping[int, Spread]
    """The perplexities by the step that an evaluation came after, the last one too; empty where that is the only one."""
    predicted: PredictedFigures | None = None
    published: PublishedFigures | None = None
    parameters: int | None = None
    is_compiled: bool = False
    """Whether the recipe has the model compiled, so that its first steps wait for that."""
    remarks: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        """The folder part of the name, which configurations of one experiment share."""
        return folder_of(self.name)

    @property
    def label(self) -> str:
        """The name within its folder, with what tells it from its namesakes."""
        short = self.name.rpartition("/")[2]
        return f"{short} ({self.settings})" if self.settings else short

    @property
    def outcome(self) -> Outcome:
        """Finished if every run has; otherwise of the first that has not."""
        return self.unfinished[0].outcome if self.unfinished else Outcome.FINISHED

    @property
    def is_finished(self) -> bool:
        """Whether every run came to its end."""
        return not self.unfinished

    @property
    def is_control(self) -> bool:
        """Whether others are measured against it, by its name."""
        return self.name.endswith("control") and not self.is_older

    @property
    def prediction_error(self) -> float | None:
        """Predicted over measured, less 1; None where either is missing, or the run did not get to its peak.

        What is predicted is a step of training: an evaluation that is higher says nothing about it.
        """
        measured_bytes = self.training_peak_bytes or self.peak_bytes
        if self.predicted is None or not measured_bytes or not self.is_finished:
            return None
        return self.predicted.peak_bytes / measured_bytes - 1


def alike_endings(row: Row) -> list[tuple[str, Ending]]:
    """The first of all endings that are the same but for the seed, each with the words for all seeds that it stands for."""
    seeds: dict[tuple[Outcome, str], list[Ending]] = {}
    for ending in row.unfinished:
        seeds.setdefault((ending.outcome, ending.message), []).append(ending)
    return [
        (f"{'seed' if len(alike) == 1 else 'seeds'} {', '.join(str(ending.seed) for ending in alike)}", alike[0])
        for alike in seeds.values()
    ]


def make_rows(records: Sequence[RunRecord], *, with_older: bool = False) -> tuple[Row, ...]:
    """Rows in the order of their first record; runs that differ in the seed alone share one.

    The newest of several runs with one seed counts. Runs of one name whose recipes differ otherwise, by an override or
    since an edit, are different configurations: each gets a row that says what differs.

    Args:
        records: Of any number of experiments.
        with_older: Whether older runs of the same configuration and seed get rows of their own, or are left out.
    """
    groups = by_configuration(records)
    # Another model is another comparison, with the model in its title: in labels it would hide what differs within one.
    namesakes: dict[tuple[str, str, str], list[dict[str, Plain]]] = {}
    for (name, device, _), runs in groups.items():
        namesakes.setdefault((name, device, _model(runs[0])), []).append(flat_settings(runs[0].recipe))
    rows = []
    for (name, device, _), runs in groups.items():
        newest, *older = generations(runs)
        settings = settings_apart(flat_settings(runs[0].recipe), namesakes[name, device, _model(runs[0])])
        num_older = 0 if with_older else len(runs) - len(newest)
        rows.append(_row(newest, device=device, settings=settings, num_older=num_older))
        for age, before in enumerate(older if with_older else (), start=1):
            when = f"older {age}, {before[0].surroundings.date[:16].replace('T', ' ')}"
            words = f"{settings}, {when}" if settings else when
            rows.append(replace(_row(before, device=device, settings=words), is_older=True))
    return tuple(rows)


def _row(runs: Sequence[RunRecord], *, device: str, settings: str, num_older: int = 0) -> Row:
    first = runs[0]
    finished = [run for run in runs if run.outcome is Outcome.FINISHED]
    # By peak: what is said about memory comes from the run that needed most, or the next that knows it.
    measured = sorted((run.memory for run in runs if run.memory), key=lambda memory: -memory.peak_bytes)
    most = measured[0] if measured else None
    timed = [run.speed for run in finished if run.speed and sum(run.speed.step_s) > 0]
    speeds = [speed for speed in timed if speed.is_alone]
    predicted = next((run.predicted for run in runs if run.predicted), None)
    watched = next((memory.at_peak for memory in measured if memory.at_peak), {})
    published, complaints = _published(runs)
    return Row(
        name=first.name,
        settings=settings,
        device=device,
        model=_model(first),
        seeds=tuple(seed_of(run) for run in runs),
        num_older=num_older,
        unfinished=tuple(
            Ending(seed=seed_of(run), outcome=run.outcome, message=_error_words(run.message))
            for run in runs
            if run.outcome is not Outcome.FINISHED
        ),
        peak_bytes=most.peak_bytes if most else None,
        training_peak_bytes=max(
            (memory.training_peak_bytes for memory in measured if memory.training_peak_bytes), default=None
        ),
        peak_phase=most.peak_phase if most and most.by_phase else None,
        by_phase=most.by_phase if most else {},
        by_category=watched or (predicted.at_peak if predicted else {}),
        is_breakdown_predicted=not watched,
        timeline=next((memory.timeline for memory in measured if memory.timeline), ()),
        reserved_bytes=max((memory.reserved_bytes for memory in measured if memory.reserved_bytes), default=None),
        host_bytes=max((memory.host_bytes for memory in measured if memory.host_bytes), default=None),
        samples_per_s=spread_of(speed.samples_per_s for speed in speeds),
        warm_samples_per_s=spread_of(speed.warm_samples_per_s() for speed in speeds),
        steps_10_to_100_s=spread_of(speed.between_s() for speed in speeds),
        samples_per_s_with_evaluation=spread_of(speed.samples_per_s_with_evaluation for speed in speeds),
        samples_per_step=timed[0].samples_per_step if timed else None,
        steps=len(timed[0].step_s) if timed else None,
        perplexity=spread_of(
            None if run.evaluation_loss is None else perplexity(run.evaluation_loss) for run in finished
        ),
        perplexities=_perplexities(finished),
        predicted=predicted,
        published=published,
        is_compiled=first.recipe.get("compile") is not None,
        parameters=next((run.parameters for run in runs if run.parameters is not None), None),
        remarks=tuple(
            dict.fromkeys([*(remark for run in runs for remark in run.remarks), *_in_company(runs), *complaints])
        ),
    )


def _perplexities(finished: Sequence[RunRecord]) -> dict[int, Spread]:
    values: dict[int, list[float]] = {}
    for run in finished:
        if run.evaluations and run.evaluation_loss is not None:
            for step, loss in (*run.evaluations, (len(run.losses), run.evaluation_loss)):
                values.setdefault(step, []).append(perplexity(loss))
    spreads = {step: spread_of(values[step]) for step in sorted(values)}
    return {step: spread for step, spread in spreads.items() if spread is not None}


def _in_company(runs: Sequence[RunRecord]) -> list[str]:
    """A remark where the times of some seeds are no speeds."""
    seeds = [str(seed_of(run)) for run in runs if run.speed is not None and not run.speed.is_alone]
    if not seeds:
        return []
    which = f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(seeds)}"
    return [f"Of {which} there are no speeds: other work was on the device."]


def _model(run: RunRecord) -> str:
    return str(run.recipe.get("model", ""))


def _published(runs: Sequence[RunRecord]) -> tuple[PublishedFigures | None, list[str]]:
    """What the newest recipe has of it; and what is wrong with it, where it cannot be read."""
    plain = next((run.recipe["published"] for run in reversed(runs) if run.recipe.get("published")), None)
    if plain is None:
        return None, []
    try:
        return config.from_plain(PublishedFigures, plain), []
    except ConfigError as error:
        return None, [f"Its published figures cannot be read: {error}"]
