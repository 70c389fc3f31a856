"""Activation policies: what happens to the tensors that a group's forward saves for its backward. Plain data.

A policy never changes the numbers: gradients are the same bits under each of them. `CompileBudget` alone compiles, and
compiled code rounds in its own way.
`resolve` says which module gets which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from lowtide.errors import ConfigError, UnknownNameError
from lowtide.memory.groups import repeated_blocks

KeepRule = Callable[[object], bool]
"""Given an operator of the forward: whether its output is kept. Others run again in the backward."""
OTHERS = "*"
"""The key, in a mapping, for the repeated blocks that no other entry names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Everything that autograd saves stays on the device, as in plain torch."""


KEEP = Keep()


@dataclass(frozen=True, slots=True, kw_only=True)
class Selective:
    """Outputs of matmuls and attention are kept; what is cheap (norms, activations, dropout) runs again in the backward."""

    rule: KeepRule | None = None
    """Which operators' outputs are kept instead. A rule is code: a plan with one cannot be written to a file. Operators that
    draw random numbers, or write in place, run again whatever it says; one that draws and does not tell (by torch's tag, or an
    argument with "dropout" in its name) must not be named, because every random number after it would be another than in the
    forward."""

    def __post_init__(self) -> None:
        if self.rule is not None and not callable(self.rule):
            raise ConfigError(
                f"rule is {self.rule!r}; give a function that takes an operator and says whether its output is kept",
                key="rule",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """The group's inputs are kept; its forward runs again in the backward, with the same random numbers."""

    segment: int = 1
    """How many groups in a row share one kept input. With n groups, about sqrt(n) holds the fewest bytes: the inputs
    inside a segment are made again from its first one when the backward gets there, at the cost of one more forward."""

    def __post_init__(self) -> None:
        _require_count("segment", self.segment, least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Saved tensors wait on the host, copied there and back during the computation."""

    recompute: bool = True
    """Recompute the group, and offload its inputs alone. Else every saved tensor of at least `min_bytes` goes."""
    min_bytes: int = 1 << 20
    """Smaller tensors stay: a copy has a price of its own."""
    depth: int = 1
    """How many groups before their use in the backward saved tensors are brought back."""

    def __post_init__(self) -> None:
        if not isinstance(self.recompute, bool):
            raise ConfigError(f"recompute is {self.recompute!r}; give True or False", key="recompute")
        for key in ("min_bytes", "depth"):
            _require_count(key, getattr(self, key), least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileBudget:
    """The group is compiled, and the compiler keeps about this share of what it would save, recomputing the rest."""

    share: float

    def __post_init__(self) -> None:
        given: object = self.share
        if not isinstance(given, int | float) or isinstance(given, bool) or not 0.0 <= given <= 1.0:
            raise ConfigError(f"share is {given!r}; give a number from 0 to 1", key="share")


Policy = Keep | Selective | Recompute | Offload | CompileBudget
Policies = Policy | str | Mapping[str, Policy | str]
"""One policy for all repeated blocks, or policies by the path of a module, with "*" for the blocks that are not named."""


def check_policies(policies: Policies | None) -> None:
    """Refuse words that are no policy.

    Raises:
        UnknownNameError: There is no such word.
        ConfigError: A policy lacks a setting, or has a wrong one.
    """
    for policy in policies.values() if isinstance(policies, Mapping) else (policies,):
        if policy is not None:
            policy_of(policy)


def _require_count(key: str, value: object, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{key} is {value!r}; give a whole number, {least} or more", key=key)


def _share(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        found = f", not {text!r}" if text else " and has no default"
        raise ConfigError(
            f"the share of a compile budget is a number{found}; write 'compile-budget/0.5' or CompileBudget(share=0.5)",
            key="share",
        ) from None


WORDS: dict[str, Policy] = {
    "keep": KEEP,
    "selective": Selective(),
    "recompute": Recompute(),
    "offload": Offload(),
    "offload/all": Offload(recompute=False),
}
"""Policies with a word of their own."""


def policy_of(policy: Policy | str) -> Policy:
    """A policy from its word; a policy comes back as it is.

    | word | policy |
    | --- | --- |
    | `keep` | everything that autograd saves stays, as in plain torch |
    | `selective` | outputs of matmuls and attention are kept, the rest is computed again |
    | `recompute` | each block keeps its inputs and runs its forward again in the backward |
    | `recompute/4` | four blocks in a row share one kept input |
    | `offload` | as `recompute`, and the kept inputs wait on the host |
    | `offload/all` | nothing is computed again, every large saved tensor waits on the host |
    | `compile-budget/0.5` | each block is compiled, to save about half of what the compiler would |

    Example:
        >>> policy_of("recompute/4")
        Recompute(segment=4)

    Raises:
        UnknownNameError: There is no such word.
        ConfigError: The policy has settings without a default, so that its word is not enough.
    """
    given: object = policy
    if isinstance(policy, Keep | Selective | Recompute | Offload | CompileBudget):
        return policy
    if not isinstance(given, str):
        made = f"; make one: {given.__name__}()" if isinstance(given, type) else ""
        raise ConfigError(
            f"{given!r} is no activation policy{made}; give a word such as 'recompute', or a policy", key="activations"
        )
    if policy in WORDS:
        return WORDS[policy]
    kind, _, number = policy.partition("/")
    if kind == "recompute" and number.isdecimal() and int(number):
        return Recompute(segment=int(number))
    if kind == "compile-budget":
        return CompileBudget(share=_share(number))
    if kind == "recompute" and number:
        raise ConfigError(f"{policy!r}: give a number of blocks, 1 or more, as in 'recompute/4'", key="activations")
    raise UnknownNameError("activation policy", policy, [*WORDS, "recompute/N", "compile-budget/0.5"])


def word_of_policy(policy: Policy) -> str:
    """The word that `policy_of` takes for a policy; its class where it has settings that no word says.

    Example:
        >>> word_of_policy(Recompute(segment=4)), word_of_policy(Offload(depth=3))
        ('recompute/4', 'Offload')
    """
    if isinstance(policy, Recompute) and policy.segment > 1:
        return f"recompute/{policy.segment}"
    if isinstance(policy, CompileBudget):
        return f"compile-budget/{policy.share:g}"
    return next((word for word, named in WORDS.items() if named == policy), type(policy).__name__)


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
