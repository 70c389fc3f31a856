"""What the tests of spread weights run in each process, beside the trainings of `rank_jobs`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import lowtide
import lowtide.optim
import lowtide.runtime.manage
from lowtide.distributed.ranks import Ranks, UnderWay
from lowtide.errors import LowtideError, SessionError
from lowtide.memory.chunk import lay_out
from lowtide.memory.groups import find_groups
from lowtide.planning.plan import Collective, Sharding
from lowtide.planning.rank_costs import bytes_between_ranks
from tests.runtime.rank_jobs import Job, Net, batches, make, values_of

ALL = dict[str, Any]
SAVED_AT, NUM_STEPS = 5, 12


def spread_plan(model: nn.Module, weights: str, collective: str = "gather", **words: Any) -> lowtide.Plan:
    """Over all ranks there are; of a single process streamed."""
    size = dist.get_world_size()
    if size == 1:
        return lowtide.make_plan(model, weights="streamed", **words)
    sharding = Sharding(shards=size, collective=Collective(collective))
    return lowtide.make_plan(model, weights=weights, sharding=sharding, **words)


def stack(width: int, num_blocks: int) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(num_blocks)]
    return nn.Sequential(*blocks)


# -- memory ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RankBytes:
    """What one rank holds, in bytes."""

    state_bytes: int
    """Weights, gradients and Adam's two moments of the whole model."""
    held_on_host: int
    held_on_device: int
    """Between two steps, gradients included."""
    window_bytes: int
    block_bytes: int


def bytes_of_a_rank(rank: int, weights: str) -> RankBytes:
    """After two steps, before the gradients are cleared."""
    del rank
    model = stack(256, 12)
    parameter_bytes = sum(each.nbytes for each in model.parameters())
    optimizer = torch.optim.Adam(model.parameters())
    plan = spread_plan(model, weights)
    with lowtide.manage(model, optimizer, plan, device="cpu", ranks=dist.group.WORLD, poison=False) as session:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 256)).sum().backward()
            optimizer.step()
        session.settle()
        plan_run = session._open()
        store = plan_run._executor.residency.store
        store.drop_all()
        tracked = plan_run.setup.tracked
        assert tracked is not None
        need = plan_run.host_tiers.need
        # Staging is of the size that the plan gives it, whatever the model is.
        on_host = need.everything_bytes - need.staging_bytes
        return RankBytes(
            state_bytes=4 * parameter_bytes,
            held_on_host=on_host,
            held_on_device=tracked.current_bytes,
            window_bytes=store.peak_bytes,
            block_bytes=parameter_bytes // 12,
        )


# -- the order of events -----------------------------------------------------------------------------------------------


def events_of_a_step(rank: int, weights: str) -> tuple[list[str], list[str]]:
    """What happens in the forward and in the backward of the third step: gathers that begin, and groups that have computed."""
    del rank
    model = stack(16, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    events: list[str] = []
    begin = Ranks.begin_gather

    def logged(ranks: Ranks, whole: torch.Tensor, mine: torch.Tensor, what: str) -> UnderWay:
        events.append(what.replace("the weights of chunk ", "gather ").removesuffix("/0"))
        return begin(ranks, whole, mine, what)

    Ranks.begin_gather = logged  # type: ignore[method-assign]  # in this process alone
    for number in range(5):
        last, first = model[number][2], model[number][0]
        last.register_forward_hook(lambda *_, number=number: events.append(f"compute {number}"))
        first.register_full_backward_hook(lambda *_, number=number: events.append(f"compute {number}"))
    with lowtide.manage(model, optimizer, spread_plan(model, weights), device="cpu", ranks=dist.group.WORLD):
        for _ in range(3):
            events.clear()
            loss = model(torch.ones(2, 16)).sum()
            forward = list(events)
            events.clear()
            loss.backward()
            backward = list(events)
            optimizer.step()
            optimizer.zero_grad()
    return forward, backward


# -- checkpoints -------------------------------------------------------------------------------------------------------


def _train(
    weights: str, collective: str, first: int, before: Callable[[lowtide.Session], object], save_into: str | None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    size, rank = dist.get_world_size(), dist.get_rank()
    model, optimizer = make(Job())
    plan = spread_plan(model, weights, collective)
    losses = []
    with lowtide.manage(model, optimizer, plan, device="cpu", ranks=dist.group.WORLD) as session:
        before(session)
        for step, ids in enumerate(batches(NUM_STEPS)):
            if step < first:
                continue
            if step == SAVED_AT and save_into is not None:
                session.save(save_into, step=step)
            loss = model(ids.chunk(size)[rank])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(float(total) / size)
    return losses, values_of(model)


def saved(rank: int, weights: str, collective: str, folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses from the checkpoint on, of a run that is not broken off, and its last weights."""
    del rank
    losses, values = _train(weights, collective, 0, lambda session: None, folder)
    return losses[SAVED_AT:], values


def resumed(rank: int, weights: str, collective: str, folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same, of one that goes on from it."""
    del rank

    def load(session: lowtide.Session) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # another number of ranks is said
            assert lowtide.load(folder, session).step == SAVED_AT

    return _train(weights, collective, SAVED_AT, load, None)


# -- what is refused ---------------------------------------------------------------------------------------------------

BAD = {
    "as many shards as there are no ranks": "over 4 ranks, and there are 2",
    "no ranks": "this is one process without a group",
    "a gradient from before": "has a gradient from before",
    "an optimizer with state": "manage a new optimizer",
    "an optimizer of whole matrices": "Sharding(collective='one to all')",
    "own kernels of whole matrices": "Sharding(collective='one to all')",
    "other plans": "differs from rank 0 in plan",
    "other weights": "differs from rank 0 in weights",
    "an allowance": "has no effect where weights are spread",
    "state_dict of the optimizer": "session.save() writes all of it",
    "load_state_dict of the optimizer": "lowtide.load() brings a checkpoint",
    "a copy of the optimizer": "after session.close()",
    "a gradient that is set": "was set, and the parameter is spread over the ranks",
    "clipped by the loop": "clip with manage(..., max_grad_norm=)",
}


def manage_badly(rank: int, case: str) -> tuple[str, str]:
    """What this rank is told."""
    kind = "ok"
    model: nn.Module = Net(torch.float32)
    if case == "other weights":
        torch.manual_seed(rank)
    else:
        torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter.data)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    if case == "an optimizer of whole matrices":
        optimizer = torch.optim.Adafactor(model.parameters())
    if case == "own kernels of whole matrices":
        optimizer = lowtide.optim.Adafactor(model.parameters())
    if case == "a gradient from before":
        model.head.weight.grad = torch.zeros_like(model.head.weight)
    if case == "an optimizer with state":
        optimizer.state[model.head.weight] = {"step": torch.tensor(1.0)}
    shards = 4 if case == "as many shards as there are no ranks" else 2
    depth = 1 + rank if case == "other plans" else 1
    plan = lowtide.make_plan(model, weights="sharded", sharding=Sharding(shards=shards), prefetch_depth=depth)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    settings: dict[str, Any] = {} if case == "no ranks" else {"ranks": dist.group.WORLD}
    if case == "own kernels of whole matrices":
        settings["precision"] = "fp32"
    try:
        session = lowtide.manage(model, optimizer, plan, device="cpu", **settings)
    except Exception as error:
        # Nothing has changed.
        for name, value in model.named_parameters():
            assert torch.equal(value, before[name]), name
        return kind, str(error)
    with session:
        model(batches(1)[0]).backward()
        try:
            _misuse(case, session, model, optimizer)
        except Exception as error:
            told = str(error)
        else:
            told = "nothing was said"
        optimizer.zero_grad()
    return kind, told


def _misuse(case: str, session: lowtide.Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    weight = model.get_parameter("head.weight")
    if case == "an allowance":
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            session.save("/nonexistent", allowance="auto")
    elif case == "state_dict of the optimizer":
        optimizer.state_dict()
    elif case == "load_state_dict of the optimizer":
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    elif case == "a copy of the optimizer":
        copy.deepcopy(optimizer)
    elif case == "a gradient that is set":
        weight.grad = torch.zeros(weight.shape)
    elif case == "clipped by the loop":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def read_outside(rank: int) -> dict[str, str]:
    """What is told by reads of what this rank has a part of."""
    del rank
    model, optimizer = make(Job())
    told: dict[str, str] = {}
    reads: dict[str, Callable[[], object]] = {
        "a value": lambda: model.head.weight.sum(),
        "a copy": lambda: copy.deepcopy(model.head.weight),
        "a state dictionary": lambda: {name: value.clone() for name, value in model.state_dict().items()},
        "a write": lambda: nn.init.zeros_(model.head.weight),
        "a call of a part beside its module": lambda: torch.nn.functional.linear(
            torch.ones(1, 16).double(), model.head.weight
        ),
    }
    with lowtide.manage(model, optimizer, spread_plan(model, "streamed"), device="cpu", ranks=dist.group.WORLD):
        for what, read in reads.items():
            try:
                read()
            except SessionError as error:
                told[what] = str(error)
            else:
                told[what] = "nothing was said"
    return told


def see_and_change(rank: int) -> tuple[bool, bool, bool]:
    """Whether whole values are seen, whether a change is seen by the next step, and whether the plain model has it."""
    del rank
    model, optimizer = make(Job())
    before = values_of(model)
    with lowtide.manage(
        model, optimizer, spread_plan(model, "streamed"), device="cpu", ranks=dist.group.WORLD
    ) as session:
        with session.gathered():
            seen = all(torch.equal(value, before[name]) for name, value in model.named_parameters())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(2)
        with torch.no_grad():
            loss = model(batches(1)[0])
    plain, _ = make(Job())
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(2)
        expected = plain(batches(1)[0])
    after = values_of(model)
    return seen, bool(loss == expected), all(torch.equal(2 * value, after[name]) for name, value in before.items())


# -- bytes between ranks -----------------------------------------------------------------------------------------------


def bytes_sent(rank: int, words: dict[str, Any]) -> tuple[int, int]:
    """What a session has counted in four steps, and what the planner says of them and of as many fetches."""
    size, num_steps = dist.get_world_size(), 4
    model, optimizer = make(Job(dtype=torch.float32))
    plan = lowtide.make_plan(model, **words)
    assert plan.sharding is not None
    layout = lay_out(find_groups(model), chunk_bytes=plan.chunk_bytes, shards=plan.sharding.shards)
    with lowtide.manage(model, optimizer, plan, device="cpu", ranks=dist.group.WORLD) as session:
        for ids in batches(num_steps):
            model(ids.chunk(size)[rank], with_extra=True).backward()
            optimizer.step()
            optimizer.zero_grad()
        stats = session.stats()
    assert stats.ranks is not None
    num_fetches = {chunk.name: chunk.num_fetches for chunk in stats.chunks}
    fetched = sum(num_fetches[chunk.name] * chunk.nbytes for chunk in layout.chunks)
    beside = bytes_between_ranks(plan, layout, num_ranks=size, rank=rank, fetches={})
    return stats.ranks.sent_bytes, fetched + num_steps * sum(beside.values())


# -- a rank that breaks off --------------------------------------------------------------------------------------------


def break_off(rank: int, where: str) -> str:
    """What each rank is told when the second one raises in the second step, there, and its session ends."""
    model, optimizer = make(Job())
    try:
        with lowtide.manage(model, optimizer, spread_plan(model, "streamed"), device="cpu", ranks=dist.group.WORLD):
            for step in range(4):
                if rank == 1 and step == 1:
                    _raise_in(model, where)
                model(batches(4)[step].chunk(2)[rank]).backward()
                optimizer.step()
                optimizer.zero_grad()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was said"


def _raise_in(model: nn.Module, where: str) -> None:
    def broken(*_: object) -> None:
        raise ValueError("broken")

    if where == "the loop":
        broken()
    block = model.get_submodule("blocks.2")
    if where == "a forward":
        block.register_forward_hook(broken)
    else:
        block.register_forward_hook(lambda module, inputs, output: output.register_hook(broken) and None)


# -- prepare -----------------------------------------------------------------------------------------------------------

ROWS, WIDTH = 64, 64


def _blocks(*, foreach: bool) -> tuple[nn.Sequential, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=foreach)
    return model, optimizer, torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def _four_steps(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> list[float]:
    losses = []
    for _ in range(4):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def four_steps_serially() -> list[float]:
    return _four_steps(*_blocks(foreach=False))


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A session that `prepare` has made, after four steps."""

    losses: list[float]
    """Means over the ranks."""
    plan: lowtide.Plan
    device_bytes: int
    """The most that the emulated device held."""
    host_bytes: int
    """What the host's books were charged with."""


def prepared_in(rank: int, jobs: dict[str, ALL]) -> dict[str, Prepared | str]:
    """By name, what `prepare` makes of these words in two sets of rows; the message where it refuses."""
    found: dict[str, Prepared | str] = {}
    for name, words in jobs.items():
        words = dict(words)
        foreach, mesh = words.pop("foreach", False), words.pop("mesh", None)
        ranks = dist.group.WORLD if mesh is None else init_device_mesh("cpu", mesh)
        model, optimizer, batch = _blocks(foreach=foreach)
        batch = batch.chunk(dist.get_world_size())[rank]
        try:
            session = lowtide.prepare(
                model,
                optimizer,
                batch,
                loss=lambda net, x: net(x).square().mean(),
                device="cpu",
                ranks=ranks,
                **words,
            )
        except LowtideError as error:
            found[name] = f"{type(error).__name__}: {error}"
            continue
        with session:
            losses = torch.tensor(_four_steps(model, optimizer, batch), dtype=torch.float64)
            dist.all_reduce(losses)
            found[name] = Prepared(
                losses=(losses / dist.get_world_size()).tolist(),
                plan=session.plan,
                device_bytes=session.take_device_peak(),
                host_bytes=session._open().host_tiers.need.everything_bytes,
            )
    return found


# -- what a review found -----------------------------------------------------------------------------------------------


def change_gathered(rank: int, how: str) -> tuple[float, str]:
    """Under `gathered`, double all weights past autograd, or on one rank alone. Returns the share that is double, and the error."""
    model, optimizer = make(Job())
    before = values_of(model)
    told = ""
    with lowtide.manage(
        model, optimizer, spread_plan(model, "sharded"), device="cpu", ranks=dist.group.WORLD
    ) as session:
        try:
            with session.gathered():
                for parameter in model.parameters():
                    if how == "in place" or (how == "on one rank" and rank == 0):
                        parameter.data.mul_(2)
                    elif how == "other memory":
                        parameter.data = parameter.data * 2
        except LowtideError as error:
            told = f"{type(error).__name__}: {error}"
    after = values_of(model)
    return sum(torch.equal(2 * value, after[name]) for name, value in before.items()) / len(before), told


def save_between(rank: int, folder: str) -> str:
    """What a save between a backward and its step is told."""
    model, optimizer = make(Job())
    with lowtide.manage(
        model, optimizer, spread_plan(model, "sharded"), device="cpu", ranks=dist.group.WORLD
    ) as session:
        model(batches(1)[0].chunk(2)[rank]).backward()
        try:
            session.save(folder)
        except LowtideError as error:
            return str(error)
    return "nothing was said"


def manage_alone(rank: int, case: str) -> str:
    """What each rank is told where the second one has a plan of its own, or fails when it has begun."""
    model, optimizer = make(Job())
    plan = spread_plan(model, "streamed")
    if rank == 1 and case == "another plan":
        plan = lowtide.make_plan(model, weights="streamed")
    if rank == 1 and case == "a late failure":
        lowtide.runtime.manage._place_the_rest = _fail  # in this process alone
    try:
        lowtide.manage(model, optimizer, plan, device="cpu", ranks=dist.group.WORLD)
    except (LowtideError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was said"


def _fail(*_: object) -> None:
    raise MemoryError("no room")


def scaled_beside_resident(rank: int, is_reversed: bool) -> tuple[float, float, float]:
    """Spread and resident groups that the host updates, in one list of a scaler's. The weights' distance from plain torch, the
    scale after, and the scale after a step in which one rank overflows.
    """

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
        parameters = list(model.parameters())
        return model, torch.optim.SGD([*reversed(parameters)] if is_reversed else parameters, lr=0.1, foreach=False)

    xs = torch.randn(4, 4, 16, generator=torch.Generator().manual_seed(1))
    plain, plain_optimizer = made()
    for x in xs:
        for part in x.chunk(2):
            (plain(part).square().mean() / 2).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    model, optimizer = made()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plan = lowtide.make_plan(
        model, weights={"*": "streamed", "0": "resident"}, update="host", sharding=Sharding(shards=2)
    )
    with lowtide.manage(model, optimizer, plan, device="cpu", ranks=dist.group.WORLD) as session:
        for x in xs:
            scaler.scale(model(x.chunk(2)[rank]).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        with session.gathered():
            pairs = zip(model.parameters(), plain.parameters(), strict=True)
            distance = max(float((one.detach() - other.detach()).abs().max()) for one, other in pairs)
        scale = scaler.get_scale()
        loss = model(xs[0].chunk(2)[rank]).square().mean()
        scaler.scale(loss * (1e38 if rank == 0 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return distance, scale, scaler.get_scale()
