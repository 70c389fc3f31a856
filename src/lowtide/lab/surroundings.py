"""Where and with what a run is made: the commit of the sources, the device, the versions and the date."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

from lowtide.lab.check import find_device
from lowtide.lab.record import Surroundings

COMMIT_VARIABLE = "LOWTIDE_COMMIT"
"""Names the commit where the sources are a copy without git's folder; it wins over what git says."""
PACKAGE = Path(__file__).resolve().parents[1]
GIT_LIMIT_S = 20.0


def find_surroundings(device: str | None) -> Surroundings:
    """Those of a run that begins now on a recipe's device. On CUDA its name is asked, which begins to use it.

    Raises:
        ConfigError: It is no device that a run can have.
        HardwareError: It is not here.
    """
    found = find_device(device)
    return named_surroundings(torch.cuda.get_device_name(found) if found.type == "cuda" else "cpu, emulated")


def named_surroundings(device: str) -> Surroundings:
    """Those of a run that begins now on a device of that name; no device is touched."""
    return Surroundings(
        date=dt.datetime.now(dt.UTC).astimezone().isoformat(timespec="seconds"),
        commit=find_commit(),
        device=device,
        torch=torch.__version__,
        lowtide=_version(),
        python=platform.python_version(),
        platform=platform.platform(),
    )


def find_commit(package: Path = PACKAGE) -> str:
    """The commit of the sources, with `+changes` where they differ from it; "unknown" outside of a checkout."""
    named = os.environ.get(COMMIT_VARIABLE, "").strip()
    if named:
        return named
    # A package installed in a folder that some other checkout ignores has nothing to do with its commit.
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return "unknown"
    commit = _git(package, "rev-parse", "HEAD")
    # Of the package only: records written beside it are no change of the sources.
    changes = _git(package, "status", "--porcelain", "--", ".")
    if not commit or changes is None:
        return "unknown"
    return f"{commit}+changes" if changes else commit


def _git(folder: Path, *words: str) -> str | None:
    """What git answers; None where there is no git or it refuses."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],  # noqa: S607 - whichever git the user has
            capture_output=True,
            text=True,
            check=True,
            timeout=GIT_LIMIT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version() -> str:
    try:
        return importlib.metadata.version("lowtide")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
