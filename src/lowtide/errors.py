"""Every exception Lowtide raises, in one tree.

    LowtideError
    ├── ConfigError (ValueError)            a setting is wrong, unknown or of the wrong type
    ├── UnknownNameError (ValueError)       a model, hardware or recipe of that name does not exist
    ├── PlanError (ValueError)              a plan is for another model, or its budgets cannot hold it
    ├── BadRecordError (ValueError)         a saved file is corrupt or of another version
    ├── MissingExtraError (ImportError)     an optional package is not installed
    ├── HardwareError (RuntimeError)        a device is missing or cannot be measured
    ├── ObserveError (RuntimeError)         a real step could not be recorded
    ├── BudgetError (RuntimeError)          a tier does not have the bytes that are asked of it
    │   └── EmulatedOutOfMemoryError        an operator went over the budget of an emulated device
    ├── ChunkStateError (RuntimeError)      a chunk was about to make a move that its table forbids
    ├── GradientStateError (RuntimeError)   a gradient on the host was about to make a move that its table forbids
    ├── SessionError (RuntimeError)         a managed model cannot do what was asked
    │   ├── ModelChangedError               the model is no longer the one that was managed
    │   ├── TwoThreadsError                 two threads use one session at once
    │   ├── UnsupportedOptimizerError       the optimizer cannot be run chunk by chunk
    │   ├── StaleBackwardError              a backward through weights that were updated since
    │   ├── SecondBackwardError             a second backward where weights are updated in the first
    │   ├── GradientGoneError               a gradient that was used up in backward
    │   ├── HigherOrderError                gradients of gradients through streamed weights
    │   ├── NonFiniteLossError              the loss is NaN or infinite
    │   ├── NonFiniteGradientError          gradients are NaN or infinite, or their norm is
    │   └── StepLostError                   a step broke off half-way: it must be repeated
    ├── RanksError (RuntimeError)           processes that train together cannot go on
    │   ├── RanksDifferError                they were given different models, plans or settings
    │   ├── RankLostError                   one of them has ended, or stands still
    │   └── RankFailedError                 a rank that this process has started raised, was killed or stood still
    ├── CheckpointError (RuntimeError)      a checkpoint cannot be saved or loaded
    │   ├── DamagedCheckpointError          a file of it is torn, changed, foreign or of another schema
    │   ├── CheckpointMismatchError         it is of another model or optimizer than it is loaded into
    │   ├── CheckpointWriteError            a file of it could not be written: the disk is full, say
    │   └── FolderInUseError                another process, or another object, saves into the same run folder
    ├── OptimizerStateError (ValueError)    a saved optimizer state is of another model or optimizer
    ├── LossScaleError (RuntimeError)       a loss cannot be scaled further, or the calls are out of order
    ├── TargetRangeError (IndexError)       a target of a loss is not in the vocabulary
    ├── ChunkedBackwardError (RuntimeError) a second or higher-order backward through a chunked loss
    ├── LogitsNotMadeError (AttributeError) logits were asked for that a chunked loss never makes
    ├── UnsupportedHeadError (ValueError)   a model's head cannot be chunked
    ├── ActivationError (RuntimeError)      an activation policy cannot do its work on a module
    │   └── SavedTensorChangedError         a tensor was written to after it was saved for the backward
    ├── HostKernelError (RuntimeError)      the C++ update cannot be built or loaded
    ├── BadPieceError (ValueError)          an update was given tensors that do not fit together
    ├── GraphAliveError (RuntimeError)      memory would have to move while a graph points into it
    ├── OwnershipError (ValueError)         bytes are given back twice, or by one who does not hold them
    ├── DataError (RuntimeError)            what a training run reads is missing, or is not for its model
    ├── RunStoppedError (RuntimeError)      a training run cannot go on
    └── TraceError (RuntimeError)           a step could not be predicted
        ├── ValueReadError                  the model reads the values of tensors
        ├── MissingKernelError              an operator has no fake kernel
        ├── BatchMismatchError              the batch does not fit the model
        ├── TooLargeError                   no device could hold the step
        └── TraceCrashedError               the tracing subprocess died

A message says what happened with numbers, which object it happened to, and what to do next. Each class also derives
from the builtin that a caller would expect, so that `except ValueError` keeps working. All of them survive a trip
through pickle with their attributes, because tracing may run in a subprocess.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable


def near(name: str, choices: Iterable[str], *, limit: int = 3) -> tuple[str, ...]:
    """The choices that a person who typed `name` most likely meant, best first.

    A choice also counts as near when it starts with what was typed: `llama` finds `llama-8b`, which edit distance alone
    may rank below shorter, unrelated names.

    Example:
        >>> near("lama-8b", ["llama-8b", "llama-70b", "resnet-50"])
        ('llama-8b', 'llama-70b')
    """
    by_fold: dict[str, str] = {}
    for choice in choices:
        by_fold.setdefault(choice.casefold(), choice)
    typed = name.casefold()
    close = difflib.get_close_matches(typed, by_fold, n=limit, cutoff=0.6)
    prefixed = sorted(choice for choice in by_fold if typed and choice.startswith(typed))
    return tuple(by_fold[choice] for choice in dict.fromkeys([*close, *prefixed]))[:limit]


NUM_NEAREST = 3
"""How many names are given where there are too many to list."""
NUM_LISTED = 20
"""How many a list may have: a catalogue's, such as that of the models, is read as a whole."""


def did_you_mean(name: str, choices: Iterable[str], *, prefix: str = "", num_listed: int = NUM_LISTED) -> str:
    """A clause for the end of a message: near names when there are any; otherwise all choices, or the nearest of many.

    "" without choices. `prefix` is put before each choice that is shown, and has no part in what counts as near: names
    that all begin alike would all be near to one another.
    """
    known = sorted(set(choices))
    if not known:
        return ""
    close = near(name, known, limit=NUM_NEAREST)
    if close:
        return f"did you mean {' or '.join(repr(prefix + choice) for choice in close)}?"
    if len(known) <= num_listed:
        return f"choose one of {', '.join(prefix + choice for choice in known)}"
    nearest = difflib.get_close_matches(name, known, n=NUM_NEAREST, cutoff=0.0)
    return f"the nearest of {len(known)} names are {', '.join(repr(prefix + choice) for choice in nearest)}"


def _rebuild(kind: type[LowtideError], message: str, attributes: dict[str, object]) -> LowtideError:
    # Not `kind(message)`: subclasses take keyword arguments that the default unpickling would not pass back.
    error = kind.__new__(kind, message)
    LowtideError.__init__(error, message)
    error.__dict__.update(attributes)
    return error


class LowtideError(Exception):
    """Root of the tree: `except lowtide.errors.LowtideError` catches all that Lowtide raises on purpose."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Callable[..., LowtideError], tuple[object, ...]]:
        return _rebuild, (type(self), self.message, dict(self.__dict__))


class ConfigError(LowtideError, ValueError):
    """A setting is unknown, of the wrong type or out of range. Correct the key or value that the message names."""

    def __init__(self, message: str, *, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key
        """Dotted path of the setting, where one is to blame."""


class UnknownNameError(LowtideError, ValueError):
    """A name that does not exist. Use one of `suggestions`, or list what there is.

    Example:
        >>> str(UnknownNameError("model", "lama-8b", ["llama-8b", "resnet-50"]))
        "there is no model named 'lama-8b'; did you mean 'llama-8b'?"

    Args:
        listed_by: The command that lists all choices, where they are too many for a message.
    """

    def __init__(self, kind: str, name: str, choices: Iterable[str] = (), *, listed_by: str | None = None) -> None:
        known = tuple(choices)
        # What was given as a name may be something else: 0 where '0' is meant.
        text = str(name)
        advice = did_you_mean(text, known)
        if listed_by is not None:
            # Too many to list here: the nearest, however far they are.
            far = difflib.get_close_matches(text, known, n=3, cutoff=0.0)
            words = advice if near(text, known) else f"the nearest are {', '.join(map(repr, far))};" if far else ""
            advice = f"{words} see {listed_by}".strip()
        super().__init__(f"there is no {kind} named {name!r}" + (f"; {advice}" if advice else ""))
        self.kind = kind
        """What was looked for, as a noun: `model`, `hardware`, `recipe`."""
        self.name = name
        self.suggestions = near(text, known)


class BadRecordError(LowtideError, ValueError):
    """A saved file cannot be read: not JSON, cut short, or written under another schema version. Make it again."""


class PlanError(LowtideError, ValueError):
    """A plan does not fit: made for another model, or with budgets that cannot hold it. Make it again, or change it."""

    def __init__(self, message: str, *, needed_bytes: int | None = None, group: str | None = None) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        """What the plan takes at least of the budget that is too small; None where no budget is."""
        self.group = group
        """The group that needs most of it; None where no single one is to blame."""


class MissingExtraError(LowtideError, ImportError):
    """A feature needs a package that is not installed. Run `command`."""

    def __init__(self, extra: str, needed_for: str) -> None:
        command = f'pip install "lowtide[{extra}]"'
        super().__init__(f"{needed_for} needs the optional extra {extra!r}, which is not installed; run: {command}")
        self.extra = extra
        self.command = command
        """The line to type."""


class HardwareError(LowtideError, RuntimeError):
    """A device is missing, or measuring it failed. Name known hardware instead, or run where the device is."""


class ObserveError(LowtideError, RuntimeError):
    """A real step could not be recorded, or only in part. The message says which part and what to change."""


class BudgetError(LowtideError, RuntimeError):
    """A tier does not have the bytes that are asked of it. Raise its budget, or ask less of it: the message says how."""

    def __init__(
        self,
        message: str,
        *,
        tier: str,
        needed_bytes: int,
        free_bytes: int,
        budget_bytes: int,
        owner: str | None = None,
    ) -> None:
        super().__init__(message)
        self.tier = tier
        """Whose budget it is: `device`, `host`, `pinned` or the name of a buffer."""
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        self.budget_bytes = budget_bytes
        self.owner = owner
        """For whom the bytes were asked; None where the budget itself is what cannot be had."""


class ChunkStateError(LowtideError, RuntimeError):
    """A chunk was about to make a move that its table forbids: a fault of Lowtide's, to be reported."""


class GradientStateError(LowtideError, RuntimeError):
    """A gradient on the host was about to make a move that its table forbids: a fault of Lowtide's, to be reported."""


class SessionError(LowtideError, RuntimeError):
    """A managed model cannot do what was asked. The message says in what condition model and optimizer are."""


class ModelChangedError(SessionError):
    """The model is no longer the one that was managed. Close the session, change the model, and manage it again."""


class TwoThreadsError(SessionError):
    """A thread used a session while another one did. Nothing of its call was done; the other goes on."""


class UnsupportedOptimizerError(SessionError):
    """The optimizer looks across parameters or needs a closure, so that no chunk can be updated by itself."""


class StaleBackwardError(SessionError):
    """A backward through weights that were updated since its forward: plain torch refuses it as well."""


class SecondBackwardError(SessionError):
    """A second backward before `step()` where weights are updated in backward. Use the deferred schedule for that."""


class GradientGoneError(SessionError):
    """A gradient was read that was used up in backward. Use the deferred schedule to read or change gradients."""


class HigherOrderError(SessionError):
    """Gradients of gradients through streamed weights. Make the named group resident."""


class NonFiniteLossError(SessionError):
    """The loss of the step is NaN or infinite. Nothing was updated."""


class NonFiniteGradientError(SessionError):
    """Gradients are NaN or infinite, or their norm is. The message says what was updated: nothing, unless in a backward."""


class StepLostError(SessionError):
    """A backward or a `step()` broke off. The message says which weights moved; `zero_grad()` and repeat the step."""

    def __init__(self, message: str, *, has_moved: bool = True) -> None:
        super().__init__(message)
        self.has_moved = has_moved
        """False where all weights are surely as before the step, so that it can be repeated."""


class RanksError(LowtideError, RuntimeError):
    """Processes that train one model together cannot go on. Each of them raises; the message names the rank."""


class RanksDifferError(RanksError):
    """Ranks were given different models, plans, weights or settings. Nothing was changed."""


class RankLostError(RanksError):
    """A rank has ended, stands still, or has left after an exception. Start all of them again from the last checkpoint."""


class RankFailedError(RanksError):
    """A rank that this process has started raised, was killed or stood still; the others were ended. Its own error is the cause."""

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank
        """The first of those that are to blame."""


class ActivationError(LowtideError, RuntimeError):
    """An activation policy cannot do its work on a module. Give that module another one: the message says which."""


class SavedTensorChangedError(ActivationError):
    """A tensor was written to in place after it was saved for the backward: plain torch refuses it as well."""


class EmulatedOutOfMemoryError(BudgetError):
    """An operator went over the budget of an emulated device, where a real one would have run out of memory.

    Its result is freed already. Raise the device's budget, or let the plan stream or recompute more.
    """


class CheckpointError(LowtideError, RuntimeError):
    """A checkpoint cannot be saved or loaded. The message names the file with its path inside the run folder."""

    def __init__(self, message: str, *, file: str | None = None) -> None:
        super().__init__(message)
        self.file = file
        """The file or folder to blame, such as `step-00000120/model.safetensors`; None where no single one is."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is torn, changed since it was saved, foreign, or of another schema. Load another one."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint is of another model, another optimizer or another kind than it is to be loaded into. Nothing was loaded."""


class CheckpointWriteError(CheckpointError):
    """A file of a checkpoint could not be written. Former checkpoints are as they were; free some room and save again."""

    def __init__(self, message: str, *, file: str | None = None, free_bytes: int | None = None) -> None:
        super().__init__(message, file=file)
        self.free_bytes = free_bytes
        """What the disk had left for this user; None where it did not say."""


class FolderInUseError(CheckpointError):
    """Somebody else saves into the same run folder. Stop that process, or give each run a folder of its own."""

    def __init__(self, message: str, *, pid: int | None = None, host: str | None = None) -> None:
        super().__init__(message)
        self.pid = pid
        """The process that holds the folder; None where it has not said yet."""
        self.host = host


class OptimizerStateError(LowtideError, ValueError):
    """A saved optimizer state does not fit: of another model, another optimizer or other weights. Nothing was loaded."""

    def __init__(self, message: str, *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        """The first parameter that does not fit; None where the state as a whole does not."""


class LossScaleError(LowtideError, RuntimeError):
    """Steps overflow at a scale that cannot be lowered, or the scaler's calls came in a wrong order."""


class TargetRangeError(LowtideError, IndexError):
    """A target of a loss is neither in the vocabulary nor the index that is ignored. Check the labels."""


class ChunkedBackwardError(LowtideError, RuntimeError):
    """A backward that a chunked loss cannot do: a second one where the first did not retain the graph, or of higher order."""


class LogitsNotMadeError(LowtideError, AttributeError):
    """Logits were asked for that a chunked loss never makes. Call the model without labels, in eval mode, or undo it."""


class UnsupportedHeadError(LowtideError, ValueError):
    """A model's head cannot be chunked: the message says why. Its loss stays as it is."""


class HostKernelError(LowtideError, RuntimeError):
    """The C++ update cannot be built or loaded: the message says which file and why. Updates run through torch instead."""


class BadPieceError(LowtideError, ValueError):
    """An update was given tensors that do not fit together, and has changed none of them. The message names the tensor."""


class GraphAliveError(LowtideError, RuntimeError):
    """Memory would have to move while an autograd graph points into it. Drop the graph (the loss, its outputs) first."""


class OwnershipError(LowtideError, ValueError):
    """Bytes are given back twice, taken twice under one name, or given back by one who does not hold them."""


class DataError(LowtideError, RuntimeError):
    """A batch of a training run could not be made. The message says which one, and what is wrong with the data."""


class RunStoppedError(LowtideError, RuntimeError):
    """A training run cannot go on. The message says at which step, why, and what is saved of it."""


class TraceError(LowtideError, RuntimeError):
    """A step could not be predicted. `lowtide.observe` on a real device still works for most of these."""

    def __init__(self, message: str, *, module: str | None = None, op: str | None = None) -> None:
        super().__init__(message)
        self.module = module
        """Dotted path of the module that was running; None where unknown, "" outside the model."""
        self.op = op
        """The operator that was running, such as `aten.nonzero`; None where unknown."""


class ValueReadError(TraceError):
    """The model reads tensor values (`.item()`, `if tensor:`, `nonzero`), which a prediction does not have.

    Take the branch out of the traced step, or use `lowtide.observe` on a real device.
    """


class MissingKernelError(TraceError):
    """An operator has no fake kernel, so its output shapes are unknown.

    Register one with `torch.library.register_fake`, or use `lowtide.observe` on a real device.
    """


class BatchMismatchError(TraceError):
    """The batch does not fit the model: wrong names, shapes or types. Compare it with the forward's signature."""


class TooLargeError(TraceError):
    """The step is beyond any device, or its sizes overflow. Check the batch for a slip, or make it smaller."""

    def __init__(
        self, message: str, *, needed_bytes: int | None = None, module: str | None = None, op: str | None = None
    ) -> None:
        super().__init__(message, module=module, op=op)
        self.needed_bytes = needed_bytes
        """What the step, or the one tensor that failed, asked for; None where not even that is known."""


class TraceCrashedError(TraceError):
    """The tracing subprocess died without an answer. `stderr_tail` holds its last words; report it with the model.

    An exit code below zero is the number of the signal that killed it, as in `subprocess`.
    """

    def __init__(self, message: str, *, exit_code: int | None = None, stderr_tail: str = "") -> None:
        super().__init__(message)
        self.exit_code = exit_code
        """None when the process is gone but never told its code."""
        self.stderr_tail = stderr_tail

    @property
    def signal(self) -> int | None:
        """Number of the signal that killed the process (9 is most often the system running out of memory)."""
        return -self.exit_code if self.exit_code is not None and self.exit_code < 0 else None
