"""Small saves for the tests of run folders: the values follow from the step, so that a mixture of two shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from lowtide.runtime.checkpoints.disk import Disk
from lowtide.runtime.checkpoints.folder import Retention, RunFolder
from lowtide.runtime.checkpoints.format import CheckpointReader, CheckpointWriter, TensorSpec
from tests.runtime.checkpoints.power_cut import QuickDisk


def tensors_of(step: int, variant: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1000 * step + variant)
    return {
        "model": {
            "embedding.weight": torch.randn(20, 8, generator=generator).bfloat16(),
            "head.bias": torch.randn(20, generator=generator),
        },
        "optimizer": {"exp_avg.0": torch.randint(0, 255, (160,), dtype=torch.uint8, generator=generator)},
    }


def write(folder: Path, step: int, *, variant: int = 0, disk: Disk | None = None, max_file_bytes: int = 300) -> None:
    tensors = tensors_of(step, variant)
    specs = {file: {name: TensorSpec.of(value) for name, value in part.items()} for file, part in tensors.items()}
    with CheckpointWriter(folder, specs, disk=disk, max_file_bytes=max_file_bytes) as writer:
        for file, part in tensors.items():
            for name, value in part.items():
                writer.write(file, name, value)
        writer.add_file("config.json", f'{{"step": {step}}}')
        writer.finish(step=step, state={"variant": variant})


@contextmanager
def saving(run: RunFolder, step: int) -> Iterator[Path]:
    """A folder to write into, which is published at the end, and abandoned where the block raises."""
    partial = run.begin(step)
    try:
        yield partial
        run.publish(partial, step)
    except BaseException:
        run.abandon(partial)
        raise


def save(run: RunFolder, step: int, *, variant: int = 0, disk: Disk | None = None) -> None:
    with saving(run, step) as partial:
        write(partial, step, variant=variant, disk=disk)


def saved(path: Path, steps: Sequence[int], retention: Retention | None = None) -> None:
    disk = QuickDisk()
    with RunFolder(path, retention=retention or Retention(keep=100), disk=disk) as run:
        for step in steps:
            save(run, step, disk=disk)


def what_is_in(reader: CheckpointReader) -> tuple[int, int]:
    """The step and the variant, after every value was compared with what that save wrote."""
    step, variant = reader.index.step, reader.index.state["variant"]
    assert isinstance(variant, int)
    for file, part in tensors_of(step, variant).items():
        assert reader.names(file).keys() == part.keys()
        for name, value in part.items():
            assert torch.equal(reader.read(file, name), value)
    assert reader.text("config.json") == f'{{"step": {step}}}'
    return step, variant
