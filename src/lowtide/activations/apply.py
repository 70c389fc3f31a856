"""apply: give modules of a plain torch model their activation policies.

Note [Key-value caches are off]
A recomputed block of a Hugging Face model would put its keys and values into the cache a second time; transformers' switch for
recomputation turns the cache off as well. Some models compute the last bits otherwise without a cache, so that a run is to
the bit that of plain torch with `use_cache=False`, and not with the default.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from lowtide.activations.policy import CompileBudget, Keep, Offload, Policies, Policy, resolve
from lowtide.activations.policy_call import (
    CompileCheck,
    CompileGroup,
    IsWeight,
    Offloading,
    PolicyCall,
    Shared,
    compiled,
    refuse_compiled_holders,
)
from lowtide.memory.mover import Mover

_LOCK = threading.Lock()
_OFF: dict[int, tuple[Any, int]] = {}
"""Configurations whose cache is off, and for how many: it comes back with the last of them. By identity: two may be equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationStats:
    """What policies have done since they were applied, and hold now."""

    num_recomputed: int
    """Runs of a group for its own backward."""
    num_remade: int
    """Runs of a group for the inputs of those after it in its segment."""
    num_offloaded: int
    """Tensors, or storages of several tensors, that went to the host."""
    offloaded_bytes: int
    """What went to the host."""
    brought_bytes: int
    """What came back: less than went by what a backward still found on the device."""
    host_bytes: int
    """Held on the host now, for graphs that live."""


class Applied:
    """Policies at work on a model, until `remove` or the end of a `with` block."""

    def __init__(self, model: nn.Module, policies: dict[str, Policy], shared: Shared) -> None:
        self.policies = policies
        """By the path of the module."""
        self._shared = shared
        self._calls = [PolicyCall(model.get_submodule(path), path, policy, shared) for path, policy in policies.items()]
        self._governed = {
            path: model.get_submodule(path) for path, policy in policies.items() if not isinstance(policy, Keep)
        }
        refuse_compiled_holders(model, self._governed)
        with contextlib.ExitStack() as undo:
            runs_again = any(_runs_again(policy) for policy in policies.values())
            self._caches_off = _CachesOff(model) if runs_again else None
            if self._caches_off is not None:
                undo.callback(self._caches_off.end)
            for call in self._calls:
                undo.callback(call.remove)
                call.install()
            # Installed last, let go first: it stands around a policy of the model itself.
            self._check = CompileCheck.of(model)
            undo.callback(self._check.forget, self._governed)
            self._check.watch(self._governed)
            undo.pop_all()

    @property
    def caches_off(self) -> tuple[str, ...]:
        """Classes of Hugging Face models that would use a key-value cache, and have it off while policies are at work."""
        return () if self._caches_off is None else self._caches_off.names

    def stats(self) -> ActivationStats:
        """What was done so far."""
        stash = self._shared.offloading.stash
        return ActivationStats(
            num_recomputed=self._shared.num_recomputed,
            num_remade=self._shared.num_remade,
            num_offloaded=0 if stash is None else stash.num_put,
            offloaded_bytes=0 if stash is None else stash.put_bytes,
            brought_bytes=0 if stash is None else stash.brought_bytes,
            host_bytes=0 if stash is None else stash.host_bytes,
        )

    def offloaded_bytes(self) -> dict[str, int]:
        """What each module that offloads has sent to the host so far, by its path."""
        stash = self._shared.offloading.stash
        sent = {} if stash is None else stash.put_bytes_of
        return {path: sent[module] for path, module in self._governed.items() if module in sent}

    def remove(self) -> None:
        """Leave the model as it was. Graphs that were made before can still be run backward."""
        self._check.forget(self._governed)
        self._governed = {}
        for call in self._calls:
            call.remove()
        if self._caches_off is not None:
            self._caches_off.end()
        self._shared.offloading.close()

    def __enter__(self) -> Applied:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def apply(
    model: nn.Module,
    policies: Policies,
    *,
    mover: Mover | None = None,
    is_weight: IsWeight | None = None,
    poison: bool = False,
    compile_group: CompileGroup | None = None,
) -> Applied:
    """Let the chosen modules of a model keep, recompute or offload what they save for the backward.

    The model is changed in place and trains as before, with the same bits in losses and gradients; only memory and time
    differ. Copies and pickles of it are plain models. Blocks that are compiled one by one stay compiled. Where blocks are
    recomputed, key-value caches of Hugging Face models are off: the bits are those of the model with `use_cache=False`.

    Args:
        model: Any torch model, on its device or not yet.
        policies: One policy, or its word ("keep", "selective", "recompute", "offload"), for all repeated blocks; or a mapping
            from the path of a module, "*" for the blocks that are not named.
        mover: Copies between device and host. None: one of its own, on the device of the model's inputs. On the CPU
            both tiers are the same memory, and offloading saves nothing: it is emulated there.
        is_weight: Tells weights among saved tensors, beyond the parameters and buffers of the group itself.
        poison: Fill memory with NaN before each copy into it, so that a missing wait shows. For tests.
        compile_group: Compiles a module under a budget. None: `torch.compile` with inductor. A prediction, which must not
            compile, gives its own.

    Example:
        >>> from lowtide.activations import Recompute
        >>> layer = nn.TransformerEncoderLayer(8, 2)
        >>> with apply(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), Recompute(segment=2)) as applied:
        ...     sorted(applied.policies)
        ['layers.0', 'layers.1', 'layers.2', 'layers.3']

    Raises:
        ActivationError: A module has a policy already, or is compiled and its policy has to look inside, or what calls it is
            compiled. Also by the module, when it is called from within `torch.compile`.
    """
    shared = Shared(Offloading(mover, is_weight, poison=poison), compile_group or compiled)
    return Applied(model, resolve(model, policies), shared)


def _runs_again(policy: Policy) -> bool:
    return not isinstance(policy, Keep | CompileBudget) and (not isinstance(policy, Offload) or policy.recompute)


class _CachesOff:
    """From when it is made until `end`, no configuration in the model keeps keys and values of past tokens."""

    def __init__(self, model: nn.Module) -> None:
        found = {
            id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None
        }
        with _LOCK:
            kinds = {
                type(module): None
                for module in _outermost_with_config(model)
                if getattr(module.config, "use_cache", False) is True
            }
            # Configurations of encoders say that there is a cache, too, though their models have none.
            takers = [kind for kind in kinds if "past_key_values" in inspect.signature(kind.forward).parameters]
            self.names = tuple(dict.fromkeys(kind.__name__ for kind in takers))
            """Classes of the models whose caches it turned off, though they would have used them."""
            self._configs = [
                config for key, config in found.items() if key in _OFF or getattr(config, "use_cache", False) is True
            ]
            for config in self._configs:
                _, num_holders = _OFF.get(id(config), (config, 0))
                _OFF[id(config)] = (config, num_holders + 1)
                config.use_cache = False

    def end(self) -> None:
        """Turn those on again that nobody else wants off. May be repeated."""
        with _LOCK:
            for config in self._configs:
                _, num_holders = _OFF.pop(id(config))
                if num_holders > 1:
                    _OFF[id(config)] = (config, num_holders - 1)
                else:
                    config.use_cache = True
            self._configs = []


def is_cache_off(config: object) -> bool:
    """Whether policies have turned off a cache that the model's configuration asks for."""
    with _LOCK:
        return id(config) in _OFF


def _outermost_with_config(module: nn.Module) -> Iterator[nn.Module]:
    """A model that a user calls; those inside of it have their configurations from it."""
    if getattr(module, "config", None) is not None:
        yield module
        return
    for child in module.children():
        yield from _outermost_with_config(child)
