"""A calibration on the processor, which stands for the device too: what is counted, fitted and timed, against arithmetic."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.config import from_plain, to_plain
from lowtide.errors import ConfigError, HardwareError
from lowtide.hardware import UpdateKind, find_hardware, known
from lowtide.hardware.calibration import Calibration, Measurement, find_calibration
from lowtide.hardware.rates import HostRates, KernelRate
from lowtide.lab.calibration import calibrate, kernels, steps
from lowtide.lab.calibration.kernels import Sizes, Timer
from lowtide.optim.host import kernel as host_kernel
from lowtide.tracing.step_trace import Op, Phase, Work
from tests.hardware.samples import RATES
from tests.lab.calibration.sizes import TINY

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small operators on several threads take a time slice each where the cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def timed(work: float, seconds: float) -> Measurement:
    return Measurement(name="", work=work, unit="FLOP", times_s=(seconds,))


@pytest.mark.parametrize("start_s", [0.0, 5e-6])
def test_a_rate_is_found_again(start_s: float) -> None:
    truth = KernelRate(per_s=7e14, start_s=start_s)
    points = [timed(work, truth.seconds(work)) for work in (2.7e8, 2e9, 1.4e11, 1.1e12)]
    found = kernels.fit_rate(points)
    assert (found.per_s, found.start_s) == (pytest.approx(truth.per_s), pytest.approx(start_s, abs=1e-12))


def test_attention_is_found_again() -> None:
    product = KernelRate(per_s=7e14, start_s=4e-6)
    num_bytes, flops = 2.7e8, [3.4e10, 1.4e11, 5.5e11]
    points = [timed(work, product.start_s + work / 4.2e14 + num_bytes / 5e12) for work in flops]
    found = kernels.fit_attention(points, num_bytes, product)
    assert (found.share, found.bytes_per_s) == (pytest.approx(0.6), pytest.approx(5e12))
    # Where bytes take no time, or the clock had it that they take less than none.
    points = [timed(work, product.start_s + work / 4.2e14) for work in flops]
    assert kernels.fit_attention(points, num_bytes, product).share == pytest.approx(0.6)


def test_a_badly_timed_kernel_leaves_a_rate() -> None:
    """One size alone, and one that got slower with less work."""
    alone = kernels.fit_rate([timed(1e9, 1e-3)])
    assert (alone.per_s, alone.start_s) == (pytest.approx(1e12), 0.0)
    found = kernels.fit_rate([timed(1e9, 2.0), timed(1e12, 1.0)])
    assert found.per_s > 0
    assert found.start_s >= 0
    product = KernelRate(per_s=1e12, start_s=1.0)
    assert kernels.fit_attention([timed(1e9, 0.5), timed(1e10, 0.6)], 1e6, product).share > 0


def test_memory_gets_what_products_leave_of_a_step() -> None:
    works = {"aten.mm": (1e3, 6e13), "aten.add": (1e11, 0.0), "aten.mul": (3e11, 0.0), "aten.view": None}
    ops = tuple(
        Op(
            name=name, module="", source="", phase=Phase.FORWARD, seconds=0.0,
            work=None if work is None else Work(int(work[0]), work[1], "torch.bfloat16"),
        )
        for name, work in works.items()
    )  # fmt: skip
    step = steps.Step(config=TINY.large, batch=(1, 1), dtype="bfloat16", ops=ops)
    starts_s = RATES.product("bfloat16").start_s + 2 * RATES.memory.start_s
    assert steps.fit_memory(step, 1 + starts_s + 4.0, RATES).per_s == pytest.approx(1e11)
    # A step as fast as that would need memory that is faster than the fastest kernel.
    assert steps.fit_memory(step, 1.5, RATES).per_s == RATES.memory.per_s


class Counted(TorchDispatchMode):
    """Counts operators, and the FLOP of products."""

    num_ops, flops = 0, 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.num_ops += 1
        if func is torch.ops.aten.mm.default:
            self.flops += 2.0 * math.prod(args[0].shape) * args[1].shape[1]
        return func(*args, **(kwargs or {}))


def test_a_step_is_counted_as_it_runs() -> None:
    on_host = steps.read_step(TINY.small, TINY.small_batch, "float32", find_hardware("cpu"))
    model, batch = on_host.build(CPU), on_host.ids(CPU)
    with Counted() as counted:
        model(**batch).loss.backward()
    assert len(on_host.ops) == counted.num_ops
    hidden = torch.randn(*TINY.small_batch, TINY.small.hidden_size)
    tables = torch.ones(TINY.small_batch[1], TINY.small.head_size)
    with Counted() as block:
        model.layers[0](hidden, tables, tables)  # type: ignore[index,operator]  # a list of modules
    assert on_host.num_block_ops == pytest.approx(TINY.small.num_layers * block.num_ops, rel=0.02)
    # A GPU's kernels are others, and its products the same: of any GPU, whether its rates are known or not.
    read = steps.read_step(TINY.small, TINY.small_batch, "float32", find_hardware("24GiB"))
    works = [(op.name, op.work) for op in read.ops if op.work is not None]
    assert sum(work.flops for name, work in works if name == "aten.mm") == counted.flops
    assert max(work.num_bytes for name, work in works if name == "aten.add") >= 3 * hidden.nbytes
    assert 0 < len(read.ops) <= counted.num_ops


@pytest.mark.parametrize(
    ("kind", "bytes_each"),
    [
        (UpdateKind.EXACT, 26),
        (UpdateKind.FP32, 28),
        (UpdateKind.EIGHT_BIT, 14 + 2 * 2 * 4 / 128),
        (UpdateKind.TORCH_FUSED, 28),
        (UpdateKind.TORCH, 28),
    ],
)
def test_an_update_reads_and_writes_what_it_says(kind: UpdateKind, bytes_each: float) -> None:
    call, num_bytes = steps.make_update(kind, 1280, CPU)
    assert num_bytes == 1280 * bytes_each
    call()
    call()


def test_updates_take_the_work_that_they_claim() -> None:
    """The time of an update grows with its parameters: it is the update that is timed."""
    timer = Timer(CPU, TINY)
    times = []
    for count in (1 << 16, 1 << 22):
        call, num_bytes = steps.make_update(UpdateKind.EXACT, count, CPU)
        times.append(timer.on_host("update", num_bytes, "byte", call).median_s)
    assert times[1] > 8 * times[0]


def test_calls_are_timed_one_by_one() -> None:
    timer = Timer(CPU, replace(TINY, least_s=0.06))
    for found in (
        timer.on_device("sleep", 2.0, "nap", lambda: time.sleep(0.004)),
        timer.on_host("sleep", 2.0, "nap", lambda: time.sleep(0.004), count=3),
    ):
        assert len(found.times_s) == TINY.num_repeats
        assert 0.004 <= min(found.times_s) < 0.02
        assert found.per_s == pytest.approx(2.0 / found.median_s)
    assert [each.name for each in timer.found] == ["sleep", "sleep"]


@pytest.fixture(scope="module")
def small() -> steps.Step:
    return steps.read_step(TINY.small, TINY.small_batch, "float32", find_hardware("h200"))


def test_a_processor_can_be_measured_as_a_device(small: steps.Step) -> None:
    """The same code as on a GPU; its figures mean nothing but that they are of what ran."""
    told: list[str] = []
    timer = Timer(CPU, TINY, told.append)
    rates, copies = calibrate.measure_device(timer, small)
    # In a session the kernels are no faster than alone; torch's step is the same in both.
    alone = {each.name.removeprefix("update on the device, "): each.per_s for each in timer.found}
    share = rates.updates.exact / alone["bf16 exact"]
    assert 0 < share <= 1.0
    assert rates.updates.fp32 == pytest.approx(share * alone["fp32"])
    assert rates.updates.torch_fused == alone["torch fused"]
    assert (rates.bf16, rates.fp16) == (None, None)
    by_name = {each.name: each for each in timer.found}
    largest = by_name["product float32 128 x 128 x 128"]
    assert largest.work == 2 * 128**3
    assert rates.fp32.per_s >= 0.5 * largest.per_s
    assert by_name["attention float32 length 64"].work == 2 * 64 * 64 * 64  # one sequence, width 64, half of it masked
    assert by_name["attention float32 length 64 backward"].work == 2.5 * 2 * 64 * 64 * 64
    host = calibrate.measure_host(timer, HostRates(), copies)
    names = {each.name for each in timer.found}
    assert {f"update on the host, {kind}, beside copies" for kind in UpdateKind} <= names
    assert host.memory_bytes_per_s is not None
    assert told


def test_what_a_session_costs_is_measured_in_steps(small: steps.Step) -> None:
    timer = Timer(CPU, TINY)
    host = steps.measure_session(timer, small, HostRates())
    found = {each.name: each.median_s for each in timer.found}
    # An emulated device watches every operator, so that a managed step takes longer than a plain one by far.
    assert host.finished_s > 0
    num_parameters = len(list(small.build(torch.device("meta")).parameters()))
    assert host.finished_s == pytest.approx((found["step, resident"] - found["step, plain"]) / num_parameters)
    groups = TINY.small.num_layers + 3
    expected = max(0.0, found["step, streamed"] - found["step, resident"]) / 2
    assert groups - 2 <= (expected / host.window_s if host.window_s else groups) <= groups + 2
    assert host.slowdown_beside_updates >= 1.0
    assert {len(each.times_s) for each in timer.found} == {3 * -(-TINY.num_steps // 3)}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without a GPU and without a calibration, on which measuring takes a second."""
    host_kernel.is_available()  # finds the library before its folder is another
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(known, "find_calibration", find_calibration)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(calibrate, "sizes_for", lambda device: TINY)
    return tmp_path


def test_the_machine_is_measured_once(home: Path) -> None:
    numbers = torch.get_rng_state()
    with torch.no_grad():
        first = lowtide.calibrate()
    assert torch.equal(torch.get_rng_state(), numbers)
    assert first.device is None
    assert "only the host was measured" in first.notes[0]
    share = HostRates().updates_beside_copies.exact / HostRates().updates.exact
    assert first.host.updates_beside_copies.exact == pytest.approx(first.host.updates.exact * share)
    assert first.host.window_s / first.host.launch_s == pytest.approx(HostRates().window_s / HostRates().launch_s)
    assert from_plain(Calibration, to_plain(first)) == first
    assert lowtide.calibrate() == first
    assert lowtide.calibrate(again=True).measured_at >= first.measured_at
    assert find_hardware("this").host.launch_s > 0


def test_a_folder_that_takes_no_file_is_named(home: Path) -> None:
    (home / "lowtide").mkdir()
    (home / "lowtide" / "hardware").write_text("in the way")
    with pytest.raises(ConfigError, match="cannot be kept in .*name a folder that can be written in XDG_CACHE_HOME"):
        lowtide.calibrate()


def test_sizes_follow_the_devices_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 1 << 30
    free = {"large": 100 * gib, "small": 7 * gib, "full": gib}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA T4")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    found: dict[str, Sizes] = {}
    for name in ("large", "small"):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, name=name: (free[name], 120 * gib))
        found[name] = calibrate.sizes_for(torch.device("cuda", 0))
    assert found["large"].dtypes == found["small"].dtypes == ("float16", "float32")
    assert found["small"].num_updated < found["large"].num_updated
    assert all(sizes.num_tokens % length == 0 for sizes in found.values() for length in sizes.lengths)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (gib, 120 * gib))
    with pytest.raises(HardwareError, match=r"NVIDIA T4 has 1.0 GiB of its 120.0 GiB free, .* takes 4.0 GiB; end what"):
        calibrate.sizes_for(torch.device("cuda", 0))


@pytest.mark.gpu
def test_a_gpu_is_measured_in_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = lowtide.calibrate()
    is_shared = any("other processes use the device" in note for note in found.notes)
    assert found.took_s < (120 if is_shared else 60)
    assert found.device is not None
    hardware = find_hardware("this")
    rates, promised = found.device.rates, hardware.memory_bytes_per_s
    assert rates.bf16 is None or hardware.bf16_flops is None or 0.2 < rates.bf16.per_s / hardware.bf16_flops < 1.1
    assert promised is None or 0.1 < rates.memory.per_s / promised < 1.1
    assert found.device.cublas_workspace_bytes == replace(
        hardware, configured_workspace_bytes=None
    ).cublas_workspace_for(torch.__version__)
    assert 3e-6 < found.host.launch_s < 1e-3
