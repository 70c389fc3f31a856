"""What the tests of ranks run in each process: a small model trained on a part of each global batch."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn

import lowtide
from lowtide.distributed.ranks import Ranks, UnderWay
from lowtide.errors import LowtideError

VOCABULARY, WIDTH, LENGTH, NUM_BLOCKS = 24, 16, 5, 4
GLOBAL_BATCH = 12
NUM_STEPS = 20


class Block(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, dtype=dtype)
        self.down = nn.Linear(2 * WIDTH, WIDTH, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """A tied table, blocks of which one has frozen weights, and a block that only some batches use."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH, dtype=dtype)
        self.blocks = nn.ModuleList([Block(dtype) for _ in range(NUM_BLOCKS)])
        self.extra = Block(dtype)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=dtype)
        self.head.weight = self.table.weight
        for parameter in self.blocks[1].up.parameters():
            parameter.requires_grad_(False)

    def forward(self, ids: torch.Tensor, *, with_extra: bool = False) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        if with_extra:
            x = self.extra(x)
        return torch.nn.functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training, on one rank or several."""

    dtype: torch.dtype = torch.float64
    plan: dict[str, Any] = field(default_factory=dict)
    """Words of `make_plan`."""
    manage: dict[str, Any] = field(default_factory=dict)
    """Settings of `manage`."""
    micro_batches: int = 1
    skips_sync: bool = True
    clips: float | None = None
    """The loop clips by itself."""
    uses_extra: str = "nobody"
    """Who uses the extra block: nobody, everybody, or rank 0 alone in every second step."""
    overflows_at: int | None = None
    """The step whose loss overflows on rank 0, with a GradScaler; None without one."""
    num_steps: int = NUM_STEPS
    seed: int = 0

    def scaler(self) -> torch.amp.GradScaler | None:
        return None if self.overflows_at is None else torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=5)


def batches(num_steps: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, VOCABULARY, (num_steps, GLOBAL_BATCH, LENGTH), generator=generator)


def make(job: Job) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(job.seed)
    model = Net(job.dtype)
    decayed = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2, foreach=False
    )
    return model, optimizer


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in model.named_parameters()}


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a training leaves."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    scales: list[float]
    num_bytes: int = 0


def step_with(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> float:
    """Returns the scale that was used."""
    if scaler is None:
        optimizer.step()
        scale = 1.0
    else:
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()
    return scale


def scaled(
    loss: torch.Tensor, scaler: torch.amp.GradScaler | None, job: Job, step: int, is_first_part: bool
) -> torch.Tensor:
    if scaler is None:
        return loss
    if step == job.overflows_at and is_first_part:
        loss = loss * 1e38
    return scaler.scale(loss)


def loss_on(model: nn.Module, ids: torch.Tensor, job: Job, step: int, is_first_part: bool) -> torch.Tensor:
    with_extra = job.uses_extra == "everybody" or (job.uses_extra == "rank 0" and step % 2 == 0 and is_first_part)
    return model(ids, with_extra=with_extra)


def serial(job: Job, num_parts: int) -> Trained:
    """Plain torch on the whole batch, as the mean over as many parts as there are ranks and micro-batches."""
    model, optimizer = make(job)
    scaler = job.scaler()
    losses, scales = [], []
    for step, ids in enumerate(batches(job.num_steps)):
        total = 0.0
        parts = ids.chunk(num_parts * job.micro_batches)
        for number, part in enumerate(parts):
            is_first = number < job.micro_batches
            loss = loss_on(model, part, job, step, is_first)
            scaled(loss / len(parts), scaler, job, step, is_first).backward()
            total += float(loss.detach()) / len(parts)
        limit = job.clips or job.manage.get("max_grad_norm")
        if limit is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        scales.append(step_with(optimizer, scaler))
        losses.append(total)
    return Trained(losses=losses, weights=values_of(model), scales=scales)


def managed(rank: int, job: Job) -> Trained:
    """The same under management on this rank: the losses are averaged over the ranks."""
    size = dist.get_world_size()
    model, optimizer = make(job)
    scaler = job.scaler()
    plan = lowtide.make_plan(model, **job.plan)
    losses, scales = [], []
    with lowtide.manage(model, optimizer, plan, device="cpu", ranks=dist.group.WORLD, **job.manage) as session:
        for step, ids in enumerate(batches(job.num_steps)):
            total = 0.0
            mine = ids.chunk(size)[rank].chunk(job.micro_batches)
            for number, part in enumerate(mine):
                is_last = number == len(mine) - 1
                with session.no_sync() if job.skips_sync and not is_last else contextlib.nullcontext():
                    loss = loss_on(model, part, job, step, rank == 0)
                    scaled(loss / len(mine), scaler, job, step, rank == 0).backward()
                total += float(loss.detach()) / len(mine)
            if job.clips is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), job.clips)
            scales.append(step_with(optimizer, scaler))
            losses.append(total)
        num_bytes = session.stats().ranks.sent_bytes
    together = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(together)
    return Trained(
        losses=(together / size).tolist(),
        weights=values_of(model),
        scales=scales,
        num_bytes=num_bytes,
    )


def train_all(rank: int, jobs: dict[str, Job]) -> dict[str, Trained]:
    """One after the other, in the same processes."""
    return {name: managed(rank, job) for name, job in jobs.items()}


def small(seed: int = 0, width: int = 8) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def statistics_at_entry(rank: int) -> list[list[float]]:
    """The running mean that each forward begins with, and that of an evaluation."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    seen: list[list[float]] = []
    plan = lowtide.make_plan(model, weights="streamed", update="host")
    with lowtide.manage(model, optimizer, plan, device="cpu", ranks=dist.group.WORLD):
        model[1].register_forward_pre_hook(lambda module, inputs: seen.append(module.running_mean.tolist()))
        torch.manual_seed(rank)
        for _ in range(3):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return seen


def manage_differently(rank: int, what: str) -> tuple[str, str, bool]:
    """Each rank's error, and whether the model can be managed afterwards."""
    is_other = rank == 1
    model, optimizer = small(seed=int(is_other and what == "seed"), width=16 if is_other and what == "shape" else 8)
    if is_other and what == "frozen":
        model[1].weight.requires_grad_(False)
    plan: Any = lowtide.make_plan(
        model, weights="resident" if is_other and what == "plan" else "streamed", update="host"
    )
    settings: dict[str, Any] = {"max_grad_norm": 2.0 if is_other and what == "norm" else 1.0}
    if is_other and what == "rate":
        optimizer.param_groups[0]["lr"] = 0.5
    if is_other and what == "error":
        plan = "the plan"
    if what == "warm-up":
        plan = lowtide.WarmUp(device_memory="1MiB")
    if what == "sparse":
        model = nn.Sequential(nn.Embedding(8, 8, sparse=True), nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan, settings = lowtide.make_plan(model, weights="resident"), {}
    try:
        lowtide.manage(model, optimizer, plan, device="cpu", ranks=dist.group.WORLD, **settings).close()
    except Exception as error:
        found = (type(error).__name__, str(error))
    else:
        found = ("", "")
    model, optimizer = small()
    plan = lowtide.make_plan(model, weights="streamed", update="host")
    with lowtide.manage(model, optimizer, plan, device="cpu", ranks=dist.group.WORLD):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    return (*found, True)


@dataclass(frozen=True, kw_only=True)
class Loop:
    """One that sums over several backwards, or nests them."""

    plan: dict[str, Any]
    syncs: tuple[bool, ...]
    """For each backward of a step, whether it sends."""
    extra_in: tuple[int, ...] = ()
    """The backwards in which rank 0 uses the extra block."""
    has_hooks: bool = False
    """Rank 0 has hooks on the gradients."""
    is_reentrant: bool = False

    def loss(self, model: Net, ids: torch.Tensor, rank: int, number: int) -> torch.Tensor:
        if not self.is_reentrant:
            loss: torch.Tensor = model(ids, with_extra=rank == 0 and number in self.extra_in)
            return loss
        x = model.table(ids)
        for block in model.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)
        return torch.nn.functional.cross_entropy(model.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def losses(self, model: Net, ids: torch.Tensor, rank: int, size: int) -> Iterator[tuple[bool, torch.Tensor]]:
        for number, part in enumerate(ids.chunk(size)[rank].chunk(len(self.syncs))):
            yield self.syncs[number], self.loss(model, part, rank, number)


LOOPS = {
    "sums of one rank between averages": Loop(plan={}, syncs=(True, False, True), extra_in=(0, 1)),
    "hooks on one rank": Loop(plan={}, syncs=(True, True), has_hooks=True),
    "reentrant checkpoints": Loop(plan={}, syncs=(True,), is_reentrant=True),
    "reentrant checkpoints, accumulated": Loop(plan={}, syncs=(True, True), is_reentrant=True),
    "reentrant checkpoints, in backward": Loop(plan={"schedule": "in_backward"}, syncs=(True,), is_reentrant=True),
}


def run_loops(rank: int) -> dict[str, dict[str, torch.Tensor]]:
    """The weights that each loop leaves."""
    found = {}
    for name, loop in LOOPS.items():
        model, optimizer = make(Job())
        plan = lowtide.make_plan(model, weights="streamed", update="host", **loop.plan)
        with lowtide.manage(model, optimizer, plan, device="cpu", ranks=dist.group.WORLD) as session:
            for parameter in model.parameters() if loop.has_hooks and rank == 0 else ():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(lambda parameter: None)
            for ids in batches(4):
                for is_sent, loss in loop.losses(model, ids, rank, dist.get_world_size()):
                    with contextlib.nullcontext() if is_sent else session.no_sync():
                        loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        found[name] = values_of(model)
    return found


def run_loop_serially(loop: Loop, size: int) -> dict[str, torch.Tensor]:
    model, optimizer = make(Job())
    for ids in batches(4):
        for rank in range(size):
            for _, loss in loop.losses(model, ids, rank, size):
                (loss / size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values_of(model)


class Branch(nn.Module):
    """A layer in the middle that only some calls use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, *, is_whole: bool) -> torch.Tensor:
        x = self.first(x)
        return self.last(self.middle(x) if is_whole else x)


def two_in_one_backward(rank: int) -> dict[str, torch.Tensor]:
    """Two managed models, of which each rank uses another part."""
    torch.manual_seed(0)
    models = nn.ModuleList([Branch(), Branch()])
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, foreach=False) for model in models]
    with contextlib.ExitStack() as stack:
        for model, optimizer in zip(models, optimizers, strict=True):
            plan = lowtide.make_plan(model, weights="streamed", update="host")
            stack.enter_context(lowtide.manage(model, optimizer, plan, device="cpu", ranks=dist.group.WORLD))
        torch.manual_seed(rank)
        for step in range(3):
            x = models[0](torch.randn(4, 8), is_whole=step == 0 or rank == 0)
            models[1](x, is_whole=step == 0 or rank == 1).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return values_of(models)


def call_twice_with_statistics(rank: int) -> dict[str, torch.Tensor]:
    """The weights after a step whose loss is of two calls of a model with batch normalisation."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    plan = lowtide.make_plan(model, weights="streamed", update="host")
    with lowtide.manage(model, optimizer, plan, device="cpu", ranks=dist.group.WORLD):
        torch.manual_seed(rank)
        (model(torch.randn(4, 8)) * model(torch.randn(4, 8))).mean().backward()
        optimizer.step()
    return values_of(model)


def part_from_others(rank: int, how: str) -> tuple[str, str]:
    """What this rank is told where its weights would become others than those of rank 0; nothing if it is not told."""
    model, optimizer = small()
    extra = nn.Parameter(torch.full((8,), float(rank)))
    if how == "a parameter beside the model":
        optimizer.add_param_group({"params": [extra]})
    other = torch.optim.SGD(model[2].parameters(), lr=0.1)
    if how == "no optimizer":
        optimizer, other = None, torch.optim.SGD(model.parameters(), lr=0.1)  # type: ignore[assignment]
    plan = lowtide.make_plan(model, weights="streamed", update="host")

    def fail(*_: object) -> None:
        raise ValueError("a hook of the user's")

    try:
        with lowtide.manage(model, optimizer, plan, device="cpu", ranks=dist.group.WORLD) as session:
            if how == "a new parameter":
                optimizer.add_param_group({"params": [extra]})
            unsent = how in ("another optimizer", "no optimizer")
            for _ in range(2):
                with session.no_sync() if unsent else contextlib.nullcontext():
                    (model(torch.ones(2, 8) * (rank + 1)).square().sum() + (extra * (rank + 1)).sum()).backward()
                hook = None
                if how == "a hook that raises" and rank == 1:
                    hook = optimizer.register_step_pre_hook(fail)
                with contextlib.suppress(ValueError):
                    (other if unsent else optimizer).step()
                if hook is not None:
                    hook.remove()
                (other if unsent else optimizer).zero_grad()
    except LowtideError as error:
        return type(error).__name__, str(error)
    return "", ""


def save_in_a_forward(rank: int, folder: str) -> tuple[str, str]:
    """What each rank is told where rank 1 saves at a place where it cannot."""
    model, optimizer = small()
    plan = lowtide.make_plan(model, weights="streamed", update="host")
    with lowtide.manage(model, optimizer, plan, device="cpu", ranks=dist.group.WORLD) as session:
        try:
            if rank == 1:
                model[0].register_forward_pre_hook(lambda *_: bool(session.save(folder).exists()) or None)
                model(torch.ones(2, 8))
            else:
                session.save(folder)
        except LowtideError as error:
            return type(error).__name__, str(error)
    raise AssertionError("it was not refused")


def break_off(rank: int, how: str) -> tuple[str, str, float]:
    """Rank 1 breaks off in the third step; what the others are told, and after how many seconds."""
    model, optimizer = small()
    plan = lowtide.make_plan(model, weights="streamed", update="host")
    session = lowtide.manage(model, optimizer, plan, device="cpu", ranks=dist.group.WORLD)
    broken_s = time.monotonic()

    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("a hook of the user's")

    for step in range(4):
        try:
            if step == 2 and rank == 1:
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                model[0].weight.register_hook(fail)
            broken_s = time.monotonic()
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        except Exception as error:
            told = (type(error).__name__, str(error), time.monotonic() - broken_s)
            with contextlib.suppress(Exception):
                model(torch.ones(2, 8))  # it notices that the step is lost, and leaves
            with contextlib.suppress(Exception):
                session.close()
            return told
    raise AssertionError("nothing broke off")


def step_after_no_sync(rank: int, weights: str) -> tuple[str, list[float]]:
    """The refusal, and the first weights afterwards."""
    del rank
    model, optimizer = small()
    before = model[0].weight.detach().clone()
    plan = lowtide.make_plan(model, weights=weights, update="device")
    with lowtide.manage(model, optimizer, plan, device="cpu", ranks=dist.group.WORLD) as session:
        with session.no_sync():
            model(torch.ones(2, 8)).sum().backward()
        try:
            optimizer.step()
        except Exception as error:
            return str(error), (model[0].weight.detach() - before).flatten().tolist()
    raise AssertionError("it stepped")


def prepared(rank: int, budgets: tuple[str, ...]) -> tuple[list[float], str, int, int]:
    """Losses, the plan, and the most that the emulated device held, where each rank has a budget of its own."""
    size = dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    batch = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).chunk(size)[rank]
    losses = []
    with lowtide.prepare(
        model,
        optimizer,
        batch,
        loss=lambda net, x: net(x).square().mean(),
        device="cpu",
        device_memory=budgets[rank],
        ranks=dist.group.WORLD,
    ) as session:
        for _ in range(4):
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        peak_bytes, limit = session.take_device_peak(), session.plan.budgets.device_bytes
        plan = session.plan.summary
    together = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(together)
    assert limit is not None
    return (together / size).tolist(), plan, peak_bytes, limit


def prepared_serially() -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    batch = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(4):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


class Noisy(nn.Module):
    """Has dropout, so that each rank draws numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(torch.float64) for _ in range(3)])
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.dropout(block(x))
        return x.square().mean()


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """A run that saves after some steps, and one that goes on from there."""

    folder: str
    has_dropout: bool
    first: int = 0
    """Steps before the save; 0 to load instead."""
    then: int = 5
    num_saved: int = 2
    """Ranks that save, or have saved."""
    precision: str | None = None
    allowance: str | None = None


def resumed(rank: int, run: Resumed) -> tuple[list[float], list[str], bool]:
    """Losses of the steps after the save or the load, warnings, and whether it is exact."""
    size = dist.get_world_size()
    torch.manual_seed(0)
    model = Noisy()
    if run.precision is not None:
        model = model.to(torch.bfloat16)
    if not run.has_dropout:
        model.dropout.p = 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data = torch.Generator().manual_seed(5)
    torch.manual_seed(100 + rank)
    plan = lowtide.make_plan(model, weights="streamed", update="host")
    told: list[str] = []
    is_exact = True
    with lowtide.manage(
        model, optimizer, plan, device="cpu", ranks=dist.group.WORLD, precision=run.precision
    ) as session:
        state = {"scheduler": scheduler, "data": data, "own": {"rank": rank}}

        def steps(count: int) -> list[float]:
            losses = []
            for _ in range(count):
                batch = torch.randn(12, WIDTH, dtype=torch.float64, generator=data).to(next(model.parameters()).dtype)
                loss = model(batch.chunk(size)[rank])
                loss.backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
            return losses

        if run.first:
            steps(run.first)
            session.save(run.folder, state=state, allowance=run.allowance)
        else:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                loaded = lowtide.load(run.folder, session, state=state)
            told = [str(each.message) for each in caught]
            is_exact = loaded.is_exact
            # Of a rank that was not there: rank 0's.
            assert loaded.state["own"]["rank"] == (rank if rank < run.num_saved else 0)
        losses = steps(run.then)
        session.wait_for_save()
    together = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(together)
    return (together / size).tolist(), told, is_exact


def save_where_rank_0_cannot(rank: int, folder: str) -> tuple[str, str, bool]:
    """Each rank's error, and whether training goes on."""
    del rank
    model, optimizer = small()
    plan = lowtide.make_plan(model, weights="streamed", update="host")
    with lowtide.manage(model, optimizer, plan, device="cpu", ranks=dist.group.WORLD) as session:
        try:
            session.save(folder)
        except Exception as error:
            told = (type(error).__name__, str(error))
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        return (*told, True)


def train_and_be_killed(rank: int, folder: str, kills_at: int | None) -> list[float]:
    """Saves after every second step; rank 1 dies in the middle of one, or nobody does."""
    size = dist.get_world_size()
    model, optimizer = make(Job())
    plan = lowtide.make_plan(model, weights="streamed", update="host")
    losses = []
    with lowtide.manage(model, optimizer, plan, device="cpu", ranks=dist.group.WORLD) as session:
        if lowtide.newest_checkpoint(folder):
            lowtide.load(folder, session)
        while session.num_steps < 8:
            step = session.num_steps
            loss = model(batches(8)[step].chunk(size)[rank])
            if rank == 1 and step == kills_at:
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            if session.num_steps % 2 == 0:
                session.save(folder)
    return losses


def train_on_cuda(rank: int, backend: str, weights: str, schedule: str) -> tuple[list[float], list[float]]:
    """Losses with the group, averaged over the ranks, and those of one process on the whole batch."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    size = dist.get_world_size()
    group = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="nccl")
    found: list[list[float]] = []
    for is_alone in (False, True):
        torch.manual_seed(0)
        model = Net(torch.float64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        plan = lowtide.make_plan(model, weights=weights, update="device", schedule=schedule)
        ranks: dict[str, Any] = {} if is_alone else {"ranks": group}
        losses = []
        with lowtide.manage(model, optimizer, plan, device="cuda", **ranks):
            for ids in batches(8):
                part = ids if is_alone else ids.chunk(size)[rank]
                loss = model(part.cuda())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
        found.append(losses)
    together = torch.tensor(found[0], dtype=torch.float64)
    dist.all_reduce(together)
    return (together / size).tolist(), found[1]


def two_on_one_card(rank: int) -> tuple[str, str]:
    """What each rank is told."""
    del rank
    model, optimizer = small()
    plan = lowtide.make_plan(model, weights="resident")
    try:
        lowtide.manage(model, optimizer, plan, device="cuda", ranks=dist.new_group(backend="nccl"))
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError("it was not refused")


def order_of_events(rank: int) -> list[str]:
    """What happens in the second backward: gradients that are made, sums that begin, and sums that are waited for."""
    del rank
    model, optimizer = small()
    events: list[str] = []
    begin, wait = Ranks.begin_sum, UnderWay.wait

    def logged_begin(ranks: Ranks, tensor: torch.Tensor) -> UnderWay:
        events.append("begin")
        return begin(ranks, tensor)

    def logged_wait(total: UnderWay) -> None:
        events.append("wait")
        wait(total)

    Ranks.begin_sum, UnderWay.wait = logged_begin, logged_wait  # type: ignore[method-assign]  # in this process alone
    for number in range(3):
        model[number].weight.register_hook(lambda gradient, number=number: events.append(f"gradient {number}"))
    model = nn.Sequential(*(nn.Sequential(layer) for layer in model))
    plan = lowtide.make_plan(model, weights="streamed", update="host")
    with lowtide.manage(model, optimizer, plan, device="cpu", ranks=dist.group.WORLD):
        for _ in range(2):
            events.clear()
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return events
