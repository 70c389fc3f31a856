"""Plan: what to keep, what to stream and where each chunk is updated. Frozen, versioned data, written as JSON."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from lowtide import plain_text
from lowtide.activations.policy import KEEP, CompileBudget, Keep, Offload, Policy, Recompute, Selective
from lowtide.config import from_plain, require_least, to_plain
from lowtide.errors import BadRecordError, ConfigError
from lowtide.units import format_bytes, parse_bytes

PLAN_VERSION = 2
E = TypeVar("E", bound=enum.StrEnum)


class Weights(enum.StrEnum):
    """Where a group's weights are between its uses."""

    RESIDENT = "resident"
    """On the device, always: no copy, no hook, all its bytes of the device."""
    STREAMED = "streamed"
    """On the host; a copy comes to the device when the group's module runs, forward and backward."""
    HOST = "host"
    """On the host, always: an embedding is looked up and updated there, and only the rows of a batch travel."""
    SHARDED = "sharded"
    """This rank's part on the device, where it is updated; the other ranks' parts come when the group's module runs."""


class Site(enum.StrEnum):
    """Where a chunk's optimizer step runs, and so where its state and its finished gradient live."""

    DEVICE = "device"
    HOST = "host"
    PAGED = "paged"
    """The step runs on the device, and the state lies on the host between steps: it visits. For compressed state, and
    updates through our own kernels."""


_PLACED = {
    Weights.RESIDENT: "resident",
    Weights.STREAMED: "streamed",
    Weights.HOST: "on the host",
    Weights.SHARDED: "sharded",
}

COMING = frozenset({Weights.STREAMED, Weights.SHARDED})
"""Weights of groups that come to the device, whole, when their module runs."""


class Collective(enum.StrEnum):
    """How a chunk that is spread over ranks comes together, and its gradient goes apart."""

    GATHER = "gather"
    """Each rank keeps an equal part of every chunk: all parts are gathered, and gradients are reduced and scattered."""
    ONE_TO_ALL = "one to all"
    """Each chunk has one owner, which sends it to all others; gradients are reduced to the owner. Whole parameters, so that any
    optimizer works."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How weights, gradients and optimizer state are spread over ranks.

    Groups that are `streamed` have their parts on the host of each rank, `sharded` ones on its device; `resident` ones are whole
    on every rank.
    """

    shards: int
    """Over how many ranks. Where there are more, a multiple of it, each set of so many has the whole state (hybrid sharding)."""
    collective: Collective = Collective.GATHER
    """Or its word."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "collective", word_of(Collective, self.collective, "collective"))
        shards: object = self.shards
        if not isinstance(shards, int) or isinstance(shards, bool) or shards < 2:
            raise ConfigError(
                f"shards is {shards!r}; give the number of ranks that share the weights, 2 or more; without sharding= each "
                "rank has all of them",
                key="shards",
            )


class Schedule(enum.StrEnum):
    """When the optimizer's work is done."""

    DEFERRED = "deferred"
    """In `optimizer.step()`: gradients are readable until then; clipping, scaling and accumulation work as ever."""
    IN_BACKWARD = "in_backward"
    """As soon as a chunk's gradient is complete: no gradient outlives its group, one backward a step."""


def word_of(kind: type[E], word: E | str, key: str) -> E:
    """The member of an enum that a word in a setting stands for.

    Raises:
        ConfigError: There is none.
    """
    try:
        return kind(word)
    except ValueError:
        choices = " or ".join(repr(member.value) for member in kind)
        raise ConfigError(f"{key} is {word!r}; give {choices}", key=key) from None


def require_sizes(settings: object, *keys: str) -> None:
    """Refuse fields of settings that hold no size; None is taken for what it means there.

    Raises:
        ConfigError: One is none; the message names the field.
    """
    for key in keys:
        size = getattr(settings, key)
        if size is not None:
            try:
                parse_bytes(size)
            except ConfigError as error:
                raise ConfigError(f"{key}: {error}", key=key) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """What becomes of one group."""

    name: str
    weights: Weights
    sites: tuple[Site, ...]
    """One for each chunk of the group, in order. Groups that are not trained have sites too; they are not used."""
    activation: Keep | Selective | Recompute | Offload | CompileBudget = KEEP
    """What becomes of what its forward saves for the backward."""
    weight_bytes: int | None = None
    """Bytes of its parameters when the plan was made: where a plan is for another model, it can say what differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Bytes that may be used. None: what the tier has."""

    device_bytes: int | None = None
    """What the allocator may reserve on the device, activations and workspaces included."""
    host_bytes: int | None = None
    """Weights, gradients, optimizer state and staging on the host, pinned or not."""
    pinned_bytes: int | None = None
    """The part of the host's bytes that may be locked for copies."""
    window_bytes: int | None = None
    """Device bytes for streamed groups. None: what the largest group and its prefetched successors need."""
    staging_bytes: int | None = None
    """Host bytes in which gradients wait for their update, or to be added to others. None: two chunks' worth; in backward
    and with an optimizer that keeps state, whose updates take longer, up to 2 GiB."""

    def __post_init__(self) -> None:
        require_least(self, 0, "device_bytes", "host_bytes", "pinned_bytes", "window_bytes", "staging_bytes")
        for part, whole in (
            ("pinned_bytes", "host_bytes"),
            ("window_bytes", "device_bytes"),
            ("staging_bytes", "host_bytes"),
        ):
            size, limit = getattr(self, part), getattr(self, whole)
            if size is not None and limit is not None and size > limit:
                raise ConfigError(
                    f"{part} is {format_bytes(size)}, more than the {format_bytes(limit)} of {whole} that it is a part "
                    f"of; lower {part} or raise {whole}",
                    key=part,
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one model is to be trained: made for a layout, and refused for another."""

    groups: tuple[GroupPlan, ...]
    fingerprint: str
    """`Layout.fingerprint` of the model it was made for."""
    chunk_bytes: int
    """`Layout.chunk_bytes`, so that the same chunks can be made again."""
    schedule: Schedule = Schedule.DEFERRED
    prefetch_depth: int = 1
    """How many groups ahead of the running one are copied to the device."""
    cached_buffers: int = 2
    """Released buffers kept per size class for the next request; 0 keeps none."""
    defragment_every: int = 0
    """Steps between two defragmentations of the host arena; 0: only when a request fails for fragmentation."""
    budgets: Budgets = Budgets()
    """The budgets of one rank, if there are several."""
    sharding: Sharding | None = None
    """How the groups that are not resident are spread over ranks; None: each rank has all of them."""
    version: int = PLAN_VERSION

    def __repr__(self) -> str:
        """One line: hundreds of groups, each with its chunks, tell nothing at a glance."""
        return f"<Plan for model {self.fingerprint[:8]}: {self.summary}>"

    @property
    def activations(self) -> dict[str, Policy]:
        """Each group's policy, by its name."""
        return {group.name: group.activation for group in self.groups}

    @property
    def summary(self) -> str:
        """Where weights and updates go, when, and inside of what, in a few words."""
        held = Counter(group.weights for group in self.groups)
        sites = Counter(site for group in self.groups for site in group.sites)
        weights = ", ".join(f"{held[kind]} {_PLACED[kind]}" for kind in Weights if held[kind])
        updates = ", ".join(f"{sites[site]} {site}" for site in Site if sites[site])
        budget = self.budgets.device_bytes
        limit = "no device budget" if budget is None else f"device budget {format_bytes(budget)}"
        groups = f"{len(self.groups)} group{'' if len(self.groups) == 1 else 's'}"
        spread = "" if self.sharding is None else f", over {self.sharding.shards} ranks ({self.sharding.collective})"
        return f"{groups} ({weights}{spread}), chunks updated: {updates or 'none'}, {self.schedule}, {limit}"

    def __post_init__(self) -> None:
        if self.version != PLAN_VERSION:
            raise ConfigError(
                f"this plan has version {self.version}, this Lowtide reads version {PLAN_VERSION}; make the plan again",
                key="version",
            )
        for key in ("prefetch_depth", "cached_buffers", "defragment_every"):
            count = getattr(self, key)
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise ConfigError(f"{key} is {count!r}; give a whole number, 0 or more", key=key)
        self._check_sharding()

    def _check_sharding(self) -> None:
        for group in self.groups:
            if group.weights is Weights.SHARDED and self.sharding is None:
                raise ConfigError(
                    f"group {group.name!r} is 'sharded', and the plan does not say over how many ranks; give sharding=, such as "
                    "Sharding(shards=4)",
                    key="weights",
                )
            if self.sharding is None or group.weights is Weights.RESIDENT:
                continue
            if group.weights is Weights.HOST:
                raise ConfigError(
                    f"group {group.name!r} stays on the host (weights='host'), which is not spread over ranks; make it 'streamed' "
                    "or 'sharded'",
                    key="weights",
                )
            is_wrong = [(site is Site.HOST) is (group.weights is Weights.SHARDED) for site in group.sites]
            if any(is_wrong):
                where, remedy = ("device", "host") if group.weights is Weights.SHARDED else ("host", "device")
                raise ConfigError(
                    f"group {group.name!r} has its part of the weights on the {where} of each rank ({group.weights.value!r}), and "
                    f"chunks of it are updated on the {remedy}; update them where they are, or make it "
                    f"{'streamed' if group.weights is Weights.SHARDED else 'sharded'!r}",
                    key="update",
                )


def plan_to_json(plan: Plan) -> str:
    """The plan as JSON, every field spelt out; `plan_from_json` is the inverse."""
    return plain_text.render(to_plain(plan), "json")


def plan_from_json(text: str) -> Plan:
    """The plan that the text holds.

    Raises:
        BadRecordError: The text is not whole JSON, not a plan, or of another version.
        ConfigError: A key is unknown, missing or given twice, or a value has the wrong type.
    """
    try:
        plain = plain_text.parse(text, "json")
    except ConfigError as error:
        if error.key is not None:
            raise
        raise BadRecordError(f"this is no plan: {error}; make the plan again") from error
    if not isinstance(plain, dict) or "groups" not in plain:
        raise BadRecordError("this is JSON, but no plan: a plan is an object with 'groups'; make the plan again")
    # First of all: the keys of another version would only look unknown.
    version = plain.get("version", PLAN_VERSION)
    if version != PLAN_VERSION:
        raise BadRecordError(
            f"this plan has version {version!r}, this Lowtide reads version {PLAN_VERSION}; make the plan again"
        )
    return from_plain(Plan, plain)


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan to a file."""
    Path(path).write_text(plan_to_json(plan), encoding="utf-8")


def load_plan(path: str | Path) -> Plan:
    """Read a plan from a file; errors are those of `plan_from_json`, with the file's name.

    Raises:
        BadRecordError: The file does not exist or holds no plan of this version.
        ConfigError: A key or a value of it is wrong.
    """
    try:
        return plan_from_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadRecordError(f"cannot read the plan {path}: {error}") from error
    except BadRecordError as error:
        raise BadRecordError(f"{path}: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", key=error.key) from error
