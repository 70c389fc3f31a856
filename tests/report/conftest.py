from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.report.browser import Browser, find_chromium


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    program = find_chromium()
    if program is None:
        message = "the page is tested in Chromium, which is not installed; on Debian: apt-get install chromium"
        # A check that silently leaves out the page is no check; a laptop may go without.
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    with Browser(program) as running:
        yield running
