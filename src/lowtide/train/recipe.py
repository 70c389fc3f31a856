"""TrainRecipe: a whole training run as a file.

Keys that the lab's recipes have too mean the same here. Where the lab says a plan, a run says how much memory there is, and
the plan is found.

    model: hf:path/to/folder
    data: {text: notes.txt, held_out_share: 0.05}
    device_memory: 24GiB
    epochs: 1
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from lowtide import config
from lowtide.config import require_least
from lowtide.errors import ConfigError, UnknownNameError
from lowtide.lab.recipe import ModelSetting
from lowtide.lab.recipe_file import RUNS_FOLDER, SUFFIXES, known_recipes, read_as
from lowtide.lab.recipe_parts import OptimizerRecipe
from lowtide.optim.update_types import numerics_of
from lowtide.plain_text import Plain
from lowtide.planning.plan import Schedule, require_sizes
from lowtide.units import parse_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRecipe:
    """What the model reads: text, or tokens that were made before. Either `text` or `tokens`."""

    text: Path | None = None
    """A text file, or a folder of .txt files; each file is one document."""
    tokens: Path | None = None
    """A .npy file of whole numbers, a .bin file of `bin_type`, or a folder of such files."""
    bin_type: Literal["uint16", "uint32"] = "uint16"
    """What a .bin file holds."""
    tokenizer: str | None = None
    """`bytes`, or `hf:FOLDER` with a tokenizer; None: the one in the model's own folder, else bytes."""
    held_out: Path | None = None
    """Text or tokens to evaluate on, of the same form."""
    held_out_share: float = 0.0
    """Else the share of the sequences, from the end, that is evaluated on and not trained on."""
    shuffle: bool = True
    """Whether each epoch has an order of its own, drawn from the seed; False keeps the order of the text."""

    def __post_init__(self) -> None:
        if (self.text is None) == (self.tokens is None):
            what = "neither text nor tokens" if self.text is None else "both text and tokens"
            raise ConfigError(f"data has {what}: give one of them, such as data.text=FILE", key="text")
        if not 0.0 <= self.held_out_share < 1.0:
            raise ConfigError(
                f"held_out_share is {self.held_out_share}; give a number from 0 up to, not including, 1",
                key="held_out_share",
            )
        if self.held_out is not None and self.held_out_share:
            raise ConfigError(
                f"held_out is {self.held_out} and held_out_share is {self.held_out_share}: give one of them",
                key="held_out",
            )
        if self.tokenizer is not None and self.tokenizer != "bytes" and not self.tokenizer.startswith("hf:"):
            raise ConfigError(f"tokenizer is {self.tokenizer!r}; give bytes, or hf:FOLDER", key="tokenizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerRecipe:
    """The learning rate of each step, as a share of the optimizer's."""

    decay: Literal["cosine", "linear", "none"] = "cosine"
    """How it falls after the rise, until the last step."""
    warmup_steps: int = 0
    """It rises in so many equal steps; the first has 1/warmup_steps of it."""
    floor: float = 0.0
    """The share that it falls to."""

    def __post_init__(self) -> None:
        require_least(self, 0, "warmup_steps")
        if not 0.0 <= self.floor <= 1.0:
            raise ConfigError(f"floor is {self.floor}; give a number from 0 to 1", key="floor")

    def share(self, step: int, steps: int) -> float:
        """The share at the step numbered from 0, of so many.

        Example:
            >>> [SchedulerRecipe(decay="linear", warmup_steps=2).share(step, 4) for step in range(4)]
            [0.5, 1.0, 1.0, 0.5]
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = min(1.0, (step - self.warmup_steps) / max(1, steps - self.warmup_steps))
        falls = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "none": 1.0}
        return self.floor + (1 - self.floor) * falls[self.decay]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecipe:
    """The loss on what is held out."""

    every: int | None = None
    """Steps between two evaluations; the last step is followed by one in any case."""
    batches: int = 50
    """The most batches of one evaluation, from the first on."""

    def __post_init__(self) -> None:
        require_least(self, 1, "every", "batches")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecipe:
    """When the run is saved, beside its end."""

    every: int | None = None
    """Steps between two checkpoints."""
    minutes: float | None = 15.0
    """Minutes between two checkpoints, whichever comes first."""
    keep: int = 2
    """The newest so many stay."""
    keep_every: int | None = None
    """Checkpoints of steps that this divides stay for ever."""
    allowance: str | int | None = "auto"
    """Host memory for saving while the training goes on, such as `4GiB`; `auto`: a quarter of what is free; None: none, and
    the training waits for each save."""

    def __post_init__(self) -> None:
        require_least(self, 1, "every", "keep", "keep_every")
        if self.allowance != "auto":
            require_sizes(self, "allowance")
        if self.minutes is not None and not self.minutes > 0:
            raise ConfigError(f"minutes is {self.minutes}; give a number above 0, or null for none", key="minutes")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRecipe:
    """What is told while the run goes on; `metrics.jsonl` has every step whatever stands here."""

    every: int = 10
    """Steps between two lines where the output is no terminal."""
    tensorboard: bool = False
    """Curves for TensorBoard, in the folder of the run."""

    def __post_init__(self) -> None:
        require_least(self, 1, "every")


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRecipe:
    """What the run takes before it gives up."""

    retries: int = 3
    """How often in a row one step is repeated that was lost, to memory that ran out for instance."""
    skip_non_finite: int = 0
    """How many steps in a row may have a loss or a gradient that is NaN or infinite; they are left out."""
    grace_s: float = 30.0
    """Seconds between SIGTERM and the end of the process: what a scheduler gives."""

    def __post_init__(self) -> None:
        require_least(self, 0, "retries", "skip_non_finite")
        require_least(self, 1, "grace_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRecipe:
    """One whole training run."""

    model: str
    """A built-in name, `package.module:factory`, or `hf:FOLDER` with its weights; `hf:CONFIG` draws them."""
    about: str = ""
    """What it is for, in a line."""
    model_settings: dict[str, ModelSetting] = field(default_factory=dict)
    """Fields of a built-in model's config that differ from the named one."""
    data: DataRecipe
    """What it trains on."""
    batch: str | None = None
    """`8x2048`: sequences of so many tokens each; the model's default where it is left out."""
    steps: int | None = None
    """How many updates are made; None: as many as `epochs` have."""
    epochs: float = 1.0
    """How often all sequences are read, where `steps` is left out."""
    device: str | None = None
    """`cuda`, or `cpu`, where the device is emulated; None: cuda where there is one."""
    device_memory: str | int | None = None
    """What may be reserved of the device, such as `24GiB`; None: what is free. An emulated device needs it."""
    host_memory: str | int | None = None
    """What may be used of the host; None: all of it."""
    sharding: Literal["gather", "one to all", "auto"] | None = None
    """How the ranks that torchrun has started share weights, gradients and optimizer state; None: each has all of them."""
    dtype: str | None = None
    """Type of the weights; None: what the folder's config names, float32 for other models."""
    precision: str | None = None
    """How updates land in the weights, through Lowtide's own kernels: see `lowtide.manage`. None: the optimizer's own step."""
    moments: Literal["fp32", "bf16", "8bit"] = "fp32"
    """How optimizer state is stored; needs a precision."""
    schedule: Schedule = Schedule.DEFERRED
    """When updates run: `deferred`, or `in_backward`, which cannot clip or accumulate."""
    seed: int = 0
    """Seeds first weights, the order of sequences, dropout masks and stochastic rounding."""
    accumulation: int = 1
    """Backward calls to an update, each on a batch of its own; each loss is divided by it."""
    max_grad_norm: float | None = None
    """Gradients are clipped to this norm before each update; None: not at all."""
    optimizer: OptimizerRecipe = field(default_factory=OptimizerRecipe)
    """`{name: adamw, settings: {lr: 0.001}}`: torch's by name, `lion`, `deep-one-adafactor`."""
    scheduler: SchedulerRecipe = field(default_factory=SchedulerRecipe)
    """The learning rate of each step."""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """The precision of fp32 matrix products, as `torch.set_float32_matmul_precision` takes it."""
    deterministic: bool = False
    """Whether CUDA uses only kernels that give the same bits again, so that a resumed run does; they may be slower."""
    evaluation: EvaluationRecipe = field(default_factory=EvaluationRecipe)
    """The loss on what is held out; without such data there is none."""
    checkpoints: CheckpointRecipe = field(default_factory=CheckpointRecipe)
    """When the run is saved."""
    log: LogRecipe = field(default_factory=LogRecipe)
    """What is told while the run goes on."""
    faults: FaultRecipe = field(default_factory=FaultRecipe)
    """What the run takes before it gives up."""

    def __post_init__(self) -> None:
        if self.dtype is not None:
            # One name for each type, so that the same settings are the same recipe; frozen, so set past the guard.
            object.__setattr__(self, "dtype", parse_dtype(self.dtype, key="dtype"))
        require_least(self, 1, "steps", "accumulation")
        require_least(self, 0, "seed")
        require_sizes(self, "device_memory", "host_memory")
        for key in ("epochs", "max_grad_norm"):
            value = getattr(self, key)
            if value is not None and not value > 0:
                raise ConfigError(f"{key} is {value}; give a number above 0", key=key)
        self._check_schedule()
        self._check_numerics()

    def _check_schedule(self) -> None:
        if self.schedule is not Schedule.IN_BACKWARD:
            return
        if self.accumulation > 1:
            raise ConfigError(
                f"accumulation is {self.accumulation}, and the schedule in_backward allows one backward to an update: set "
                "accumulation to 1, or schedule to deferred",
                key="accumulation",
            )
        if self.max_grad_norm is not None:
            raise ConfigError(
                f"max_grad_norm is {self.max_grad_norm}, which needs all gradients before the first update, and the "
                "schedule in_backward keeps none: leave max_grad_norm out, or set schedule to deferred",
                key="max_grad_norm",
            )
        if self.is_scaled:
            raise ConfigError(
                f"precision is {self.precision!r}, whose loss is scaled, and the schedule in_backward cannot undo the scale: "
                "set schedule to deferred, or choose a bf16 precision",
                key="precision",
            )

    def _check_numerics(self) -> None:
        if self.precision is None:
            if self.moments != "fp32":
                raise ConfigError(
                    f"moments is {self.moments!r}, which is for updates through Lowtide's own kernels: give a precision as "
                    "well, such as 'fp32' or 'bf16 exact', or leave moments out",
                    key="moments",
                )
            return
        wanted = numerics_of(self.precision, self.moments)[0].dtype
        if self.dtype is not None and wanted != self.torch_dtype:
            name = str(wanted).removeprefix("torch.")
            raise ConfigError(
                f"precision is {self.precision!r}, which is for weights in {name}, and dtype is {self.dtype}: set dtype to "
                f"{name}, or choose another precision",
                key="precision",
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch's own; float32 where it is left to the model."""
        dtype: torch.dtype = getattr(torch, self.dtype or "float32")
        return dtype

    @property
    def is_scaled(self) -> bool:
        """Whether the loss is scaled, so that gradients in fp16 stay in range."""
        return self.precision == "fp16 exact"


HARMLESS = frozenset(
    {
        "about",
        "steps",
        "epochs",
        "device_memory",
        "host_memory",
        "sharding",
        "evaluation",
        "checkpoints",
        "log",
        "faults",
    }
)
"""What a run may be resumed with otherwise: none of it changes a step that both runs take, but that a learning rate which
decays over `steps` follows the new number from there on, and that `sharding` may add gradients up in another order."""


def read_train_recipe(name: str, overrides: Sequence[str] = ()) -> TrainRecipe:
    """The recipe of a run: a file, or a name such as `finetune`; all its paths absolute.

    Raises:
        ConfigError: The file cannot be read, a key is unknown, or a value does not fit.
        UnknownNameError: There is no recipe of that name.
    """
    known = known_train_recipes()
    if Path(name).suffix not in SUFFIXES and name not in known:
        raise UnknownNameError("recipe of a run", name, known)
    path = known.get(name, Path(name))
    try:
        recipe = read_as(TrainRecipe, path, overrides)
    except ConfigError as error:
        if "missing key" not in str(error):
            raise
        raise ConfigError(f"{error}: give --set {error.key}=...", key=error.key) from error
    # Those of the file are absolute by now; what was typed is from where it was typed.
    data = {key: value.absolute() for key in ("text", "tokens", "held_out") if (value := getattr(recipe.data, key))}
    if recipe.data.tokenizer is not None:
        data["tokenizer"] = _absolute(recipe.data.tokenizer)
    return replace(recipe, model=_absolute(recipe.model), data=replace(recipe.data, **data))


def known_train_recipes() -> dict[str, Path]:
    """The file of each recipe that comes with the package."""
    return known_recipes(base=RUNS_FOLDER)


def _absolute(spec: str) -> str:
    """`hf:FOLDER` with the whole path, so that a run can be resumed from elsewhere; anything else as it is."""
    path = Path(spec.removeprefix("hf:")).expanduser()
    return f"hf:{path.absolute()}" if spec.startswith("hf:") and path.exists() else spec


def differing_keys(old: TrainRecipe, new: TrainRecipe) -> dict[str, tuple[Plain, Plain]]:
    """What two recipes have otherwise, by dotted key: the old value and the new one."""
    flat_old, flat_new = _flat(config.to_plain(old)), _flat(config.to_plain(new))
    keys = [key for key in {**flat_old, **flat_new} if flat_old.get(key) != flat_new.get(key)]
    return {key: (flat_old.get(key), flat_new.get(key)) for key in keys}


def harmful_keys(keys: Sequence[str]) -> list[str]:
    """Those of the keys with which a run cannot be resumed otherwise."""
    return [key for key in keys if key.partition(".")[0] not in HARMLESS]


def _flat(plain: dict[str, Plain], prefix: str = "") -> dict[str, Plain]:
    found: dict[str, Plain] = {}
    for key, value in plain.items():
        # An empty mapping has no keys of its own to differ by.
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found
