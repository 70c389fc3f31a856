"""A whole training run: from a recipe to a trained model in a folder, through interruptions and faults.

Each step is a pure function of the weights, the optimizer and the step's number: batches, learning rate and random numbers come
from the number. So a run that goes on from a checkpoint takes the steps that it would have taken undisturbed.

Note [What becomes of a fault]
A step whose weights did not move is repeated. Where some have moved, or may have (updates in backward), the run goes back to its
last checkpoint, in the same process. A loss or gradient that is not finite leaves the step out, as often as the recipe allows.
Anything else ends the run: the checkpoints stay as they are, and nothing is saved of a state that nobody knows.
"""

from __future__ import annotations

import contextlib
import math
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from lowtide.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    LossScaleError,
    LowtideError,
    NonFiniteGradientError,
    NonFiniteLossError,
    RanksDifferError,
    RunStoppedError,
    StepLostError,
)
from lowtide.hardware.machine import software
from lowtide.lab import training
from lowtide.lab.training import Batch
from lowtide.plain_text import Plain
from lowtide.planning.plan import Schedule
from lowtide.runtime.replanning import OUT_OF_MEMORY
from lowtide.train.data import Prefetch, mixed_seed
from lowtide.train.folder import OutputFolder, differences_in_words
from lowtide.train.inputs import Inputs, find_tokenizer, huggingface_folder, read_inputs
from lowtide.train.keeper import Keeper
from lowtide.train.metrics import Curves, MetricsLog, Unlogged, require_tensorboard
from lowtide.train.model import Subject, Trained, find_subject, on_device, prepared, ready_for
from lowtide.train.progress import Meter, RunStatus
from lowtide.train.recipe import TrainRecipe
from lowtide.train.stopping import StopRequests
from lowtide.train.team import Team, team_on


class Watcher(Protocol):
    """Is told how a run goes on."""

    def say(self, words: str) -> None:
        """What is being done, before the first step and after the last."""

    def show(self, status: RunStatus) -> None:
        """How far the training is."""

    def note(self, sentence: str) -> None:
        """Something that a person should read, such as a step that is repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What became of a run."""

    folder: Path
    step: int
    steps: int
    is_finished: bool
    saved_step: int | None
    """Of the last checkpoint."""
    model: Path | None = None
    """Where the trained model is, if the run is finished."""
    loss: float | None = None
    """Of the last step that this start took."""
    evaluation_loss: float | None = None


_ADVICE = "Lower optimizer.settings.lr, set max_grad_norm, or look at the batch"


class _FromCheckpointError(Exception):
    """Weights are no longer those of a step: the run must go back."""


def run_training(
    recipe: TrainRecipe, out: OutputFolder, *, resume: bool, watcher: Watcher, stop: StopRequests
) -> RunResult:
    """Train to the end of the recipe, or until somebody asks to stop.

    Args:
        recipe: What to train.
        out: The run's folder.
        resume: Go on with the run that is there.
        watcher: Told what happens.
        stop: Asked between steps.

    Raises:
        ConfigError: The recipe does not fit its model, its data or the folder; nothing was written.
        PlanError: No plan fits the memory.
        RunStoppedError: The run cannot go on; the message says why, and what is saved.
    """
    if recipe.log.tensorboard:
        require_tensorboard()
    with team_on(recipe.device) as team:
        return _run(recipe, out, team, resume=resume, watcher=watcher, stop=stop)


def _run(
    recipe: TrainRecipe, out: OutputFolder, team: Team, *, resume: bool, watcher: Watcher, stop: StopRequests
) -> RunResult:
    with team.together("begin the run"):
        subject = find_subject(recipe)
        team.require_rows(subject.shape[0])
        team.require_several(recipe.sharding)
        differing = out.check(subject.recipe, resume=resume)
        tokenizer = find_tokenizer(recipe.data.tokenizer, recipe.model) if recipe.data.tokens is None else None
        inputs = read_inputs(subject, tokenizer, watcher.say)
        out.check_data(inputs.record)
    with out.held() if team.is_first else contextlib.nullcontext():
        if resume and not out.is_saved:
            watcher.note("nothing of the run is saved: it begins anew")
        if differing:
            watcher.note(f"the recipe differs from before: {differences_in_words(differing)}")
        # Rank 0 writes while the others wait: they could not go on alone for more than a backward.
        saves = recipe.checkpoints if team.size == 1 else replace(recipe.checkpoints, allowance=None)
        keeper = Keeper(out.checkpoints, saves)
        with team.together("look for a checkpoint") as facts:
            is_over = _is_over(out, keeper, inputs.steps)
            facts["the folder of the run"] = {"last checkpoint": f"of step {keeper.saved_step or 0}"}
        if is_over:
            if team.is_first:
                out.begin(subject.recipe, inputs.record)
            result = RunResult(
                folder=out.path, step=inputs.steps, steps=inputs.steps, is_finished=True, saved_step=inputs.steps
            )
        else:
            with training.arithmetic(subject.recipe, subject.device), _reproducible(subject):
                result = Run(subject, inputs, out, team, keeper, watcher, stop).to_the_end()
        if result.is_finished and team.is_first:
            watcher.say("writing the model")
            result = replace(result, model=_published(subject, out, keeper))
    return result


def _reproducible(subject: Subject) -> contextlib.AbstractContextManager[None]:
    return training.deterministic(subject.device) if subject.recipe.deterministic else contextlib.nullcontext()


def _is_over(out: OutputFolder, keeper: Keeper, steps: int) -> bool:
    """Whether the last step is saved already, so that nothing is left to train.

    Raises:
        ConfigError: More steps than these are saved.
    """
    saved = keeper.find()
    if saved is not None and saved > steps:
        raise ConfigError(
            f"the run in {out.path} is saved at step {saved:,}, beyond the {steps:,} that are asked for: set steps to {saved} or "
            "more, or begin in another folder",
            key="steps",
        )
    if saved != steps:
        return False
    keeper.folder_of_last()  # every byte of it: a damaged one sends the run back
    return keeper.saved_step == steps


def _published(subject: Subject, out: OutputFolder, keeper: Keeper) -> Path:
    checkpoint = keeper.folder_of_last()
    try:
        return out.publish(checkpoint, huggingface_folder(subject.recipe.model), subject.recipe.dtype or "")
    except OSError as error:
        raise RunStoppedError(
            f"the run is finished and saved, and its model cannot be copied to {out.model}: {error}; it is in {checkpoint}. "
            f"Make room, and write it by `{out.resume_command}`"
        ) from error


class Run:
    """One start of a run, from its last checkpoint to its end.

    Args:
        subject: What is trained.
        inputs: What it reads.
        out: Its folder.
        team: The ranks that train it.
        keeper: Saves it there.
        watcher: Told what happens.
        stop: Asked between steps.
    """

    def __init__(
        self,
        subject: Subject,
        inputs: Inputs,
        out: OutputFolder,
        team: Team,
        keeper: Keeper,
        watcher: Watcher,
        stop: StopRequests,
    ) -> None:
        self._subject, self._inputs, self._out, self._team = subject, inputs, out, team
        self._is_asked_to_stop = False
        """What the team has decided; a team of one asks at once."""
        self._recipe = subject.recipe
        self._keeper, self._watcher, self._stop = keeper, watcher, stop
        self._step = 0
        """Updates that were made."""
        self._num_returns = 0
        self._is_updating = False
        """Whether the step under way has begun to change weights."""
        self._evaluation: tuple[int, float] | None = None
        self._loss: float | None = None
        self._trained: Trained
        self._log: MetricsLog
        self._curves: Curves | None = None
        self._meter: Meter
        self._rates: list[float] = []

    def to_the_end(self) -> RunResult:
        """Train, going back to the last checkpoint where that must be."""
        while True:
            try:
                return self._from_checkpoint()
            except _FromCheckpointError as error:
                reason = str(error)
            self._num_returns += 1
            if self._num_returns > self._recipe.faults.retries:
                raise RunStoppedError(self._told(f"it went back to a checkpoint {self._num_returns} times: {reason}"))
            self._watcher.note(f"{reason}: back to the last checkpoint")

    def _from_checkpoint(self) -> RunResult:
        with contextlib.ExitStack() as stack:
            self._trained = stack.enter_context(prepared(self._subject, self._team, self._watcher.say))
            self._rates = [group["lr"] for group in self._trained.optimizer.param_groups]
            self._step = self._keeper.load(self._trained, self._watcher.say)
            self._open_logs(stack)
            self._meter = Meter(self._trained.session, self._subject.tokens_per_step, self._inputs.steps)
            self._tell_start()
            first = self._step * self._recipe.accumulation
            device = self._subject.device
            batches = Prefetch(lambda number: ready_for(device, self._team.part(self._inputs.batches(number))), first)
            stack.callback(batches.close)
            with self._stop.guarded(), self._explained():
                self._train(batches)
            return self._ended()

    def _open_logs(self, stack: contextlib.ExitStack) -> None:
        # Not before: a plan that does not fit, and an interrupt meanwhile, leave the folder as it was.
        if not self._team.is_first:
            self._log = Unlogged()
            return
        self._out.begin(self._recipe, self._inputs.record)
        self._log = MetricsLog(self._out.metrics, step=self._step)
        stack.callback(self._log.close)
        if self._recipe.log.tensorboard:
            self._curves = Curves(self._out.tensorboard, step=self._step)
            stack.callback(self._curves.close)

    def _tell_start(self) -> None:
        session = self._trained.session
        self._log.add("start", self._step, steps=self._inputs.steps, plan=session.plan.summary, **software())
        if self._step:
            self._watcher.note(f"going on after step {self._step:,}")
        if self._recipe.scheduler.warmup_steps >= self._inputs.steps:
            self._watcher.note(
                f"scheduler.warmup_steps is {self._recipe.scheduler.warmup_steps}, and the run has {self._inputs.steps} steps: the "
                "learning rate never reaches its whole"
            )

    # -- the loop ------------------------------------------------------------------------------------------------------

    def _train(self, batches: Prefetch) -> None:
        num_left_out = 0
        self._show("training")
        while self._step < self._inputs.steps and not self._is_stopping:
            own = [batches.take() for _ in range(self._recipe.accumulation)]
            began_s = time.perf_counter()
            try:
                loss, norm = self._repeated(own)
                num_left_out = 0
            except (NonFiniteLossError, NonFiniteGradientError) as error:
                num_left_out += 1
                self._leave_out(error, num_left_out)
                loss, norm = math.nan, None
            self._step += 1
            self._loss = loss
            self._meter.step_ended(time.perf_counter() - began_s, loss, is_last=self._step == self._inputs.steps)
            self._add_row(loss, norm)
            self._between_steps()
        self._evaluate_last()
        self._save_last()

    @property
    def _is_stopping(self) -> bool:
        """Whether the run ends after the step under way."""
        return self._stop.is_requested if self._team.size == 1 else self._is_asked_to_stop

    def _between_steps(self) -> None:
        self._is_asked_to_stop = self._team.any(self._stop.is_requested)
        every = self._recipe.evaluation.every
        is_last = self._step == self._inputs.steps
        if every is not None and self._step % every == 0 and not is_last and not self._is_stopping:
            self._evaluate()
        self._look_for_save()
        if self._team.as_first(self._keeper.is_due(self._step)) and not is_last and not self._is_stopping:
            self._save()
        self._show("training")

    def _repeated(self, batches: Sequence[Batch]) -> tuple[float, float | None]:
        """One update, repeated where it is lost; see Note [What becomes of a fault]."""
        for _ in range(self._recipe.faults.retries + 1):
            try:
                return self._take_step(batches)
            except StepLostError as error:
                reason, has_moved = str(error), error.has_moved
            except OUT_OF_MEMORY as error:
                reason, has_moved = f"memory ran out: {error}", self._is_updating
            # Out of the except block: what the exception held of the step is gone.
            if self._team.size > 1:
                raise RunStoppedError(
                    self._told(f"step {self._step + 1:,} was lost on rank {self._team.rank}: {reason}")
                )
            reason = f"step {self._step + 1:,} was lost ({reason})"
            self._log.add("lost", self._step, reason=reason)
            if has_moved or self._recipe.schedule is Schedule.IN_BACKWARD:
                raise _FromCheckpointError(reason)
            self._trained.optimizer.zero_grad()
            self._watcher.note(f"{reason}; it is repeated")
        raise RunStoppedError(self._told(f"{self._recipe.faults.retries + 1} times in a row {reason}"))

    def _take_step(self, batches: Sequence[Batch]) -> tuple[float, float | None]:
        """One update: its loss, and the norm of its gradients where that is known."""
        trained, recipe = self._trained, self._recipe
        seed = mixed_seed(recipe.seed, self._step)
        torch.manual_seed(mixed_seed(seed, self._team.rank) if self._team.rank else seed)
        share = recipe.scheduler.share(self._step, self._inputs.steps)
        for group, rate in zip(trained.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * share
        parts = []
        self._is_updating = False
        for number, batch in enumerate(batches, start=1):
            is_last = number == len(batches)
            with contextlib.nullcontext() if is_last else trained.session.no_sync():
                loss = trained.model(**on_device(batch, self._subject.device)).loss
                if recipe.schedule is Schedule.IN_BACKWARD:
                    require_finite(self._team.mean(float(loss.detach())))  # the backward updates
                part = loss / recipe.accumulation if recipe.accumulation > 1 else loss
                (part if trained.scaler is None else trained.scaler.scale(part)).backward()
            parts.append(loss.detach())
            del loss, part
        value = self._team.mean(math.fsum(float(part.double().item()) for part in parts) / len(parts))
        if trained.scaler is None:
            require_finite(value)
        self._is_updating = True
        norm = self._updated()
        trained.optimizer.zero_grad()
        return value, norm

    def _updated(self) -> float | None:
        """Update the weights by the gradients that are there."""
        trained = self._trained
        if trained.scaler is not None:
            trained.scaler.step(trained.optimizer)
            trained.scaler.update()
            return None
        if self._is_unwatched:
            gradients = [each.grad for each in trained.model.parameters() if each.grad is not None]
            norm = float(torch.nn.utils.get_total_norm(gradients))
            if not math.isfinite(norm):
                raise NonFiniteGradientError(f"the norm of the gradients is {norm}")
            trained.optimizer.step()
            return norm
        trained.optimizer.step()
        found = trained.session.last_grad_norm
        return None if found is None else float(found)

    @property
    def _is_unwatched(self) -> bool:
        """Whether torch's own step takes gradients as they are; a session looks at those of all other updates."""
        recipe = self._recipe
        is_deferred = recipe.schedule is Schedule.DEFERRED
        return self._trained.is_plain and is_deferred and recipe.max_grad_norm is None and recipe.precision is None

    def _leave_out(self, error: LowtideError, num_left_out: int) -> None:
        most = self._recipe.faults.skip_non_finite
        self._log.add("left out", self._step + 1, reason=str(error))
        if num_left_out > most or (
            isinstance(error, NonFiniteGradientError) and self._recipe.schedule is Schedule.IN_BACKWARD
        ):
            times = f", {num_left_out} steps in a row" if num_left_out > 1 else ""
            raise RunStoppedError(
                self._told(
                    f"step {self._step + 1:,} is not finite{times}: {error}. {_ADVICE}, or let faults.skip_non_finite "
                    f"leave out more than {most}"
                )
            ) from error
        self._trained.optimizer.zero_grad()
        self._watcher.note(f"step {self._step + 1:,} is left out: {error}")

    # -- beside the loop -----------------------------------------------------------------------------------------------

    def _evaluate_last(self) -> None:
        if self._step == self._inputs.steps and self._meter.num_steps and not self._is_stopping:
            self._evaluate()

    def _evaluate(self) -> None:
        """The mean loss over what is held out; the training goes on as if it had not been."""
        if not self._inputs.held_out:
            return
        model, began_s = self._trained.model, time.perf_counter()
        self._show("evaluating")
        model.eval()
        total = rows = 0.0
        with torch.no_grad():
            held_out, rank = self._inputs.held_out, self._team.rank
            for first in range(0, len(held_out), self._team.size):
                if self._is_stopping:
                    break
                # All ranks call the model as often, because they may share its weights: one without a batch repeats the last.
                batch = held_out[min(first + rank, len(held_out) - 1)]
                loss = model(**on_device(batch, self._subject.device)).loss
                count = len(batch["input_ids"]) if first + rank < len(held_out) else 0
                total, rows = total + count * float(loss.double().item()), rows + count
        model.train()
        if self._is_stopping:
            return
        total, rows = self._team.sums(total, rows)
        self._evaluation = (self._step, total / rows)
        self._log.add("evaluation", self._step, loss=total / rows, seconds=time.perf_counter() - began_s)
        if self._curves is not None:
            self._curves.add_evaluation(self._step, total / rows)

    def _save(self) -> None:
        """Begin to save, and go on training where that fails: the checkpoints from before are still there."""
        self._finish_save()
        self._show("saving")
        self._require_good_weights()
        self._log.sync()
        with self._noted():
            self._keeper.save(self._trained, self._step)
            self._tell_saved()

    def _require_good_weights(self) -> None:
        """Save no weights that updates in backward have made of a NaN: their verdict comes when all of them are over."""
        try:
            self._trained.session.settle()
        except NonFiniteGradientError as error:
            raise RunStoppedError(
                self._told(f"step {self._step:,} is not finite, and is not saved: {error}. {_ADVICE}")
            ) from error

    def _finish_save(self) -> None:
        """Wait for one that is under way."""
        if self._keeper.is_saving:
            self._show("saving")
            with self._noted():
                self._keeper.wait(self._trained)
                self._tell_saved()

    def _look_for_save(self) -> None:
        """Note a save beside the training that has come to its end."""
        with self._noted():
            if self._keeper.look(self._trained):
                self._tell_saved()

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except (CheckpointError, RanksDifferError) as error:
            self._log.add("not saved", self._step, reason=str(error))
            self._watcher.note(f"a checkpoint could not be saved: {error}; the training goes on")

    def _tell_saved(self) -> None:
        if not self._keeper.is_saving:
            self._log.add("checkpoint", self._step, saved_step=self._keeper.saved_step, seconds=self._keeper.save_s)

    def _save_last(self) -> None:
        """Save where the run ends, if there is something new and the time to do it."""
        self._finish_save()
        if self._keeper.saved_step == self._step:
            return
        left_s, needed_s = self._stop.left_s, self._keeper.expected_s
        is_late = left_s is not None and needed_s is not None and needed_s > left_s
        if self._team.as_first(is_late):
            left_s, needed_s = left_s or 0.0, needed_s or 0.0
            words = f"a save takes about {needed_s:.0f} s, and {max(0.0, left_s):.0f} s are left: step {self._step:,} is not saved"
            self._log.add("not saved", self._step, reason=words)
            self._watcher.note(words)
            return
        self._show("saving")
        self._require_good_weights()
        self._log.sync()
        try:
            self._keeper.save(self._trained, self._step)
            self._keeper.wait(self._trained)
        except (CheckpointError, RanksDifferError) as error:
            raise RunStoppedError(self._told(f"step {self._step:,} could not be saved: {error}")) from error
        self._tell_saved()

    def _ended(self) -> RunResult:
        is_finished = self._step == self._inputs.steps and self._keeper.saved_step == self._step
        self._log.add("end", self._step, is_finished=is_finished)
        self._show("ended")
        return RunResult(
            folder=self._out.path,
            step=self._step,
            steps=self._inputs.steps,
            is_finished=is_finished,
            saved_step=self._keeper.saved_step,
            loss=self._loss if self._loss is not None and math.isfinite(self._loss) else None,
            evaluation_loss=None if self._evaluation is None else self._evaluation[1],
        )

    # -- what is told --------------------------------------------------------------------------------------------------

    def _show(self, words: str) -> None:
        self._watcher.show(
            self._meter.status(
                "stopping after this step" if self._is_stopping and words == "training" else words,
                step=self._step,
                evaluation=self._evaluation,
                saved_step=self._keeper.saved_step,
                saved_at_s=self._keeper.saved_at_s,
                is_saving=self._keeper.is_saving or words == "saving",
            )
        )

    def _add_row(self, loss: float, norm: float | None) -> None:
        values: dict[str, Plain] = {
            "loss": loss,
            "lr": float(self._trained.optimizer.param_groups[0]["lr"]),
            "grad_norm": norm,
            **self._meter.row(),
        }
        self._log.add("step", self._step, **values)
        for sentence in self._meter.new_plans():
            self._log.add("plan", self._step, reason=sentence, plan=self._trained.session.plan.summary)
        if self._curves is not None and math.isfinite(loss):
            self._curves.add(self._step, values)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Whatever ends the training says at which step it did, and what is saved."""
        try:
            yield
        except (RunStoppedError, _FromCheckpointError):
            raise
        except DataError as error:
            raise RunStoppedError(self._told(str(error))) from error
        except LossScaleError as error:
            raise RunStoppedError(self._told(f"step {self._step + 1:,}: {error}")) from error
        except Exception as error:
            place = self._out.path / (
                "traceback.txt" if self._team.is_first else f"traceback-rank{self._team.rank}.txt"
            )
            place.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
            words = f"step {self._step + 1:,} failed: {type(error).__name__}: {error}"
            raise RunStoppedError(self._told(f"{words} (the traceback is in {place})")) from error

    def _told(self, words: str) -> str:
        with contextlib.suppress(Exception):  # the words are of what ends the run, not of this
            self._finish_save()
        saved = self._keeper.saved_step
        if saved is None:
            return f"the run stopped: {words}. Nothing of it is saved yet"
        return f"the run stopped: {words}. Step {saved:,} is saved; go on by `{self._out.resume_command}`"


def require_finite(loss: float | torch.Tensor) -> None:
    """Refuse a loss that is NaN or infinite.

    Raises:
        NonFiniteLossError: It is.
    """
    if not math.isfinite(float(loss.detach() if isinstance(loss, torch.Tensor) else loss)):
        raise NonFiniteLossError("the loss is NaN or infinite")
