"""Bad input of the optimizer: a clear error with nothing half updated, wherever and whenever chunks are updated."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import (
    ConfigError,
    NonFiniteGradientError,
    NonFiniteLossError,
    OptimizerStateError,
    UnsupportedOptimizerError,
)
from tests.zoo import bf16_safe

WIDTH = 16
DTYPES = {None: torch.float32, "fp32": torch.float32, "bf16 exact": torch.bfloat16}
PLACES = [
    (precision, update, schedule)
    for precision in DTYPES
    for update in ("host", "device", "paged")
    for schedule in ("deferred", "in_backward")
    if precision is not None or update != "paged"
]
everywhere = pytest.mark.parametrize(
    ("precision", "update", "schedule"), PLACES, ids=[" ".join(map(str, place)) for place in PLACES]
)
everywhere_in_turn = pytest.mark.parametrize(
    ("precision", "update"),
    [place[:2] for place in PLACES[::2]],
    ids=[f"{place[0]} {place[1]}" for place in PLACES[::2]],
)


@pytest.fixture(autouse=True)
def safe() -> Iterator[None]:
    with bf16_safe():
        yield


class Spoil(torch.autograd.Function):
    """Leaves the forward as it is, and gives back a gradient of one number."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, value: float) -> torch.Tensor:
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.full_like(gradient, ctx.value), None


def spoilt(x: torch.Tensor, value: float) -> torch.Tensor:
    out: torch.Tensor = Spoil.apply(x, value)  # type: ignore[no-untyped-call]  # torch's
    return out


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).to(dtype)


def loss_of(model: nn.Module, step: int = 0) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    rows = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)
    return model(rows).float().square().mean()  # type: ignore[no-any-return]  # a module's call has no type


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> None:
    loss_of(model, step).backward()
    optimizer.step()
    optimizer.zero_grad()


def flat(value: Any) -> list[Any]:
    """Numbers and tensors of a state dictionary, in order."""
    if isinstance(value, dict):
        return [part for key in sorted(value, key=str) for part in flat(value[key])]
    if isinstance(value, list | tuple):
        return [part for each in value for part in flat(each)]
    return [value]


class Managed:
    """A model under management that has taken a step, and what it was then."""

    def __init__(self, precision: str | None, update: str, schedule: str, **settings: Any) -> None:
        self.model = network(DTYPES[precision])
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        plan = lowtide.make_plan(self.model, update=update, schedule=schedule)
        self.session = lowtide.manage(self.model, self.optimizer, plan, device="cpu", precision=precision, **settings)
        take_step(self.model, self.optimizer)
        self.before = self.everything()

    def everything(self) -> list[Any]:
        self.session.settle()
        return flat(copy.deepcopy([self.model.state_dict(), self.optimizer.state_dict()]))

    def assert_as_before_and_going_on(self) -> None:
        for one, other in zip(self.before, self.everything(), strict=True):
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        self.optimizer.zero_grad()
        take_step(self.model, self.optimizer, 1)
        self.session.close()
        assert all(parameter.isfinite().all() for parameter in self.model.parameters())
        assert all(type(parameter) is nn.Parameter for parameter in self.model.parameters())


def backward_and_step(managed: Managed, factor: float = 1.0) -> None:
    (loss_of(managed.model, 1) * factor).backward()
    managed.optimizer.step()
    managed.session.settle()


@everywhere
@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite(precision: str | None, update: str, schedule: str, factor: float) -> None:
    managed = Managed(precision, update, schedule)
    with pytest.raises(NonFiniteLossError, match="nothing was updated"):
        backward_and_step(managed, factor)
    managed.assert_as_before_and_going_on()


@everywhere_in_turn
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite_where_the_loss_is(
    precision: str | None, update: str, value: float, max_grad_norm: float | None
) -> None:
    managed = Managed(precision, update, "deferred", max_grad_norm=max_grad_norm)
    hook = managed.model[1].register_forward_hook(lambda module, args, out: spoilt(out, value))
    with pytest.raises(NonFiniteGradientError, match="(nan|inf|NaN or infinite)[,;].* nothing was updated"):
        backward_and_step(managed)
    hook.remove()
    managed.assert_as_before_and_going_on()


@everywhere_in_turn
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_backward_that_updates_by_gradients_that_are_not_finite(
    precision: str | None, update: str, value: float
) -> None:
    """Such chunks are left out, by the host and by our own kernels. torch's own step on the device is made, and named."""
    managed = Managed(precision, update, "in_backward")
    is_left_out = update == "host" or precision is not None
    before = [parameter.detach().clone() for parameter in managed.model.parameters()]
    state = copy.deepcopy(managed.optimizer.state_dict()["state"])
    hook = managed.model[1].register_forward_hook(lambda module, args, out: spoilt(out, value))
    lost = "Left as they were: 1.weight" if is_left_out else "their weights are lost: 1.weight"
    with pytest.raises(NonFiniteGradientError, match=lost):
        backward_and_step(managed)
    hook.remove()
    if is_left_out:
        # Moments and counts too.
        for number, entries in managed.optimizer.state_dict()["state"].items():
            assert float(entries["step"]) == (1.0 if number < 4 else 2.0)
            for name, kept in entries.items():
                assert torch.equal(torch.as_tensor(kept), torch.as_tensor(state[number][name])) == (number < 4)
    managed.session.close()
    after = list(managed.model.parameters())
    # The gradient is spoilt on its way from the second layer to the first.
    assert all(parameter.isfinite().all() for parameter in after[4:])
    assert not any(torch.equal(*pair) for pair in zip(before[4:], after[4:], strict=True))
    for one, other in zip(before[:4], after[:4], strict=True):
        assert torch.equal(one, other) if is_left_out else not other.isfinite().all()


@pytest.mark.parametrize("update", ["device", "host"])
def test_the_next_backward_is_refused_after_one_that_updated_by_such_gradients(update: str) -> None:
    managed = Managed(None, update, "in_backward")
    hook = managed.model[1].register_forward_hook(lambda module, args, out: spoilt(out, float("nan")))
    loss_of(managed.model, 1).backward()
    hook.remove()
    with pytest.raises(NonFiniteGradientError, match="a backward that updates brought gradients"):
        take_step(managed.model, managed.optimizer, 2)  # the step of before was never asked for: this is its forward
    managed.session.close()


@everywhere_in_turn
def test_a_gradient_that_the_user_spoils_or_mends(precision: str | None, update: str) -> None:
    """What counts is the gradient at `step()`, not what it was when it passed by."""
    managed = Managed(precision, update, "deferred")
    hook = managed.model[1].register_forward_hook(lambda module, args, out: spoilt(out, float("nan")))
    loss_of(managed.model, 1).backward()
    hook.remove()
    for parameter in managed.model.parameters():
        assert parameter.grad is not None
        parameter.grad.nan_to_num_(nan=0.0)
    managed.optimizer.step()
    managed.optimizer.zero_grad()
    managed.before = managed.everything()

    loss_of(managed.model, 1).backward()
    gradient = managed.model[2].weight.grad
    assert isinstance(gradient, torch.Tensor)
    gradient[3, 3] = float("inf")
    with pytest.raises(NonFiniteGradientError, match=r"gradients of 2\.weight are NaN or infinite"):
        managed.optimizer.step()
    managed.assert_as_before_and_going_on()


@pytest.mark.parametrize("precision", list(DTYPES))
def test_gradients_that_are_not_finite_in_one_of_several_backwards(precision: str | None) -> None:
    managed = Managed(precision, "host", "deferred")
    hook = managed.model[1].register_forward_hook(lambda module, args, out: spoilt(out, float("inf")))
    loss_of(managed.model, 1).backward()
    hook.remove()
    loss_of(managed.model, 2).backward()
    with pytest.raises(NonFiniteGradientError, match=r"gradients of 0\.weight, 0\.bias, 1\.weight and 1 more are"):
        managed.optimizer.step()
    managed.assert_as_before_and_going_on()


@everywhere
@pytest.mark.parametrize("rate", [None, float("nan"), "fast"])
def test_a_learning_rate_that_is_none(precision: str | None, update: str, schedule: str, rate: Any) -> None:
    managed = Managed(precision, update, schedule)
    managed.optimizer.param_groups[0]["lr"] = rate
    with pytest.raises(
        ConfigError, match=rf"lr of .*param group.* is {rate!r}; set a finite number before the next step"
    ):
        backward_and_step(managed)
    managed.optimizer.param_groups[0]["lr"] = 1e-2
    managed.assert_as_before_and_going_on()


@everywhere
def test_a_learning_rate_in_a_tensor_that_is_none(precision: str | None, update: str, schedule: str) -> None:
    managed = Managed(precision, update, schedule)
    managed.optimizer.param_groups[0]["lr"] = torch.tensor(float("nan"))
    with pytest.raises(
        ConfigError, match=r"lr of .*param group.* is .*nan.*; set a finite number before the next step"
    ):
        backward_and_step(managed)
    managed.optimizer.param_groups[0]["lr"] = 1e-2
    managed.assert_as_before_and_going_on()


def test_an_optimizer_whose_rate_may_be_none_goes_on() -> None:
    class Own(torch.optim.SGD):
        """Chooses its rate itself where it is given none."""

        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as torch's own do
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.data.sub_(parameter.grad, alpha=0.1 if group["lr"] is None else group["lr"])

    models = network(), network()
    optimizers = [Own(model.parameters(), lr=1.0) for model in models]
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] = None
    with lowtide.manage(models[1], optimizers[1], lowtide.make_plan(models[1]), device="cpu"):
        for model, optimizer in zip(models, optimizers, strict=True):
            take_step(model, optimizer)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


def states_of_others() -> dict[str, tuple[Any, str]]:
    """States that do not fit, and what is said of them."""
    wider = nn.Sequential(*(nn.Linear(WIDTH + 1, WIDTH + 1) for _ in range(4)))
    of_wider = torch.optim.AdamW(wider.parameters())
    wider(torch.ones(2, WIDTH + 1)).sum().backward()
    of_wider.step()
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    take_step(model, sgd)
    without_state = torch.optim.SGD(model.parameters(), lr=0.1)
    few = torch.optim.AdamW(list(network().parameters())[:3])
    whole = torch.optim.AdamW(model.parameters())
    take_step(model, whole)
    without = copy.deepcopy(whole.state_dict())
    del without["state"][5]["exp_avg_sq"]
    return {
        "another model": (of_wider.state_dict(), r"exp_avg of 'parameter 0 of param group 0' has shape \(17, 17\)"),
        "another optimizer": (sgd.state_dict(), "has momentum_buffer; Adam.* keeps step, exp_avg, exp_avg_sq"),
        "another optimizer without state": (
            without_state.state_dict(),
            "param group 0 of the state has momentum, dampening, nesterov, which AdamW does not know, and not betas, eps,",
        ),
        "other groups": (few.state_dict(), r"has param groups of \[3\] parameters, and the optimizer of \[8\]"),
        "an entry is missing": (without, "the state of 'parameter 5 of param group 0' has exp_avg, step"),
        "a model's": (model.state_dict(), "has the entries .* give what optimizer.state_dict"),
        "no dictionary": ([1, 2], "the state is a list"),
    }


STATES_OF_OTHERS = states_of_others()


@everywhere
@pytest.mark.parametrize("which", STATES_OF_OTHERS)
def test_a_state_that_does_not_fit(precision: str | None, update: str, schedule: str, which: str) -> None:
    state, message = STATES_OF_OTHERS[which]
    managed = Managed(precision, update, schedule)
    with pytest.raises(OptimizerStateError, match=message):
        managed.optimizer.load_state_dict(state)
    managed.assert_as_before_and_going_on()


@everywhere
def test_a_state_that_fits_is_loaded(precision: str | None, update: str, schedule: str) -> None:
    managed = Managed(precision, update, schedule)
    saved = copy.deepcopy(managed.optimizer.state_dict())
    weights = copy.deepcopy(managed.model.state_dict())
    take_step(managed.model, managed.optimizer, 1)
    managed.session.settle()
    managed.model.load_state_dict(weights)
    managed.optimizer.load_state_dict(saved)
    managed.assert_as_before_and_going_on()


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.AdamW(parameters, amsgrad=True),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.Adafactor(parameters),
        lambda parameters: torch.optim.RMSprop(parameters, centered=True, momentum=0.9),
        lambda parameters: torch.optim.NAdam(parameters),
        lambda parameters: torch.optim.ASGD(parameters),
        lambda parameters: torch.optim.Rprop(parameters),
        lambda parameters: lowtide.optim.Lion(parameters),
        lambda parameters: lowtide.optim.Adafactor(parameters),
    ],
)
def test_the_states_of_other_optimizers_fit_themselves(make: Any) -> None:
    model = network()
    optimizer = make(model.parameters())
    take_step(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    with lowtide.manage(model, optimizer, lowtide.make_plan(model), device="cpu"):
        optimizer.load_state_dict(saved)
        take_step(model, optimizer, 1)


class WithClosure(torch.optim.SGD):
    """Asks its closure for the loss."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        super().step()
        return loss


@everywhere
@pytest.mark.parametrize("kind", [torch.optim.LBFGS, WithClosure])
def test_a_rule_that_needs_a_closure(precision: str | None, update: str, schedule: str, kind: Any) -> None:
    model = network(DTYPES[precision])
    before = copy.deepcopy(model.state_dict())
    optimizer = kind(model.parameters(), lr=0.1)
    plan = lowtide.make_plan(model, update=update, schedule=schedule)
    with pytest.raises(UnsupportedOptimizerError, match=kind.__name__):
        lowtide.manage(model, optimizer, plan, device="cpu", precision=precision)
    assert "step" not in vars(optimizer)
    assert not optimizer.state
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


@pytest.mark.parametrize("precision", ["bf16 exact", "fp16 exact"])
def test_masters_that_torch_has_rounded_before_are_refused(precision: str) -> None:
    """The natural order, model and optimizer loaded and then managed: torch's own `load_state_dict` rounds the masters."""
    dtype = torch.bfloat16 if precision.startswith("bf16") else torch.float16
    torch.manual_seed(0)
    model = nn.Linear(8, 8, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plan = lowtide.make_plan(model)
    with lowtide.manage(model, optimizer, plan, device="cpu", precision=precision):
        model(torch.ones(2, 8, dtype=dtype)).float().sum().backward()
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    again = nn.Linear(8, 8, dtype=dtype)
    other = torch.optim.AdamW(again.parameters(), lr=1e-3)
    other.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    with pytest.raises(OptimizerStateError, match=r"Load the state after manage\(\)"):
        lowtide.manage(again, other, lowtide.make_plan(again), device="cpu", precision=precision)
    assert torch.equal(again.weight, saved[1]["weight"]), "a plain model, as it was"


@pytest.mark.parametrize(
    ("precision", "moments", "bits"),
    [("bf16 stochastic", "8bit", 8), ("bf16 stochastic", "fp32", 32), ("bf16 nearest", "8bit", 8)],
)
def test_moments_that_torch_has_rounded_before_are_refused(precision: str, moments: str, bits: int) -> None:
    """Without masters the moments tell: a run that goes on with rounded ones is another run."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    words: dict[str, Any] = {"device": "cpu", "precision": precision, "moments": moments}
    with lowtide.manage(model, optimizer, lowtide.make_plan(model), **words):
        model(torch.ones(2, 8, dtype=torch.bfloat16)).float().sum().backward()
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        weights = copy.deepcopy(model.state_dict())
    again = nn.Linear(8, 8, dtype=torch.bfloat16)
    again.load_state_dict(weights)
    other = torch.optim.AdamW(again.parameters(), lr=1e-3)
    other.load_state_dict(saved)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(OptimizerStateError, match=rf"was saved in fp32, from {bits} bits: .*after manage\(\)"):
        lowtide.manage(again, other, lowtide.make_plan(again), **words)
    assert_same_state_dicts(other.state_dict(), before)
    assert torch.equal(again.weight, weights["weight"])
    # Both ways that the message names.
    with lowtide.manage(
        again, torch.optim.AdamW(again.parameters(), lr=1e-3), lowtide.make_plan(again), **words
    ) as session:
        assert session.optimizer is not None
        session.optimizer.load_state_dict(saved)
        assert_same_state_dicts(session.optimizer.state_dict(), saved)
    for entries in other.state.values():
        del entries["moments"]
    lowtide.manage(again, other, lowtide.make_plan(again), **words).close()


def test_moments_of_a_run_in_plain_bf16_are_taken_over() -> None:
    model = nn.Linear(8, 8, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(2, 8, dtype=torch.bfloat16)).float().sum().backward()
    optimizer.step()
    expected = {name: value.float() for name, value in optimizer.state[model.weight].items()}
    with lowtide.manage(model, optimizer, lowtide.make_plan(model), device="cpu", precision="bf16 stochastic"):
        found = optimizer.state_dict()["state"][0]
        assert torch.equal(found["exp_avg"], expected["exp_avg"])


def assert_same_state_dicts(one: dict[str, Any], other: dict[str, Any]) -> None:
    for key, entries in other["state"].items():
        assert entries.keys() == one["state"][key].keys()
        for name, value in entries.items():
            found = one["state"][key][name]
            assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value
