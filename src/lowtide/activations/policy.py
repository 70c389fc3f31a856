"""Activation policies: what becomes of the tensors that a group's forward saves for its backward. Plain data.

A policy never changes the numbers: gradients are the same bits under each of them. `CompileBudget` alone compiles, and
compiled code rounds in its own way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lowtide.errors import ConfigError, UnknownNameError

KeepRule = Callable[[object], bool]
"""Given an operator of the forward: whether its output is kept. Others run again in the backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Everything that autograd saves stays on the device, as in plain torch."""


KEEP = Keep()


@dataclass(frozen=True, slots=True, kw_only=True)
class Selective:
    """Outputs of matmuls and attention are kept; what is cheap (norms, activations, dropout) runs again in the backward."""

    rule: KeepRule | None = None
    """Which operators' outputs are kept instead. A rule is code: a plan with one cannot be written to a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """The group's inputs are kept; its forward runs again in the backward, with the same random numbers."""

    segment: int = 1
    """How many groups in a row share one kept input. With n groups, about sqrt(n) holds the fewest bytes: the inputs
    inside a segment are made again from its first one when the backward gets there, at the cost of one more forward."""

    def __post_init__(self) -> None:
        if self.segment < 1:
            raise ConfigError(f"segment is {self.segment}; give 1 or more groups", key="segment")


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Saved tensors wait on the host, copied there and back beside the computation."""

    recompute: bool = True
    """Recompute the group, and offload its inputs alone. Else every saved tensor of at least `min_bytes` goes."""
    min_bytes: int = 1 << 20
    """Smaller tensors stay: a copy has a price of its own."""
    depth: int = 1
    """How many groups ahead of the running backward are brought back."""

    def __post_init__(self) -> None:
        for key in ("min_bytes", "depth"):
            if getattr(self, key) < 0:
                raise ConfigError(f"{key} is {getattr(self, key)}; give 0 or more", key=key)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileBudget:
    """The group is compiled, and the compiler keeps about this share of what it would save, recomputing the rest."""

    share: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.share <= 1.0:
            raise ConfigError(f"share is {self.share}; give a number from 0 to 1", key="share")


Policy = Keep | Selective | Recompute | Offload | CompileBudget
Policies = Policy | str | Mapping[str, Policy | str]
"""One for all repeated blocks, or by the path of a module, "*" for the blocks that are not named."""

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

    Example:
        >>> policy_of("recompute/4")
        Recompute(segment=4)

    Raises:
        UnknownNameError: There is no such word.
        ConfigError: The policy has settings without a default, so that its word is not enough.
    """
    if not isinstance(policy, str):
        return policy
    if policy in WORDS:
        return WORDS[policy]
    kind, _, number = policy.partition("/")
    if kind == "recompute" and number.isdecimal() and int(number):
        return Recompute(segment=int(number))
    if policy == "compile-budget":
        raise ConfigError("a compile budget has no default share; write CompileBudget(share=0.5)", key="share")
    raise UnknownNameError("activation policy", policy, [*WORDS, "recompute/4"])
