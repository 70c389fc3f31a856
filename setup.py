"""Compiles the host kernel into the package, where there is a compiler. All other settings are in pyproject.toml.

The library has no Python API: one wheel serves every Python. Where it cannot be compiled the package installs without it,
and tries again at first use.
"""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

HOST_BUILD = runpy.run_path(str(Path(__file__).parent / "src/lowtide/optim/host/build.py"))


class BuildHostKernel(build_ext):
    """Runs the package's own build instead of setuptools' compiler: each instruction set has flags of its own."""

    def build_extension(self, ext: Extension) -> None:
        """Compile to where the package expects it; a failure is a warning."""
        target = Path(self.get_ext_fullpath(ext.name))
        try:
            HOST_BUILD["build"](target.resolve(), HOST_BUILD["find_compiler"]())
        except (HOST_BUILD["BuildFailedError"], OSError) as error:
            self.warn(
                f"the host kernel was not compiled, updates on the host will be tried again at first use: {error}"
            )

    def get_ext_filename(self, fullname: str) -> str:
        """Without the tag of a Python version."""
        return str(Path(*fullname.split(".")[:-1]) / HOST_BUILD["LIBRARY_NAME"])

    def get_outputs(self) -> list[str]:
        """Only what was compiled."""
        return [path for path in super().get_outputs() if Path(path).exists()]

    def copy_extensions_to_source(self) -> None:
        """For an editable installation: the library lies beside its sources, if there is one."""
        if (Path(self.build_lib) / self.get_ext_filename(self.extensions[0].name)).exists():
            super().copy_extensions_to_source()


class AnyPythonWheel(bdist_wheel):
    """For one platform, and any Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """The tag in the wheel's name."""
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension("lowtide.optim.native.host", sources=[], optional=True)],
    cmdclass={"build_ext": BuildHostKernel, "bdist_wheel": AnyPythonWheel},
)
