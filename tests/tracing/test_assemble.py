"""From a log to a StepTrace: numbering, the step's start, and categories by role and by lifetime."""

from __future__ import annotations

import random

from lowtide.tracing.allocator import AllocatorSettings
from lowtide.tracing.assemble import MAX_REPEATS, assemble, exact, replay
from lowtide.tracing.recorder import Life, StorageRecorder
from lowtide.tracing.step_trace import Category, Phase, StepTrace, Target
from lowtide.units import MiB

TARGET = Target(card="h200", torch_version="2.11.0", context_bytes=7, capacity_bytes=9)


class Run:
    """A recorder driven by hand: one operator an allocation."""

    def __init__(self) -> None:
        self.recorder = StorageRecorder()
        self.first_event = self.first_op = 0

    def make(self, nbytes: int, category: Category | None = None, op: str = "aten.op") -> Life:
        number = self.recorder.begin_op(op)
        life = self.recorder.allocate(nbytes, (nbytes,), "uint8", category=category)
        self.recorder.use(life, number)
        return life

    def free(self, *lives: Life) -> None:
        for life in lives:
            self.recorder.free(life)

    def phase(self, phase: Phase) -> None:
        self.recorder.begin_phase(phase)

    def begin_step(self) -> None:
        self.first_event, self.first_op = len(self.recorder.log), len(self.recorder.ops)

    def trace(self, *, is_exact: bool = True) -> StepTrace:
        log = exact(self.recorder) if is_exact else replay(self.recorder, AllocatorSettings())
        return assemble(
            self.recorder,
            log,
            origin="predicted",
            first_event=self.first_event,
            first_op=self.first_op,
            model="hand-made",
            settings={"accumulate": 1},
            num_parameters=3,
            target=TARGET,
            notes=("a note",),
        )


def step() -> tuple[Run, dict[str, Life]]:
    run = Run()
    lives = {"weight": run.make(1000, Category.WEIGHTS)}
    run.phase(Phase.FORWARD)
    gone = run.make(300)
    run.free(gone)  # in the warm-up step
    lives["state"] = run.make(2000, Category.OPTIMIZER)
    run.begin_step()
    lives["saved"] = run.make(400, op="aten.relu")
    lives["passing"] = run.make(500)
    run.free(lives["passing"])
    run.phase(Phase.LOSS)
    lives["loss"] = run.make(4)
    run.phase(Phase.BACKWARD)
    lives["gradient"] = run.make(1000, Category.GRADIENTS)
    run.recorder.use(lives["saved"], len(run.recorder.ops) - 1)
    run.free(lives["saved"])
    lives["scratch"] = run.make(600, Category.WORKSPACE)
    run.free(lives["scratch"])
    run.phase(Phase.UPDATE)
    lives["root"] = run.make(1000)
    run.free(lives["root"], lives["gradient"], lives["loss"])
    return run, lives


def test_the_curve_by_hand() -> None:
    result = step()[0].trace()
    assert result.start_allocated_bytes == 3000
    assert result.curve.tolist() == [3000, 3400, 3900, 3400, 3404, 4404, 4004, 4604, 4004, 5004, 4004, 3004, 3000]
    assert (result.peak_bytes, result.peak_phase) == (5004, Phase.UPDATE)
    assert result.phase_peaks() == {
        Phase.FORWARD: 3900, Phase.LOSS: 3404, Phase.BACKWARD: 4604, Phase.UPDATE: 5004,
    }  # fmt: skip


def test_what_died_before_the_step_is_not_in_it() -> None:
    result = step()[0].trace()
    assert [a.requested_bytes for a in result.allocations] == [1000, 2000, 400, 500, 4, 1000, 600, 1000]
    assert [a.born for a in result.allocations][:3] == [None, None, 0]
    assert [a.phase for a in result.allocations][:3] == [None, None, Phase.FORWARD]


def test_events_point_at_their_allocations() -> None:
    result = step()[0].trace()
    for index, event in enumerate(result.events):
        allocation = result.allocations[event.allocation]
        assert (allocation.died if event.is_free else allocation.born) == index


def test_categories_by_role_and_by_lifetime() -> None:
    result = step()[0].trace()
    assert [a.category for a in result.allocations] == [
        Category.WEIGHTS, Category.OPTIMIZER, Category.ACTIVATIONS, Category.TEMPORARIES, Category.ACTIVATIONS,
        Category.GRADIENTS, Category.WORKSPACE, Category.TEMPORARIES,
    ]  # fmt: skip
    assert sum(result.at_peak.values()) == result.peak_bytes
    assert result.at_peak == {
        Category.WEIGHTS: 1000, Category.GRADIENTS: 1000, Category.OPTIMIZER: 2000, Category.ACTIVATIONS: 4,
        Category.TEMPORARIES: 1000, Category.WORKSPACE: 0,
    }  # fmt: skip


def test_uses_and_operators_count_from_the_step() -> None:
    result = step()[0].trace()
    saved = result.allocations[2]
    assert [result.ops[use].phase for use in saved.uses] == [Phase.FORWARD, Phase.BACKWARD]
    assert result.ops[saved.uses[0]].name == saved.op == "aten.relu"
    assert result.allocations[0].uses == ()  # used in the warm-up only


def test_what_is_made_between_two_backwards_is_an_activation_of_the_second() -> None:
    run = Run()
    run.phase(Phase.FORWARD)
    first = run.make(10)
    run.phase(Phase.BACKWARD)
    run.make(1)
    run.free(first)
    run.phase(Phase.FORWARD)
    second = run.make(20)
    run.phase(Phase.BACKWARD)
    run.make(2)
    run.free(second)
    categories = {a.requested_bytes: a.category for a in run.trace().allocations}
    assert categories[10] is categories[20] is Category.ACTIVATIONS
    assert categories[1] is categories[2] is Category.TEMPORARIES


def test_recomputed_tensors_are_activations() -> None:
    run = Run()
    run.phase(Phase.BACKWARD)
    run.recorder.enter_module("layers.0")
    run.make(10)
    assert run.trace().allocations[0].category is Category.ACTIVATIONS


def test_the_allocator_rounds_what_was_asked_for() -> None:
    run, _ = step()
    result = run.trace(is_exact=False)
    assert [a.bytes for a in result.allocations] == [1024, 2048, 512, 512, 512, 1024, 1024, 1024]
    assert result.peak_bytes == 1024 + 2048 + 512 + 1024 + 1024
    assert result.peak_reserved_bytes == 2 * 2**20  # one small segment


def test_names_are_passed_on() -> None:
    result = step()[0].trace()
    assert (result.model, result.origin, result.target, result.num_parameters) == ("hand-made", "predicted", TARGET, 3)
    assert result.notes == ("a note",)
    assert result.settings == {"accumulate": 1}


def recorded() -> StorageRecorder:
    """700 bytes, then 3 MiB, then the first is freed."""
    recorder = StorageRecorder()
    small = recorder.allocate(700, (700,), "uint8")
    recorder.allocate(3 * MiB, (3 * MiB,), "uint8")
    recorder.free(small)
    return recorder


def test_exact_bytes_are_neither_rounded_nor_reserved() -> None:
    memory = exact(recorded())
    assert memory.allocated == memory.reserved == [700, 700 + 3 * MiB, 3 * MiB]
    assert memory.block_bytes == {0: 700, 1: 3 * MiB}


def test_replayed_bytes_are_the_caching_allocators() -> None:
    memory = replay(recorded(), AllocatorSettings())
    assert memory.allocated == [1024, 1024 + 3 * MiB, 3 * MiB]
    assert memory.reserved == [2 * MiB, 22 * MiB, 22 * MiB]  # a segment of 2 MiB for small blocks, one of 20 for others
    assert memory.block_bytes == {0: 1024, 1: 3 * MiB}


def test_each_stream_has_a_pool_of_its_own() -> None:
    recorder = StorageRecorder()
    recorder.free(recorder.allocate(12 * MiB, (12 * MiB,), "uint8", stream=1))
    recorder.allocate(12 * MiB, (12 * MiB,), "uint8")
    recorder.allocate(12 * MiB, (12 * MiB,), "uint8", stream=1)
    memory = replay(recorder, AllocatorSettings())
    assert memory.allocated == [12 * MiB, 0, 12 * MiB, 24 * MiB]
    assert memory.reserved == [12 * MiB, 12 * MiB, 24 * MiB, 24 * MiB]  # the last one is where the first was


def steps(seed: int, count: int) -> tuple[StorageRecorder, int]:
    """The same step several times, each keeping some blocks until the next has made its own; and where the second begins."""
    recorder, kept, first = StorageRecorder(), [], 0
    for number in range(count):
        rng = random.Random(seed)
        first = len(recorder.log) if number == 1 else first
        passing, left = [], []
        for _ in range(12):
            life = recorder.allocate(rng.randint(2, 60) * MiB, (1,), "uint8")
            (left if rng.random() < 0.3 else passing).append(life)
            if passing and rng.random() < 0.5:
                recorder.free(passing.pop(rng.randrange(len(passing))))
        for life in (*passing, *kept):
            recorder.free(life)
        kept = left
    return recorder, first


def test_a_step_is_repeated_until_it_reserves_nothing_more() -> None:
    num_grown = 0
    for seed in range(20):
        recorder, first = steps(seed, 2)
        after = [
            max(replay(steps(seed, count)[0], AllocatorSettings()).reserved) for count in range(1, 3 + MAX_REPEATS)
        ]
        quiet = next((n for n in range(1, len(after)) if after[n] == after[n - 1]), len(after) - 1)
        settled = replay(recorder, AllocatorSettings(), first)
        assert settled.reserved[-1] == max(settled.reserved) == after[min(quiet + 1, len(after) - 1)]
        assert len(settled.reserved) == len(settled.allocated) == len(recorder.log)
        num_grown += after[2] > after[1]
    assert num_grown >= 5, "cases in which the third step reserves more than the second"


def test_a_step_that_leaves_other_than_it_found_is_not_repeated() -> None:
    recorder = StorageRecorder()
    recorder.allocate(MiB, (1,), "uint8")
    recorder.allocate(12 * MiB, (1,), "uint8")  # a leak
    memory = replay(recorder, AllocatorSettings(), 1)
    assert memory.reserved == [2 * MiB, 14 * MiB]
