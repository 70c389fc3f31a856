"""Changes: what can be turned on to make a step smaller, one word for the whole model each, with the line that does it.

Those that a plan says change where bytes are and nothing else. The others change the arithmetic or the training loop, and
need the user's word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lowtide.planning.plan import Schedule, Weights
from lowtide.planning.search import Candidate, Limits, Search, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One word for each part of a plan; `Choice()` is the step as plain torch runs it."""

    weights: str = "resident"
    update: str = "device"
    activations: str = "keep"
    schedule: str = "deferred"

    @property
    def changed(self) -> Mapping[str, str]:
        """The words that differ from plain torch, by the argument of `make_plan` that takes them."""
        plain = Choice()
        words = {name: getattr(self, name) for name in self.__slots__}
        return {name: word for name, word in words.items() if word != getattr(plain, name)}

    @property
    def words(self) -> Mapping[str, str]:
        """What `make_plan` takes for it; weights and updates always, since they are streamed and on the host by default."""
        return {"weights": self.weights, "update": self.update, **self.changed}

    @property
    def flags(self) -> str:
        """What `lowtide trace` takes to show the step with it; nothing for plain torch."""
        return " ".join(f"--set plan.{name}={word}" for name, word in self.words.items()) if self.changed else ""

    def code(self, device_bytes: int, for_manage: Mapping[str, object] | None = None) -> str:
        """The lines of a script that turn it on, with more words for `manage` if there are any."""
        words = {**self.words, "device_memory": f"{device_bytes >> 20}MiB"}
        given = ", ".join(f"{name}={word!r}" for name, word in words.items())
        more = "".join(f", {name}={word!r}" for name, word in (for_manage or {}).items())
        return f"plan = lowtide.make_plan(model, {given}); session = lowtide.manage(model, optimizer, plan{more})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A choice with what it takes, estimated."""

    choice: Choice
    candidate: Candidate
    over_bytes: int
    """By how much it is beyond the budget that it exceeds by most; 0 or less for one that fits."""
    short_of: str
    """The memory of that budget."""


def options(search: Search, limits: Limits) -> list[Option]:
    """Every uniform choice, those with the fewest changes first, of these the fastest first.

    A schedule is among the changes only where updates are deferred and need not wait for all gradients.
    """
    schedules = [limits.schedule]
    if limits.schedule is Schedule.DEFERRED and not limits.is_clipped:
        schedules.append(Schedule.IN_BACKWARD)
    found = [
        _option(search, replace(limits, schedule=schedule), num_resident, num_device, policy)
        for schedule in schedules
        for num_resident in (search.num_groups, 0)
        for num_device in (search.num_groups, 0)
        for policy in limits.policies
    ]
    return sorted(found, key=lambda option: (len(option.choice.changed), option.candidate.step_s))


def _option(search: Search, limits: Limits, num_resident: int, num_device: int, policy: str) -> Option:
    shape = Shape(num_resident=num_resident, num_device=num_device, small=policy, fast=policy, num_fast=0)
    candidate = search.evaluate(shape, limits)
    over_bytes, short_of = max(
        (candidate.device_bytes - limits.device_bytes, "the device"),
        (candidate.host_bytes - limits.host_bytes, "the host"),
        (candidate.pinned_bytes - limits.pinned_bytes, "locked memory"),
    )
    return Option(
        choice=Choice(
            weights=(Weights.RESIDENT if num_resident else Weights.STREAMED).value,
            update="device" if num_device else "host",
            activations=policy,
            schedule=limits.schedule.value,
        ),
        candidate=candidate,
        over_bytes=over_bytes,
        short_of=short_of,
    )
