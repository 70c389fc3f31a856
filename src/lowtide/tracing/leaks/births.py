"""BirthLog: every storage that is born while it watches, when and where, without keeping any of them alive.

Births come from a dispatch mode, which sees each operator with the line and the module that called it, and from a look
through the collector's objects after each step, which finds what no operator made here (`from_numpy`, another thread).
Deaths come from weak references to the storages: torch keeps one Python object per storage for as long as the storage
lives, even when only C++ holds it, so its `id` is a key and its weak reference tells of its death.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lowtide import compat
from lowtide.compat import WatchingMode, autograd_references, has_autograd_references, plain_storage

# Frames of these files are not where a person would look for a tensor's birth.
_SKIPPED_FILES = (str(Path(torch.__file__).parent) + os.sep, "<frozen ", "<eval_with_key>")


@dataclass(frozen=True, slots=True)
class BirthSite:
    """The place of a birth: storages of one site are counted together."""

    op: str
    module: str
    source: str
    device: str

    @property
    def line(self) -> str:
        """What births are counted by: the source line and the device, or the op where no line is known.

        Coarser than the site, because the same code may run in another module each time (an expert, a random layer).
        """
        return f"{self.source or self.op} {self.device}"


StorageRef = weakref.ref[torch.UntypedStorage]


@dataclass(slots=True)
class Born:
    """One storage that was born while the log watched."""

    ref: StorageRef
    site: BirthSite
    step: int
    bytes: int
    """As of the last `end_step`, because a storage may be resized."""


class BirthLog:
    """Watches the steps that run inside `watch(step)`; itself a context, at whose end every weak reference is dropped.

    The log owns weak references only. Their callbacks hold the log, so a log left open would be a reference cycle.
    """

    def __init__(self) -> None:
        self.alive: dict[int, Born] = {}
        """By the `id` of the storage's Python object."""
        self.collected: list[Born] = []
        """What outlived its step and was freed by the garbage collector, so by nothing else."""
        self._older: dict[int, StorageRef] = {}
        self._step = 0
        self._in_step = False
        self._collecting = False
        self._module_stack: list[str] = []
        self._module_paths: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._warnings = warnings.catch_warnings()

    def __enter__(self) -> BirthLog:
        gc.callbacks.append(self._on_collection)
        # A compiled module would warn about hooks that do it no harm. Once for all steps, because each change of the
        # filters makes every warning appear anew.
        self._warnings.__enter__()
        warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")
        # What exists already is not born later, even where a step touches it for the first time (a dataset in memory).
        for holder in _with_graphs(living_tensors()):
            if (storage := storage_of(holder)) is not None and id(storage) not in self._older:
                self._older[id(storage)] = self._follow(storage)
        return self

    def __exit__(self, *exc_info: object) -> None:
        gc.callbacks.remove(self._on_collection)
        self._warnings.__exit__(None, None, None)
        self.alive.clear()
        self._older.clear()

    @contextmanager
    def watch(self, step: int) -> Iterator[None]:
        """Log the births of one step, numbered from 1."""
        self._step, self._in_step = step, True
        self._module_stack.clear()
        after = register_module_forward_hook(self._leave_module, always_call=True)
        with register_module_forward_pre_hook(self._enter_module), after, _BirthMode(self):
            yield
        self._module_stack.clear()
        for tensor in living_tensors():
            self.see(tensor, "")
        for born in list(self.alive.values()):
            if (storage := born.ref()) is not None:
                born.bytes = storage.nbytes()
        self._in_step = False

    def see(self, tensor: torch.Tensor, op: str) -> None:
        """Note the tensor's storage as born here, unless it is known."""
        storage = storage_of(tensor)
        if storage is None or id(storage) in self.alive or id(storage) in self._older:
            return
        module = self._module_stack[-1] if self._module_stack else ""
        site = BirthSite(op, module, _calling_line() if op else "", str(tensor.device))
        self.alive[id(storage)] = Born(self._follow(storage), site, self._step, storage.nbytes())

    def _follow(self, storage: torch.UntypedStorage) -> StorageRef:
        return weakref.ref(storage, partial(self._forget, id(storage)))

    def _forget(self, key: int, _: StorageRef) -> None:
        self._older.pop(key, None)
        born = self.alive.pop(key, None)
        outlived_its_step = born is not None and (born.step < self._step or not self._in_step)
        if born is not None and self._collecting and outlived_its_step:
            self.collected.append(born)

    def _on_collection(self, phase: str, _: Mapping[str, int]) -> None:
        self._collecting = phase == "start"

    def _enter_module(self, module: nn.Module, _: object) -> None:
        # Only a module's first call from its root tells the whole path; a recomputation enters it in the middle.
        name = type(module).__name__
        for path, child in module.named_modules() if module not in self._module_paths else ():
            self._module_paths.setdefault(child, f"{name}.{path}" if path else name)
        self._module_stack.append(self._module_paths[module])

    def _leave_module(self, *_: object) -> None:
        if self._module_stack:
            self._module_stack.pop()


class _BirthMode(WatchingMode):  # torch's __init_subclass__ has no types
    def __init__(self, log: BirthLog) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self._log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A wrapper subclass first takes itself apart; its inner tensors come back here and are the ones with memory.
        if any(_is_wrapper(kind) for kind in types):
            return NotImplemented
        # The overload in `aten.add.Tensor` says little; a higher-order operator has none.
        op = str(getattr(func, "overloadpacket", func))
        result = func(*args, **(kwargs or {}))
        for tensor in compat.tensors_in(result):
            self._log.see(tensor, op)
        return result


def storage_of(holder: object) -> torch.UntypedStorage | None:
    """The storage with the bytes of a tensor or storage; None where there is none (sparse, meta, fake, wrapper)."""
    if isinstance(holder, torch.UntypedStorage):
        return holder
    if not isinstance(holder, torch.Tensor) or _is_wrapper(type(holder)):
        return None
    return plain_storage(holder)


def living_tensors() -> list[torch.Tensor]:
    """Every tensor with a Python object, garbage in cycles included."""
    # By type: `isinstance` on a foreign object may run its code (a lazy proxy's `__class__`).
    kinds, waiting = {torch.Tensor}, [torch.Tensor]
    while waiting:
        new = set(type.__subclasses__(waiting.pop())) - kinds
        kinds |= new
        waiting += new
    return [candidate for candidate in gc.get_objects() if type(candidate) in kinds]


def _with_graphs(tensors: list[torch.Tensor]) -> list[object]:
    """The tensors, and all that they hold through autograd: gradients and saved tensors may have no Python object."""
    found: list[object] = list(tensors)
    seen = {id(tensor) for tensor in tensors}
    for holder in found:  # grows while it is read
        for reference in autograd_references(holder):
            if id(reference) not in seen and has_autograd_references(type(reference)):
                seen.add(id(reference))
                found.append(reference)
    return found


def _is_wrapper(kind: type) -> bool:
    # The protocol of tensor subclasses that are made of other tensors (DTensor, quantised and nested ones).
    return hasattr(kind, "__tensor_flatten__")


def _calling_line() -> str:
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        file = frame.f_code.co_filename
        if not file.startswith(_SKIPPED_FILES) and file != __file__:
            return f"{Path(file).name}:{line}"
    return ""
