"""This machine and the software on it, as records and reports name them: processor, memory, driver, versions, commit."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

COMMIT_VARIABLE = "LOWTIDE_COMMIT"
"""Names the commit where the sources are a copy without git's folder; it wins over what git says."""
PACKAGE = Path(__file__).resolve().parents[1]
UNKNOWN = "unknown"
LIMIT_S = 20.0
"""How long another program may take to answer."""
_CPU_FILE = Path("/proc/cpuinfo")
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a measurement depends on beside the device."""

    processor: str
    """With the number of its logical cores: `2 x Intel(R) Xeon(R) Processor`."""
    memory_bytes: int
    """The host's, whatever part of it a container may use."""
    driver: str | None
    """Version of NVIDIA's driver; None where there is none."""


def this_machine() -> Machine:
    """The machine that this process runs on; no device is touched."""
    return Machine(processor=_processor(), memory_bytes=int(psutil.virtual_memory().total), driver=_driver())


@functools.cache
def software() -> dict[str, str]:
    """Versions of torch, lowtide and Python, and the commit of Lowtide's sources where it is known.

    As they were when this process first asked.
    """
    commit = find_commit()
    return {
        "torch": torch.__version__,
        "lowtide": lowtide_version(),
        "python": platform.python_version(),
        **({} if commit == UNKNOWN else {"commit": commit}),
    }


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/lowtide`, or `~/.cache/lowtide`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The standard says that a relative path there is to be ignored.
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "lowtide"


def lowtide_version() -> str:
    """The version of the installed package; "unknown" where only its sources are there."""
    try:
        return importlib.metadata.version("lowtide")
    except importlib.metadata.PackageNotFoundError:
        return UNKNOWN


def find_commit(package: Path = PACKAGE) -> str:
    """The commit of the sources, with `+changes` where they differ from it; "unknown" outside of a checkout."""
    named = os.environ.get(COMMIT_VARIABLE, "").strip()
    if named:
        return named
    git = ("git", "-C", str(package))
    # A package installed in a folder that some other checkout ignores has nothing to do with its commit.
    if _answer(*git, "ls-files", "--error-unmatch", "__init__.py") is None:
        return UNKNOWN
    commit = _answer(*git, "rev-parse", "HEAD")
    # Changes of the package only: records written beside it are no change of the sources.
    changes = _answer(*git, "status", "--porcelain", "--", ".")
    if not commit or changes is None:
        return UNKNOWN
    return f"{commit}+changes" if changes else commit


def _processor() -> str:
    names = re.findall(r"^model name\s*:\s*(.+)$", _text(_CPU_FILE), flags=re.MULTILINE)
    return f"{os.cpu_count() or 1} x {names[0].strip() if names else platform.processor() or platform.machine()}"


def _driver() -> str | None:
    # The kernel's own word first: it costs nothing, and is there where the program is not.
    found = re.search(r"^NVRM version:.*?\s(\d+(?:\.\d+)+)\s", _text(_DRIVER_FILE), flags=re.MULTILINE)
    if found is not None:
        return found[1]
    answer = _answer("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return answer.splitlines()[0].strip() if answer else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _answer(*words: str) -> str | None:
    """What a program answers; None where it is not there or refuses."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=LIMIT_S)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
