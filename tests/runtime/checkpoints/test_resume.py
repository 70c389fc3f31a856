"""A resumed run goes on with the bits of the undisturbed one: every numerics mode, under the same plan and another."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import lowtide
from tests.runtime.checkpoints.training_runs import (
    RESIDENT,
    SPREAD,
    STREAMED_HOST,
    Run,
    Training,
    assert_resumes,
    assert_same,
    draw_from,
    training,
)
from tests.zoo import bf16_safe

PAGED = {"weights": "streamed", "update": "paged"}


@pytest.fixture(autouse=True)
def safe() -> Iterator[None]:
    with bf16_safe():
        yield


# Each precision with each format of moments; the other choices are spread over them so that each meets each precision.
RUNS = [
    Run(precision=None, accumulate=2, activations="offload", max_grad_norm=0.5),
    Run(precision=None, optimizer="sgd", schedule="in_backward", activations="recompute", place=STREAMED_HOST),
    Run(precision=None, optimizer="torch adafactor", has_scheduler=False),
    Run(precision=None, optimizer="amsgrad", place=RESIDENT),
    Run(precision="fp32", moments="fp32", schedule="in_backward", activations="offload", place=PAGED),
    Run(precision="fp32", moments="bf16", optimizer="sgd", accumulate=3, place=RESIDENT),
    Run(precision="fp32", moments="8bit", max_grad_norm=0.5, activations="recompute", place=STREAMED_HOST),
    Run(precision="fp32", optimizer="adafactor", has_scheduler=False),
    Run(precision="bf16 exact", moments="fp32", accumulate=2, max_grad_norm=0.5),
    Run(precision="bf16 exact", moments="bf16", schedule="in_backward", activations="recompute"),
    Run(precision="bf16 exact", moments="8bit", optimizer="sgd", activations="offload", place=PAGED),
    Run(precision="bf16 exact", optimizer="adafactor", place=STREAMED_HOST),
    Run(precision="bf16 stochastic", moments="fp32", optimizer="sgd", schedule="in_backward", place=STREAMED_HOST),
    Run(precision="bf16 stochastic", moments="bf16", accumulate=2, activations="offload", place=RESIDENT),
    Run(precision="bf16 stochastic", moments="8bit", max_grad_norm=0.5, place=PAGED),
    Run(precision="bf16 stochastic", optimizer="adafactor", activations="recompute", schedule="in_backward"),
    Run(precision="fp16 exact", moments="fp32", activations="recompute", place=PAGED),
    Run(precision="fp16 exact", moments="bf16", optimizer="amsgrad", accumulate=2),
    Run(precision="fp16 exact", moments="8bit", place=STREAMED_HOST, max_grad_norm=0.5, activations="offload"),
]


def under_another_plan(run: Run) -> Run:
    """Other sites, other chunks, another schedule where gradients need not wait; the seed comes with the checkpoint."""
    place = next(place for place in (STREAMED_HOST, RESIDENT, SPREAD) if place != run.place)
    may_change = run.accumulate == 1 and run.max_grad_norm is None and run.precision != "fp16 exact"
    schedule = {"deferred": "in_backward", "in_backward": "deferred"}[run.schedule] if may_change else run.schedule
    activations = None if run.activations else "recompute"
    return replace(run, place=place, schedule=schedule, activations=activations, chunk_bytes=2048, seed=123)


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_resume_is_exact(run: Run, tmp_path: Path) -> None:
    assert_resumes(run, run, tmp_path)


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_resume_under_another_plan_is_exact(run: Run, tmp_path: Path) -> None:
    assert_resumes(run, under_another_plan(run), tmp_path)


IN_A_PROCESS = """
import sys
from pathlib import Path
import torch
from tests.runtime.checkpoints.training_runs import Run, draw_from, training
from tests.zoo import bf16_safe

run = Run(precision="bf16 stochastic", moments="8bit")
draw_from(5)
with bf16_safe(), training(run) as resumed:
    resumed.load(Path(sys.argv[1]))
    torch.save([resumed.steps(2), resumed.values()], sys.argv[2])
"""


def test_a_fresh_process_goes_on(tmp_path: Path) -> None:
    run = Run(precision="bf16 stochastic", moments="8bit")
    draw_from(11)
    with training(run) as whole:
        whole.steps(2)
        whole.session.save(tmp_path / "run", state=whole.state)
        losses, values = whole.steps(2), whole.values()
    out = tmp_path / "out.pt"
    done = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS, tmp_path / "run", out],
        cwd=Path(__file__).resolve().parents[3],
        env=None,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found_losses, found_values = torch.load(out, weights_only=True)
    assert found_losses == losses
    assert_same(found_values, values)


def test_a_checkpoint_before_the_first_step_is_one(tmp_path: Path) -> None:
    assert_resumes(Run(precision="bf16 exact"), Run(precision="bf16 exact"), tmp_path, num_before=0)


def test_saving_changes_nothing(tmp_path: Path) -> None:
    run = Run(precision="bf16 stochastic", activations="offload")
    found = []
    for saves in (False, True):
        draw_from(11)
        with training(run) as each:
            losses = []
            for _ in range(4):
                losses.append(each.step())
                if saves:
                    each.session.save(tmp_path, state=each.state)
            found.append((losses, each.values()))
    assert found[0][0] == found[1][0]
    assert_same(found[1][1], found[0][1])


def test_the_seed_of_a_checkpoint_stays_when_the_plan_changes(tmp_path: Path) -> None:
    run = Run(precision="bf16 stochastic", has_scheduler=False)
    draw_from(11)
    with training(run) as whole:
        whole.steps(1)
        whole.session.save(tmp_path, state=whole.state)
        losses, values = whole.steps(3), whole.values()
    with training(replace(run, seed=123)) as resumed:
        resumed.load(tmp_path)
        found = resumed.steps(1)
        resumed.session._switch(lowtide.make_plan(resumed.model, weights="resident", update="device"))
        assert found + resumed.steps(2) == losses
        assert_same(resumed.values(), values)


def test_a_momentum_that_is_switched_on_later(tmp_path: Path) -> None:
    """As at the first step, SGD takes the next gradient itself for it: that none was taken yet is saved, too."""
    run = Run(precision="bf16 exact", optimizer="sgd", has_scheduler=False)

    def set_momentum(each: Training, momentum: float) -> None:
        each.optimizer.param_groups[0].update(momentum=momentum, nesterov=momentum > 0)

    draw_from(11)
    with training(run) as whole:
        set_momentum(whole, 0.0)
        whole.steps(2)
        whole.session.save(tmp_path, state=whole.state)
        set_momentum(whole, 0.9)
        losses, values = whole.steps(2), whole.values()
    with training(run) as resumed:
        resumed.load(tmp_path)
        set_momentum(resumed, 0.9)
        assert resumed.steps(2) == losses
        assert_same(resumed.values(), values)


def test_a_scaler_of_torch(tmp_path: Path) -> None:
    def step(each: Training, scaler: torch.amp.GradScaler) -> float:
        ids = torch.randint(20, (2, 6), generator=each.generator)
        loss = each.model(ids).square().mean()
        scaler.scale(loss).backward()
        scaler.step(each.optimizer)
        scaler.update()
        each.optimizer.zero_grad()
        return float(loss.detach())

    def scaler() -> torch.amp.GradScaler:
        # Overflows at first, and grows every second step.
        return torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=2)

    run = Run(has_scheduler=False, place=STREAMED_HOST)
    draw_from(11)
    with training(run) as whole:
        first = scaler()
        for _ in range(5):
            step(whole, first)
        whole.session.save(tmp_path, state={**whole.state, "scaler": first})
        losses = [step(whole, first) for _ in range(5)]
        scale, values = first.get_scale(), whole.values()
    with training(run) as resumed:
        second = scaler()
        lowtide.load(tmp_path, resumed.session, state={**resumed.state, "scaler": second})
        assert [step(resumed, second) for _ in range(5)] == losses
        assert second.get_scale() == scale
        assert_same(resumed.values(), values)


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_resume_on_cuda_is_exact(run: Run, tmp_path: Path) -> None:
    on_cuda = replace(run, device="cuda")
    # Weights are elsewhere, and each update is where it was: host and device differ in the last bits there.
    weights = "streamed" if run.place["weights"] == "resident" else "resident"
    elsewhere = replace(on_cuda, place={**run.place, "weights": weights}, seed=123)
    assert_resumes(on_cuda, on_cuda, tmp_path / "same")
    assert_resumes(on_cuda, elsewhere, tmp_path / "elsewhere")
