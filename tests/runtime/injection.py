"""Exceptions injected at lines: one training step is broken off at a chosen line, and what is left is compared with a plain loop.

Each injection runs in a forked process together with others: a crash or a hang ends that process, and is blamed on the
injection that was under way. Run as a module it prints what went wrong; see `main`.

A line is hit by a trace function, which raises there, or sends SIGINT there: Python then calls its handler at once, as it
does for an interrupt that arrives while the line before is running. Nothing is raised where neither code nor a signal can:
where a `with` block is left, Python traces the line of the `with` once more, before it calls `__exit__`; and at a `try`, where
no block around it in the function would see the exception.
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
import tempfile
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from lowtide.activations import Offload, Policy, Recompute, Selective
from lowtide.errors import CheckpointError, LossScaleError, StepLostError, UnsupportedOptimizerError
from lowtide.optim import LossScaler
from lowtide.optim.loss_scale import StaticScale
from lowtide.optim.state import MASTER, to_torch_state
from lowtide.optim.update_types import numerics_of
from lowtide.planning.plan import Schedule
from lowtide.runtime.checkpoints.folder import RunFolder
from lowtide.runtime.checkpoints.format import CheckpointReader
from lowtide.runtime.emulation.device import living_trackers
from lowtide.runtime.plan_run import BROKEN_OFF
from lowtide.runtime.updates.worker import FAILED
from tests.runtime.kernel_loops import PlainKernels
from tests.runtime.twins import PLACES, SmallNet, adamw, device_peak, flat_state, make_batch, make_net, off_the_books

ROOT = Path(lowtide.__file__).parent
FOLDERS = tuple(f"{ROOT / name}{os.sep}" for name in ("runtime", "memory", "activations", "optim"))
PARTS = ("step", "close")
"""What is broken off: a forward, backward, `step()` and `zero_grad()`; or `close()`."""
LIMIT_S = 20
MAX_STEPS = 8
"""The most steps of one run."""
SCHEDULES = ("deferred", "in_backward")
UNWATCHED = ("resident-device", "deferred")
"""The backward is torch's own here: nobody notices that it broke off, and a `step()` after it is the user's, as in plain torch."""


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """What decides the numbers of a run: runs that are equal in it take the same steps, wherever their bytes are."""

    precision: str | None = None
    moments: str = "fp32"
    max_grad_norm: float | None = None
    scales_loss: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.precision is None else numerics_of(self.precision)[0].dtype


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to train."""

    numbers: Numbers = Numbers()
    plan: dict[str, Any] = field(default_factory=dict)
    """Options of `make_plan`."""
    slack_bytes: int = 8192
    """Device memory beyond what a few steps take: a traceback, or a graph that is kept, holds a few activations longer."""
    warm_up_memory: int | None = None
    """The size of the device, where the plan is a `WarmUp`."""
    num_steps_before: int = 2
    """Whole steps before the one that is broken off."""
    schedules: tuple[str, ...] = SCHEDULES
    saves: bool = False
    """Whether a checkpoint is written while the step is taken, and when the session is closed."""


def _policies(place: str, policy: Policy) -> Setting:
    return Setting(plan={**PLACES[place], "activations": policy})


HOST, DEVICE, MIXED = PLACES["streamed-host"], PLACES["streamed-device"], PLACES["mixed"]
PART_RESIDENT = {"*": "streamed", "layers.1": "resident"}
ALL_SITES = {"*": "host", "layers.1": "paged", "layers.2": "device", "stem": "paged"}
EXACT = Numbers(precision="bf16 exact")
SETTINGS: dict[str, Setting] = {
    **{name: Setting(plan=place) for name, place in PLACES.items()},
    "exact-host": Setting(numbers=EXACT, plan=HOST),
    "exact-device": Setting(numbers=EXACT, plan={"weights": PART_RESIDENT, "update": "device"}),
    "stochastic": Setting(numbers=Numbers(precision="bf16 stochastic", moments="8bit"), plan=MIXED),
    "fp16": Setting(numbers=Numbers(precision="fp16 exact"), plan=MIXED, schedules=("in_backward",)),
    "fp16-scaled": Setting(
        numbers=Numbers(precision="fp16 exact", scales_loss=True), plan=MIXED, schedules=("deferred",)
    ),
    "paged": Setting(
        numbers=Numbers(precision="bf16 exact", moments="8bit"),
        plan={"weights": PART_RESIDENT, "update": "paged"},
        slack_bytes=12 * 1024,  # as much as the plan is refused without
    ),
    "recompute": _policies("streamed-host", Recompute()),
    "segments": _policies("streamed-device", Recompute(segment=2)),
    "selective": _policies("streamed-device", Selective()),
    "offload": _policies("streamed-host", Offload(min_bytes=0)),
    "offload-all": _policies("mixed", Offload(recompute=False, min_bytes=0)),
    "clipped": Setting(numbers=Numbers(max_grad_norm=0.1), plan=MIXED, schedules=("deferred",)),
    "clipped-exact": Setting(
        numbers=Numbers(precision="bf16 exact", max_grad_norm=0.1), plan=MIXED, schedules=("deferred",)
    ),
    # The first step makes the optimizer's state.
    "first": Setting(plan=MIXED, num_steps_before=0),
    "first-exact": Setting(numbers=EXACT, plan={"weights": PART_RESIDENT, "update": ALL_SITES}, num_steps_before=0),
    # The first step is observed, and the second begins with another plan.
    "warm-up": Setting(warm_up_memory=40 * 1024, num_steps_before=0),
    "hand-over": Setting(warm_up_memory=40 * 1024, num_steps_before=1),
    "hand-over-exact": Setting(numbers=EXACT, warm_up_memory=32 * 1024, num_steps_before=1),
    "saving": Setting(plan=MIXED, saves=True),
    "saving-exact": Setting(numbers=EXACT, plan={"weights": PART_RESIDENT, "update": ALL_SITES}, saves=True),
}
CASES = tuple((name, schedule) for name, setting in SETTINGS.items() for schedule in setting.schedules)


MISSED = "missed"
"""A worker may take its jobs in another order than when the lines were counted."""


class InjectedError(Exception):
    """What is raised at a line."""


@dataclass(frozen=True)
class Injection:
    """Break off here."""

    setting: str
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
        return f"{self.setting} {self.schedule} {self.part} {self.kind}, then {self.after}, at {where}"


# -- lines -------------------------------------------------------------------------------------------------------------


@functools.cache
def _with_blocks(file: str) -> dict[int, int]:
    """The line of each `with`, and the last line of its block."""
    tree = ast.parse(Path(file).read_text())
    return {node.lineno: node.end_lineno or node.lineno for node in ast.walk(tree) if isinstance(node, ast.With)}


@functools.cache
def _tries(file: str) -> set[int]:
    """The line of each `try`."""
    return {node.lineno for node in ast.walk(ast.parse(Path(file).read_text())) if isinstance(node, ast.Try)}


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
                file = frame.f_code.co_filename
                if not line < last <= _with_blocks(file).get(line, 0) and line not in _tries(file):
                    self._on_line(thread, file, line)
            return on_event

        return on_event


# -- one training run --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Snapshot:
    """Copies of weights, by name, and of the optimizer's state, by the parameter's number and the state's name."""

    weights: dict[str, Tensor]
    state: dict[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module, state: dict[str, Tensor]) -> Snapshot:
        return cls(
            {name: value.detach().clone() for name, value in model.named_parameters()},
            # A state that was made and not used yet is as good as none.
            {key: value.clone() for key, value in state.items() if state[f"{key.partition('.')[0]}.step"] > 0},
        )

    def entries(self, number: int) -> dict[str, Tensor]:
        return {key: value for key, value in self.state.items() if key.startswith(f"{number}.")}

    def handed_back(self) -> Snapshot:
        """As `close` hands the state of a run with a precision back."""
        dtypes = [value.dtype for value in self.weights.values()]
        return Snapshot(
            self.weights,
            {
                key: value if key.endswith(".step") else value.to(dtypes[int(key.partition(".")[0])])
                for key, value in self.state.items()
                if not key.endswith(f".{MASTER}")
            },
        )


@functools.cache
def plain_trajectory(numbers: Numbers) -> list[Snapshot]:
    """A plain loop after each step: torch's own, or with a precision the kernels on each parameter by itself.

    All steps see the same batch.
    """
    model = make_net().to(numbers.dtype)
    optimizer = adamw(model)
    kernels = None if numbers.precision is None else PlainKernels(optimizer, numbers.precision, numbers.moments, 0)

    def snapshot() -> Snapshot:
        if kernels is None:
            return Snapshot.of(model, flat_state(optimizer))
        states = {
            f"{number}.{key}": value
            for number, parameter in enumerate(model.parameters())
            if id(parameter) in kernels.states
            for key, value in to_torch_state(parameter, kernels.states[id(parameter)], kernels.numerics).items()
            if isinstance(value, Tensor)
        }
        return Snapshot.of(model, states)

    found = [snapshot()]
    for _ in range(MAX_STEPS):
        scaler = _scaler(numbers)
        scaler.scale(_loss(model, numbers)).backward()
        if numbers.scales_loss:
            scaler.unscale_(optimizer)
        if kernels is not None:
            kernels.step(numbers.max_grad_norm)
        else:
            if numbers.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), numbers.max_grad_norm)
            optimizer.step()
        optimizer.zero_grad()
        found.append(snapshot())
    return found


def _loss(model: nn.Module, numbers: Numbers) -> Tensor:
    x, classes = make_batch(0)
    loss: Tensor = model(x.to(numbers.dtype), classes)
    return loss


def _scaler(numbers: Numbers) -> LossScaler:
    """A new one for each step, so that an exception in one leaves nothing to the next. The scale stays the same."""
    return LossScaler(StaticScale(scale=1024.0), enabled=numbers.scales_loss)


def steps_taken(run: Run) -> dict[str, tuple[int | None, int | None]]:
    """After which step the plain loop has each parameter's weight, and its state."""
    numbers = run.setting.numbers
    plain = plain_trajectory(numbers)
    if numbers.precision is not None and not run.session.is_open:
        plain = [each.handed_back() for each in plain]
    snapshot = Snapshot.of(run.model, flat_state(run.optimizer))
    found: dict[str, tuple[int | None, int | None]] = {}
    for index, (name, weight) in enumerate(snapshot.weights.items()):
        entries = snapshot.entries(index)
        weight_at = state_at = None
        for step, each in enumerate(plain):
            if torch.equal(weight, each.weights[name]):
                weight_at = step
            expected = each.entries(index)
            if expected.keys() == entries.keys() and all(torch.equal(expected[key], entries[key]) for key in expected):
                state_at = step
        found[name] = (weight_at, state_at)
    return found


class Run:
    """A managed model that has taken its first steps.

    Args:
        name: One of `SETTINGS`.
        schedule: When updates are made.
        is_bounded: Whether the device has no more than a few steps take.
    """

    def __init__(self, name: str, schedule: str, *, is_bounded: bool = True) -> None:
        self.setting = SETTINGS[name]
        numbers = self.setting.numbers
        self.model: SmallNet = make_net().to(numbers.dtype)
        self.optimizer = adamw(self.model)
        plan: lowtide.Plan | lowtide.WarmUp
        if self.setting.warm_up_memory is not None:
            plan = lowtide.WarmUp(device_memory=self.setting.warm_up_memory, schedule=Schedule(schedule))
        else:
            budget_bytes = usual_peak(name, schedule) + self.setting.slack_bytes if is_bounded else None
            plan = lowtide.make_plan(self.model, schedule=schedule, device_memory=budget_bytes, **self.setting.plan)
        self.session = lowtide.manage(
            self.model,
            self.optimizer,
            plan,
            device="cpu",
            # Where everything is resident and updated on the device torch's own step would run: the norm, which clips
            # nothing, lets the session's run.
            max_grad_norm=1e9 if (name, schedule) == UNWATCHED else numbers.max_grad_norm,
            precision=numbers.precision,
            moments=numbers.moments,
        )
        self.phase = ""
        self._folder = tempfile.TemporaryDirectory(prefix="injection-")
        self._scaler = _scaler(numbers)

    def step(self) -> None:
        """One unchanged step."""
        self._scaler = _scaler(self.setting.numbers)
        self.phase = "forward"
        loss = _loss(self.model, self.setting.numbers)
        self.phase = "backward"
        self._scaler.scale(loss).backward()
        self.phase = "step"
        self.update()
        self.phase = "zero_grad"
        self.optimizer.zero_grad()
        self.phase = "over"

    def update(self) -> None:
        """`step()`, through the scaler where the loss is scaled."""
        self._scaler.step(self.optimizer)

    def warm_up(self, part: str) -> None:
        for _ in range(self.setting.num_steps_before):
            self.step()
        if self.setting.saves and part == "close":
            self.save()

    def traced(self, part: str) -> None:
        """What is broken off."""
        if part == "close":
            self.session.close()
            return
        if self.setting.saves:
            self.phase = "save"
            self.save()
        self.step()
        if self.setting.saves:
            self.phase = "wait"
            self.session.wait_for_save()
        self.phase = "over"

    def save(self) -> None:
        """Begin a checkpoint, which is read and written in many pieces."""
        self.session.save(self._folder.name, allowance=4096)

    def damage(self) -> str | None:
        """What is wrong with a checkpoint that was written."""
        for step, folder in RunFolder(Path(self._folder.name)).checkpoints().items():
            reader = CheckpointReader(folder)
            reader.verify()
            for name, value in plain_trajectory(self.setting.numbers)[step].weights.items():
                if not torch.equal(reader.read("model", name), value):
                    return f"damaged: the checkpoint of step {step} has another {name}"
        self._folder.cleanup()
        return None


@functools.cache
def usual_peak(name: str, schedule: str) -> int:
    """What a few steps of training take of the device."""
    run = Run(name, schedule, is_bounded=False)
    with run.session:
        for _ in range(3):
            run.step()
        return device_peak(run.session)


def lines_of(name: str, schedule: str, part: str) -> Counter[tuple[str, str, int]]:
    """How often each line is executed, by thread, file and line."""
    counts: Counter[tuple[str, str, int]] = Counter()

    def count(thread: str, file: str, line: int) -> None:
        counts[thread, file, line] += 1

    run = Run(name, schedule)
    if part == "close":
        run.warm_up(part)
        with LineTrace(count):
            run.traced(part)
    else:
        is_armed = [False]
        # A worker's thread starts with its first job, and is traced from there on.
        with LineTrace(lambda *line: count(*line) if is_armed[0] else None, ["worker"]):
            run.warm_up(part)
            run.session.settle()
        is_armed[0] = True
        with LineTrace(lambda *line: count(*line) if is_armed[0] else None):
            run.traced(part)
        run.session.settle()
        is_armed[0] = False
        run.session.close()
    return counts


def injections_of(
    name: str, schedule: str, *, parts: Sequence[str] = PARTS, kinds: Sequence[str] = ("error", "sigint")
) -> list[Injection]:
    """At the first and last execution of each line. What the loop does then takes turns."""
    found: list[Injection] = []
    for part in parts:
        counts = lines_of(name, schedule, part)
        for index, ((thread, file, line), count) in enumerate(sorted(counts.items())):
            for kind in kinds:
                if kind == "sigint" and thread != "main":
                    continue  # signals arrive in the main thread alone
                for turn, number in enumerate(sorted({1, count})):
                    after = "close" if part == "close" else ("close", "go on", "step")[(index + turn) % 3]
                    if after == "step" and (name, schedule) == UNWATCHED:
                        after = "go on"
                    found.append(Injection(name, schedule, part, kind, after, thread, str(Path(file)), line, number))
    return found


# -- one injection -----------------------------------------------------------------------------------------------------


def perform(injection: Injection) -> str | None:
    """Break off there; what is wrong afterwards, None, or that the line was not reached so often."""
    run = Run(injection.setting, injection.schedule)
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
    notes: Sequence[str] = ()
    unraisable: list[object] = []
    sys.unraisablehook = unraisable.append
    with LineTrace(maybe_raise, [] if injection.thread == "main" else ["worker"]):
        run.warm_up(injection.part)
        if injection.part != "close":
            run.session.settle()
    is_armed[0] = True
    with LineTrace(maybe_raise, [injection.thread]):
        try:
            run.traced(injection.part)
        except (InjectedError, KeyboardInterrupt, UnsupportedOptimizerError, CheckpointError) as error:
            # A change of plan tries the optimizer out again, and says what its step raised; a save says what its threads did.
            is_told = isinstance(error, UnsupportedOptimizerError | CheckpointError)
            if is_told and InjectedError.__name__ not in str(error):
                raise
            raised = type(error).__name__
            notes = getattr(error, "__notes__", ())
    phase = run.phase
    gc.collect()
    if not was_hit and injection.thread == "main":
        run.session.close()
        return MISSED
    # In a callback of a weak reference Python itself lets nothing out.
    if injection.kind == "sigint" and raised != "KeyboardInterrupt" and not unraisable:
        run.session.close()
        return f"swallowed: the interrupt in {phase} raised {raised}"
    try:
        problem = _aftermath(run, injection, phase, notes)
    finally:
        if run.session.is_open:
            with contextlib.suppress(Exception):
                run.session.close()  # its budget must not stand in the way of the next
    if problem is None and signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return "swallowed: another handler stayed"
    return problem if was_hit else problem or MISSED


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
            except CheckpointError:
                if not self._run.setting.saves:
                    raise  # else it tells of the save that broke off
            except LossScaleError:
                if not self._run.setting.numbers.scales_loss:
                    raise  # else the backward that broke off has left nothing to unscale
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
                taken = steps_taken(self._run)
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


def _aftermath(run: Run, injection: Injection, phase: str, notes: Sequence[str]) -> str | None:
    after = _Aftermath(run, injection, was_told=FAILED in notes)
    # A change of plan that broke off: what trains on would be torch's own step.
    has_ended = injection.part != "close" and not run.session.is_open
    if has_ended and BROKEN_OFF not in notes:
        return "unsaid: the session is closed"
    if not has_ended and injection.after == "step" and phase in ("forward", "backward"):
        problem = after.attempt("step()", run.update)
        if problem or (after.said is not None and (problem := after.verdict())):
            return problem
    is_trained = False
    if not has_ended and injection.after != "close":
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
    if run.setting.saves and (problem := run.damage()):
        return problem
    return after.attempt("the plain model", run.step)


# -- many of them ------------------------------------------------------------------------------------------------------


def run_all(injections: Sequence[Injection], *, batch: int = 60) -> Iterator[tuple[Injection, str]]:
    """Each injection that left something wrong, and what; or that was missed."""
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


def prepare(cases: Iterable[tuple[str, str]]) -> None:
    """One thread for torch's own kernels, which a forked process can use; what is cached is made before the fork."""
    torch.set_num_threads(1)
    # oneDNN's kernels for 16 bits use instructions that some processors lack.
    torch.backends.mkldnn.enabled = False
    warnings.simplefilter("ignore")
    # A shell lets its jobs in the background ignore interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, schedule in cases:
        plain_trajectory(SETTINGS[name].numbers)
        if SETTINGS[name].warm_up_memory is None:
            usual_peak(name, schedule)
    gc.collect()
    gc.freeze()


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m tests.runtime.injection [--setting S] [--schedule S] [--kind K] [--part P] [--sample N] [--shard K/N]`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--setting", action="append", choices=list(SETTINGS))
    parser.add_argument("--schedule", action="append", choices=SCHEDULES)
    parser.add_argument("--kind", action="append", choices=["error", "sigint"])
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--sample", type=int)
    parser.add_argument("--each", type=int, help="a sample of so many in one part of each case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at", help="file.py:LINE alone")
    parser.add_argument("--shard", default="0/1", help="K/N: every N-th injection from the K-th on, for N processes")
    chosen = parser.parse_args(arguments)
    cases = [
        (name, schedule)
        for name, schedule in CASES
        if name in (chosen.setting or SETTINGS) and schedule in (chosen.schedule or SCHEDULES)
    ]
    prepare(cases)
    generator = random.Random(chosen.seed)
    injections: list[Injection] = []
    for name, schedule in cases:
        parts = chosen.part or (PARTS if chosen.each is None else generator.choices(PARTS, [3, 1]))
        found = injections_of(name, schedule, parts=parts, kinds=chosen.kind or ("error", "sigint"))
        injections += found if chosen.each is None else generator.sample(found, chosen.each)
    if chosen.at:
        injections = [each for each in injections if f"{Path(each.file).name}:{each.line}" == chosen.at]
    if chosen.sample is not None and chosen.sample < len(injections):
        injections = generator.sample(injections, chosen.sample)
    shard, num_shards = map(int, chosen.shard.split("/"))
    injections = injections[shard::num_shards]
    num_wrong = num_missed = 0
    for injection, problem in run_all(injections):
        if problem == MISSED:
            num_missed += 1
            continue
        num_wrong += 1
        print(json.dumps({**asdict(injection), "file": Path(injection.file).name, "problem": problem}), flush=True)
    print(json.dumps({"injections": len(injections), "missed": num_missed, "wrong": num_wrong}), flush=True)
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
