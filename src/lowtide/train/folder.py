"""The folder of a run: its recipe, its rows, its checkpoints, and at the end the model.

OUT/
  recipe.yaml       the recipe, every key spelt out
  data.json         what it read, so that another text is noticed when it goes on
  metrics.jsonl     a row for each step and event
  tensorboard/      curves, where the recipe asks for them
  checkpoints/      see `lowtide.runtime.checkpoints.folder`
  model/            the result: loads with `from_pretrained` where the model is a Hugging Face one
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lowtide import config, plain_text
from lowtide.errors import ConfigError
from lowtide.plain_text import Plain
from lowtide.runtime.checkpoints.contents import tokenizer_files
from lowtide.runtime.checkpoints.disk import Disk
from lowtide.runtime.checkpoints.folder import RunFolder
from lowtide.train.recipe import TrainRecipe, differing_keys, harmful_keys

RECIPE, DATA = "recipe.yaml", "data.json"
_HIDDEN_MODEL = ".model."
_MODEL_SUFFIXES = (".safetensors", ".safetensors.index.json")
_CONFIG_FILES = ("config.json", "generation_config.json")


class OutputFolder:
    """Where a run writes.

    Args:
        path: Made when the run begins.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.model = path / "model"

    @property
    def has_run(self) -> bool:
        """Whether a run has begun here."""
        return (self.path / RECIPE).is_file()

    @property
    def is_saved(self) -> bool:
        """Whether there is a checkpoint of it; one without may as well begin anew."""
        return bool(RunFolder(self.checkpoints).checkpoints())

    @property
    def resume_command(self) -> str:
        """What to type to go on."""
        return f"lowtide train {shlex.quote(str(self.path))} --resume"

    def recipe(self, overrides: Sequence[str] = ()) -> TrainRecipe:
        """The recipe of the run that is here.

        Raises:
            ConfigError: It cannot be read, or an override does not fit.
        """
        return config.override(config.read_config(TrainRecipe, self.path / RECIPE), overrides)

    def check(self, recipe: TrainRecipe, *, resume: bool) -> dict[str, tuple[Plain, Plain]]:
        """What differs from the run that is here, where it may go on with this recipe; nothing where there is none.

        Raises:
            ConfigError: There is a run and it is not to go on, there is none to go on with, or its recipe differs in more than
                what may change.
        """
        if not self.has_run:
            if resume:
                raise ConfigError(
                    f"there is no run in {self.path} to resume: leave --resume out to begin one", key="out"
                )
            if self.path.is_dir() and any(not path.name.startswith(".") for path in self.path.iterdir()):
                raise ConfigError(
                    f"{self.path} is not empty, and has no run: give another folder with --out", key="out"
                )
            return {}
        if not self.is_saved:
            return {}
        differing = differing_keys(self.recipe(), recipe)
        harmful = harmful_keys(list(differing))
        if not resume:
            what = f"a run of another recipe ({_listed(differing, harmful)})" if harmful else "a run of this recipe"
            advice = "" if harmful else f"go on with it by `{self.resume_command}`, or "
            raise ConfigError(f"{self.path} has {what} already: {advice}give another folder with --out", key="out")
        if harmful:
            raise ConfigError(
                f"the run in {self.path} cannot go on with another recipe: {_listed(differing, harmful)}; steps, epochs, memory, "
                "evaluation, checkpoints, log and faults may change. Leave these as they were, or begin in another folder",
                key=harmful[0],
            )
        return differing

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Be the one process that writes here.

        Raises:
            FolderInUseError: Another process is; the message has its number.
            CheckpointWriteError: The folder cannot be made.
        """
        with RunFolder(self.path):
            yield

    def check_data(self, data: Mapping[str, Plain]) -> None:
        """Refuse other data than what is saved was trained on.

        Raises:
            ConfigError: It has changed.
        """
        path = self.path / DATA
        old = plain_text.read(path, "record of the data") if self.is_saved and path.is_file() else None
        if isinstance(old, dict) and old.get("fingerprint") != data["fingerprint"]:
            raise ConfigError(
                f"the data of the run in {self.path} is not what it began with ({data['files']} has other contents): give the old "
                "data, or begin in another folder",
                key="data",
            )

    def begin(self, recipe: TrainRecipe, data: Mapping[str, Plain]) -> None:
        """Write down what is run and what it reads, once the folder is held."""
        # The recipe first: a folder that has one can be begun again, whatever else a killed process did not come to.
        texts = {
            self.path / RECIPE: plain_text.render(config.to_plain(recipe), "yaml"),
            self.path / DATA: json.dumps(data, indent=2),
        }
        for path, text in texts.items():
            plain_text.clear_unfinished(path)
            with plain_text.written_whole(path) as file:
                file.write(text.encode())

    def publish(self, checkpoint: Path, source: Path | None, dtype: str) -> Path:
        """Make `model/` of a checkpoint: a copy of its weights, with what belongs to them.

        Args:
            checkpoint: Of the last step.
            source: The Hugging Face folder that the model came from; its tokenizer and configs go along.
            dtype: Of the weights, which the config names.
        """
        for left in self.path.glob(f"{_HIDDEN_MODEL}*"):  # by a process that was killed: this one holds the folder
            shutil.rmtree(left)
        fresh = self.path / f"{_HIDDEN_MODEL}{os.getpid()}"
        fresh.mkdir()
        for file in sorted(checkpoint.iterdir()):
            is_model = file.name.startswith("model") and file.name.endswith(_MODEL_SUFFIXES)
            if is_model or file.name in _CONFIG_FILES:
                # No link: who writes into the result must not change the checkpoint.
                shutil.copyfile(file, fresh / file.name)
        if source is not None:
            with contextlib.suppress(ConfigError):  # which has no tokenizer
                for file in tokenizer_files(source):
                    shutil.copyfile(file, fresh / file.name)
            for name in _CONFIG_FILES:
                if (source / name).is_file():
                    shutil.copyfile(source / name, fresh / name)
            _name_dtype(fresh / "config.json", dtype)
        self._replace_model(fresh)
        return self.model

    def _replace_model(self, fresh: Path) -> None:
        """Give the new model its name when it is on the disk; the old one goes when that is so."""
        for file in fresh.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        disk = Disk()
        disk.sync_folder(fresh)
        old = self.path / f"{_HIDDEN_MODEL}{os.getpid()}.old"
        if self.model.exists():
            self.model.rename(old)
        fresh.rename(self.model)
        disk.sync_folder(self.path)
        shutil.rmtree(old, ignore_errors=True)


def _listed(differing: Mapping[str, tuple[Plain, Plain]], keys: Sequence[str]) -> str:
    shown = [f"{key} is {_told(differing[key][1])} and was {_told(differing[key][0])}" for key in keys[:3]]
    return "; ".join([*shown, *([f"and {len(keys) - 3} more"] if len(keys) > 3 else [])])


def _told(value: Plain) -> str:
    return json.dumps(value)


def differences_in_words(differing: Mapping[str, tuple[Plain, Plain]]) -> str:
    """`steps is 200 and was 100`, for each key."""
    return _listed(differing, list(differing))


def _name_dtype(path: Path, dtype: str) -> None:
    """The weights' type into a config, under the name that the config uses."""
    if not path.is_file():
        return
    values = json.loads(path.read_text(encoding="utf-8"))
    values["torch_dtype" if "torch_dtype" in values else "dtype"] = dtype
    with plain_text.written_whole(path) as file:
        file.write((json.dumps(values, indent=2) + "\n").encode())
