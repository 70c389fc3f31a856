"""What can be checked of observing on CUDA without a card: how the allocator's own records are read."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lowtide.tracing.observation.cuda_record import Block, Request, StepRecord
from lowtide.tracing.observation.on_cuda import complete_changes, named_tensors, out_of_memory, requests_in, used_blocks
from lowtide.tracing.observation.profile import Change, Marks, ProfiledStep, Running
from lowtide.tracing.recorder import Role, StorageRecorder
from lowtide.tracing.settings import StepSettings
from lowtide.tracing.step_trace import Category, Phase
from lowtide.tracing.training_step import TrainingStep
from lowtide.units import GiB, MiB

CARD = torch.device("cuda:1")


def frame(filename: str, line: int) -> dict[str, Any]:
    return {"filename": filename, "line": line, "name": "f"}


def test_blocks_in_use_get_their_roles() -> None:
    weight = torch.zeros(100)
    role = Role(Category.WEIGHTS, "layer", "parameter weight")
    segment = {
        "device": 1,
        "address": 1000,
        "blocks": [
            {"size": 512, "requested_size": 400, "state": "active_allocated"},
            {"size": 1024, "requested_size": 1000, "state": "inactive"},
            {"size": 512, "requested_size": 512, "state": "active_pending_free"},
            {"size": 32 * MiB, "requested_size": 32 * MiB, "state": "active_allocated"},
            {"size": 2048, "requested_size": 2000, "state": "active_allocated"},
        ],
    }
    blocks = used_blocks([segment, {**segment, "device": 0}], {1000: (weight, role)}, {32 * MiB}, CARD)
    assert [(b.address, b.bytes, b.requested_bytes, b.role.category) for b in blocks] == [
        (1000, 512, 400, Category.WEIGHTS),
        (1000 + 2048, 32 * MiB, 32 * MiB, Category.WORKSPACE),
        (1000 + 2048 + 32 * MiB, 2048, 2000, Category.TEMPORARIES),
    ]
    assert (blocks[0].shape, blocks[0].dtype) == ((100,), "float32")


def test_history_gives_sizes_and_the_users_line() -> None:
    own = str(torch.__path__[0])
    step_file = TrainingStep.__call__.__code__.co_filename
    entries = [
        {"action": "segment_alloc", "addr": 4096, "size": 2 * MiB},
        {
            "action": "alloc",
            "addr": 4096,
            "size": 700,
            "frames": [
                frame(f"{own}/nn/functional.py", 9),
                frame("/somewhere/net.py", 12),
                frame("/somewhere/run.py", 3),
            ],
        },
        {"action": "free_requested", "addr": 4096, "size": 700},
        {"action": "alloc", "addr": 8192, "size": 8, "frames": [frame(step_file, 50), frame("/somewhere/run.py", 3)]},
        {"action": "alloc", "addr": 9000, "size": 9},
    ]
    assert requests_in(entries) == [
        Request(address=4096, bytes=700, source="net.py:12"),
        Request(address=8192, bytes=8, source=""),
        Request(address=9000, bytes=9, source=""),
    ]


def test_out_of_memory_in_words() -> None:
    marks = Marks()
    marks.begin_phase(Phase.FORWARD)
    marks.enter_module("layers.3.mlp")
    entries = [
        {"action": "alloc", "addr": 1, "size": GiB, "frames": [frame("/somewhere/net.py", 7)]},
        {"action": "oom", "size": 20 * GiB, "frames": [frame("/somewhere/net.py", 8)]},
    ]
    text = out_of_memory(marks, entries, 130 * GiB, 140 * GiB)
    assert "in the forward at net.py:8, the last module entered being 'layers.3.mlp'" in text
    assert "20.0 GiB was asked for with 130.0 GiB allocated of 140.0 GiB" in text
    assert "Last allocations: 1.0 GiB net.py:7" in text
    assert "Last allocations: none" in out_of_memory(Marks(), [], 0, GiB)


def test_tied_weights_state_gradients_and_batch_have_one_role_each() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = {"x": [torch.ones(2, 4)]}
    model(batch["x"][0]).sum().backward()
    optimizer.step()
    named = named_tensors(TrainingStep(model, batch, optimizer, None, StepSettings()), "Sequential")
    assert sorted(role.category.value for _, role in named.values()) == [
        "activations",
        "gradients",
        "optimizer",
        "weights",
    ]
    assert named[model[0].weight.data_ptr()][1].module == "1"


def running(time_ns: int, name: str, number: int) -> Running:
    return Running(
        time_ns=time_ns,
        thread=1,
        name=name,
        is_listed=True,
        sequence=-1,
        node=None,
        is_nested=False,
        is_update=False,
        number=number,
    )


def test_blocks_requests_and_reserved_bytes_come_from_the_allocator() -> None:
    recorder = StorageRecorder(root="Net")
    role = Role(Category.WEIGHTS, "Net", "parameter weight")
    weight = Block(address=16, bytes=1024, requested_bytes=1000, role=role, shape=(250,), dtype="float32")
    record = StepRecord(recorder, [weight], start_reserved_bytes=2 * MiB)
    op = running(10, "aten.mm", 0)

    def change(time_ns: int, address: int, size: int, reserved: int) -> Change:
        return Change(time_ns, 1, address, size, reserved, op, "")

    changes = [change(11, 32, 512, 2 * MiB), change(12, 64, 20 * MiB, 22 * MiB), change(13, 32, -512, 22 * MiB)]
    changes.append(Change(20, 1, 999, -512, 22 * MiB, None, ""))
    requests = [Request(address=32, bytes=100, source="net.py:1"), Request(address=77, bytes=5, source="other.py:2")]
    record.walk(ProfiledStep(running=[op], changes=changes), requests)
    record.finish({64: Role(Category.OPTIMIZER, "Net", "state momentum")})
    assert record.memory.allocated == [1024, 1536, 1536 + 20 * MiB, 1024 + 20 * MiB]
    assert record.memory.reserved == [2 * MiB, 2 * MiB, 22 * MiB, 22 * MiB]
    assert record.num_unknown_frees == 1
    scratch, state = recorder.lives[1:]
    assert (scratch.requested_bytes, scratch.source, scratch.category) == (100, "net.py:1", Category.WORKSPACE)
    # The history's second request is of another address: it tells nothing of this block.
    assert (state.requested_bytes, state.op, state.dtype) == (20 * MiB, "state momentum", "uint8")


def change(time_ns: int, address: int, size: int, reserved: int = 4096) -> Change:
    return Change(
        time_ns=time_ns, thread=7, address=address, bytes=size, reserved_bytes=reserved, op=None, inside=f"op {time_ns}"
    )


def entry(action: str, address: int, size: int) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size}


def block(address: int, size: int) -> Block:
    role = Role(Category.WEIGHTS, "layer", "parameter weight")
    return Block(address=address, bytes=size, requested_bytes=size, role=role, shape=(size,), dtype="uint8")


def test_nothing_is_added_where_nothing_was_missed() -> None:
    seen = [change(1, 100, 1024), change(2, 200, 512), change(3, 100, -1024)]
    history = [
        entry("alloc", 100, 1000),
        entry("segment_alloc", 0, 2 << 20),
        entry("alloc", 200, 500),
        entry("free_requested", 100, 1000),
        entry("free_completed", 100, 1000),
    ]
    assert complete_changes(seen, history, [], 0) == seen


def test_a_missed_free_stands_where_it_happened_with_the_size_of_its_block() -> None:
    seen = [change(1, 100, 2048, 8192), change(5, 100, 512, 8192)]  # the same address again: freed in between, unseen
    history = [
        entry("alloc", 100, 1100),
        entry("free_requested", 100, 1100),
        entry("free_completed", 100, 1100),
        entry("alloc", 100, 300),
    ]
    completed = complete_changes(seen, history, [], 0)
    assert [(item.address, item.bytes) for item in completed] == [(100, 2048), (100, -2048), (100, 512)]
    assert completed[1].time_ns == 1  # right after what was seen last
    assert completed[1].reserved_bytes == 8192


def test_a_missed_free_of_a_block_from_before_the_step() -> None:
    completed = complete_changes([], [entry("free_completed", 300, 10)], [block(300, 4096)], 1 << 20)
    assert [(item.bytes, item.reserved_bytes) for item in completed] == [(-4096, 1 << 20)]


def test_a_missed_allocation_counts_what_was_requested_in_whole_units() -> None:
    history = [entry("alloc", 100, 513), entry("free_completed", 100, 513)]
    assert [item.bytes for item in complete_changes([], history, [], 0)] == [1024, -1024]
