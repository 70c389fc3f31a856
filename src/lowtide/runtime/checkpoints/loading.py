"""load: bring a model, its optimizer and everything beside them to where a checkpoint left them.

All of it is checked before anything is written: that every byte is the one that was saved, and that the checkpoint is of this
model and this optimizer. Then parameters are read one after the other, each to where the plan has it, and the host never
holds a second copy of more than one. What a disk can still do after that is to fail while it is read: then an error says that
the model is a mixture, and of what.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowtide import compat
from lowtide.errors import BadRecordError, CheckpointError, CheckpointMismatchError, ConfigError, SessionError
from lowtide.optim.state import ParameterState
from lowtide.optim.update_types import Numerics
from lowtide.planning.plan import Plan, plan_from_json
from lowtide.runtime.checkpoints.contents import (
    MODEL,
    STATE,
    ModelEntries,
    has_state,
    model_entries,
    parameter_names,
)
from lowtide.runtime.checkpoints.folder import RunFolder, opened
from lowtide.runtime.checkpoints.format import CheckpointReader
from lowtide.runtime.checkpoints.matching import SavedTraining, check_model, check_optimizer, rule_with
from lowtide.runtime.checkpoints.plain_values import Decoder
from lowtide.runtime.checkpoints.random_numbers import restore_random_state
from lowtide.runtime.checkpoints.state_forms import StateReader
from lowtide.runtime.hand_over import bring_state
from lowtide.runtime.parameters.weight_file import WeightFile
from lowtide.runtime.plan_run import PlanRun
from lowtide.runtime.session import Session, refuse_managed
from lowtide.runtime.updates.chunk_optimizer import unwrapped


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheckpoint:
    """What `load` gives back."""

    folder: Path
    """The checkpoint that was loaded."""
    step: int
    """The step after which it was saved."""
    state: Mapping[str, Any]
    """The plain values that were given to `save` as `state`, by their names: an epoch, say."""
    is_exact: bool
    """Whether training goes on with the bits of the undisturbed run; False where a format had to be converted."""
    plan: Plan | None
    """Under which it was saved, on which nothing in it depends; None where it is of another version of Lowtide."""


def load(
    folder: str | Path,
    target: Session | nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    state: Mapping[str, object] | None = None,
    step: int | None = None,
) -> LoadedCheckpoint:
    """Go on from a checkpoint: weights, optimizer, random numbers, and what was saved beside them.

    Gradients that are there go. The plan may be another one than that of the run that saved it. Where the precision or the
    format of the moments is another one, the values are converted, with a warning: losses are then no longer bit-identical.

    Args:
        folder: The folder of a run, of whose checkpoints the newest undamaged one is taken; or one checkpoint.
        target: The session; or a plain model, with its optimizer.
        optimizer: Of a plain model.
        state: The objects that `save` was given as `state`, under the same names: each is loaded. Plain values are given back.
        step: Of a run's checkpoints, that of this step.

    Example:
        >>> import tempfile, lowtide
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with tempfile.TemporaryDirectory() as run:
        ...     with lowtide.manage(model, optimizer, lowtide.make_plan(model), device="cpu") as session:
        ...         _ = session.save(run, step=3, state={"epoch": 1})
        ...         loaded = lowtide.load(run, session)
        >>> loaded.step, loaded.state["epoch"], loaded.is_exact
        (3, 1, True)

    Raises:
        DamagedCheckpointError: The checkpoint that was asked for is damaged, or none of the run is whole. Nothing was loaded.
        CheckpointMismatchError: It is of another model or optimizer. Nothing was loaded.
        SessionError: A forward or a backward is under way, or the model is managed and not its session was given.
    """
    session = target if isinstance(target, Session) else None
    _check_target(target, optimizer)
    if session is None:
        assert isinstance(target, nn.Module)
        assert optimizer is not None
        saved = SavedTraining.read(open_checkpoint(Path(folder), step))
        return _load(saved, _of_plain(target, unwrapped(optimizer, None)), state or {})
    plan_run = session._open()
    with plan_run.together("load a checkpoint") as facts:
        session.wait_for_save()  # it may be the one that is meant, and its values are about to go
        saved = SavedTraining.read(open_checkpoint(Path(folder), step))
        # Another rank may have gone back to an older one.
        facts["checkpoint"] = {"step": saved.reader.index.step, "folder": saved.reader.folder.name}
    with (
        plan_run.together("load a checkpoint"),
        plan_run.between_steps("lowtide.load", discards_step=True),
        plan_run.setup.on_host(),
    ):
        loaded = _load(saved, _of_session(plan_run), state or {})
    session._count_from(loaded.step)
    return loaded


def newest_checkpoint(folder: str | Path) -> Path | None:
    """The newest checkpoint in the folder of a run; None where nothing was saved yet.

    Its bytes are verified when it is loaded: `load` with the run's folder goes back to the one before where they are damaged.
    """
    return next(iter(RunFolder(Path(folder)).checkpoints().values()), None)


def load_weights(folder: str | Path, target: Session | nn.Module, *, step: int | None = None) -> None:
    """Take over weights and persistent buffers alone: to evaluate, or to begin a new training from them.

    They are converted to the model's types. Optimizer and random numbers stay as they are.

    Args:
        folder: The folder of a run, one checkpoint, a Hugging Face folder, or a safetensors file.
        target: A session or a plain model.
        step: Of a run's checkpoints, that of this step.

    Raises:
        DamagedCheckpointError: The checkpoint is damaged. Nothing was loaded.
        CheckpointMismatchError: It is of another model. Nothing was loaded.
        BadRecordError: The weight files are of another model, or none is there. Nothing was loaded.
    """
    session = target if isinstance(target, Session) else None
    path = Path(folder)
    model = target.model if isinstance(target, Session) else target
    if session is None:
        refuse_managed(model, None)
        _take_weights(path, model, step)
        return
    plan_run = session._open()
    with plan_run.between_steps("lowtide.load_weights"), plan_run.setup.on_host():
        _take_weights(path, model, step, plan_run.write_weight)
        plan_run.settle()


# -- which checkpoint, and into what -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Receiver:
    """What a checkpoint is loaded into: a session, or plain objects."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    device: torch.device
    numerics: Numerics | None
    """The formats of our own kernels, where they update."""
    may_convert: bool
    """Whether state of our own kernels may be turned into that of torch's own optimizer."""
    begin: Callable[[int | None], None]
    """Before the first value is written; with the seed of stochastic rounding, where there is one."""
    put: Callable[[torch.Tensor, ParameterState | dict[str, Any], Mapping[str, Any]], None]
    """State of a parameter, in the form that its optimizer keeps here; with the settings of its group."""
    end: Callable[[], None]
    broke: Callable[[str], None]
    """Told why only a part was written."""
    write: Callable[[torch.Tensor, torch.Tensor], object] = torch.Tensor.copy_
    """Puts a value into one of the model's tensors."""
    rank: int = 0
    num_ranks: int = 1


def _of_session(plan_run: PlanRun) -> _Receiver:
    kept = plan_run.kept_states
    return _Receiver(
        model=plan_run.setup.model,
        optimizer=plan_run.setup.optimizer,
        device=plan_run.setup.mover.device,
        numerics=None if kept is None else kept.numerics,
        may_convert=True,
        begin=plan_run.begin_loading,
        put=plan_run.put_state,
        end=plan_run.end_loading,
        broke=plan_run.lose_load,
        write=plan_run.write_weight,
        rank=0 if plan_run.setup.ranks is None else plan_run.setup.ranks.rank,
        num_ranks=1 if plan_run.setup.ranks is None else plan_run.setup.ranks.size,
    )


def _of_plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> _Receiver:
    def begin(seed: int | None) -> None:
        assert seed is None, "only our own kernels round by chance"
        optimizer.zero_grad()
        optimizer.state.clear()

    def put(parameter: torch.Tensor, state: ParameterState | dict[str, Any], group: Mapping[str, Any]) -> None:
        assert isinstance(state, dict)
        bring_state(state, parameter, group)
        optimizer.state[parameter] = state

    devices = [parameter.device for parameter in model.parameters()]
    return _Receiver(
        model=model,
        optimizer=optimizer,
        device=next((device for device in devices if device.type == "cuda"), torch.device("cpu")),
        numerics=None,
        # Nobody would see that masters are gone: the next `manage` would begin from the rounded weights.
        may_convert=False,
        begin=begin,
        put=put,
        end=lambda: None,
        broke=lambda reason: None,
    )


def _check_target(target: object, optimizer: object) -> None:
    if isinstance(target, Session):
        if optimizer is not None:
            raise ConfigError("a session has its optimizer; give lowtide.load the session alone", key="optimizer")
        return
    if not isinstance(target, nn.Module):
        raise ConfigError(
            f"lowtide.load was given a {type(target).__name__} to load into; give a session, or a model and its optimizer",
            key="target",
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"the optimizer is {optimizer!r:.80}; give lowtide.load the plain model's optimizer as well, or take the weights alone "
            "with lowtide.load_weights",
            key="optimizer",
        )
    try:
        refuse_managed(target, optimizer)
    except SessionError as error:
        error.add_note("To load a checkpoint into it, give its session: lowtide.load(folder, session).")
        raise


def open_checkpoint(folder: Path, step: int | None) -> CheckpointReader:
    """The checkpoint that is meant, with every byte verified."""
    if (folder / "checkpoint.json").exists():
        reader = CheckpointReader(folder)
        if step is not None and step != reader.index.step:
            raise CheckpointError(
                f"{folder.name} is the checkpoint of step {reader.index.step}, and step {step} was asked for; give the folder of "
                "the run"
            )
        reader.verify()
        return reader
    run = RunFolder(folder)
    if step is None:
        newest = run.newest_good()
        if newest is None:
            raise CheckpointError(f"there is no checkpoint in {folder}; give the folder that session.save() was given")
        return newest
    found = run.checkpoints()
    if step not in found:
        there = ", ".join(map(str, sorted(found))) or "none"
        raise CheckpointError(f"there is no checkpoint of step {step} in {folder}; there are those of steps {there}")
    reader = opened(found[step], step)
    reader.verify()
    return reader


# -- loading -----------------------------------------------------------------------------------------------------------


def _load(saved: SavedTraining, receiver: _Receiver, state: Mapping[str, object]) -> LoadedCheckpoint:
    own = model_entries(receiver.model)
    _check(saved, receiver, own, state)
    reader = saved.reader
    decoder = Decoder(lambda name: reader.read(STATE, name))
    own_state = _state_of(reader, receiver.rank)
    plain = _load_objects(own_state["given"], decoder, state)
    with StateReader(saved, receiver.numerics) as states, compat.without_modes():
        is_exact = _write(saved, receiver, own, states, decoder)
    if not is_exact:
        warnings.warn(
            f"{reader.folder.name} was saved with {saved.words} and other types of weights or state than are kept here: its values "
            "were converted, and losses from here on are not bit-identical to those of the run that saved it",
            stacklevel=3,
        )
    num_saved = 1 + len(_other_ranks(reader))
    if num_saved != receiver.num_ranks:
        is_exact = False
        if receiver.rank == 0:
            warnings.warn(
                f"{reader.folder.name} was saved by {num_saved} ranks and is loaded by {receiver.num_ranks}: gradients are added "
                "up in another order, so that losses equal those of the run that saved it within rounding; random numbers differ",
                stacklevel=3,
            )
    # Last: what was loaded before may have drawn some. A rank that was not there goes on with its own.
    if receiver.rank < num_saved:
        restore_random_state(decoder.decode(own_state["random"]), receiver.device)
    return LoadedCheckpoint(
        folder=reader.folder, step=reader.index.step, state=plain, is_exact=is_exact, plan=_plan_of(reader)
    )


def _other_ranks(reader: CheckpointReader) -> list[Mapping[str, Any]]:
    """What ranks beside the first have saved of their own: random numbers, and objects of the user's."""
    found: Any = reader.index.state.get("ranks") or []
    return list(found)


def _state_of(reader: CheckpointReader, rank: int) -> Mapping[str, Any]:
    """What the rank has saved of its own; rank 0's where it was not there."""
    found: list[Any] = [reader.index.state, *_other_ranks(reader)]
    return found[rank if rank < len(found) else 0]  # type: ignore[no-any-return]  # plain data


def _plan_of(reader: CheckpointReader) -> Plan | None:
    try:
        return plan_from_json(str(reader.index.state.get("plan")))
    except (BadRecordError, ConfigError):
        return None


def _check(saved: SavedTraining, receiver: _Receiver, own: ModelEntries, state: Mapping[str, object]) -> None:
    """Refuse what can be refused before anything is written."""
    check_model(saved, own)
    name = saved.reader.folder.name
    optimizer = receiver.optimizer
    if (optimizer is None) != (saved.optimizer is None):
        here, there = ("no optimizer", "one") if optimizer is None else ("an optimizer", "none")
        raise CheckpointMismatchError(
            f"{name} has {there}, and there is {here} here; to take the weights alone, use lowtide.load_weights. Nothing was "
            "loaded"
        )
    if optimizer is not None:
        check_optimizer(saved, optimizer, own, receiver.numerics)
        if saved.numerics is not None and not receiver.may_convert:
            raise CheckpointMismatchError(
                f"{name} was saved by a session with {saved.words}, which a plain torch optimizer cannot keep; call "
                "lowtide.manage with that precision first and give lowtide.load the session, or export it to torch's form with "
                "lowtide.export. Nothing was loaded"
            )
    _check_objects(saved, state)


def _check_objects(saved: SavedTraining, state: Mapping[str, object]) -> None:
    given: Any = saved.reader.index.state["given"]
    for name, value in state.items():
        if name not in given:
            found = ", ".join(map(repr, given)) or "nothing"
            raise CheckpointMismatchError(
                f"state has {name!r}, and {saved.reader.folder.name} was saved with {found} as state; leave it out, or load "
                "another checkpoint. Nothing was loaded"
            )
        kind = given[name]["kind"]
        fits = {"generator": isinstance(value, torch.Generator), "state_dict": has_state(value)}
        if not fits.get(kind, True):
            raise CheckpointMismatchError(
                f"state[{name!r}] is a {type(value).__name__}, and was saved from "
                f"{'a torch.Generator' if kind == 'generator' else 'an object with load_state_dict()'}. Nothing was loaded"
            )
    left_out = [name for name, entry in given.items() if entry["kind"] != "plain" and name not in state]
    if left_out:
        warnings.warn(
            f"{saved.reader.folder.name} has the state of {', '.join(map(repr, left_out))}, which is not loaded: give the "
            f"objects to lowtide.load as state={{{left_out[0]!r}: ...}}, or the run goes on without",
            stacklevel=5,
        )


def _load_objects(given: Mapping[str, Any], decoder: Decoder, state: Mapping[str, object]) -> dict[str, Any]:
    """Load the user's objects, before the model: what they refuse is refused while everything else is as it was."""
    plain: dict[str, Any] = {}
    for name, entry in given.items():
        if entry["kind"] == "plain":
            plain[name] = decoder.decode(entry["value"])
        elif name in state:
            target: Any = state[name]
            restore = target.set_state if entry["kind"] == "generator" else target.load_state_dict
            try:
                restore(decoder.decode(entry["value"]))
            except Exception as error:
                error.add_note(
                    f"This is state[{name!r}] of lowtide.load. The model and the optimizer are as they were before."
                )
                raise
    return plain


def _write(saved: SavedTraining, receiver: _Receiver, own: ModelEntries, states: StateReader, decoder: Decoder) -> bool:
    """Write everything; whether each value went to its place as it was saved."""
    reader, optimizer = saved.reader, receiver.optimizer
    trained = _trained(saved, receiver, own)
    is_exact = all(states.is_exact(name, parameter) for name, parameter, _ in trained.values())
    with _told_where_it_broke(reader.folder.name, len(own.tensors), receiver.broke) as written, torch.no_grad():
        receiver.begin(None if saved.numerics is None or receiver.numerics is None else saved.numerics.seed)
        if optimizer is not None:
            _take_settings(saved, optimizer, decoder)
        for name, tensor in own.tensors.items():
            if id(tensor) not in trained:
                is_exact &= saved.weights[name].dtype is tensor.dtype
                receiver.write(tensor, reader.read(MODEL, name))
                written.append(name)
        for name, parameter, group in trained.values():
            _write_parameter(saved, receiver, states, name, parameter, group)
            written.append(name)
        extra = {name: decoder.decode(value) for name, value in saved.model["extra"].items()}
        if extra:
            receiver.model.load_state_dict(extra, strict=False)
        receiver.end()
    return is_exact


def _write_parameter(
    saved: SavedTraining,
    receiver: _Receiver,
    states: StateReader,
    name: str,
    parameter: torch.Tensor,
    group: Mapping[str, Any],
) -> None:
    """Write one parameter and its state; what was read for it is gone when this returns."""
    assert receiver.optimizer is not None
    has_state = saved.state_of(name) is not None
    rule = rule_with(receiver.optimizer, group, {}, parameter, receiver.numerics, saved.numerics) if has_state else None
    found = states.read(name, parameter, rule)
    receiver.write(parameter, found.weight)
    if found.state is not None:
        receiver.put(parameter, found.state, group)


def _trained(
    saved: SavedTraining, receiver: _Receiver, own: ModelEntries
) -> dict[int, tuple[str, torch.Tensor, dict[str, Any]]]:
    """By its `id`, each parameter of the optimizer with its name and its group."""
    if receiver.optimizer is None:
        return {}
    names = parameter_names(receiver.optimizer, own)
    return {
        id(parameter): (name, parameter, group)
        for pairs, group in zip(names, receiver.optimizer.param_groups, strict=True)
        for name, parameter in pairs
    }


def _take_settings(saved: SavedTraining, optimizer: torch.optim.Optimizer, decoder: Decoder) -> None:
    """The param groups as they were: schedulers and users change them while a run lasts."""
    assert saved.optimizer is not None
    attributes = saved.optimizer.get("attributes")
    if attributes is not None:
        # The class brings back what it has added itself; without states, which it would convert.
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({**decoder.decode(attributes), "state": {}, "param_groups": groups})
    for group, settings in zip(optimizer.param_groups, saved.settings, strict=True):
        for key, value in settings.items():
            if key == "params":
                continue
            now = group.get(key)
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and value.shape == now.shape:
                now.copy_(value)  # the same tensor: a step that was captured or compiled has it
            else:
                group[key] = value
    others = saved.optimizer.get("others")
    for key, value in decoder.decode(others) if others is not None else ():
        dict.__setitem__(optimizer.state, key, value)


def _take_weights(
    path: Path,
    model: nn.Module,
    step: int | None,
    write: Callable[[torch.Tensor, torch.Tensor], object] = torch.Tensor.copy_,
) -> None:
    if not (path / "checkpoint.json").exists() and (path.is_file() or any(path.glob("*.safetensors"))):
        file = WeightFile(path)
        file.check(model)
        _fill(model, lambda name: file.tensor(name) if name in file else None, write)
        return
    reader = open_checkpoint(path, step)
    saved = SavedTraining.read(reader)
    check_model(saved, model_entries(model))
    _fill(model, lambda name: reader.read(MODEL, name) if name in saved.weights else None, write)


def _fill(
    model: nn.Module,
    value_of: Callable[[str], torch.Tensor | None],
    write: Callable[[torch.Tensor, torch.Tensor], object],
) -> None:
    own = model_entries(model)
    with torch.no_grad(), compat.without_modes():
        for name, tensor in own.tensors.items():
            value = value_of(name)
            if value is not None:
                write(tensor, value)


@contextlib.contextmanager
def _told_where_it_broke(checkpoint: str, num_tensors: int, broke: Callable[[str], None]) -> Iterator[list[str]]:
    """Gathers the names of what is written; an error inside says how much that was, and so does the next step."""
    written: list[str] = []
    try:
        yield written
    except BaseException as error:
        reason = (
            f"loading {checkpoint} broke off after {len(written)} of {num_tensors} tensors of the model: it is a mixture of what "
            "it was and of the checkpoint. Load a checkpoint again before it is trained or saved"
        )
        broke(reason)
        error.add_note(reason)
        raise
