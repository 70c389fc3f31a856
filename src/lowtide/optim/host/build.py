"""Compiles the host kernel: one shared library with three instruction sets, chosen at run time.

Nothing here imports torch or the rest of the package: the build of the package runs this file by itself, and an
installation that came without a library runs the same code at first use.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "native"
LIBRARY_NAME = "liblowtide_host.so"

# Products and sums are fused only where the sources say so: instruction sets would differ in the last bit otherwise.
# GCC's own AVX-512 headers set off the warning about uninitialised values.
COMMON_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
    "-Wno-unused-function",
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
)
ISA_FLAGS = {
    "kernel_avx2.cpp": ("-mavx2", "-mfma", "-mf16c"),
    "kernel_avx512.cpp": (
        "-mavx512f",
        "-mavx512bw",
        "-mavx512dq",
        "-mavx512vl",
        "-mavx2",
        "-mfma",
        "-mf16c",
        "-mprefer-vector-width=512",
    ),
}
"""Beside those that all files get, where the processor is an x86."""


class BuildFailedError(Exception):
    """There is no compiler, or it would not compile. Caught by the two callers, which say what follows from it."""


def source_files() -> list[Path]:
    """All sources and headers, in an order that is always the same."""
    return sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")])


def source_hash() -> str:
    """A digest of the sources and the flags: a library built from others must not be used."""
    digest = hashlib.sha256(repr((COMMON_FLAGS, sorted(ISA_FLAGS.items()))).encode())
    for path in source_files():
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def find_compiler() -> list[str]:
    """The command of a C++ compiler: `$CXX`, or the first of the usual names on the path.

    Raises:
        BuildFailedError: There is none.
    """
    named = os.environ.get("CXX", "").split()
    if named:
        if shutil.which(named[0]) is None:
            raise BuildFailedError(f"CXX={' '.join(named)} is not a program on the path")
        return named
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name) is not None:
            return [name]
    raise BuildFailedError("no C++ compiler: none of g++, clang++ and c++ is on the path, and CXX is not set")


def compiler_version(compiler: list[str]) -> str:
    """What the compiler says about itself, in one line."""
    return _run([*compiler, "--version"]).partition("\n")[0].strip()


def build(target: Path, compiler: list[str]) -> None:
    """Compile the library to that path: written aside and renamed, so that nobody ever sees half of one.

    Takes a few seconds, on as many cores as there are files.

    Raises:
        BuildFailedError: The compiler did not succeed; the message has its first words.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lowtide-build-", dir=target.parent) as folder:
        commands = [_compile_command(compiler, path, Path(folder)) for path in sorted(SOURCES.glob("*.cpp"))]
        _run_all(commands)
        aside = Path(folder) / LIBRARY_NAME
        _run([*compiler, "-shared", "-pthread", "-o", str(aside), *(command[-1] for command in commands)])
        aside.replace(target)


def _compile_command(compiler: list[str], source: Path, folder: Path) -> list[str]:
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    flags = [*COMMON_FLAGS, *(ISA_FLAGS.get(source.name, ()) if is_x86 else ())]
    define = f'-DLOWTIDE_SOURCE_HASH="{source_hash()}"'
    return [*compiler, *flags, define, "-c", str(source), "-o", str(folder / f"{source.stem}.o")]


def _run(command: list[str]) -> str:
    return _run_all([command])[0]


def _run_all(commands: list[list[str]]) -> list[str]:
    """Start all of them, wait for all of them, and give what they printed."""
    with contextlib.ExitStack() as stack:
        running = []
        for command in commands:
            try:
                process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            except OSError as error:
                raise BuildFailedError(f"{command[0]} cannot be started: {error}") from error
            running.append(stack.enter_context(process))
        outputs = [process.communicate()[0] for process in running]
    for command, process, output in zip(commands, running, outputs, strict=True):
        if process.returncode != 0:
            words = " ".join(output.split())[:500]
            # A compilation is known by its source; the question for a version and the linking are not of one file.
            asked = command[command.index("-c") + 1] if "-c" in command else " ".join(command[1:3])
            raise BuildFailedError(f"{command[0]} ended with {process.returncode} on {asked}: {words}")
    return outputs
