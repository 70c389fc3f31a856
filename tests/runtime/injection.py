"""Exceptions injected at lines: one training step is broken off at a chosen line, and what is left is compared with plain torch.

Each injection runs in a forked process together with others: a crash or a hang ends that process, and is blamed on the
injection that was under way. Run as a module it prints what went wrong; see `main`.

A line is hit by a trace function, which raises there, or sends SIGINT there: Python then calls its handler at once, as it
does for an interrupt that arrives while the line before is running. Nothing is raised where a `with` block is left: Python
traces the line of the `with` there once more, before it calls `__exit__`, where neither code nor a signal can raise.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import faulthandler
import functools
import gc
import json
import os
import random
import signal
import sys
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from lowtide.errors import StepLostError
from lowtide.runtime.emulation.device import living_trackers
from lowtide.runtime.updates.worker import FAILED
from tests.runtime.twins import PLACES, SmallNet, adamw, flat_state, make_batch, make_net, off_the_books, usual_peak

ROOT = Path(lowtide.__file__).parent
FOLDERS = (f"{ROOT / 'runtime'}{os.sep}", f"{ROOT / 'memory'}{os.sep}")
WARM_STEPS = 2
"""Whole steps before the one that is broken off."""
PARTS = ("step", "close")
"""What is broken off: a forward, backward, `step()` and `zero_grad()`; or `close()`."""
LIMIT_S = 20
UNWATCHED = ("resident-device", "deferred")
"""The backward is torch's own here: nobody notices that it broke off, and a `step()` after it is the user's, as in plain torch."""
CASES = tuple((place, schedule) for place in PLACES for schedule in ("deferred", "in_backward"))


class InjectedError(Exception):
    """What is raised at a line."""


@dataclass(frozen=True)
class Injection:
    """Break off here."""

    place: str
    schedule: str
    part: str
    """One of `PARTS`."""
    kind: str
    """`error` raises InjectedError, `sigint` sends the signal."""
    after: str
    """What the loop does then: `close`, `go on` or `step`."""
    thread: str
    file: str
    line: int
    number: int
    """At which execution of the line, from 1."""

    @property
    def label(self) -> str:
        where = f"{self.file}:{self.line} #{self.number} ({self.thread})"
        return f"{self.place} {self.schedule} {self.part} {self.kind}, then {self.after}, at {where}"


# -- lines -------------------------------------------------------------------------------------------------------------


@functools.cache
def _with_blocks(file: str) -> dict[int, int]:
    """Of each `with`, its line and the last line of its block."""
    tree = ast.parse(Path(file).read_text())
    return {node.lineno: node.end_lineno or node.lineno for node in ast.walk(tree) if isinstance(node, ast.With)}


class LineTrace:
    """Calls `on_line` at each line of the folders, in the loop's thread and that of a worker which starts meanwhile."""

    def __init__(self, on_line: Callable[[str, str, int], None], threads: Sequence[str] = ("main", "worker")) -> None:
        self._on_line = on_line
        self._threads = threads
        self._is_ours: dict[CodeType, bool] = {}

    def __enter__(self) -> None:
        if "worker" in self._threads:
            threading.settrace(self._worker_call)
        if "main" in self._threads:
            sys.settrace(self._main_call)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]  # as documented

    def _matches(self, frame: FrameType) -> bool:
        code = frame.f_code
        if code not in self._is_ours:
            self._is_ours[code] = code.co_filename.startswith(FOLDERS)
        return self._is_ours[code]

    def _main_call(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._in_frame("main") if self._matches(frame) else None

    def _worker_call(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._in_frame("worker") if self._matches(frame) else None

    def _in_frame(self, thread: str) -> Any:
        before = 0

        def on_event(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal before
            if event == "line":
                line, last = frame.f_lineno, before
                before = line
                if not line < last <= _with_blocks(frame.f_code.co_filename).get(line, 0):
                    self._on_line(thread, frame.f_code.co_filename, line)
            return on_event

        return on_event


# -- one training run --------------------------------------------------------------------------------------------------


@functools.cache
def plain_trajectory() -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Weights and optimizer state of plain torch after each step. All steps see the same batch."""
    model = make_net()
    optimizer = adamw(model)
    found = [_snapshot(model, optimizer)]
    for _ in range(WARM_STEPS + 5):
        model(*make_batch(0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(_snapshot(model, optimizer))
    return found


def _snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return (
        {name: value.detach().clone() for name, value in model.named_parameters()},
        {name: value.clone() for name, value in flat_state(optimizer).items()},
    )


def steps_taken(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[int | None, int | None]]:
    """Of each parameter, after which step plain torch has this weight, and this state."""
    weights, state = _snapshot(model, optimizer)
    found: dict[str, tuple[int | None, int | None]] = {}
    for index, name in enumerate(weights):
        entries = {key: value for key, value in state.items() if key.startswith(f"{index}.")}
        weight_at = state_at = None
        for step, (plain_weights, plain_state) in enumerate(plain_trajectory()):
            plain = {key: value for key, value in plain_state.items() if key.startswith(f"{index}.")}
            if torch.equal(weights[name], plain_weights[name]):
                weight_at = step
            if plain.keys() == entries.keys() and all(torch.equal(plain[key], entries[key]) for key in plain):
                state_at = step
        found[name] = (weight_at, state_at)
    return found


class Run:
    """A managed model that has taken its first steps."""

    def __init__(self, place: str, schedule: str) -> None:
        self.model: SmallNet = make_net()
        self.optimizer = adamw(self.model)
        budget_bytes = usual_peak(place, schedule) + 8192
        plan = lowtide.make_plan(self.model, schedule=schedule, device_memory=budget_bytes, **PLACES[place])
        # Where everything is resident and updated on the device torch's own step would run: the norm, which clips nothing,
        # lets the session's run.
        max_grad_norm = 1e9 if (place, schedule) == UNWATCHED else None
        self.session = lowtide.manage(self.model, self.optimizer, plan, device="cpu", max_grad_norm=max_grad_norm)
        self.phase = ""

    def step(self) -> None:
        """One unchanged step."""
        self.phase = "forward"
        loss = self.model(*make_batch(0))
        self.phase = "backward"
        loss.backward()
        self.phase = "step"
        self.optimizer.step()
        self.phase = "zero_grad"
        self.optimizer.zero_grad()
        self.phase = "over"

    def warm_up(self) -> None:
        for _ in range(WARM_STEPS):
            self.step()

    def traced(self, part: str) -> None:
        """What is broken off."""
        if part == "close":
            self.session.close()
        else:
            self.step()


def lines_of(place: str, schedule: str, part: str) -> Counter[tuple[str, str, int]]:
    """How often each line is executed, by thread, file and line."""
    counts: Counter[tuple[str, str, int]] = Counter()

    def count(thread: str, file: str, line: int) -> None:
        counts[thread, file, line] += 1

    run = Run(place, schedule)
    if part == "close":
        run.warm_up()
        with LineTrace(count):
            run.traced(part)
    else:
        is_armed = [False]
        # The worker's thread starts with its first job, and is traced from there on.
        with LineTrace(lambda *line: count(*line) if is_armed[0] else None, ["worker"]):
            run.warm_up()
            run.session.settle()
        is_armed[0] = True
        with LineTrace(count, ["main"]):
            run.traced(part)
        run.session.settle()
        is_armed[0] = False
        run.session.close()
    return counts


def injections_of(
    place: str, schedule: str, *, parts: Sequence[str] = PARTS, kinds: Sequence[str] = ("error", "sigint")
) -> list[Injection]:
    """At the first and last execution of each line. What the loop does then takes turns."""
    found: list[Injection] = []
    for part in parts:
        counts = lines_of(place, schedule, part)
        for index, ((thread, file, line), count) in enumerate(sorted(counts.items())):
            for kind in kinds:
                if kind == "sigint" and thread != "main":
                    continue  # signals arrive in the main thread alone
                for turn, number in enumerate(sorted({1, count})):
                    after = "close" if part == "close" else ("close", "go on", "step")[(index + turn) % 3]
                    if after == "step" and (place, schedule) == UNWATCHED:
                        after = "go on"
                    found.append(Injection(place, schedule, part, kind, after, thread, str(Path(file)), line, number))
    return found


# -- one injection -----------------------------------------------------------------------------------------------------


def perform(injection: Injection) -> str | None:
    """Break off there; what is wrong afterwards, or None."""
    run = Run(injection.place, injection.schedule)
    executions = 0
    was_hit = False

    def maybe_raise(thread: str, file: str, line: int) -> None:
        nonlocal executions, was_hit
        if line == injection.line and thread == injection.thread and file == injection.file and is_armed[0]:
            executions += 1
            if executions == injection.number and not was_hit:
                was_hit = True
                if injection.kind == "sigint":
                    signal.raise_signal(signal.SIGINT)
                else:
                    raise InjectedError("injected")

    is_armed = [False]
    raised: str | None = None
    was_told = False
    unraisable: list[object] = []
    sys.unraisablehook = unraisable.append
    with LineTrace(maybe_raise, [] if injection.thread == "main" else ["worker"]):
        run.warm_up()
        run.session.settle()
    is_armed[0] = True
    with LineTrace(maybe_raise, ["main"] if injection.thread == "main" else []):
        try:
            run.traced(injection.part)
        except (InjectedError, KeyboardInterrupt) as error:
            raised = type(error).__name__
            was_told = FAILED in getattr(error, "__notes__", ())
    phase = run.phase
    gc.collect()
    if not was_hit and injection.thread == "main":
        run.session.close()
        return None
    # In a callback of a weak reference Python itself lets nothing out.
    if injection.kind == "sigint" and raised != "KeyboardInterrupt" and not unraisable:
        run.session.close()
        return f"swallowed: the interrupt in {phase} raised {raised}"
    try:
        problem = _aftermath(run, injection, phase, was_told=was_told)
    finally:
        if run.session.is_open:
            with contextlib.suppress(Exception):
                run.session.close()  # its budget must not stand in the way of the next
    if problem is None and signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return "swallowed: another handler stayed"
    return problem


class _Aftermath:
    """What the loop does after the exception, and what it hears."""

    def __init__(self, run: Run, injection: Injection, *, was_told: bool) -> None:
        self._run = run
        self._injection = injection
        self.was_told = was_told
        """Whether an error said that some groups may have taken the step: the worker's own."""
        self.said: str | None = None
        """Which groups moved, in an error or a warning."""
        self.is_workers = False
        """Whether the worker's own error was heard."""

    def attempt(self, what: str, call: Callable[[], object]) -> str | None:
        """What is wrong, where it raises anything but what tells of a lost step or of the worker's error."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                call()
            except StepLostError as error:
                self.said = str(error)
            except InjectedError as error:
                self.is_workers = True
                if self._injection.thread != "worker":
                    return f"{what} raised the injected error again"
                self.was_told = self.was_told or FAILED in getattr(error, "__notes__", ())
            except BaseException as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{Path(last.filename).name}:{last.lineno}"
                return f"{what} raised {type(error).__name__} in {where}: {str(error)[:150]} [{self._run.phase}]"
        for warning in caught:
            if issubclass(warning.category, RuntimeWarning) and "these have taken the step" in str(warning.message):
                self.said = str(warning.message)
        return None

    def verdict(self) -> str | None:
        """What is wrong with weights and state, which nothing was done to since."""
        try:
            with off_the_books():
                taken = steps_taken(self._run.model, self._run.optimizer)
        except InjectedError as error:
            if self._injection.thread != "worker":
                return "a look at the weights raised the injected error again"
            self.is_workers = True
            return None if FAILED in getattr(error, "__notes__", ()) else "the worker's error says nothing of the step"
        pairs = set(taken.values())
        if self.was_told:
            return None
        torn = {name: pair for name, pair in taken.items() if pair[0] is None or pair[0] != pair[1]}
        if self.said is None and len(pairs) == 1 and not torn:
            return None
        if self.said is None:
            return f"mixed: {dict(Counter(taken.values()))}"
        last = max((pair[0] for pair in pairs if pair[0] is not None), default=None)
        moved = {_label(name) for name, (weight, _) in taken.items() if weight == last} | set(map(_label, torn))
        if len({pair for name, pair in taken.items() if name not in torn}) > 1 or torn:
            unsaid = [label for label in moved if label not in self.said]
            return f"mixed: {unsaid} moved, and {self.said!r}" if unsaid else None
        return None


def _label(name: str) -> str:
    """The group of a parameter, as messages name it."""
    return {"head": "(rest of the model)", "stem": "stem"}.get(name.split(".")[0], ".".join(name.split(".")[:2]))


def _aftermath(run: Run, injection: Injection, phase: str, *, was_told: bool) -> str | None:
    after = _Aftermath(run, injection, was_told=was_told)
    if injection.after == "step" and phase in ("forward", "backward"):
        problem = after.attempt("step()", run.optimizer.step)
        if problem or (after.said is not None and (problem := after.verdict())):
            return problem
    is_trained = False
    if injection.after != "close":
        for what, call in (("zero_grad()", run.optimizer.zero_grad), ("going on", run.step), ("going on", run.step)):
            if problem := after.attempt(what, call):
                return problem
            if after.is_workers:
                break
            if what == "zero_grad()" and after.said is not None and (problem := after.verdict()):
                return problem
            is_trained = what != "zero_grad()"
    if problem := after.attempt("close()", run.session.close):
        return problem
    if run.session.is_open:
        return "unclosed: the session is open"
    if any(type(parameter) is not nn.Parameter for parameter in run.model.parameters()):
        return "unclosed: a parameter is not plain"
    if vars(run.optimizer).keys() & {"step", "zero_grad"}:
        return "unclosed: the optimizer is not plain"
    if living_trackers():
        return "unclosed: the budget is still on"
    if not (is_trained and after.said is not None) and (problem := after.verdict()):
        return problem
    return after.attempt("the plain model", run.step)


# -- many of them ------------------------------------------------------------------------------------------------------


def run_all(injections: Sequence[Injection], *, batch: int = 60) -> Iterator[tuple[Injection, str]]:
    """Each injection that left something wrong, and what."""
    waiting = list(injections)
    while waiting:
        now, waiting = waiting[:batch], waiting[batch:]
        answers = _run_forked(now)
        for injection, problem in zip(now, answers, strict=False):
            if problem is not None:
                yield injection, problem
        waiting = now[len(answers) :] + waiting


def _run_forked(injections: Sequence[Injection]) -> list[str | None]:
    """The answers, up to and including that of one which ended its process."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2) if not os.environ.get("INJECTION_STDERR") else None
        with os.fdopen(writing, "w") as pipe:
            for injection in injections:
                faulthandler.dump_traceback_later(LIMIT_S, exit=True)
                try:
                    answer = perform(injection)
                except BaseException as error:
                    answer = f"broke: {type(error).__name__}: {error} {traceback.format_exc()[-600:]}"
                faulthandler.cancel_dump_traceback_later()
                sys.settrace(None)
                pipe.write(json.dumps(answer) + "\n")
                pipe.flush()
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answers: list[str | None] = [json.loads(line) for line in pipe]
    _, status = os.waitpid(pid, 0)
    if len(answers) < len(injections):
        ended = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "no end within the limit"
        answers.append(f"{'crash' if os.WIFSIGNALED(status) else 'hang'}: {ended}")
    return answers


def prepare() -> None:
    """One thread for torch's own kernels, which a forked process can use; what is cached is made before the fork."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # A shell lets its jobs in the background ignore interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    plain_trajectory()
    for place, schedule in CASES:
        usual_peak(place, schedule)
    gc.collect()
    gc.freeze()


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m tests.runtime.injection [--place P] [--schedule S] [--kind K] [--part P] [--sample N] [--shard K/N]`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--place", action="append", choices=list(PLACES))
    parser.add_argument("--schedule", action="append", choices=["deferred", "in_backward"])
    parser.add_argument("--kind", action="append", choices=["error", "sigint"])
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--sample", type=int)
    parser.add_argument("--each", type=int, help="a sample of so many for each placement and schedule")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at", help="file.py:LINE alone")
    parser.add_argument("--shard", default="0/1", help="K/N: every N-th injection from the K-th on, for N processes")
    chosen = parser.parse_args(arguments)
    prepare()
    injections: list[Injection] = []
    for place, schedule in CASES:
        if place in (chosen.place or PLACES) and schedule in (chosen.schedule or ("deferred", "in_backward")):
            injections += injections_of(
                place, schedule, parts=chosen.part or PARTS, kinds=chosen.kind or ("error", "sigint")
            )
    if chosen.at:
        injections = [each for each in injections if f"{Path(each.file).name}:{each.line}" == chosen.at]
    generator = random.Random(chosen.seed)
    if chosen.each is not None:
        by_case: dict[tuple[str, str], list[Injection]] = {}
        for each in injections:
            by_case.setdefault((each.place, each.schedule), []).append(each)
        injections = [each for found in by_case.values() for each in generator.sample(found, chosen.each)]
    if chosen.sample is not None and chosen.sample < len(injections):
        injections = generator.sample(injections, chosen.sample)
    shard, num_shards = map(int, chosen.shard.split("/"))
    injections = injections[shard::num_shards]
    num_wrong = 0
    for injection, problem in run_all(injections):
        num_wrong += 1
        print(json.dumps({**asdict(injection), "file": Path(injection.file).name, "problem": problem}), flush=True)
    print(json.dumps({"injections": len(injections), "wrong": num_wrong}), flush=True)
    return 1 if num_wrong else 0


def kinds_of(problems: Iterable[str]) -> Counter[str]:
    """How many of each kind."""
    return Counter(problem.partition(":")[0] for problem in problems)


if __name__ == "__main__":
    sys.exit(main())
