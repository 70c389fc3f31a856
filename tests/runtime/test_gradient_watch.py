"""What counts as a gradient that is not finite."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from lowtide.errors import NonFiniteGradientError
from lowtide.memory.emulated_mover import EmulatedMover
from lowtide.runtime.updates.norms import GradientWatch, norm_of, refuse_non_finite_gradients

BAD = float("nan"), float("inf"), -float("inf")


def refuse(*gradients: torch.Tensor) -> None:
    refuse_non_finite_gradients({}, dict(enumerate(gradients)), "weight {}".format)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64])
@pytest.mark.parametrize("value", BAD)
def test_one_element_of_one_gradient(dtype: torch.dtype, value: float) -> None:
    gradients = [torch.ones(7, 3, dtype=dtype) for _ in range(6)]
    refuse(*gradients)
    gradients[4][2, 1] = value
    with pytest.raises(NonFiniteGradientError, match="gradients of weight 4 are NaN or infinite; nothing was updated"):
        refuse(*gradients)


def test_halves_whose_total_is_beyond_halves() -> None:
    """Norm of each 1.9e6, and their elements are finite: torch's own total of them is infinite."""
    gradients = [torch.full((1000,), 6e4, dtype=torch.float16) for _ in range(3)]
    assert torch.nn.utils.get_total_norm(gradients).isinf()
    refuse(*gradients)


def test_doubles_whose_norm_is_beyond_fp32() -> None:
    refuse(torch.full((3,), 1e40, dtype=torch.float64), torch.ones(3))
    refuse_non_finite_gradients({0: norm_of(torch.full((3,), 1e40, dtype=torch.float64))}, {}, "weight {}".format)


def test_a_norm_that_overflows_fp32_is_refused_and_the_message_says_so() -> None:
    """Its squares would be the second moments of Adam, which are infinite for good then."""
    refuse(torch.full((3,), 1e19))
    with pytest.raises(NonFiniteGradientError, match=r"weight 0 are .* A norm beyond 1\.8e19 counts as infinite"):
        refuse(torch.full((3,), 2e19))


def test_sparse_gradients() -> None:
    values = torch.ones(2, 4)
    indices = torch.tensor([[0, 2]])
    refuse(torch.sparse_coo_tensor(indices, values, (5, 4), check_invariants=True))
    values[1, 3] = float("nan")
    with pytest.raises(NonFiniteGradientError, match="weight 0"):
        refuse(torch.sparse_coo_tensor(indices, values, (5, 4), check_invariants=True))


@pytest.mark.parametrize("value", BAD)
def test_norms_that_were_taken(value: float) -> None:
    taken = {number: torch.tensor(1.0) for number in range(6)}
    refuse_non_finite_gradients(taken, {}, "weight {}".format)
    taken[1] = taken[2] = taken[4] = taken[5] = torch.tensor(value)
    with pytest.raises(NonFiniteGradientError, match="weight 1, weight 2, weight 4 and 1 more are NaN or infinite"):
        refuse_non_finite_gradients(taken, {}, "weight {}".format)


def test_no_gradient_at_all() -> None:
    refuse()
    refuse(torch.ones(0))


def test_verdicts_of_a_backward_are_told_together() -> None:
    watch = GradientWatch(EmulatedMover())
    fine, bad = torch.tensor(1.0), torch.tensor(float("nan"))
    assert watch.judge_sent(["c"], [fine]).is_finite()
    assert not watch.judge_sent(["b"], [fine, bad]).is_finite()
    watch.judge(["a"], [bad], is_left_out=False)
    with pytest.raises(
        NonFiniteGradientError, match=r"Left as they were: b\. .* weights are lost: a\. Load a checkpoint"
    ):
        watch.check(waits=True)
    watch.check(waits=True)  # told once


@pytest.mark.parametrize("value", [*BAD, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gate_of_an_update_on_the_device(value: float, dtype: torch.dtype) -> None:
    watch = GradientWatch(EmulatedMover())
    norms = [torch.tensor(1e19), torch.tensor(value, dtype=dtype), torch.tensor(0.0)]
    for some in (norms, norms[1:2]):
        gate = watch.judge(["a"] * len(some), some, is_left_out=True).gate()
        assert (gate.dtype, gate.shape) == (torch.float32, ())
        assert gate.item() == 1.0 if value == 2.0 else gate.isnan()


def test_a_backward_sends_what_it_judged_on_the_device_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    mover, sent = EmulatedMover(), list[list[float]]()
    to_host = mover.to_host
    monkeypatch.setattr(
        mover, "to_host", lambda target, source, after: sent.append(source.tolist()) or to_host(target, source, after)
    )  # type: ignore[func-returns-value]
    watch = GradientWatch(mover)
    verdicts = [
        watch.judge(["a", "b"], [torch.tensor(1.0), torch.tensor(2.0)], is_left_out=True),
        watch.judge(["c"], [torch.tensor(3.0)], is_left_out=False),
    ]
    assert not any(verdict.is_known() for verdict in verdicts)
    watch.send()
    watch.send()
    assert sent == [[1.0, 2.0, 3.0]]
    assert all(verdict.is_finite() for verdict in verdicts)


def test_what_no_backward_has_sent_is_told_all_the_same() -> None:
    """A backward that broke off has sent nothing."""
    watch = GradientWatch(EmulatedMover())
    watch.judge(["a"], [torch.tensor(1.0)], is_left_out=False)
    watch.judge(["b"], [torch.tensor(float("inf"))], is_left_out=False)
    with pytest.raises(NonFiniteGradientError, match=r"weights are lost: b\."):
        watch.check(waits=True)


def test_the_gate_is_open_for_finite_norms_whose_sum_is_not() -> None:
    """Torch's norm of a gradient with one element is the element itself."""
    watch = GradientWatch(EmulatedMover())
    norms = [norm_of(torch.tensor([3e38])) for _ in range(2)]
    verdict = watch.judge(["a", "b"], norms, is_left_out=True)
    assert verdict.gate() == 1.0
    watch.send()
    assert verdict.is_finite()  # nobody is told of an update that was left out


@pytest.mark.parametrize("where", [torch.inference_mode, lambda: torch.device("meta")])
def test_the_loop_sends_what_a_backward_that_broke_off_has_left_wherever_it_is(
    where: Callable[[], AbstractContextManager[None]],
) -> None:
    watch = GradientWatch(EmulatedMover())
    watch.judge(["a"], [torch.tensor(float("nan"))], is_left_out=True)
    with where():
        watch.check(waits=False)
    with pytest.raises(NonFiniteGradientError, match="Left as they were: a"):
        watch.check(waits=True)


def test_verdicts_that_could_not_be_sent_are_sent_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose memory is full."""

    def fail(*args: object) -> None:
        raise torch.OutOfMemoryError("full")

    watch = GradientWatch(EmulatedMover())
    watch.judge(["a"], [torch.tensor(1.0)], is_left_out=True)
    watch.judge(["b"], [torch.tensor(float("nan"))], is_left_out=True)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "stack", fail)
        with pytest.raises(torch.OutOfMemoryError):
            watch.send()
        with pytest.raises(torch.OutOfMemoryError):
            watch.judge_sent(["c"], [torch.tensor(float("nan"))])  # whose update is not made either
    with pytest.raises(NonFiniteGradientError, match=r"Left as they were: b\."):
        watch.check(waits=True)
    watch.check(waits=True)
