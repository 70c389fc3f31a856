"""The ghost process, one for each process that runs tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tracing.ghost.ghost_process import GhostProcess


@pytest.fixture(scope="session")
def ghosts() -> Iterator[GhostProcess]:
    process = GhostProcess()
    yield process
    process.close()
