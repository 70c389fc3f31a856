"""The exception tree: what callers may catch, what survives pickling, and which names are suggested."""

from __future__ import annotations

import inspect
import pickle
import re

import cloudpickle
import pytest

from lowtide import errors
from lowtide.errors import (
    ActivationError,
    BadPieceError,
    BadRecordError,
    BatchMismatchError,
    BudgetError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointWriteError,
    ChunkedBackwardError,
    ChunkStateError,
    ConfigError,
    DamagedCheckpointError,
    DataError,
    EmulatedOutOfMemoryError,
    FolderInUseError,
    GradientGoneError,
    GradientStateError,
    GraphAliveError,
    HardwareError,
    HigherOrderError,
    HostKernelError,
    LogitsNotMadeError,
    LossScaleError,
    LowtideError,
    MissingExtraError,
    MissingKernelError,
    ModelChangedError,
    NonFiniteGradientError,
    NonFiniteLossError,
    ObserveError,
    OptimizerStateError,
    OwnershipError,
    PlanError,
    RankFailedError,
    RankLostError,
    RanksDifferError,
    RanksError,
    RunStoppedError,
    SavedTensorChangedError,
    SecondBackwardError,
    SessionError,
    StaleBackwardError,
    StepLostError,
    TargetRangeError,
    TooLargeError,
    TraceCrashedError,
    TraceError,
    TwoThreadsError,
    UnknownNameError,
    UnsupportedHeadError,
    UnsupportedOptimizerError,
    ValueReadError,
    did_you_mean,
    near,
)

EXAMPLES: list[LowtideError] = [
    LowtideError("root"),
    ActivationError("compiled"),
    SavedTensorChangedError("written to"),
    TargetRangeError("target 9 of 8"),
    ChunkedBackwardError("twice"),
    LogitsNotMadeError("never made"),
    UnsupportedHeadError("no head"),
    OptimizerStateError("another model's", parameter="head.weight"),
    CheckpointError("no step", file="step-00000120"),
    CheckpointMismatchError("another model's"),
    DamagedCheckpointError("torn", file="step-00000120/model.safetensors"),
    CheckpointMismatchError("wider", file="step-00000120"),
    CheckpointWriteError("full", file="step-00000120/model.safetensors", free_bytes=12),
    FolderInUseError("held", pid=12, host="node-3"),
    ConfigError("bad", key="optim.rate"),
    UnknownNameError("model", "lama-8b", ["llama-8b", "resnet-50"]),
    BadRecordError("cut short"),
    PlanError("too small", needed_bytes=4096, group="layers.3"),
    MissingExtraError("plotly", "the interactive chart"),
    HardwareError("no device"),
    ObserveError("no step ran"),
    BudgetError("full", tier="host", needed_bytes=2, free_bytes=1, budget_bytes=4, owner="weights"),
    ChunkStateError("ChunkStateError"),
    GradientStateError("GradientStateError"),
    SessionError("SessionError"),
    RanksError("RanksError"),
    RanksDifferError("rank 1 differs"),
    RankLostError("rank 1 is gone"),
    ModelChangedError("ModelChangedError"),
    TwoThreadsError("TwoThreadsError"),
    UnsupportedOptimizerError("UnsupportedOptimizerError"),
    StaleBackwardError("StaleBackwardError"),
    SecondBackwardError("SecondBackwardError"),
    GradientGoneError("GradientGoneError"),
    HigherOrderError("HigherOrderError"),
    NonFiniteGradientError("NonFiniteGradientError"),
    NonFiniteLossError("NonFiniteLossError"),
    StepLostError("StepLostError"),
    RankFailedError("rank 1 of 2: ValueError: on purpose", rank=1),
    EmulatedOutOfMemoryError("full", tier="device", needed_bytes=2, free_bytes=1, budget_bytes=4, owner="aten.mm"),
    LossScaleError("LossScaleError"),
    HostKernelError("HostKernelError"),
    BadPieceError("BadPieceError"),
    GraphAliveError("GraphAliveError"),
    OwnershipError("OwnershipError"),
    DataError("DataError"),
    RunStoppedError("RunStoppedError"),
    TraceError("failed", module="layers.3", op="aten.mm"),
    ValueReadError("reads", module="router", op="aten._local_scalar_dense"),
    MissingKernelError("no kernel", module="", op="mylib.scan"),
    BatchMismatchError("shape", module="embed"),
    TooLargeError("too large", needed_bytes=2**50, module="head", op="aten.mm"),
    TraceCrashedError("died", exit_code=-6, stderr_tail="terminate called"),
]
ALL_CLASSES = {
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, Exception) and cls.__module__ == errors.__name__
}


def test_examples_cover_every_class() -> None:
    assert {type(error) for error in EXAMPLES} == ALL_CLASSES


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps], ids=["pickle", "cloudpickle"])
def test_pickle_keeps_type_message_and_attributes(error: LowtideError, dumps: type) -> None:
    again = pickle.loads(dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error) != ""
    assert again.__dict__ == error.__dict__


def test_pickle_keeps_notes() -> None:
    error = TraceError("failed")
    error.add_note("while tracing llama-8b")
    assert pickle.loads(pickle.dumps(error)).__notes__ == ["while tracing llama-8b"]


@pytest.mark.parametrize("cls", sorted(ALL_CLASSES, key=lambda cls: cls.__name__))
def test_docstring_tree_shows_each_class_below_its_parent(cls: type[LowtideError]) -> None:
    lines = (errors.__doc__ or "").splitlines()
    indent_of = {match[1]: match.start(1) for line in lines if (match := re.search(r"^[ │├└─]*(\w+Error)", line))}
    own = [base for base in cls.__bases__ if issubclass(base, LowtideError)]
    assert len(own) == (0 if cls is LowtideError else 1)
    assert all(indent_of[cls.__name__] == indent_of[parent.__name__] + 4 for parent in own)


@pytest.mark.parametrize("cls", sorted(ALL_CLASSES, key=lambda cls: cls.__name__))
def test_every_class_says_when_it_is_raised(cls: type[LowtideError]) -> None:
    assert cls.__dict__.get("__doc__")


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (ConfigError, ValueError),
        (UnknownNameError, ValueError),
        (BadRecordError, ValueError),
        (PlanError, ValueError),
        (MissingExtraError, ImportError),
        (TraceError, RuntimeError),
        (ObserveError, RuntimeError),
        (HardwareError, RuntimeError),
    ],
)
def test_callers_may_catch_the_builtin(cls: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(cls, builtin)


def test_crash_tells_a_signal_from_an_exit_code() -> None:
    assert TraceCrashedError("killed", exit_code=-9).signal == 9
    assert TraceCrashedError("left", exit_code=1).signal is None
    assert TraceCrashedError("gone").signal is None


def test_missing_extra_gives_the_command() -> None:
    error = MissingExtraError("transformers", "a Hugging Face model")
    assert error.command == 'pip install "lowtide[transformers]"'
    assert str(error).endswith(error.command)


def test_near_orders_by_likeness_and_ignores_case() -> None:
    assert near("LAMA-8b", ["llama-70b", "llama-8b", "resnet-50"])[0] == "llama-8b"
    assert near("rtx4090", ["RTX-4090", "h100"]) == ("RTX-4090",)


def test_near_finds_what_starts_with_the_name() -> None:
    assert near("l", ["llama-8b", "gpt2"]) == ("llama-8b",)


def test_near_is_empty_when_nothing_is_like_it() -> None:
    assert near("xyz", ["llama-8b", "resnet-50"]) == ()
    assert near("", ["llama-8b"]) == ()


def test_advice_lists_all_choices_when_none_is_near() -> None:
    assert did_you_mean("xyz", ["b", "a"]) == "choose one of a, b"
    assert did_you_mean("xyz", []) == ""


def test_advice_gives_the_nearest_of_many_choices() -> None:
    advice = did_you_mean("xyz", [f"layer.{number}" for number in range(30)])
    assert advice.startswith("the nearest of 30 names are ")
    assert advice.count("layer") == 3


def test_unknown_name_message() -> None:
    error = UnknownNameError("hardware", "h10", ["h100", "h200", "rtx-4090"])
    assert str(error).startswith("there is no hardware named 'h10'; did you mean 'h100'")
    assert error.suggestions[0] == "h100"
    assert str(UnknownNameError("hardware", "q")) == "there is no hardware named 'q'"
