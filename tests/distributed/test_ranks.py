"""What ranks are refused, each in one sentence: the group, the device, gradients that are not averaged."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowtide
from lowtide.distributed.ranks import Ranks
from lowtide.errors import ConfigError, RankLostError, SessionError
from lowtide.runtime import assembly
from lowtide.runtime.passes.exchange import Averaged, GradientAverage
from lowtide.train.team import team_on

CPU = torch.device("cpu")


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """Of this process alone."""
    dist.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def averaged(group: dist.ProcessGroup) -> tuple[GradientAverage, nn.Parameter]:
    parameter = nn.Parameter(torch.ones(3))
    average = GradientAverage(Ranks(group, CPU), [Averaged(parameter, "head.weight", None)], CPU)
    average.begin()
    parameter.grad = torch.full((3,), 2.0)
    return average, parameter


def test_no_group_says_how_to_make_one() -> None:
    with pytest.raises(ConfigError, match="has no process group; start the script with torchrun"):
        Ranks(None, CPU)  # type: ignore[arg-type]


def test_what_is_no_group_and_what_has_no_backend_for_the_device(group: dist.ProcessGroup) -> None:
    with pytest.raises(ConfigError, match="ranks is a int; give a process group"):
        Ranks(2, CPU)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="none of which sends tensors of a meta device"):
        Ranks(group, torch.device("meta"))


def test_two_ranks_on_one_gpu_are_one_sentence(group: dist.ProcessGroup) -> None:
    """NCCL's own words, which only a GPU brings about."""
    ranks = Ranks(group, CPU)
    with pytest.raises(ConfigError, match="rank 0 and another rank use the same GPU"), ranks._told():
        raise RuntimeError("NCCL error: Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000")


def test_a_rank_that_has_left_says_why(group: dist.ProcessGroup) -> None:
    ranks = Ranks(group, CPU)
    ranks.leave("an exception in a backward")
    with pytest.raises(RankLostError, match=r"rank 0 has left the other ranks \(an exception in a backward\)"):
        ranks.exchange(1)


def test_a_gradient_that_comes_after_it_was_sent(group: dist.ProcessGroup) -> None:
    average, parameter = averaged(group)
    assert list(average.take(parameter)) == []
    with pytest.raises(SessionError, match=r"the gradient of head.weight came a second time in one backward"):
        list(average.take(parameter))


def test_the_only_rank_finds_its_own_gradient(group: dist.ProcessGroup) -> None:
    average, parameter = averaged(group)
    ((member, gradient),) = [*average.take(parameter), *average.finish()]
    assert member.name == "head.weight"
    assert gradient.tolist() == [2.0, 2.0, 2.0]


def test_a_parameter_that_the_optimizer_got_later(group: dist.ProcessGroup) -> None:
    average, parameter = averaged(group)
    late = nn.Parameter(torch.ones(2))
    late.grad = torch.ones(2)
    optimizer = torch.optim.SGD([parameter, late], lr=0.1)
    with pytest.raises(SessionError, match="parameter 1 of the optimizer has a gradient that was not averaged"):
        average.refuse_local_sums(optimizer, is_own=True)


def test_no_sync_has_nothing_to_keep_in_backward(group: dist.ProcessGroup) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = lowtide.make_plan(model, weights="streamed", update="host", schedule="in_backward")
    with (
        lowtide.manage(model, optimizer, plan, device="cpu", ranks=group) as session,
        pytest.raises(SessionError, match="the schedule 'in_backward' uses them up"),
    ):
        session.no_sync()


def test_tables_on_the_host_are_refused_between_gpus() -> None:
    setup: Any = SimpleNamespace(is_on_cuda=True)
    table: Any = SimpleNamespace(name="embed", is_on_host=True)
    ranks: Any = None
    with pytest.raises(ConfigError, match=r"group embed stays on the host \(weights='host'\)"):
        assembly._make_average(setup, ranks, [table])


def test_more_processes_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "2", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with (
        pytest.raises(ConfigError, match="has started 4 processes on this machine, which has 2 GPUs"),
        team_on("cuda"),
    ):
        pass
