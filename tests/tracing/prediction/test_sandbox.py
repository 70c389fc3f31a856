"""The sandbox: crashes, interrupts and threads never mix up answers, and a script's own classes travel."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lowtide.errors import TraceError, ValueReadError
from lowtide.hardware import find_hardware
from lowtide.runtime.prediction.trace import trace
from lowtide.tracing.allocator import AllocatorSettings
from lowtide.tracing.prediction.job import Contents, Job, pack
from lowtide.tracing.prediction.sandbox import Sandbox, portable, receive, send, shared_sandbox
from lowtide.tracing.settings import StepSettings


class Line(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum()


def job_of(width: int) -> Job:
    return Job(
        name=f"line-{width}",
        payload=pack(Contents(Line(width), (torch.randn(2, width),), None, None)),
        settings=StepSettings(),
        hardware=find_hardware("h200"),
        torch_version="2.13.0",
        allocator=AllocatorSettings(),
    )


@pytest.fixture
def sandbox() -> Sandbox:
    return shared_sandbox()  # starting one of their own would cost each test seconds


def is_for(width: int, sandbox: Sandbox) -> bool:
    """Whether a job's answer is its own: a matrix of that width."""
    result = sandbox.run(job_of(width))
    return result.model == f"line-{width}" and result.allocations[0].shape == (width, width)


def test_an_interrupt_leaves_it_usable(sandbox: Sandbox) -> None:
    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sandbox.run(job_of(8), interrupt)
    assert is_for(16, sandbox)


def test_a_listener_that_fails_leaves_it_usable(sandbox: Sandbox) -> None:
    def fail(text: str) -> None:
        raise BrokenPipeError("the caller's own output is gone")  # not to be taken for a crash of the subprocess

    with pytest.raises(BrokenPipeError, match="caller's own"):
        sandbox.run(job_of(8), fail)
    assert is_for(24, sandbox)


def test_the_subprocess_is_kept_for_the_next_job(sandbox: Sandbox) -> None:
    assert is_for(8, sandbox)
    first = sandbox._process
    assert is_for(40, sandbox)
    assert sandbox._process is first


def test_an_error_does_not_cost_the_subprocess(sandbox: Sandbox) -> None:
    class Reads(Line):
        def forward(self, x: Tensor) -> Tensor:
            loss = super().forward(x)
            return loss if loss > 0 else -loss

    assert is_for(8, sandbox)
    first = sandbox._process
    job = job_of(8)
    bad = Job(**{**{f: getattr(job, f) for f in job.__dataclass_fields__},
                 "payload": pack(Contents(Reads(8), (torch.randn(2, 8),), None, None))})  # fmt: skip
    with pytest.raises(ValueReadError):
        sandbox.run(bad)
    assert is_for(16, sandbox)
    assert sandbox._process is first


def test_threads_take_turns_and_get_their_own_answers(sandbox: Sandbox) -> None:
    widths = [8, 16, 24, 32, 40, 48]
    answers: dict[int, bool] = {}
    threads = [threading.Thread(target=lambda w=width: answers.update({w: is_for(w, sandbox)})) for width in widths]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == dict.fromkeys(widths, True)


def test_a_closed_one_starts_again(sandbox: Sandbox) -> None:
    sandbox.close()
    sandbox.close()  # twice is fine
    assert is_for(8, sandbox)


def test_the_shared_one_is_one() -> None:
    assert shared_sandbox() is shared_sandbox()


def test_this_process_stays_as_it_was() -> None:
    """Only the subprocess becomes a ghost machine."""
    trace(Line(8), (torch.randn(2, 8),))
    assert not hasattr(torch, "ghost")
    assert torch.autocast("cpu").device == "cpu"


def test_classes_of_a_script_travel(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch
            from torch import nn
            from lowtide.runtime.prediction.trace import trace

            class Output:
                def __init__(self, loss):
                    self.loss = loss

            SCALE = 3.0

            def scaled(x):
                return x * SCALE

            class Model(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.layer = nn.Linear(4, 4)

                def forward(self, x):
                    return Output(torch.ops.aten.relu(scaled(self.layer(x))).sum())

            if __name__ == "__main__":
                result = trace(Model(), {"x": torch.randn(2, 4)}, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
                print(result.model, result.num_parameters, result.peak_bytes == sum(result.at_peak.values()))
            """
        )
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert done.stdout.split() == ["Model", "20", "True"], done.stderr


class TestMessages:
    def test_what_is_sent_arrives(self) -> None:
        stream = io.BytesIO()
        messages = [("progress", "half"), ("result", {"a": [1, 2]}), b"x" * 100_000]
        for message in messages:
            send(stream, message)
        stream.seek(0)
        assert [receive(stream) for _ in messages] == messages

    @pytest.mark.parametrize("kept", [0, 3, 8, 12])
    def test_a_message_cut_short_is_an_end(self, kept: int) -> None:
        stream = io.BytesIO()
        send(stream, "a message of some length")
        with pytest.raises(EOFError):
            receive(io.BytesIO(stream.getvalue()[:kept]))

    def test_an_error_that_cannot_travel_is_told_of(self) -> None:
        class StubbornError(Exception):
            def __reduce__(self) -> str:
                raise TypeError("no")

        told = portable(StubbornError("seven"))
        assert isinstance(told, TraceError)
        assert "StubbornError: seven" in str(told)

    def test_our_own_errors_keep_their_facts(self) -> None:
        error = ValueReadError("reads", module="a.b", op="aten.nonzero")
        stream = io.BytesIO()
        send(stream, portable(error))
        stream.seek(0)
        back = receive(stream)
        assert (type(back), back.module, back.op) == (ValueReadError, "a.b", "aten.nonzero")

    def test_foreign_errors_carry_where_they_were_raised(self) -> None:
        try:
            torch.zeros(2)[5]
        except IndexError as error:
            told = portable(error)
        assert "test_sandbox.py" in told.__notes__[0]
