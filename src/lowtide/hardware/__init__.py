"""Hardware profiles as data: what a device has, how fast it is, and what it keeps for itself."""

from __future__ import annotations

from lowtide.hardware.profile import (
    Hardware,
    Source,
    cublas_workspace_bytes,
    find_hardware,
    known_hardware,
    parse_cublas_workspace_config,
    release_of,
)

__all__ = [
    "Hardware",
    "Source",
    "cublas_workspace_bytes",
    "find_hardware",
    "known_hardware",
    "parse_cublas_workspace_config",
    "release_of",
]
