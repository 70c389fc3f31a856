"""Finds or builds the shared library of the host kernel, and loads it once for the process.

Looked for in this order: beside the sources, where an installation puts it; in the cache of the user; else it is compiled
into that cache. A library that was built from other sources than those of this package is passed over.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import logging
import platform
import time
from pathlib import Path

from lowtide.errors import HostKernelError
from lowtide.hardware.machine import cache_folder
from lowtide.optim.host import build as host_build

_log = logging.getLogger(__name__)

ISA_NUMBERS = {"plain": 1, "avx2": 2, "avx512": 3}
"""As update.cpp counts them; 0 is the best that the processor has."""


class HostLibrary:
    """The functions of the library, typed. Calls release Python's lock for as long as they run."""

    def __init__(self, path: Path, functions: ctypes.CDLL) -> None:
        self.path = path
        self._functions = functions
        self.piece_bytes = int(functions.lowtide_piece_bytes())
        """Size of the struct of a piece: the packing in Python must come to the same."""
        self.isas = tuple(name for name, number in ISA_NUMBERS.items() if functions.lowtide_has_isa(number))
        """What this processor and this build have, the best last."""

    def update(self, pieces: bytearray, num_pieces: int, num_threads: int, isa: str | None) -> None:
        """Update packed pieces in place. `isa` is one of `isas`, or None for the best."""
        array = (ctypes.c_char * len(pieces)).from_buffer(pieces)
        failed = self._functions.lowtide_update(array, num_pieces, num_threads, ISA_NUMBERS[isa] if isa else 0)
        assert not failed, f"{isa} is not one of {self.isas}"

    def pin_threads(self, cpus: tuple[int, ...]) -> None:
        """Bind thread i to the processor `cpus[i]`, now and when it is made."""
        self._functions.lowtide_pin_threads((ctypes.c_int * len(cpus))(*cpus), len(cpus))

    def num_threads(self) -> int:
        """How many threads exist: none until the first update that needs more than one."""
        return int(self._functions.lowtide_num_threads())

    def stop_threads(self) -> None:
        """End the threads, after the update that runs. The next update makes new ones."""
        self._functions.lowtide_stop_threads()


@functools.cache
def _load_once() -> HostLibrary | HostKernelError:
    try:
        library = _find()
    except HostKernelError as error:
        return error
    atexit.register(library.stop_threads)
    return library


def load() -> HostLibrary:
    """The library, built first where that is needed (some seconds, once for each version and compiler).

    Raises:
        HostKernelError: It cannot be built or loaded; says which file and why. Later calls raise the same at once.
    """
    found = _load_once()
    if isinstance(found, HostKernelError):
        raise HostKernelError(found.message)
    return found


def why_missing() -> str | None:
    """None where the library is there; else the reason, for a warning that the update runs through torch instead."""
    found = _load_once()
    return found.message if isinstance(found, HostKernelError) else None


def cached_path(compiler: list[str]) -> Path:
    """Where the library for these sources, this compiler and this processor is kept."""
    key = (host_build.source_hash(), compiler, host_build.compiler_version(compiler), platform.machine())
    digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    return cache_folder() / f"host-kernel-{digest}" / host_build.LIBRARY_NAME


def _find() -> HostLibrary:
    installed = host_build.SOURCES / host_build.LIBRARY_NAME
    if installed.exists():
        try:
            return open_library(installed)
        except HostKernelError as error:
            _log.warning("%s; another is built", error)
    try:
        compiler = host_build.find_compiler()
        path = cached_path(compiler)
        if not path.exists():
            began_s = time.perf_counter()
            host_build.build(path, compiler)
            _log.info("built the host kernel with %s in %.1f s: %s", compiler[0], time.perf_counter() - began_s, path)
    except host_build.BuildFailedError as error:
        raise HostKernelError(
            f"the host kernel cannot be built: {error}; install g++ or clang++, or name a compiler in CXX"
        ) from error
    except OSError as error:
        raise HostKernelError(
            f"the host kernel cannot be kept in {cache_folder()}: {error}; name a folder that can be written in XDG_CACHE_HOME"
        ) from error
    return open_library(path)


def open_library(path: Path) -> HostLibrary:
    """Load a library and make sure that it belongs to these sources.

    Raises:
        HostKernelError: It is not a library of this machine, or was built from other sources.
    """
    try:
        functions = ctypes.CDLL(str(path))
        declared = _declare(functions)
    except (OSError, AttributeError) as error:
        raise HostKernelError(
            f"the host kernel {path} cannot be loaded: {error}; delete it to have it built anew"
        ) from error
    found, expected = declared.lowtide_source_hash().decode(), host_build.source_hash()
    if found != expected:
        raise HostKernelError(
            f"the host kernel {path} was built from other sources ({found}, not {expected}); delete it to have it built anew"
        )
    return HostLibrary(path, declared)


def _declare(functions: ctypes.CDLL) -> ctypes.CDLL:
    functions.lowtide_source_hash.restype = ctypes.c_char_p
    functions.lowtide_piece_bytes.restype = ctypes.c_int64
    functions.lowtide_has_isa.argtypes = [ctypes.c_int]
    functions.lowtide_update.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int]
    functions.lowtide_pin_threads.argtypes = [ctypes.c_void_p, ctypes.c_int]
    functions.lowtide_pin_threads.restype = None
    functions.lowtide_stop_threads.restype = None
    return functions
