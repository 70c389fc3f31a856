"""Models that torch spreads over several processes or cards are refused by name, whichever came first."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lowtide
from lowtide import compat
from lowtide.errors import ModelChangedError, SessionError
from tests.runtime.side_by_side import Tower, adamw, assert_same_values, inputs, manage, seeded, steps

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed"),
    # torch's own, when its parallel modules are imported and made.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:FSDP is switching:UserWarning"),
]
PLACES = ["streamed-host", "resident-host", "streamed-device"]


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


class TestWrappedBefore:
    @pytest.mark.parametrize("place", PLACES)
    def test_distributed_data_parallel_and_what_is_inside(self, place: str) -> None:
        model = seeded(Tower)
        assert isinstance(model, Tower)
        wrapped = DistributedDataParallel(model)
        # Made here: a wrapper that is found in a second must not hide that this one is.
        for target, text in (
            (wrapped, "the model is a DistributedDataParallel"),
            (nn.ModuleDict({"a": wrapped}), "the model's a is a DistributedDataParallel"),
            (model, "the model is inside of a DistributedDataParallel"),
            (model.blocks, "the model is inside of a DistributedDataParallel"),
        ):
            with pytest.raises(SessionError, match=f"{text}, and a session averages gradients by itself"):
                manage(target, adamw(target), place)
        assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
        wrapped(inputs(0)).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())

    def test_a_model_is_managed_when_its_wrapper_is_gone(self) -> None:
        model = seeded(Tower)
        wrapped = DistributedDataParallel(model)
        del wrapped
        gc.collect()
        with manage(model, adamw(model), "streamed-host"):
            steps(model, adamw(seeded(Tower)), range(1))

    def test_a_wrapper_around_something_else_is_no_concern(self) -> None:
        other = DistributedDataParallel(nn.Linear(2, 2))
        model = seeded(Tower)
        optimizer = adamw(model)
        with manage(model, optimizer, "streamed-host"):
            assert_same_values(steps(plain := seeded(Tower), adamw(plain)), steps(model, optimizer))
        assert other(torch.ones(1, 2)).shape == (1, 2)

    def test_fully_shard(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = seeded(Tower)
        assert isinstance(model, Tower)
        fully_shard(model.blocks[0], mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(SessionError, match=r"the model's blocks\.0 is a module under fully_shard"):
            lowtide.manage(model, None, lowtide.make_plan(seeded(Tower)), device="cpu")
        with pytest.raises(SessionError, match=r"parameter weight is a shard, made by DTensor \(fully_shard or tensor"):
            lowtide.manage(model.blocks[0].inner, None, lowtide.make_plan(nn.Linear(2, 2)), device="cpu")

    @pytest.mark.parametrize("use_orig_params", [False, True])
    def test_fully_sharded_data_parallel(self, use_orig_params: bool) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = seeded(Tower)
        wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=use_orig_params)
        with pytest.raises(SessionError, match="the model is a FullyShardedDataParallel, and"):
            manage(wrapped, None, "streamed-host")
        with pytest.raises(SessionError, match="is a shard, made by FullyShardedDataParallel"):
            manage(model, None, "streamed-host")

    def test_data_parallel_where_it_has_several_cards(self) -> None:
        model = seeded(Tower)
        wrapped = nn.DataParallel(model)
        wrapped.device_ids = [0, 1]
        with pytest.raises(SessionError, match="the model is a DataParallel"):
            manage(wrapped, None, "streamed-host")
        # On one card or none it calls the model, and that is all.
        wrapped.device_ids = []
        expected = wrapped(inputs(0))
        with manage(wrapped, None, "streamed-host"):
            assert torch.equal(wrapped(inputs(0)), expected)


class TestWrappedAfterwards:
    @pytest.mark.parametrize("place", PLACES)
    def test_the_constructor_raises(self, place: str) -> None:
        model, plain = seeded(Tower), seeded(Tower)
        optimizer = adamw(model)
        assert isinstance(model, Tower)
        with manage(model, optimizer, place):
            for target in (model, model.blocks[0], nn.Sequential(model)):
                with pytest.raises(
                    SessionError,
                    match=r"a DistributedDataParallel is being made around a managed model, .* session\.close\(\)",
                ):
                    DistributedDataParallel(target)
            assert_same_values(steps(plain, adamw(plain)), steps(model, optimizer))
        DistributedDataParallel(model)

    def test_fully_sharded_data_parallel(self) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = seeded(Tower)
        with (
            manage(model, None, "streamed-host"),
            pytest.raises(SessionError, match="a FullyShardedDataParallel is being made .* build the model again"),
        ):
            FullyShardedDataParallel(model, device_id=torch.device("cpu"))

    def test_data_parallel_where_there_are_several_cards(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = seeded(Tower)
        with manage(model, None, "streamed-host"):
            nn.DataParallel(model)
            monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
            with pytest.raises(SessionError, match="a DataParallel is being made around a managed model"):
                nn.DataParallel(model)

    def test_fully_shard_is_refused_at_the_next_call(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = seeded(Tower)
        with manage(model, None, "streamed-host"):
            fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
            with pytest.raises(ModelChangedError, match="18 replaced .* by DTensor .fully_shard or tensor parallelism"):
                model(inputs(0))

    def test_a_wrapper_that_nobody_saw_is_refused_when_it_calls(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As one that the collector does not list, because the user has set all objects aside."""
        model = seeded(Tower)
        optimizer = adamw(model)
        wrapped = DistributedDataParallel(model)
        monkeypatch.setattr(gc, "get_objects", list)
        with manage(model, optimizer, "streamed-host"):
            with pytest.raises(
                SessionError, match="the managed model was called by a DistributedDataParallel around it"
            ):
                wrapped(inputs(0))
            assert compat.running_data_parallel() is None
            steps(model, optimizer)

    def test_a_managed_teacher_inside_of_another_s_forward(self) -> None:
        teacher = seeded(Tower)

        class Student(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.own = nn.Linear(8, 4)

            def forward(self, x: Tensor) -> Tensor:
                with torch.no_grad():
                    wanted = teacher(x)
                out: Tensor = (self.own(x) - wanted).square().mean()
                return out

        wrapped = DistributedDataParallel(Student())
        with manage(teacher, None, "streamed-host"):
            wrapped(inputs(0)).backward()


_RANK = """
import gc, sys
import torch, lowtide
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from lowtide.errors import SessionError

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
plan = lowtide.make_plan(model, update="host")

def train(make):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        wrapped = make(optimizer)
        wrapped(torch.full((2, 4), rank + 1.0)).sum().backward()
        optimizer.step()
        print("trained in silence")
    except SessionError as error:
        print(error)

def manage_first(optimizer):
    session = lowtide.manage(model, optimizer, plan, device="cpu")
    return DistributedDataParallel(model)

def wrap_first(optimizer):
    wrapped = DistributedDataParallel(model)
    lowtide.manage(model, optimizer, plan, device="cpu")
    return wrapped

train(wrap_first)
gc.collect()
train(manage_first)
dist.destroy_process_group()
"""


def test_two_ranks(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(_RANK))
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        said, errors = rank.communicate(timeout=120)
        assert rank.returncode == 0, errors
        before, after = said.splitlines()
        assert before.startswith(
            "the model is inside of a DistributedDataParallel, and a session averages gradients by itself"
        )
        assert after.startswith("a DistributedDataParallel is being made around a managed model")
