"""export: a checkpoint as files that others read: weights as Hugging Face has them, the optimizer in torch's form."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import torch

from lowtide.errors import CheckpointError
from lowtide.runtime.checkpoints.contents import MODEL, tokenizer_files
from lowtide.runtime.checkpoints.loading import open_checkpoint
from lowtide.runtime.checkpoints.matching import SavedTraining
from lowtide.runtime.checkpoints.state_forms import StateReader

OPTIMIZER_FILE = "optimizer.pt"


def export(
    folder: str | Path,
    out: str | Path,
    *,
    step: int | None = None,
    tokenizer: str | Path | None = None,
) -> Path:
    """Write a checkpoint into a new folder, without anything that is Lowtide's own.

    The folder has the weights in safetensors, with `config.json` where the model is a Hugging Face one: `from_pretrained` and
    `lowtide.load_weights` read it. Where the checkpoint has an optimizer, `optimizer.pt` is what `optimizer.state_dict()`
    would give, and `torch.load(..., weights_only=True)` reads it: moments in fp32, and the fp32 master of a 16-bit weight. All
    of that is in host memory while it is written.

    Args:
        folder: The folder of a run, of whose checkpoints the newest undamaged one is taken; or one checkpoint.
        out: The new folder. It must not exist, or be empty.
        step: Of a run's checkpoints, that of this step.
        tokenizer: A folder whose tokenizer files are copied along.

    Returns:
        The new folder.

    Raises:
        CheckpointError: The checkpoint is damaged, or the new folder has files.
    """
    target = Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} is there already, and not an empty folder; export into a new one")
    reader = open_checkpoint(Path(folder), step)
    saved = SavedTraining.read(reader)
    # Under its own name only when it is whole.
    partial = target.parent / f".{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        for name in (*(part.name for part in reader.index.files[MODEL]), *reader.index.texts):
            shutil.copyfile(reader.folder / name, partial / name)
        for path in tokenizer_files(tokenizer):
            shutil.copyfile(path, partial / path.name)
        if saved.optimizer is not None:
            torch.save(_optimizer_in_torchs_form(saved), partial / OPTIMIZER_FILE)
        if target.exists():
            target.rmdir()
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def _optimizer_in_torchs_form(saved: SavedTraining) -> dict[str, Any]:
    _warn_of_left_out(saved)
    with StateReader(saved, None) as states:
        return saved.in_torchs_form(states.in_torchs_form)


def _warn_of_left_out(saved: SavedTraining) -> None:
    """Parameters that are the optimizer's alone have no place in either file."""
    if saved.loose:
        warnings.warn(
            f"{saved.reader.folder.name} has {len(saved.loose)} parameters that the optimizer holds and the model has not, the "
            f"first is {saved.loose[0]}; their values are not exported",
            stacklevel=4,
        )
