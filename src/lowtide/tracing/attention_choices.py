"""AttentionChoices: the backend of each attention call as it comes, and what a trace has to say about them."""

from __future__ import annotations

from lowtide.tracing.attention_rules import HOST, Backend, Call, choose, describe, enabled_backends, refusals, ways_out
from lowtide.tracing.attention_use import FALLS_BACK, backend_note

MAX_FALLBACKS = 3
"""Calls told of one by one: layers of a model call alike."""


class AttentionChoices:
    """Chooses as torch would on a card, or on the host, and remembers why."""

    def __init__(self, capability: tuple[int, int], torch_version: tuple[int, int]) -> None:
        self._capability = capability
        self._version = torch_version
        self.chosen: dict[Backend, str] = {}
        """Backends used so far, each with the reason why no better one was (empty for the best)."""
        self._fallbacks: dict[str, str] = {}

    @property
    def is_on_host(self) -> bool:
        """Whether the host is to run the calls."""
        return self._capability == HOST

    def choose(self, call: Call, module: str) -> Backend:
        """The backend of a call made in a module."""
        enabled = enabled_backends()
        backend = choose(call, self._capability, self._version, enabled)
        if backend is not Backend.MATH:
            self.chosen.setdefault(backend, "")
            return backend
        is_asked_for = enabled <= {Backend.MATH}
        if backend not in self.chosen:
            self.chosen[backend] = "" if is_asked_for else refusals(call, self._capability, backend)
        if not is_asked_for:
            self._remember(call, module)
        return backend

    def notes(self) -> list[str]:
        """One note for each backend, then one for each kind of call that fell back to math."""
        return [*(backend_note(backend, reason) for backend, reason in self.chosen.items()), *self._fallbacks.values()]

    def notes_on_math(self) -> list[str]:
        """Those of the notes that are on the math backend."""
        of_math = [backend_note(backend, reason) for backend, reason in self.chosen.items() if backend is Backend.MATH]
        return [*of_math, *self._fallbacks.values()]

    def _remember(self, call: Call, module: str) -> None:
        words = describe(call)
        if words in self._fallbacks or len(self._fallbacks) == MAX_FALLBACKS:
            return
        ways = ways_out(call, self._capability, self._version)
        advice = "; ".join(ways) if ways else "no single change of its arguments lets a fused backend take it"
        where = f" in {module!r}" if module else ""
        self._fallbacks[words] = f"the attention{where} ({words}) {FALLS_BACK}: {advice}"
