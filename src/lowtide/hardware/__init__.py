"""Hardware profiles as data: what a device has, how fast it is, and what it keeps for itself."""

from __future__ import annotations

from lowtide.hardware.profile import ASSUMED_CONTEXT_BYTES as ASSUMED_CONTEXT_BYTES
from lowtide.hardware.profile import Hardware as Hardware
from lowtide.hardware.profile import Source as Source
from lowtide.hardware.profile import cublas_workspace_bytes as cublas_workspace_bytes
from lowtide.hardware.profile import find_hardware as find_hardware
from lowtide.hardware.profile import known_hardware as known_hardware
from lowtide.hardware.profile import parse_cublas_workspace_config as parse_cublas_workspace_config
from lowtide.hardware.profile import release_of as release_of
