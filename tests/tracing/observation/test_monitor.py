"""The monitor against what is known to have been allocated, entered, left and raised."""

from __future__ import annotations

import gc
import json
import threading
import time
import weakref

import pytest
import torch
from torch import nn

from lowtide.errors import ConfigError, ObserveError
from lowtide.memory.tier import HostMemory
from lowtide.tracing.observation import monitor as monitor_module
from lowtide.tracing.observation.monitor import MemoryMonitor, own_device, own_index, take_sample
from lowtide.units import MiB

BIG_BYTES = 96 * MiB
RSS_SLACK_BYTES = 12 * MiB
"""Room for what else the process does meanwhile (thread stacks, the interpreter's arenas)."""


def touch_big() -> torch.Tensor:
    return torch.ones(BIG_BYTES // 4)  # written to, so that every page is really there


def wait_for_ticks(monitor: MemoryMonitor, count: int) -> None:
    goal = len(monitor.samples) + count
    deadline_s = time.monotonic() + 30
    while len(monitor.samples) < goal:
        assert time.monotonic() < deadline_s, "the thread does not sample"
        time.sleep(0.002)


class TestThread:
    def test_host_memory_rises_by_what_was_allocated(self) -> None:
        gc.collect()
        with MemoryMonitor(interval_s=0.002, device="cpu") as monitor:
            with monitor.phase("hold"):
                big = touch_big()
                wait_for_ticks(monitor, 3)
            del big
            wait_for_ticks(monitor, 3)
        before = monitor.samples[0].host_rss_bytes
        peak = monitor.peak()
        assert peak.host_rss_bytes - before == pytest.approx(BIG_BYTES, abs=RSS_SLACK_BYTES)
        assert peak.label == "hold"
        assert monitor.samples[-1].host_rss_bytes - before < RSS_SLACK_BYTES
        assert all(sample.host_available_bytes > 0 for sample in monitor.samples)

    def test_samples_are_ordered_and_labelled(self) -> None:
        with MemoryMonitor(interval_s=0.001, device="cpu") as monitor:
            with monitor.phase("forward"):
                wait_for_ticks(monitor, 2)
                with monitor.phase("loss"):
                    wait_for_ticks(monitor, 2)
                wait_for_ticks(monitor, 2)
            wait_for_ticks(monitor, 2)
        times = [sample.time_s for sample in monitor.samples]
        assert times == sorted(times)
        marks = [(sample.event, sample.label) for sample in monitor.samples if sample.event != "tick"]
        assert marks == [
            ("start", ""),
            ("enter", "forward"),
            ("enter", "loss"),
            ("exit", "loss"),
            ("exit", "forward"),
            ("stop", ""),
        ]
        assert {sample.label for sample in monitor.samples if sample.event == "tick"} >= {"forward", "loss"}

    def test_works_without_a_device(self) -> None:
        with MemoryMonitor(device="cpu") as monitor:
            pass
        assert monitor.device is None
        for sample in monitor.samples:
            assert (sample.device_allocated_bytes, sample.device_reserved_bytes, sample.device_used_bytes) == (
                None,
            ) * 3

    def test_thread_is_a_daemon_and_is_gone_afterwards(self) -> None:
        def ours() -> list[threading.Thread]:
            return [thread for thread in threading.enumerate() if thread.name == "lowtide memory monitor"]

        with MemoryMonitor(device="cpu"):
            (thread,) = ours()
            assert thread.daemon
        assert ours() == []
        with pytest.raises(KeyError), MemoryMonitor(device="cpu"):
            raise KeyError("from the user")
        assert ours() == []

    def test_a_dropped_monitor_dies_without_the_collector(self) -> None:
        with MemoryMonitor(device="cpu") as monitor:
            wait_for_ticks(monitor, 1)
        ref = weakref.ref(monitor)
        del monitor
        assert ref() is None

    def test_slow_samples_become_rarer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real, cost_s = monitor_module.take_sample, 0.02

        def slow(*args: object, **kwargs: object) -> object:
            time.sleep(cost_s)
            return real(*args, **kwargs)  # type: ignore[arg-type]

        monkeypatch.setattr(monitor_module, "take_sample", slow)
        monkeypatch.setattr(monitor_module, "MAX_OVERHEAD", 0.1)
        begun_s = time.perf_counter()
        with MemoryMonitor(interval_s=0.001, device="cpu") as monitor:
            wait_for_ticks(monitor, 3)
        took_s = time.perf_counter() - begun_s
        ticks = sum(sample.event == "tick" for sample in monitor.samples)
        assert ticks <= 1 + took_s / (cost_s / 0.1)

    def test_number_of_samples_is_bounded_and_the_peak_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(monitor_module, "MAX_SAMPLES", 20)
        with MemoryMonitor(interval_s=0.001, device="cpu") as monitor:
            with monitor.phase("peak"):
                big = touch_big()
            del big
            for _ in range(100):
                with monitor.phase("later"):
                    pass
        assert len(monitor.samples) <= 20
        assert monitor.peak().label == "peak"


class TestThreadErrors:
    @pytest.fixture
    def broken(self, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
        real, failed = monitor_module.take_sample, threading.Event()

        def fails_in_the_thread(*args: object, **kwargs: object) -> object:
            if kwargs["event"] == "tick":
                failed.set()
                raise OSError("the sensor is gone")
            return real(*args, **kwargs)  # type: ignore[arg-type]

        monkeypatch.setattr(monitor_module, "take_sample", fails_in_the_thread)
        return failed

    def test_raised_at_the_end(self, broken: threading.Event) -> None:
        with (
            pytest.raises(ObserveError, match=r"stopped after 2 samples: OSError: the sensor is gone") as caught,
            MemoryMonitor(interval_s=0.001, device="cpu"),
        ):
            assert broken.wait(30)
        assert isinstance(caught.value.__cause__, OSError)

    def test_raised_by_the_next_call(self, broken: threading.Event) -> None:
        with MemoryMonitor(interval_s=0.001, device="cpu") as monitor:
            assert broken.wait(30)
            monitor._thread.join()
            with pytest.raises(ObserveError, match="the sensor is gone"):
                monitor.peak()
        assert [sample.event for sample in monitor.samples] == ["start", "stop"]

    def test_does_not_hide_the_callers_error(self, broken: threading.Event) -> None:
        def body(monitor: MemoryMonitor) -> None:
            assert broken.wait(30)
            monitor._thread.join()
            raise KeyError("from the user")

        with pytest.raises(KeyError) as caught, MemoryMonitor(interval_s=0.001, device="cpu") as monitor:
            body(monitor)
        assert caught.value.__notes__ == ["The memory monitor had stopped before, with OSError('the sensor is gone')."]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class TestModules:
    def test_entries_and_exits_nest_like_the_modules(self) -> None:
        model = Net()
        with MemoryMonitor.at_modules(model, device="cpu") as monitor:
            model(torch.ones(2, 4))
        expected = ["enter Net"]
        for block in ("Net.blocks.0", "Net.blocks.1"):
            expected += [f"enter {block}"]
            expected += [f"{event} {block}.{layer}" for layer in ("first", "second") for event in ("enter", "exit")]
            expected += [f"exit {block}"]
        expected += ["exit Net"]
        samples = monitor.samples
        assert [f"{sample.event} {sample.label}" for sample in samples[1:-1]] == expected
        assert (samples[0].event, samples[-1].event) == ("start", "stop")

    def test_sees_what_a_module_allocates(self) -> None:
        class Big(nn.Module):
            def forward(self) -> torch.Tensor:
                return touch_big()

        model = Big()
        gc.collect()
        with MemoryMonitor.at_modules(model, device="cpu") as monitor:
            kept = model()
        entered, left = monitor.samples[1:3]
        assert left.host_rss_bytes - entered.host_rss_bytes == pytest.approx(BIG_BYTES, abs=RSS_SLACK_BYTES)
        assert kept.nbytes == BIG_BYTES

    def test_nesting_survives_a_module_that_raises(self) -> None:
        class Broken(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                raise ValueError("no")

        model = nn.Sequential(nn.Identity(), Broken())
        with MemoryMonitor.at_modules(model, device="cpu") as monitor, pytest.raises(ValueError, match="no"):
            model(torch.ones(1))
        assert [f"{sample.event} {sample.label}" for sample in monitor.samples[1:-1]] == [
            "enter Sequential",
            "enter Sequential.0",
            "exit Sequential.0",
            "enter Sequential.1",
            "exit Sequential.1",
            "exit Sequential",
        ]

    def test_nothing_remains(self) -> None:
        model = Net()
        with MemoryMonitor.at_modules(model, device="cpu") as monitor:
            model(torch.ones(2, 4))
        assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
        count = len(monitor.samples)
        model(torch.ones(2, 4))
        assert len(monitor.samples) == count
        ref = weakref.ref(model)
        del model
        assert ref() is None, "the monitor keeps the model"

    def test_hooks_hold_neither_model_nor_monitor(self) -> None:
        model = Net()
        monitor = MemoryMonitor.at_modules(model, device="cpu")
        monitor.__enter__()
        monitor_ref, model_ref = weakref.ref(monitor), weakref.ref(model)
        del monitor
        assert monitor_ref() is None
        model(torch.ones(2, 4))  # the orphaned hooks do nothing
        del model
        assert model_ref() is None

    def test_bounded_and_still_paired(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(monitor_module, "MAX_SAMPLES", 40)
        model = nn.Sequential(nn.Identity())
        with MemoryMonitor.at_modules(model, device="cpu") as monitor:
            for _ in range(50):
                model(torch.ones(1))
        samples = monitor.samples
        assert len(samples) <= 40
        tail = [f"{sample.event} {sample.label}" for sample in samples[-5:]]
        assert tail == ["enter Sequential", "enter Sequential.0", "exit Sequential.0", "exit Sequential", "stop "]

    def test_a_model_that_is_gone(self) -> None:
        monitor = MemoryMonitor.at_modules(nn.Linear(1, 1), device="cpu")
        with pytest.raises(ObserveError, match="the model to monitor is gone"):
            monitor.__enter__()


class TestReading:
    def test_to_dict_is_json(self) -> None:
        with MemoryMonitor(device="cpu", interval_s=0.5) as monitor, monitor.phase("forward"):
            pass
        data = json.loads(json.dumps(monitor.to_dict()))
        assert data["schema"] == "lowtide.memory_monitor/1"
        assert data["device"] is None
        assert data["interval_s"] == 0.5
        assert [sample["event"] for sample in data["samples"]] == ["start", "enter", "exit", "stop"]
        assert data["samples"][1]["host_rss_bytes"] == monitor.samples[1].host_rss_bytes

    def test_bad_input(self) -> None:
        with pytest.raises(ConfigError, match=r"interval_s is 0; give a time above 0"):
            MemoryMonitor(interval_s=0)
        monitor = MemoryMonitor(device="cpu")
        with pytest.raises(ObserveError, match="no samples yet"):
            monitor.peak()
        with monitor:
            pass
        with pytest.raises(ConfigError, match=r"no 'device_used_bytes' to take the peak of; use one of host_rss_bytes"):
            monitor.peak("device_used_bytes")
        with pytest.raises(ObserveError, match="has run already and holds 2 samples"), monitor:
            pass


@pytest.mark.gpu
class TestGpu:
    def test_device_memory_rises_by_what_was_allocated(self) -> None:
        torch.cuda.init()
        with MemoryMonitor(interval_s=0.002) as monitor:
            before = monitor.samples[0]
            with monitor.phase("hold"):
                big = torch.empty(BIG_BYTES, dtype=torch.uint8, device="cuda")
                wait_for_ticks(monitor, 3)
            del big
        peak = monitor.peak()
        assert before.device_allocated_bytes is not None
        assert peak.device_allocated_bytes == before.device_allocated_bytes + BIG_BYTES
        assert peak.device_reserved_bytes >= peak.device_allocated_bytes
        assert peak.device_used_bytes >= peak.device_reserved_bytes
        assert monitor.device == torch.device("cuda", torch.cuda.current_device())

    def test_host_alone_on_request(self) -> None:
        with MemoryMonitor(device="cpu") as monitor:
            pass
        assert monitor.samples[0].device_allocated_bytes is None


@pytest.mark.parametrize(
    ("current", "local_rank", "count", "expected"),
    [
        (0, None, 8, 0),
        (0, "0", 8, 0),
        (0, "5", 8, 5),  # the process has not chosen yet: not device 0
        (3, "5", 8, 3),  # it has
        (0, "5", 1, 0),  # it sees one device only, its own
        (0, "", 8, 0),
        (0, "five", 8, 0),
    ],
)
def test_own_index(current: int, local_rank: str | None, count: int, expected: int) -> None:
    assert own_index(current=current, local_rank=local_rank, count=count) == expected


def fake_cuda(monkeypatch: pytest.MonkeyPatch, *, current: int, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_own_device_is_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, current=0, count=4)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert own_device() == torch.device("cuda", 2)
    assert own_device("cuda") == torch.device("cuda", 2)
    assert own_device("cuda:1") == torch.device("cuda", 1)
    assert own_device(3) == torch.device("cuda", 3)
    assert own_device("cpu") is None


def test_own_device_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert own_device() is None
    with pytest.raises(ConfigError, match="device is cuda:0, but no CUDA device is available; use 'cpu'"):
        own_device("cuda:0")
    with pytest.raises(ConfigError, match="device is mps, but only cuda and cpu can be watched"):
        own_device("mps")


def test_reads_the_given_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    def answer(value: object) -> object:
        return lambda device: (asked.append(device), value)[1]

    monkeypatch.setattr(torch.cuda, "memory_allocated", answer(10))
    monkeypatch.setattr(torch.cuda, "memory_reserved", answer(20))
    monkeypatch.setattr(torch.cuda, "mem_get_info", answer((70, 100)))
    device = torch.device("cuda", 3)
    sample = take_sample(device, HostMemory(), started_s=time.perf_counter(), event="tick", label="forward")
    assert asked == [device] * 3
    assert (sample.device_allocated_bytes, sample.device_reserved_bytes, sample.device_used_bytes) == (10, 20, 30)
    assert (sample.event, sample.label) == ("tick", "forward")
