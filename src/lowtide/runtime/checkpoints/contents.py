"""What a checkpoint contains: the tensors of a model and its optimizer as they are kept, and everything else as plain values.

Nothing is converted and nothing is copied here: a `Part` names live tensors, and whoever writes them decides when they are
read. Names are those of `model.state_dict()`; a tied parameter stands under its first name, and the others are noted. The
optimizer's tensors have the name of their parameter and their own: `head.weight.exp_avg`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowtide.activations.apply import is_cache_off
from lowtide.errors import ConfigError
from lowtide.optim.state import ParameterState
from lowtide.plain_text import Plain
from lowtide.planning.plan import plan_to_json
from lowtide.runtime.checkpoints.format import TensorSpec
from lowtide.runtime.checkpoints.plain_values import TAG, Encoder, require_plain_tensor
from lowtide.runtime.checkpoints.random_numbers import random_state
from lowtide.runtime.parameters.pieces import Values
from lowtide.runtime.plan_run import PlanRun
from lowtide.runtime.updates.kernel_optimizer import KernelStates

MODEL, OPTIMIZER, STATE = "model", "optimizer", "state"
"""Files of tensors."""
VALUE = "parameter_value"
"""After the name of a parameter that is the optimizer's and not the model's: what it is."""
KERNELS, TORCH = "kernels", "torch"
"""Who keeps the optimizer's state, and so in which form it is saved."""
_REMAINDER, _MASTER = "remainder", "master"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """Tensors that one update changes together: a parameter's weight, moments, remainder or master."""

    parameter: torch.Tensor | None
    """None for what no update changes: buffers, and tensors of the plain state."""
    tensors: Mapping[tuple[str, str], torch.Tensor]
    """By file and name: the live tensor, on the host or the device."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contents:
    """All of a checkpoint."""

    parts: Sequence[Part]
    state: Mapping[str, Plain]
    files: Mapping[str, str]
    """Text files beside the tensors, by name: what a Hugging Face model is built from."""
    names: Mapping[int, str]
    """By the `id` of each of the model's tensors, its name."""

    def specs(self) -> dict[str, dict[str, TensorSpec]]:
        """What will be written, by file and name."""
        found: dict[str, dict[str, TensorSpec]] = {}
        for part in self.parts:
            for (file, name), tensor in part.tensors.items():
                found.setdefault(file, {})[name] = TensorSpec(dtype=tensor.dtype, shape=tuple(tensor.shape))
        return found


def session_contents(
    plan_run: PlanRun,
    state: Mapping[str, object] | None = None,
    *,
    tokenizer: str | Path | None = None,
    spread: Mapping[int, Values] | None = None,
) -> Contents:
    """What a session's checkpoint contains. Everything must be settled.

    Args:
        plan_run: Of the session.
        state: What else belongs to the training run, by names of the user's: objects with `state_dict`, generators of torch,
            plain values.
        tokenizer: A folder whose tokenizer files belong to the model.
        spread: By the `id` of each parameter that is spread over ranks, what its values look like as a whole, on meta: they are
            written apart.

    Raises:
        ConfigError: Something has no plain form. The message names it.
    """
    wholes = spread or {}
    setup = plan_run.setup
    model = model_entries(setup.model)
    for name, tensor in model.tensors.items():
        require_plain_tensor(tensor, f"the model's {name}")
    homes = plan_run.homes() | {key: each.weight for key, each in wholes.items() if each.weight is not None}
    described: dict[str, Plain] = {
        "model": model.described(),
        "optimizer": None,
        "plan": plan_to_json(plan_run.plan),
    }
    tensors = {id(tensor): {(MODEL, name): homes.get(id(tensor), tensor)} for name, tensor in model.tensors.items()}
    parameters: dict[int, torch.Tensor] = {
        id(tensor): tensor for tensor in model.tensors.values() if isinstance(tensor, nn.Parameter)
    }
    plain = dict(model.extra_tensors)
    if setup.optimizer is not None:
        saved = describe_optimizer(setup.optimizer, plan_run.kept_states, model, wholes)
        described["optimizer"] = saved.described
        plain |= saved.plain_tensors
        parameters |= {id(parameter): parameter for parameter in saved.parameters}
        for key, named in saved.tensors.items():
            tensors.setdefault(key, {}).update({(OPTIMIZER, name): tensor for name, tensor in named.items()})
    rank = 0 if setup.ranks is None else setup.ranks.rank
    others, other_tensors = _describe_rest(setup.mover.device, state or {}, rank)
    described |= others
    if setup.ranks is not None:
        # On the host: rank 0 would look for another rank's tensors on the device of that number.
        rest = setup.ranks.exchange((others, {name: each.cpu() for name, each in other_tensors.items()}))[1:]
        described["ranks"] = [theirs for theirs, _ in rest]
        other_tensors |= {name: each for _, tensors in rest for name, each in tensors.items()}
    parts = [Part(parameter=parameters.get(key), tensors=named) for key, named in tensors.items()]
    parts.append(Part(parameter=None, tensors={(STATE, name): each for name, each in (plain | other_tensors).items()}))
    files = model_files(setup.model) | _texts(tokenizer)
    return Contents(parts=parts, state=described, files=files, names=model.names())


# -- the model ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelEntries:
    """What `state_dict` of a model has, with each tensor once."""

    kind: str
    tensors: Mapping[str, torch.Tensor]
    """Parameters and persistent buffers by their first names: the model's own objects."""
    tied: Mapping[str, str]
    """Other names, and the first."""
    extra: Mapping[str, Plain]
    """What modules give by `get_extra_state`."""
    extra_tensors: Mapping[str, torch.Tensor]

    def described(self) -> dict[str, Plain]:
        """The part that is no tensor."""
        return {"class": self.kind, "tied": dict(self.tied), "extra": dict(self.extra)}

    def names(self) -> dict[int, str]:
        """By the `id` of a tensor, its name."""
        return {id(tensor): name for name, tensor in self.tensors.items()}


def model_entries(model: nn.Module) -> ModelEntries:
    """What a checkpoint has of a model.

    Raises:
        ConfigError: A module's extra state has no plain form.
    """
    tensors: dict[str, torch.Tensor] = {}
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    extra: dict[str, Plain] = {}
    extra_tensors: dict[str, torch.Tensor] = {}
    # The objects themselves: a detached one would count as somebody's hold on the memory.
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            encoder = Encoder(f"extra.{name}")
            extra[name] = encoder.encode(value, f"model.state_dict()[{name!r}]")
            extra_tensors |= encoder.tensors
        elif id(value) in first:
            tied[name] = first[id(value)]
        else:
            first[id(value)] = name
            tensors[name] = value
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    return ModelEntries(kind=kind, tensors=tensors, tied=tied, extra=extra, extra_tensors=extra_tensors)


_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
)
"""What a folder of Hugging Face may have of a tokenizer."""


def tokenizer_files(folder: str | Path | None) -> list[Path]:
    """The tokenizer's files in a folder.

    Raises:
        ConfigError: There are none.
    """
    if folder is None:
        return []
    found = [path for name in _TOKENIZER_FILES if (path := Path(folder) / name).is_file()]
    if not found:
        raise ConfigError(
            f"there is no tokenizer in {folder}: none of {', '.join(_TOKENIZER_FILES)}; give the folder that "
            "tokenizer.save_pretrained() wrote",
            key="tokenizer",
        )
    return found


def _texts(folder: str | Path | None) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in tokenizer_files(folder):
        try:
            found[path.name] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{path} is not text, and a checkpoint has text and tensors; leave the tokenizer out here, and give its folder to "
                "lowtide.export, which copies it",
                key="tokenizer",
            ) from error
    return found


def model_files(model: nn.Module) -> dict[str, str]:
    """The files that make a folder of weights loadable by `from_pretrained`; none where the model is not transformers'."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return {}
    config: Any = copy.deepcopy(model.config)
    _turn_caches_on(model.config, config)
    config.architectures = [type(model).__name__]
    # The name that the installed version reads.
    setattr(
        config, "dtype" if hasattr(type(config), "dtype") or "dtype" in vars(config) else "torch_dtype", model.dtype
    )
    files = {"config.json": config.to_json_string()}
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None:
        files["generation_config.json"] = generation.to_json_string()
    return files


def _turn_caches_on(original: Any, copied: Any) -> None:
    """Policies turn caches off while they are at work; the model itself is one that has them."""
    if is_cache_off(original):
        copied.use_cache = True
    for name, inner in vars(original).items():
        if hasattr(inner, "to_json_string"):
            _turn_caches_on(inner, getattr(copied, name))


# -- the optimizer -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedOptimizer:
    """An optimizer's state as it is kept."""

    described: dict[str, Plain]
    parameters: Sequence[torch.Tensor]
    tensors: Mapping[int, Mapping[str, torch.Tensor]]
    """By the `id` of the parameter: the tensors that an update of it changes, by name."""
    plain_tensors: Mapping[str, torch.Tensor]
    """Those of settings, such as a learning rate that lies on the device."""


def parameter_names(optimizer: torch.optim.Optimizer, model: ModelEntries) -> list[list[tuple[str, torch.Tensor]]]:
    """The parameters of each group with their names; one that is not the model's is called by its place."""
    names = model.names()
    return [
        [
            (names.get(id(parameter), f"param_groups.{index}.{number}"), parameter)
            for number, parameter in enumerate(group["params"])
        ]
        for index, group in enumerate(optimizer.param_groups)
    ]


def describe_optimizer(
    optimizer: torch.optim.Optimizer,
    kept: KernelStates | None,
    model: ModelEntries,
    spread: Mapping[int, Values] | None = None,
) -> SavedOptimizer:
    """The optimizer's state, as our kernels keep it or as its own class does.

    Raises:
        ConfigError: It keeps something that has no plain form.
    """
    groups = parameter_names(optimizer, model)
    named = [pair for group in groups for pair in group]
    settings = Encoder("optimizer.settings")
    described: dict[str, Plain] = {
        "class": class_name(optimizer),
        "kept_by": TORCH if kept is None else KERNELS,
        "numerics": None,
        "param_groups": [
            settings.encode(
                {
                    **{key: value for key, value in group.items() if key != "params"},
                    "params": [name for name, _ in pairs],
                },
                f"optimizer.param_groups[{index}]",
            )
            for index, (group, pairs) in enumerate(zip(optimizer.param_groups, groups, strict=True))
        ],
    }
    if kept is not None:
        numerics = kept.numerics
        described["numerics"] = {
            "rounding": numerics.rounding.value,
            "moments": numerics.moments.value,
            "seed": numerics.seed,
        }
    states: dict[str, Plain] = {}
    tensors: dict[int, dict[str, torch.Tensor]] = {}
    known = model.names()
    for name, parameter in named:
        mine = tensors.setdefault(id(parameter), {})
        if id(parameter) not in known:
            mine[f"{name}.{VALUE}"] = parameter
        whole = (spread or {}).get(id(parameter))
        if kept is not None:
            state = kept.by_parameter.get(id(parameter)) if whole is None else whole.state
            if isinstance(state, ParameterState):
                states[name] = _describe_kept(state, parameter)
                mine |= {f"{name}.{key}": tensor for key, tensor in kept_tensors(state).items()}
        elif entries := dict.get(optimizer.state, parameter) if whole is None else whole.state:
            assert isinstance(entries, dict)
            states[name], own = _describe_entries(name, entries)
            mine |= own
    described["state"] = states
    if kept is None:
        keys: list[Any] = list(dict.keys(optimizer.state))  # of torch's promise only tensors, and classes break it
        others = [(key, dict.get(optimizer.state, key)) for key in keys if not isinstance(key, torch.Tensor)]
        described["others"] = settings.encode(others, "optimizer.state") if others else None
        described["attributes"] = _own_entries(optimizer, settings)
    return SavedOptimizer(
        described=described,
        parameters=[parameter for _, parameter in named],
        tensors=tensors,
        plain_tensors=settings.tensors,
    )


def class_name(value: object) -> str:
    """The class by its module and name."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def kept_tensors(state: ParameterState) -> dict[str, torch.Tensor]:
    """The tensors of a kernel's state, by the names under which they are saved."""
    found = dict(state.tensors)
    if state.remainder is not None:
        found[_REMAINDER] = state.remainder
    if state.master is not None:
        found[_MASTER] = state.master
    return found


def kept_state(step: int, tensors: Mapping[str, torch.Tensor], *, lacks_momentum: bool) -> ParameterState:
    """A kernel's state of what `kept_tensors` gave."""
    return ParameterState(
        step=step,
        tensors={name: tensor for name, tensor in tensors.items() if name not in (_REMAINDER, _MASTER)},
        remainder=tensors.get(_REMAINDER),
        master=tensors.get(_MASTER),
        lacks_momentum=lacks_momentum,
    )


def _describe_kept(state: ParameterState, parameter: torch.Tensor) -> Plain:
    # States lie in the weight's order of memory: what they mean depends on it.
    stride: list[Plain] = list(parameter.stride())
    return {"step": state.step, "lacks_momentum": state.lacks_momentum, "stride": stride}


def _describe_entries(name: str, entries: Mapping[Any, Any]) -> tuple[Plain, dict[str, torch.Tensor]]:
    """What torch's own optimizer keeps for a parameter: a dictionary of anything."""
    tensors: dict[str, torch.Tensor] = {}
    plain: list[Plain] = []
    for key, value in entries.items():
        place = f"optimizer.state[{name}][{key!r}]"
        encoder = Encoder(f"{name}.{key}")
        # One on meta is the form of what is spread over ranks.
        encoded = None if isinstance(value, torch.Tensor) and value.is_meta else encoder.encode(value, place)
        if isinstance(value, torch.Tensor):
            tensors[f"{name}.{key}"] = value
            encoded = {TAG: "tensor", "name": f"{name}.{key}"}
        else:
            tensors |= encoder.tensors
        plain.append([Encoder(name).encode(key, place), encoded])
    return plain, tensors


def _own_entries(optimizer: torch.optim.Optimizer, encoder: Encoder) -> Plain:
    """What the class adds to `state_dict` beside state and settings; None where it adds nothing, as torch's own do."""
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
        return None
    own = {key: value for key, value in optimizer.state_dict().items() if key not in ("state", "param_groups")}
    return encoder.encode(own, "optimizer.state_dict()") if own else None


# -- everything else ---------------------------------------------------------------------------------------------------


def _describe_rest(
    device: torch.device, state: Mapping[str, object], rank: int
) -> tuple[dict[str, Plain], dict[str, torch.Tensor]]:
    """Random numbers, and what the user has given: each rank has its own."""
    owner = f"rank{rank}." if rank else ""
    encoder = Encoder(f"{owner}random")
    random = encoder.encode(random_state(device), "the random numbers")
    tensors = dict(encoder.tensors)
    given: dict[str, Plain] = {}
    for name, value in _checked(state):
        encoder = Encoder(f"{owner}given.{name}")
        kind, plain = _plain_of(value)
        given[name] = {"kind": kind, "value": encoder.encode(plain, f"state[{name!r}]")}
        tensors |= encoder.tensors
    return {"random": random, "given": given}, tensors


def _checked(state: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    if not isinstance(state, Mapping):
        raise ConfigError(
            f"state is a {type(state).__name__}; give a dictionary of what belongs to the run, such as "
            "{'scheduler': scheduler, 'epoch': 3}",
            key="state",
        )
    for name, value in state.items():
        if not isinstance(name, str):
            raise ConfigError(f"state has the key {name!r}; give each object a name that is text", key="state")
        yield name, value


def _plain_of(value: object) -> tuple[str, object]:
    """How an object is brought back, and what is saved of it."""
    if isinstance(value, torch.Generator):
        return "generator", value.get_state()
    if has_state(value):
        return "state_dict", value.state_dict()  # type: ignore[attr-defined]  # asked in the line above
    return "plain", value


def has_state(value: object) -> bool:
    """Whether an object gives its state and takes it back."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
