"""One run of a recipe, from nothing to its record, and what is measured meanwhile: the device's peak in each phase, and through
one step. The run has the process to itself.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowtide import compat, config
from lowtide.activations.policy import Offload, policy_of
from lowtide.errors import LowtideError
from lowtide.hardware import find_hardware
from lowtide.lab import training
from lowtide.lab.inputs import Inputs, check_vocabulary, make_inputs
from lowtide.lab.preflight import UnpredictedError, predict
from lowtide.lab.progress import OnProgress, Progress, find_surroundings
from lowtide.lab.recipe import Recipe
from lowtide.lab.recipe_parts import session_plan
from lowtide.lab.record import EVALUATION, MemoryFigures, Outcome, PredictedFigures, RunRecord, SpeedFigures
from lowtide.memory.groups import find_groups
from lowtide.models import resolve_model
from lowtide.plain_text import Plain
from lowtide.runtime.emulation.memory import TrackedMemory
from lowtide.runtime.manage import manage
from lowtide.runtime.session import Session
from lowtide.runtime.statistics.observer import CudaGauge
from lowtide.units import format_bytes

TakePeak = Callable[[], int]
"""The most since the last call, in bytes of tensors; a new peak begins."""


class Meter:
    """Collects the peak of each phase of a run.

    Args:
        take_peak: Asked at each phase's end.
        device: A CUDA device, whose reserved memory is noted too.
    """

    def __init__(self, take_peak: TakePeak, device: torch.device) -> None:
        self._take_peak, self._device = take_peak, device
        self._by_phase: dict[str, int] = {}
        self._reserved_bytes = 0

    @property
    def peak_bytes(self) -> int:
        """The largest of all phases so far."""
        return max(self._by_phase.values(), default=0)

    def begin(self) -> None:
        """Begin to measure: what was held before does not count."""
        self._note_reserved()
        self._take_peak()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """At the end, what was held since the end of the phase before was held in this one."""
        yield
        self._note_reserved()
        self._by_phase[name] = max(self._by_phase.get(name, 0), self._take_peak())

    def figures(self, timeline: tuple[tuple[str, int], ...] = ()) -> MemoryFigures:
        """The figures of the run."""
        return MemoryFigures(
            peak_bytes=self.peak_bytes,
            by_phase=dict(self._by_phase),
            reserved_bytes=self._reserved_bytes or None,
            host_bytes=_host_peak_bytes(),
            timeline=timeline,
        )

    def _note_reserved(self) -> None:
        # Before the peak is taken, which begins a new one of these too.
        if self._device.type == "cuda":
            self._reserved_bytes = max(self._reserved_bytes, torch.cuda.max_memory_reserved(self._device))


@contextmanager
def metered(model: nn.Module, session: Session | None, device: torch.device) -> Iterator[TakePeak]:
    """How to ask for peaks while the model is trained: of the session, of the GPU, or of a host that stands in for one."""
    if session is not None:
        # The step that a warm-up watches has its peaks for itself; the run is measured from the next one on.
        yield lambda: 0 if session.is_warming_up else session.take_device_peak()
        return
    if device.type == "cuda":
        yield CudaGauge(device).take_peak
        return
    tracked = TrackedMemory(None)
    tracked.start()
    try:
        for tensor in chain(model.parameters(), model.buffers()):
            tracked.include(tensor, "weights")
        yield tracked.reset_peak
    finally:
        tracked.stop()


def _host_peak_bytes() -> int:
    """The largest resident size of this process."""
    try:
        # On Linux `getrusage` remembers the process that started this one, if that was larger.
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Watch:
    """Points of a timeline; the code that runs the step says which phase it is in."""

    def __init__(self, take_peak: TakePeak) -> None:
        self._take_peak = take_peak
        self._phase = "forward"
        self.points: list[tuple[str, int]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Points in between are of this phase, and one is added at its end."""
        self._phase = name
        yield
        self.mark(name)

    def mark(self, phase: str | None = None) -> None:
        """Add a point with the most that was held since the last one."""
        self.points.append((phase or self._phase, self._take_peak()))


def watched_modules(model: nn.Module) -> list[nn.Module]:
    """The modules whose calls are marked: those of a plain model's groups, because a session may hide parameters."""
    paths = dict.fromkeys(window for group in find_groups(model) for window in group.modules)
    return [model.get_submodule(path) for path in paths if path]


@contextmanager
def watched(modules: Sequence[nn.Module], watch: Watch) -> Iterator[None]:
    """Mark the ends of the calls of modules, and the beginnings of their backwards. Changes no tensor and no graph."""

    def on_forward(module: nn.Module, inputs: Any, output: Any) -> None:
        del module, inputs
        watch.mark()
        for tensor in compat.flatten(output)[0]:
            if isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled():
                tensor.register_hook(lambda _: watch.mark("backward"))
                break

    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_hook(on_forward))
        yield


MOST_POINTS = 400
"""How many points the timeline of a record has."""


def run_experiment(recipe: Recipe, *, name: str, on_progress: OnProgress) -> RunRecord:
    """Train, evaluate and measure.

    Args:
        recipe: What to run.
        name: The recipe's, for the record.
        on_progress: Called at each step.

    Raises:
        LowtideError: The recipe does not fit the model or the machine.
        torch.OutOfMemoryError: The device's memory, real or emulated, did not hold the run.
    """
    device = training.find_device(recipe.device)
    with training.arithmetic(recipe, device):
        return _run(recipe, name, device, on_progress)


def _run(recipe: Recipe, name: str, device: torch.device, on_progress: OnProgress) -> RunRecord:
    surroundings = find_surroundings(recipe.device)
    source = resolve_model(recipe.model, settings=recipe.model_settings)
    check_vocabulary(recipe, source)
    inputs = make_inputs(recipe, source, lambda words: on_progress(Progress(words=words)))
    on_progress(Progress(words="drawing the first weights"))
    model = training.make_model(recipe, source)
    remarks = list(inputs.remarks)
    predicted = _prediction(recipe, device, on_progress, remarks)
    run = _Run(recipe, model, inputs, device, on_progress)
    with run.prepared() as session:
        run.train()
        evaluation_loss = run.evaluate()
        stats: dict[str, Plain] | None = None if session is None else {**session.stats().to_dict(), "chunks": []}
        timeline = _timeline(run, remarks)
        if session is not None and session.observed:
            most = format_bytes(max(sample.used_bytes for sample in session.observed))
            remarks.append(f"peaks are without the first step, which the warm-up watched, and which held {most}")
    if device.type == "cpu" and recipe.compile is not None and recipe.compile.backend == "inductor":
        remarks.append("memory that compiled code makes on an emulated device is not seen: the peak is too small")
    if stats is not None and _offloaded_nothing(recipe, stats):
        remarks.append("nothing was offloaded: tensors under 1 MiB stay on the device, and no block saved a larger one")
    return RunRecord(
        name=name,
        outcome=Outcome.FINISHED,
        surroundings=surroundings,
        recipe=config.to_plain(recipe),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        losses=tuple(run.losses),
        evaluation_loss=evaluation_loss,
        evaluations=tuple(run.evaluations),
        memory=run.meter.figures(timeline),
        predicted=predicted,
        speed=SpeedFigures(
            step_s=tuple(run.step_s),
            samples_per_step=inputs.batch_size * recipe.accumulation,
            evaluation_s=run.evaluation_s,
        ),
        session=stats,
        remarks=tuple(remarks),
    )


def _timeline(run: _Run, remarks: list[str]) -> tuple[tuple[str, int], ...]:
    """The memory of one more step. All figures of the run are there by now: what goes wrong here costs nothing else."""
    try:
        return run.watch()
    except Exception as error:  # hooks on modules of any kind: hours of training are worth more than a curve
        remarks.append(f"no timeline: one more step, to be watched, ended with {type(error).__name__}: {error}")
        return ()


def _offloaded_nothing(recipe: Recipe, stats: dict[str, Plain]) -> bool:
    given = None if recipe.plan is None else recipe.plan.activations
    asked = given.values() if isinstance(given, Mapping) else (given,)
    done = stats.get("activations")
    is_done = isinstance(done, dict) and bool(done.get("offloaded_bytes"))
    return not is_done and any(policy is not None and isinstance(policy_of(policy), Offload) for policy in asked)


class _Run:
    """The state of a run: what was measured so far."""

    def __init__(
        self, recipe: Recipe, model: nn.Module, inputs: Inputs, device: torch.device, on_progress: OnProgress
    ) -> None:
        self.recipe, self.model, self.inputs, self.device = recipe, model, inputs, device
        self.on_progress = on_progress
        self.losses: list[float] = []
        self.evaluations: list[tuple[int, float]] = []
        self.step_s: list[float] = []
        self.evaluation_s: float | None = None
        self.meter: Meter
        self._groups = watched_modules(model)

    @contextlib.contextmanager
    def prepared(self) -> Iterator[Session | None]:
        """The model on its device, managed if there is a plan, compiled if asked for, and metered."""
        self.on_progress(Progress(words="preparing the model", steps=self.recipe.steps))
        if self.recipe.plan is None:
            self.model.to(self.device)
        if self.recipe.compile is not None:
            # Before the session: its windows are outside of compiled code.
            training.compile_model(self.model, self.recipe.compile)
        self.optimizer = training.make_optimizer(self.recipe.optimizer, self.model)
        with contextlib.ExitStack() as stack:
            session = None
            if self.recipe.plan is not None:
                plan = session_plan(self.recipe.plan, self.model)
                session = stack.enter_context(
                    manage(
                        self.model,
                        self.optimizer,
                        plan,
                        device=self.device,
                        max_grad_norm=self.recipe.max_grad_norm,
                        precision=self.recipe.precision,
                        moments=self.recipe.moments,
                        seed=self.recipe.seed,
                        poison=False,
                    )
                )
            self.scheduler = training.make_scheduler(self.recipe, self.optimizer)
            self.take_peak = stack.enter_context(metered(self.model, session, self.device))
            self.meter = Meter(self.take_peak, self.device)
            yield session

    def train(self) -> None:
        """All steps, and the evaluations between them."""
        torch.manual_seed(self.recipe.seed)
        self.model.train()
        self.meter.begin()
        for step in range(self.recipe.steps):
            began_s = time.perf_counter()
            loss = self._step(step, self.meter.phase)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.step_s.append(time.perf_counter() - began_s)
            self.losses.append(loss)
            self.on_progress(
                Progress(
                    words="training",
                    step=step + 1,
                    steps=self.recipe.steps,
                    loss=loss,
                    peak_bytes=self.meter.peak_bytes or None,
                    samples_per_s=self.inputs.batch_size * self.recipe.accumulation / self.step_s[-1],
                )
            )
            if self.recipe.evaluation is not None and step + 1 in self.recipe.evaluation.after:
                evaluation_loss = self.evaluate()
                assert evaluation_loss is not None, "inputs without evaluation batches are refused"
                self.evaluations.append((step + 1, evaluation_loss))
                self.on_progress(
                    Progress(words="evaluated", step=step + 1, steps=self.recipe.steps, evaluation_loss=evaluation_loss)
                )

    def evaluate(self) -> float | None:
        """Mean over the evaluation batches of each one's mean loss; None where nothing is to be evaluated.

        The training goes on as if it had not been, and `evaluation_s` is that of the last call.
        """
        if not self.inputs.evaluation:
            return None
        step = len(self.losses)
        words = "evaluating" if step == self.recipe.steps else f"evaluating after step {step}"
        self.model.eval()
        losses: list[float] = []
        began_s = time.perf_counter()
        # A model may draw in an evaluation too, such as a dropout that is never off.
        draws = torch.random.fork_rng([self.device] if self.device.type == "cuda" else [])
        with self.meter.phase(EVALUATION), torch.no_grad(), draws:
            for number, batch in enumerate(self.inputs.evaluation):
                losses.append(self.model(**self._moved(batch)).loss.double().item())
                counted = f"{words}, batch {number + 1} of {len(self.inputs.evaluation)}"
                self.on_progress(Progress(words=counted, step=step, steps=self.recipe.steps))
        self.evaluation_s = time.perf_counter() - began_s  # each loss was waited for
        self.model.train()
        return sum(losses) / len(losses)

    def watch(self) -> tuple[tuple[str, int], ...]:
        """One more step, whose peaks between the calls of groups are noted; the figures of the run stay as they are.

        Compiled code would be compiled again for a hook on a group: of such a step the peaks of its phases are noted.
        """
        watch = Watch(self.take_peak)
        self.take_peak()
        with watched(() if self.recipe.compile is not None else self._groups, watch):
            self._step(self.recipe.steps, watch.phase)
        return thinned(watch.points, MOST_POINTS)

    def _step(self, step: int, phase: Callable[[str], contextlib.AbstractContextManager[None]]) -> float:
        numbers = range(step * self.recipe.accumulation, (step + 1) * self.recipe.accumulation)
        return training.take_step(
            self.recipe,
            self.model,
            self.optimizer,
            self.scheduler,
            (self._moved(self.inputs.train(number)) for number in numbers),
            # A session clips by itself.
            max_grad_norm=self.recipe.max_grad_norm if self.recipe.plan is None else None,
            phase=phase,
        )

    def _moved(self, batch: training.Batch) -> training.Batch:
        # A copy, also where the host plays the device: what it holds of a batch dies with the step.
        return {
            key: value.to(self.device, self.recipe.torch_dtype if value.is_floating_point() else value.dtype, copy=True)
            for key, value in batch.items()
        }


def thinned(points: list[tuple[str, int]], limit: int) -> tuple[tuple[str, int], ...]:
    """At most `limit` points: of each stretch of one phase the largest stays.

    Example:
        >>> thinned([("forward", 1), ("forward", 3), ("backward", 2), ("backward", 1)], 2)
        (('forward', 3), ('backward', 2))
    """
    if len(points) <= limit:
        return tuple(points)
    width = -(-len(points) // max(1, limit - len({phase for phase, _ in points}) + 1))
    kept: list[tuple[str, int]] = []
    stretch: list[tuple[str, int]] = []
    for point in points:
        if stretch and (point[0] != stretch[0][0] or len(stretch) == width):
            kept.append(max(stretch, key=lambda each: each[1]))
            stretch = []
        stretch.append(point)
    return (*kept, max(stretch, key=lambda each: each[1]))


def _prediction(
    recipe: Recipe, device: torch.device, on_progress: OnProgress, remarks: list[str]
) -> PredictedFigures | None:
    if device.type != "cuda":
        return None  # predictions are for GPUs: an emulated device has no allocator and no workspaces
    try:
        hardware = find_hardware(torch.cuda.get_device_name(device).removeprefix("NVIDIA "))
        return predict(recipe, hardware=hardware.name, say=lambda words: on_progress(Progress(words=words)))
    except UnpredictedError as error:
        remarks.append(f"no prediction: {error}")
    except LowtideError as error:
        remarks.append(f"the prediction failed: {error}")
    return None
