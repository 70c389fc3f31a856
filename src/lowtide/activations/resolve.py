"""Which module gets which policy."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lowtide.activations.policy import Policies, Policy, policy_of
from lowtide.errors import ConfigError, UnknownNameError
from lowtide.memory.groups import repeated_blocks

OTHERS = "*"
"""In a mapping: the repeated blocks that no other entry has to do with."""


def resolve(model: nn.Module, policies: Policies) -> dict[str, Policy]:
    """The policy of each chosen module by its path, in the order of the model.

    One policy alone is for all repeated and shared blocks (`lowtide.memory.groups`). In a mapping, `*` stands for those that
    are neither named nor hold or belong to a module that is.

    Example:
        >>> layer = nn.TransformerEncoderLayer(8, 2)
        >>> resolve(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), "recompute")
        {'layers.0': Recompute(segment=1), 'layers.1': Recompute(segment=1)}

    Raises:
        UnknownNameError: The model has no module of that path.
        ConfigError: The model has no repeated blocks, or a module cannot have a policy of its own.
    """
    if not isinstance(policies, Mapping):
        return resolve(model, {OTHERS: policies})
    modules = dict(model.named_modules(remove_duplicate=False))
    chosen: dict[str, Policy] = {}
    by_module: dict[int, str] = {}
    for path, policy in policies.items():
        if path == OTHERS:
            continue
        if not isinstance(path, str):
            raise ConfigError(f"{path!r} is no path of a module; give a string, {str(path)!r}", key=str(path))
        if path not in modules:
            raise UnknownNameError("module", path, modules)
        if isinstance(modules[path], nn.ModuleList | nn.ModuleDict):
            raise ConfigError(
                f"{path!r} is a {type(modules[path]).__name__}, which is never called itself; name its members, or '*'",
                key=path,
            )
        if (other := by_module.setdefault(id(modules[path]), path)) != path:
            raise ConfigError(f"{path!r} and {other!r} are the same module; give it one policy", key=path)
        chosen[path] = policy_of(policy)
    for outer in chosen:
        for inner in chosen:
            if outer != inner and _holds(outer, inner):
                raise ConfigError(
                    f"{outer or 'the model'!r} holds {inner!r}, and both have a policy; give one to either of them",
                    key=inner,
                )
    if OTHERS in policies:
        policy = policy_of(policies[OTHERS])
        blocks = [(path, block) for path, block in repeated_blocks(model) if by_module.get(id(block)) is None]
        others = [path for path, _ in blocks if not any(_holds(path, name) or _holds(name, path) for name in chosen)]
        if not others and not chosen:
            raise ConfigError(
                f"{type(model).__name__} has no repeated blocks (a ModuleList or Sequential with two modules of one "
                "class, other than single layers such as Linear or Conv2d) and no module that is named one; name modules by their "
                "path: {'encoder': policy, ...}"
            )
        chosen |= dict.fromkeys(others, policy)
    return {path: chosen[path] for path in modules if path in chosen}


def _holds(outer: str, inner: str) -> bool:
    return outer == "" or inner.startswith(f"{outer}.")
