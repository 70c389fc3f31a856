"""What all tests share: markers that skip, hypothesis settings, and the browser."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Two workers with a thread pool each would fight for two cores. Must be set before anything imports torch.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Some virtual machines show AMX and do not have it: torch's own products of bf16 matrices end the process there. For the same
# reason before torch is imported, and in processes that tests start.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# Imports and collection leave half a million objects and no garbage; looking for it takes four of ten seconds.
gc.disable()

# Time limits belong to pytest-timeout: a slow machine must not fail a property. The same examples on every run, so that
# a failure in CI can be repeated.
settings.register_profile("lowtide", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("lowtide")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nvme", metavar="FOLDER", help="run the tests that write gigabytes, in this folder")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _has_cuda():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if not config.getoption("--nvme"):
        for item in items:
            if item.get_closest_marker("nvme"):
                item.add_marker(pytest.mark.skip(reason="needs --nvme FOLDER"))


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.enable()


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> None:
    """Collections look through what a module's own tests make, not through all that is imported, which takes 0.3 s each.

    Not where sessions set objects aside themselves, on CUDA.
    """
    if "torch" in sys.modules and not _has_cuda():
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _uncalibrated() -> Iterator[None]:
    """What tests predict does not depend on whether somebody has measured this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lowtide.hardware.known.find_calibration", lambda device: None)
        yield


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of a Chromium; where it is missing the test skips, but fails in CI, which installs one."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    if os.environ.get("CI") == "true":
        pytest.fail("chromium is missing; `make chromium` installs it")
    pytest.skip("needs chromium")


@pytest.fixture(scope="session")
def repo_root() -> Path:
    return Path(__file__).resolve().parent.parent
