"""Every private torch touchpoint, in one folder, so that a new torch version is checked in one place (2.11 to 2.13)."""

from __future__ import annotations

# The public names of these files are the package's: `compat.plain_call` says all that a reader needs.
from lowtide.compat.autograd import *  # noqa: F403
from lowtide.compat.compiler import *  # noqa: F403
from lowtide.compat.devices import *  # noqa: F403
from lowtide.compat.modules import *  # noqa: F403
