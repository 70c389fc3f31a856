"""Records as the lab would write them: the published configurations, ours, and runs that came to a bad end.

Peaks are near the published ones and made of the parts that make up such a step; times and perplexities are invented,
and none of this is a measurement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from lowtide.lab.budget import BudgetPoint, BudgetSweep
from lowtide.lab.record import MemoryFigures, Outcome, PredictedFigures, RunRecord, SpeedFigures, Surroundings
from lowtide.units import GiB, MiB

SOURCE = "the experiment's own page, one RTX 4090, torch 2.8"
SURROUNDINGS = Surroundings(
    date="2026-03-01T10:00:00+00:00",
    commit="cad574b",
    device="NVIDIA H200",
    torch="2.13.0",
    lowtide="0.1.0",
    python="3.11.9",
    platform="Linux-6.8 x86_64",
)
LAYERS = 32


def record(
    name: str = "peak_memory/control", *, seed: int = 0, peak_bytes: int | None = GiB, **changes: Any
) -> RunRecord:
    """A small finished record; `recipe` is added to the least that there is."""
    recipe = {"model": "deep-one", "seed": seed, "steps": 100, **changes.pop("recipe", {})}
    around = replace(SURROUNDINGS, device=changes.pop("device", SURROUNDINGS.device))
    memory = None if peak_bytes is None else MemoryFigures(peak_bytes=peak_bytes, by_phase={"forward": peak_bytes})
    return RunRecord(
        **{
            "name": name,
            "outcome": Outcome.FINISHED,
            "surroundings": around,
            "recipe": recipe,
            "memory": memory,
            **changes,
        }
    )


@dataclass(frozen=True)
class Config:
    """What a configuration is made of."""

    name: str
    peak_gib: float
    step_s: float
    perplexity: float
    phase: str = "forward"
    published: tuple[float, float, float, float] | None = None
    """Peak, samples/s, seconds of steps 10 to 100, perplexity."""
    compile_s: float = 0.0
    is_predicted: bool = True
    weights_gib: float = 6.08
    gradients_gib: float = 0.0
    seeds: int = 1


PUBLISHED = (
    Config("control", 21.171, 0.71, 151.2, "forward", (21.165, 2.518, 100, 152.1), seeds=3),
    Config("bfloat16", 12.42, 0.112, 178.9, "backward", (12.418, 6.79, 41, 180.0), weights_gib=3.04, seeds=3),
    Config("checkpoint", 12.535, 0.93, 151.2, "backward", (12.529, 2.03, 135, 152.1), gradients_gib=5.9),
    Config("compile", 19.55, 0.64, 151.2, "backward", (19.712, 2.307, 96, 152.1), compile_s=52, is_predicted=False),
    Config("fused", 21.171, 0.72, 151.2, "forward", (21.164, 2.535, 100, 152.1)),
    Config("fused_checkpoint", 7.431, 0.94, 151.2, "backward", (7.425, 2.049, 134, 152.1)),
    Config("bf16_fused_chkpt", 3.981, 0.139, 181.7, "backward", (3.975, 5.834, 49, 182.5), weights_gib=3.04, seeds=2),
    Config(
        "memory_budget_05", 13.6, 0.9, 151.2, "backward", (13.561, 1.574, 125, 152.1), 75, False, gradients_gib=6.08
    ),
    Config("memory_budget_60", 15.2, 0.69, 151.2, "backward", (15.636, 1.76, 98, 152.1), 81, False),
    Config("fused_memory_budget_05", 13.6, 0.9, 151.2, "backward", (13.562, 1.938, 100, 152.1), 74, False),
    Config("bf16_budget_60", 6.71, 0.105, 181.1, "backward", (6.709, 2.76, 45, 182.4), 80, False, weights_gib=3.04),
)
OURS = (
    Config("bf16_stochastic", 3.74, 0.128, 151.6, "backward", weights_gib=3.04, seeds=3),
    Config("host_inputs", 3.39, 0.133, 151.7, "backward", weights_gib=3.04),
    Config("streamed", 0.562, 0.19, 151.5, "backward", weights_gib=0.28, is_predicted=False, seeds=2),
)


def experiment(*, seed: int = 0) -> list[RunRecord]:
    """All configurations, one that ran out of memory and one that was killed."""
    random = Random(seed)
    runs = [_run(config, number, random) for config in (*PUBLISHED, *OURS) for number in range(config.seeds)]
    out_of_memory = record(
        "peak_memory/control_batch_64",
        peak_bytes=138 * GiB,
        outcome=Outcome.OUT_OF_MEMORY,
        message="CUDA out of memory. Tried to allocate 2.47 GiB. GPU 0 has a total capacity of 139.81 GiB of which 1.9 GiB "
        "is free. Of the allocated memory 135.2 GiB is allocated by PyTorch, and 1.1 GiB is reserved.",
    )
    killed = record(
        "peak_memory/streamed_from_disk",
        peak_bytes=None,
        outcome=Outcome.KILLED,
        message="ended by signal 9 after 240 s, in step 12 of 100: most often the system running out of memory",
    )
    return [*runs, out_of_memory, killed]


def budget_sweep(*, is_monotone: bool = False, model: str = "deep-one") -> BudgetSweep:
    """A sweep of which the smallest budgets are not the best."""
    peaks = (13.561, 13.1, 13.4, 14.2, 14.9, 15.636, 18.2, 19.712)
    budgets = (0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0)
    ordered = sorted(peaks) if is_monotone else peaks
    points = [
        BudgetPoint(
            budget=budget,
            saved_bytes=int((0.77 + 12.4 * budget) * GiB),
            peak_bytes=int(peak * GiB),
            unfused_peak_bytes=int(peak * GiB) + 300 * MiB,
            recomputed_flops_share=round(0.95 * (1 - budget) ** 2, 4),
            seconds=0.5,
        )
        for budget, peak in zip(budgets, ordered, strict=True)
    ]
    return BudgetSweep(
        model=model, batch="4x768", dtype="bfloat16", torch="2.13.0", trace_seconds=1.0, points=tuple(points)
    )


def _run(config: Config, seed: int, random: Random) -> RunRecord:
    peak = int(config.peak_gib * GiB) + seed * MiB
    published = None
    if config.published is not None:
        figures = ("peak_gib", "samples_per_s", "steps_10_to_100_s", "perplexity")
        published = {"source": SOURCE, **dict(zip(figures, config.published, strict=True))}
    steps = [config.step_s * random.uniform(0.98, 1.02) for _ in range(100)]
    steps[0] += 1.5 + config.compile_s
    weights, gradients = int(config.weights_gib * GiB), int(config.gradients_gib * GiB)
    at_peak = {"weights": weights, "gradients": gradients, "optimizer": 5 * MiB, "workspace": 16 * MiB}
    at_peak["activations"] = int(0.93 * (peak - sum(at_peak.values())))
    at_peak["temporaries"] = peak - sum(at_peak.values())
    by_phase = {"forward": peak - 90 * MiB, "backward": peak - 40 * MiB, "update": peak // 2, "evaluation": peak // 3}
    predicted = None
    if config.is_predicted:
        predicted = PredictedFigures(peak_bytes=int(peak * 0.9992), peak_phase=config.phase, at_peak=at_peak)
    return record(
        f"peak_memory/{config.name}",
        seed=seed,
        recipe={"published": published},
        parameters=1_631_455_744,
        evaluation_loss=math.log(config.perplexity + random.uniform(-0.4, 0.4)),
        memory=MemoryFigures(
            peak_bytes=peak,
            by_phase={**by_phase, config.phase: peak},
            reserved_bytes=int(peak * 1.06),
            host_bytes=int(5.2 * GiB),
            at_peak=at_peak if config.is_predicted else {},
            timeline=_timeline(peak, weights, gradients, config.phase),
        ),
        predicted=predicted,
        speed=SpeedFigures(step_s=tuple(steps), samples_per_step=4),
        remarks=("Attention runs on another backend than the published run's.",) if "bf16" in config.name else (),
    )


def _timeline(peak: int, weights: int, gradients: int, phase: str) -> tuple[tuple[str, int], ...]:
    """Up through the layers and down again, or on up where gradients pile up; the peak in its phase."""
    hill = peak - weights
    height = 0.15 if gradients else 0.97 if phase == "backward" else 1.0
    up = [("forward", weights + int(hill * height * (layer + 1) / LAYERS)) for layer in range(LAYERS)]
    start, end = (0.2, 1.0) if gradients else (1.0 if phase == "backward" else 0.97, 0.12)
    down = [
        ("backward", weights + int(hill * (start + (end - start) * layer / (LAYERS - 1)))) for layer in range(LAYERS)
    ]
    return (*up, *down, *[("update", weights + int(hill * end * 0.9))] * 6)
