"""The recorder: births, deaths, uses, and the names that operators go by."""

from __future__ import annotations

import ast
import gc
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from lowtide.tracing import recorder as recording
from lowtide.tracing.recorder import Role, StorageRecorder, state_roles, weight_roles
from lowtide.tracing.step_trace import Category, Phase


@pytest.fixture
def recorder() -> StorageRecorder:
    recorder = StorageRecorder(root="Net", updater="AdamW")
    recorder.begin_phase(Phase.FORWARD)
    return recorder


def test_a_storage_tells_of_its_own_death(recorder: StorageRecorder) -> None:
    recorder.begin_op("aten.empty")
    tensor = torch.empty(10)
    life = recorder.allocate(40, (10,), "float32", storage=tensor.untyped_storage())
    view = tensor[2:]
    del tensor
    assert life.died_event is None  # the view holds it
    del view
    assert life.died_event == 1
    assert recorder.log == [life.number, ~life.number]


def test_the_recorder_holds_no_tensor(recorder: StorageRecorder) -> None:
    recorder.begin_op("aten.empty")
    tensor = torch.empty(10)
    recorder.allocate(40, (10,), "float32", storage=tensor.untyped_storage())
    assert not [holder for holder in gc.get_referrers(tensor) if holder is recorder.__dict__]


def test_a_life_dies_once(recorder: StorageRecorder) -> None:
    recorder.begin_op("aten.mm")
    life = recorder.allocate(512, (512,), "uint8", category=Category.WORKSPACE)
    recorder.free(life)
    recorder.free(life)
    assert recorder.log == [0, ~0]


@pytest.mark.parametrize("options", [{"on_device": False}, {"is_logged": False}])
def test_what_is_not_on_the_device_or_not_logged_makes_no_event(
    recorder: StorageRecorder, options: dict[str, bool]
) -> None:
    recorder.begin_op("aten.empty")
    life = recorder.allocate(100, (100,), "uint8", **options)
    recorder.free(life)
    assert recorder.log == []
    assert life.died_event == 0


def test_an_empty_storage_makes_no_event(recorder: StorageRecorder) -> None:
    recorder.begin_op("aten.empty")
    recorder.free(recorder.allocate(0, (0,), "float32"))
    assert recorder.log == []


def test_a_birth_logged_later_counts_from_then(recorder: StorageRecorder) -> None:
    recorder.begin_op("unpack")
    early = recorder.allocate(8, (8,), "uint8", is_logged=False)
    recorder.allocate(16, (16,), "uint8")
    recorder.log_birth(early)
    recorder.log_birth(early)
    assert recorder.log == [1, 0]
    assert early.born_event == 1


def test_operators_carry_module_line_and_phase(recorder: StorageRecorder) -> None:
    recorder.enter_module("layers.0")
    recorder.enter_module("layers.0.mlp")
    first = recorder.begin_op("aten.mm")
    recorder.leave_module()
    second = recorder.begin_op("aten.add")
    recorder.leave_module()
    third = recorder.begin_op("aten.sum")
    assert [recorder.ops[i].module for i in (first, second, third)] == ["layers.0.mlp", "layers.0", "Net"]
    assert all(source.startswith("test_recorder.py:") for source in (op.source for op in recorder.ops))
    assert [op.phase for op in recorder.ops] == [Phase.FORWARD] * 3


def test_the_outermost_module_goes_by_the_roots_name(recorder: StorageRecorder) -> None:
    recorder.enter_module("")
    assert recorder.ops[recorder.begin_op("aten.mm")].module == "Net"


def test_an_update_belongs_to_the_optimizer(recorder: StorageRecorder) -> None:
    recorder.begin_phase(Phase.UPDATE)
    assert recorder.ops[recorder.begin_op("aten._foreach_mul_")].module == "AdamW"


def test_without_detail_no_lines_are_looked_up(recorder: StorageRecorder) -> None:
    recorder.begin_step(is_detailed=False)
    assert recorder.ops[recorder.begin_op("aten.mm")].source == ""


def test_each_thread_has_modules_of_its_own(recorder: StorageRecorder) -> None:
    recorder.enter_module("main")
    found: list[str] = []

    def work() -> None:
        recorder.enter_module("other")
        found.append(recorder.ops[recorder.begin_op("aten.mm")].module)
        recorder.leave_module()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == ["other"]
    assert recorder.ops[recorder.begin_op("aten.mm")].module == "main"


def test_a_backward_goes_by_the_names_of_its_forward(recorder: StorageRecorder) -> None:
    """The node that an operator makes has the operator's place; the backward runs under that node."""
    x = torch.randn(3, requires_grad=True)
    seen: list[str] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):  # type: ignore[no-untyped-def]
            recorder.begin_op("aten.watched")
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            seen.append(recorder.ops[recorder.begin_op("aten.watched_backward")].module)
            return gradient

    for path in ("a", "b"):
        recorder.enter_module(path)
        x = Watched.apply(x)
        recorder.leave_module()
    recorder.begin_phase(Phase.BACKWARD)
    x.sum().backward()
    assert seen == ["b", "a"]


def test_the_loss_begins_after_the_last_module_with_weights(recorder: StorageRecorder) -> None:
    recorder.enter_module("")
    recorder.enter_module("head")
    recorder.begin_op("aten.mm")
    logits = recorder.allocate(100, (100,), "uint8")
    recorder.leave_module(has_weights=True)
    recorder.begin_op("aten._log_softmax")
    scores = recorder.allocate(100, (100,), "uint8")
    recorder.leave_module(has_weights=True)
    recorder.begin_phase(Phase.BACKWARD)
    assert [op.phase for op in recorder.ops] == [Phase.FORWARD, Phase.LOSS]
    assert recorder.log_phases == [Phase.FORWARD, Phase.LOSS]
    assert (logits.phase, scores.phase) == (Phase.FORWARD, Phase.LOSS)


def test_what_is_born_while_a_module_runs_in_the_backward_is_recomputed(recorder: StorageRecorder) -> None:
    recorder.begin_phase(Phase.BACKWARD)
    recorder.begin_op("aten.mm_backward")
    plain = recorder.allocate(4, (1,), "float32")
    recorder.enter_module("layers.1")
    recorder.begin_op("aten.mm")
    again = recorder.allocate(4, (1,), "float32")
    assert (plain.in_recompute, again.in_recompute) == (False, True)


def test_uses_are_listed_once_an_operator(recorder: StorageRecorder) -> None:
    recorder.begin_op("aten.mm")
    life = recorder.allocate(4, (1,), "float32")
    for op in (0, 0, 3, 3, 5):
        recorder.use(life, op)
    assert life.uses == [0, 3, 5]


def test_what_dies_after_the_run_is_not_recorded(recorder: StorageRecorder) -> None:
    """The garbage collector may find a cycle at any time, also while the trace is put together."""
    recorder.begin_op("aten.empty")
    tensor = torch.empty(10)
    life = recorder.allocate(40, (10,), "float32", storage=tensor.untyped_storage())
    recorder.close()
    del tensor
    assert life.died_event is None
    assert len(recorder.log) == 1


def test_weights_have_the_path_of_their_module() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False), nn.Linear(2, 2, bias=False))
    model[2].weight = model[0].weight
    roles = [(role.module, role.op) for _, role in weight_roles(model, "Net")]
    assert roles == [
        ("0", "parameter weight"),
        ("0", "parameter bias"),
        ("1", "buffer running_mean"),
        ("1", "buffer running_var"),
        ("1", "buffer num_batches_tracked"),
        ("2", "parameter weight"),
    ]
    assert next(weight_roles(nn.Linear(1, 1), "Net"))[1] == Role(Category.WEIGHTS, "Net", "parameter weight")


def test_state_has_the_path_of_its_parameter() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert list(state_roles(model, optimizer)) == list(state_roles(model, None)) == []
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    [(tensor, role)] = state_roles(model, optimizer)
    assert tensor.shape == (2, 2)
    assert role == Role(Category.OPTIMIZER, "0", "state momentum_buffer")


def test_only_its_own_file_writes_to_a_life() -> None:
    folder = Path(recording.__file__).parent
    writes = []
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                owner = ast.unparse(node.value)
                if path.name != "recorder.py" and (owner == "life" or owner.endswith(".life")):
                    writes.append(f"{path.relative_to(folder)}:{node.lineno} {ast.unparse(node)}")
    assert writes == []
