"""The fork server that all tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.forks import ForkServer


@pytest.fixture(scope="package")
def server() -> Iterator[ForkServer]:
    with ForkServer() as server:
        yield server
