"""Where and with what a run was made: against git itself."""

from __future__ import annotations

import datetime as dt
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from lowtide.errors import HardwareError
from lowtide.lab.surroundings import COMMIT_VARIABLE, find_commit, find_surroundings


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    command = ["git", *identity, "-C", str(folder), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(autouse=True)
def unnamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COMMIT_VARIABLE, raising=False)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A package inside of a checkout with one commit."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    package = tmp_path / "src" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    return package


def test_the_commit_of_a_checkout_and_its_changes(checkout: Path) -> None:
    commit = git(checkout, "rev-parse", "HEAD")
    assert find_commit(checkout) == commit
    (checkout.parents[1] / "records.json").touch()
    assert find_commit(checkout) == commit, "what lies beside the sources is no change of them"
    (checkout / "new.py").touch()
    assert find_commit(checkout) == f"{commit}+changes"
    (checkout / "new.py").unlink()
    (checkout / "__init__.py").write_text("changed = True\n", encoding="utf-8")
    assert find_commit(checkout) == f"{commit}+changes"


def test_an_installed_package_has_no_commit(checkout: Path, tmp_path: Path) -> None:
    installed = checkout.parents[1] / "environment" / "package"
    shutil.copytree(checkout, installed)
    assert find_commit(installed) == "unknown", "another checkout around it says nothing"
    assert find_commit(Path("/")) == "unknown"


def test_without_git_nothing_is_known(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_commit(checkout) == "unknown"


def test_a_named_commit_wins(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMMIT_VARIABLE, " abc123 ")
    assert find_commit(checkout) == "abc123"
    monkeypatch.setenv(COMMIT_VARIABLE, "")
    assert find_commit(checkout) == git(checkout, "rev-parse", "HEAD")


def test_the_rest() -> None:
    found = find_surroundings("cpu")
    assert found.device == "cpu, emulated"
    assert found.torch == torch.__version__
    assert found.python == platform.python_version()
    date = dt.datetime.fromisoformat(found.date)
    assert date.tzinfo is not None
    assert abs((dt.datetime.now(dt.UTC) - date).total_seconds()) < 60
    with pytest.raises(HardwareError):
        find_surroundings("cuda:99")


@pytest.mark.gpu
def test_a_card_is_named() -> None:
    assert find_surroundings("cuda").device == torch.cuda.get_device_name(0)
