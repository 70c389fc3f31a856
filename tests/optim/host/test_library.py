"""Building and loading the host kernel: the cache, a stale or broken library, a machine without a compiler."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowtide.errors import HostKernelError
from lowtide.optim.host import build as host_build
from lowtide.optim.host import kernel as host_kernel
from lowtide.optim.host import library as host_library
from tests.optim.host.cases import needs_kernel


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """As in a process that has loaded nothing, with an empty cache and no installed library."""
    sources = tmp_path / "native"
    shutil.copytree(host_build.SOURCES, sources, ignore=shutil.ignore_patterns("*.so"))
    monkeypatch.setattr(host_build, "SOURCES", sources)
    # Compiled in a third of the time.
    flags = tuple("-O0" if flag == "-O3" else flag for flag in host_build.COMMON_FLAGS)
    monkeypatch.setattr(host_build, "COMMON_FLAGS", flags)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    host_library._load_once.cache_clear()
    host_kernel._warn_once.cache_clear()
    yield tmp_path
    host_library._load_once.cache_clear()
    host_kernel._warn_once.cache_clear()


@needs_kernel
def test_built_once_and_then_found(fresh: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    library = host_library.load()
    assert library.path.is_relative_to(fresh / "cache" / "lowtide")
    assert [record.getMessage().partition(" with ")[0] for record in caplog.records] == ["built the host kernel"]
    assert host_library.load() is library
    host_library._load_once.cache_clear()
    caplog.clear()
    assert host_library.load().path == library.path
    assert not caplog.records
    # Nothing is left beside it.
    assert [path.name for path in library.path.parent.iterdir()] == [host_build.LIBRARY_NAME]


@needs_kernel
def test_other_sources_have_another_place(fresh: Path) -> None:
    compiler = host_build.find_compiler()
    before = host_library.cached_path(compiler)
    with (host_build.SOURCES / "abi.h").open("a") as file:
        file.write("// changed\n")
    assert host_library.cached_path(compiler) != before


@needs_kernel
def test_a_stale_installed_library_is_passed_over(fresh: Path, caplog: pytest.LogCaptureFixture) -> None:
    installed = host_build.SOURCES / host_build.LIBRARY_NAME
    host_build.build(installed, host_build.find_compiler())
    assert host_library.load().path == installed
    with (host_build.SOURCES / "abi.h").open("a") as file:
        file.write("// changed\n")
    host_library._load_once.cache_clear()
    assert host_library.load().path != installed
    assert "was built from other sources" in caplog.text


@needs_kernel
def test_a_file_that_is_no_library_is_named(fresh: Path) -> None:
    path = host_library.cached_path(host_build.find_compiler())
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not a library")
    with pytest.raises(HostKernelError, match=rf"the host kernel {path} cannot be loaded: .*; delete it"):
        host_library.load()
    reason = host_library.why_missing()
    assert reason is not None
    assert str(path) in reason


def test_without_a_compiler(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(fresh))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(HostKernelError, match=r"cannot be built: no C\+\+ compiler: .*; install g\+\+ or clang\+\+"):
        host_library.load()
    with pytest.warns(
        RuntimeWarning, match=r"run through torch's operators, about 10 to 30 times slower.*no C\+\+ compiler"
    ):
        assert not host_kernel.is_available()
    # Once only: a second warning would be an error here.
    assert not host_kernel.is_available()


def test_a_compiler_that_is_not_there(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -x")
    with pytest.raises(HostKernelError, match="CXX=no-such-compiler -x is not a program on the path"):
        host_library.load()


def test_a_compiler_that_fails_at_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(HostKernelError, match=r"false ended with 1 on --version: .*; install g\+\+ or clang\+\+"):
        host_library.load()


@needs_kernel
def test_a_cache_that_cannot_be_written(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fresh / "cache").write_text("a file where the folder would be")
    with pytest.raises(
        HostKernelError, match="cannot be kept in .*; name a folder that can be written in XDG_CACHE_HOME"
    ):
        host_library.load()


@needs_kernel
def test_sources_that_do_not_compile(fresh: Path) -> None:
    (host_build.SOURCES / "update.cpp").write_text("this is no C++")
    with pytest.raises(HostKernelError, match=r"ended with 1 on .*update\.cpp"):
        host_library.load()
    cache = fresh / "cache" / "lowtide"
    assert not list(cache.rglob("*.so"))


def test_the_build_needs_nothing_of_the_package() -> None:
    """The package's own build runs the file where torch is not installed."""
    program = (
        "import sys; sys.modules['torch'] = None; sys.modules['lowtide'] = None; import runpy; "
        f"print(runpy.run_path({host_build.__file__!r})['source_hash']())"
    )
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == host_build.source_hash()
