"""This machine and its software: against git, the system's own files, and what drivers write."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks import suite
from lowtide.hardware import machine
from lowtide.hardware.machine import COMMIT_VARIABLE, find_commit, software, this_machine


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


def test_the_machine_is_the_one_that_the_system_names() -> None:
    found = this_machine()
    assert found.memory_bytes == psutil.virtual_memory().total
    num_cores, _, name = found.processor.partition(" x ")
    assert int(num_cores) == os.cpu_count()
    if Path("/proc/cpuinfo").is_file() and "model name" in Path("/proc/cpuinfo").read_text():
        assert f": {name}" in Path("/proc/cpuinfo").read_text()


@pytest.mark.parametrize(
    "line",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build  (dvs-builder@U22)",
    ],
)
def test_the_driver_is_read_from_the_kernel(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "version"
    file.write_text(f"{line}\nGCC version:  gcc version 12.3.0 (Ubuntu)\n")
    monkeypatch.setattr(machine, "_DRIVER_FILE", file)
    assert this_machine().driver == "550.54.15"


def test_the_driver_is_asked_where_the_kernel_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_DRIVER_FILE", tmp_path / "none")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert this_machine().driver is None
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 570.86.10\necho 570.86.10\n")
    program.chmod(0o755)
    assert this_machine().driver == "570.86.10"


def test_versions_and_the_commit() -> None:
    found = software()
    assert (found["torch"], found["python"]) == (torch.__version__, platform.python_version())
    assert found.get("commit", "unknown") == find_commit()


def test_a_suite_s_record_has_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "results", lambda module, rows, timeout_s: iter([{**rows[0], "median_s": 1.0}]))
    monkeypatch.setattr(sys, "argv", ["suite", "one", "--out", str(tmp_path)])
    suite.main("no.module", "lowtide.test/1", {"one": [{"name": "row"}]})
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text())["machine"] == asdict(this_machine())


@pytest.mark.parametrize(
    "name", ["lab/repeats", "compiled/peak", "compiled/check", "optim/host_kernel", "accuracy/measure"]
)
def test_other_measurements_have_it_too(name: str) -> None:
    source = (Path(suite.__file__).parent / f"{name}.py").read_text(encoding="utf-8")
    assert '"machine": machine(),' in source
