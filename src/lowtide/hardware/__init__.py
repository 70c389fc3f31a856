"""Hardware as data: what a device has, how fast it is and what it keeps for itself, by its data sheet or measured."""

from __future__ import annotations

from lowtide.hardware.known import find_hardware as find_hardware
from lowtide.hardware.known import hardware_of as hardware_of
from lowtide.hardware.known import known_hardware as known_hardware
from lowtide.hardware.profile import ASSUMED_CONTEXT_BYTES as ASSUMED_CONTEXT_BYTES
from lowtide.hardware.profile import Hardware as Hardware
from lowtide.hardware.profile import Source as Source
from lowtide.hardware.profile import cublas_workspace_bytes as cublas_workspace_bytes
from lowtide.hardware.profile import parse_cublas_workspace_config as parse_cublas_workspace_config
from lowtide.hardware.profile import release_of as release_of
from lowtide.hardware.rates import UpdateKind as UpdateKind
