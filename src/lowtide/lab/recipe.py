"""Recipe: a training run as a file: what is trained, how, and under which plan.

A recipe is YAML or JSON, read strictly: an unknown key is an error that names the nearest known one. Everything that
would change the numbers of the run stands in it, so that the same recipe gives the same losses.

    model: gpt-tiny
    batch: 2x64
    steps: 20
    optimizer: {name: adamw, settings: {lr: 0.001}}
    plan: {weights: streamed, update: host, device_memory: 4MiB}
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from lowtide.config import require_least
from lowtide.errors import ConfigError
from lowtide.lab import recipe_parts as parts
from lowtide.optim.update_types import numerics_of
from lowtide.planning.budget_plans import StaticPartition, WarmUp
from lowtide.planning.plan import Schedule, Site
from lowtide.units import parse_dtype

ModelSetting = bool | int | float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileRecipe:
    """What `torch.compile` compiles, with the backend's defaults and fixed shapes."""

    scope: Literal["model", "blocks"] = "model"
    """The whole model with its loss as one graph, or each repeated block by itself: one graph, reused by equal blocks."""
    activation_budget: float | None = None
    """torch's activation memory budget, 0 to 1: the share of what a compiled graph saves by default."""
    backend: Literal["inductor", "aot_eager_decomp_partition"] = "inductor"
    """The second parts forward and backward as inductor does, and runs them operator by operator: seconds instead of
    minutes, for the memory that is saved and not for speed."""

    def __post_init__(self) -> None:
        if self.activation_budget is not None and not 0.0 <= self.activation_budget <= 1.0:
            raise ConfigError(
                f"activation_budget is {self.activation_budget}; give a number from 0 to 1", key="activation_budget"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedFigures:
    """What others reported for this configuration, shown next to our own."""

    source: str
    """Who reported it, and on which hardware."""
    peak_gib: float | None = None
    samples_per_s: float | None = None
    steps_10_to_100_s: float | None = None
    perplexity: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One training run."""

    model: str
    """A built-in name, `hf:FOLDER_OR_CONFIG` or `package.module:factory`."""
    about: str = ""
    """What is tried, in a line."""
    model_settings: dict[str, ModelSetting] = field(default_factory=dict)
    """Fields of a built-in model's config that differ from the named one, such as `norm: fused`."""
    data: parts.RandomInputs | parts.Stories | parts.TextFiles | parts.HubDataset = field(
        default_factory=parts.RandomInputs
    )
    """`kind: random-inputs`, `stories`, `text-files` or `hub-dataset`."""
    batch: str | None = None
    """`8x2048` (sequences x tokens) or `64x3x224x224` (images); the model's default where it is left out."""
    dtype: str = "float32"
    """Type of the weights, and of everything computed from them: float32, bfloat16 or float16, or fp32, bf16, fp16."""
    device: str | None = None
    """`cuda` or `cpu`, where the device of the managed run is emulated; None: cuda where there is one."""
    steps: int = 20
    """How many updates are made."""
    seed: int = 0
    """Seeds the first weights and the dropout masks."""
    accumulation: int = 1
    """Backward calls to an update, each on a batch of its own; each loss is divided by it."""
    max_grad_norm: float | None = None
    """Gradients are clipped to this norm before each update; None: not at all."""
    optimizer: parts.OptimizerRecipe = field(default_factory=parts.OptimizerRecipe)
    scheduler: parts.Constant | parts.LinearWarmup | parts.RiseFromZero = field(default_factory=parts.Constant)
    """`kind: constant`, `kind: linear-warmup` with `warmup_steps`, or `kind: rise-from-zero` with `rise_steps`."""
    precision: str | None = None
    """How updates land in the weights, through Lowtide's own kernels: see `lowtide.manage`. None: the optimizer's own step."""
    moments: Literal["fp32", "bf16", "8bit"] = "fp32"
    """How optimizer state is stored; needs a precision."""
    compile: CompileRecipe | None = None
    plan: parts.PlanRecipe | StaticPartition | WarmUp | None = field(default_factory=parts.PlanRecipe)
    """The plan by hand, or `kind: static-partition` with its `share`, or `kind: warm-up`; None: plain torch, nothing is managed."""
    evaluation: parts.EvaluationRecipe | None = None
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """The precision of fp32 matrix products, as `torch.set_float32_matmul_precision` takes it."""
    cublas_workspace: str | None = None
    """`CUBLAS_WORKSPACE_CONFIG` of the run, such as `:4096:2:16:8`; None: the library's default."""
    published: PublishedFigures | None = None
    tolerance: float = 0.0
    """Largest difference from the plain run that a check accepts in any loss or weight; 0 asks for the same bits."""

    def __post_init__(self) -> None:
        # One name for each type, so that the same settings are the same recipe; frozen, so set past the guard.
        object.__setattr__(self, "dtype", parse_dtype(self.dtype, key="dtype"))
        require_least(self, 1, "steps", "accumulation")
        require_least(self, 0, "seed", "tolerance")
        if self.max_grad_norm is not None and self.max_grad_norm <= 0:
            raise ConfigError(
                f"max_grad_norm is {self.max_grad_norm}; give a number above 0, or leave it out", key="max_grad_norm"
            )
        if self.plan is not None and self.plan.schedule is Schedule.IN_BACKWARD:
            self._check_in_backward()
        if isinstance(self.plan, WarmUp) and self.steps < 2:
            raise ConfigError(
                "plan is a warm-up, which watches the first step and plans those after it, and steps is 1: set steps to 2 or "
                "more, or give another plan",
                key="steps",
            )
        if isinstance(self.scheduler, parts.LinearWarmup) and self.scheduler.warmup_steps > self.steps:
            raise ConfigError(
                f"scheduler.warmup_steps is {self.scheduler.warmup_steps}, more than the {self.steps} steps of the run",
                key="scheduler.warmup_steps",
            )
        if self.evaluation is not None and self.evaluation.after and self.evaluation.after[-1] >= self.steps:
            raise ConfigError(
                f"evaluation.after has {self.evaluation.after[-1]}, and steps is {self.steps}: the last evaluation is always "
                "after the last step; give numbers below it (evaluation.after=[] for none), or raise steps",
                key="evaluation.after",
            )
        if self.precision is not None and self.plan is None:
            raise ConfigError(
                f"precision is {self.precision!r}, which is a session's, and plan is null: give a plan, such as "
                "{weights: resident, update: device}, or leave precision out",
                key="precision",
            )
        self._check_numerics()

    def _check_numerics(self) -> None:
        if self.precision is not None:
            wanted = numerics_of(self.precision, self.moments)[0].dtype
            if wanted != self.torch_dtype:
                name = str(wanted).removeprefix("torch.")
                raise ConfigError(
                    f"precision is {self.precision!r}, which is for weights in {name}, and dtype is {self.dtype}: set "
                    f"dtype to {name}, or choose another precision",
                    key="precision",
                )
            return
        if self.moments != "fp32":
            raise ConfigError(
                f"moments is {self.moments!r}, which is for updates through Lowtide's own kernels: give a precision as "
                "well, such as 'fp32' or 'bf16 exact', or leave moments out",
                key="moments",
            )
        if isinstance(self.plan, parts.PlanRecipe) and Site.PAGED in self.plan.sites:
            raise ConfigError(
                "plan.update is 'paged', which is for updates through Lowtide's own kernels: give a precision as well, such "
                "as 'fp32' or 'bf16 exact', or update on the device or the host",
                key="precision",
            )

    def _check_in_backward(self) -> None:
        if self.accumulation > 1:
            raise ConfigError(
                f"accumulation is {self.accumulation}, and the schedule in_backward allows one backward to an update: "
                "set accumulation to 1, or plan.schedule to deferred",
                key="accumulation",
            )
        if self.max_grad_norm is not None:
            raise ConfigError(
                f"max_grad_norm is {self.max_grad_norm}, which needs all gradients before the first update, and the "
                "schedule in_backward keeps none: leave max_grad_norm out, or set plan.schedule to deferred",
                key="max_grad_norm",
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch's own."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype
