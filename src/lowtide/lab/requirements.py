"""What a recipe needs and this machine lacks, found before its run is started."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator

import torch

from lowtide.errors import HardwareError
from lowtide.lab.check import find_device
from lowtide.lab.data_recipe import HubDataset, RandomInputs
from lowtide.lab.recipe import Recipe

CPP_COMPILERS = ("g++", "clang++", "c++")
C_COMPILERS = ("gcc", "clang", "cc")


def unmet_requirements(recipe: Recipe) -> tuple[str, ...]:
    """One sentence for each; empty where the recipe can run here.

    Raises:
        ConfigError: The recipe's device is none that a run can have anywhere.
    """
    return (*_device(recipe), *_data(recipe), *_packages(recipe), *_compilation(recipe))


def _device(recipe: Recipe) -> Iterator[str]:
    try:
        find_device(recipe.device)
    except HardwareError:
        yield (
            f"it needs the device {recipe.device!r}, and torch sees {torch.cuda.device_count()} CUDA devices; run it where "
            "there is one, or set device=cpu, where a device is emulated"
        )


def _data(recipe: Recipe) -> Iterator[str]:
    data = recipe.data
    if isinstance(data, HubDataset) and not _has("datasets"):
        yield f"it reads {data.name!r} through the package 'datasets'; run: pip install datasets"
    if not isinstance(data, RandomInputs) and not _has("tokenizers"):
        yield "it trains a tokenizer with the package 'tokenizers'; run: pip install tokenizers"


def _packages(recipe: Recipe) -> Iterator[str]:
    if recipe.model.startswith("hf:") and not _has("transformers"):
        yield f"it builds {recipe.model!r} with the package 'transformers'; run: pip install \"lowtide[transformers]\""


def _compilation(recipe: Recipe) -> Iterator[str]:
    if recipe.compile is None or recipe.compile.backend != "inductor":
        return  # other backends run torch's own operators, and build nothing
    try:
        on_cuda = find_device(recipe.device).type == "cuda"
    except HardwareError:
        return  # said already, and where it will run nobody knows
    if on_cuda and not _has("triton"):
        yield "it compiles for CUDA with the package 'triton'; run: pip install triton"
    # Triton builds a small C library for each kernel's launch; on the host inductor writes C++.
    variable, names = ("CC", C_COMPILERS) if on_cuda else ("CXX", CPP_COMPILERS)
    if not _has_program(variable, names):
        yield (
            f"torch.compile needs a {'C' if on_cuda else 'C++'} compiler: none of {', '.join(names)} is on the path, and "
            f"{variable} names none; install one, or set compile=null"
        )


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _has_program(variable: str, names: tuple[str, ...]) -> bool:
    named = os.environ.get(variable, "").split()[:1]
    return any(shutil.which(name) is not None for name in named or names)
