"""`torch.func` on a managed model: calls with tensors of the user's are plain ones, all else is refused in one sentence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap

import lowtide
from lowtide.errors import ActivationError, ModelChangedError, SessionError
from lowtide.planning.budget_plans import WarmUp
from tests.runtime.side_by_side import (
    Tower,
    adamw,
    assert_same_values,
    in_all_places,
    in_turn,
    inputs,
    loss_of,
    manage,
    seeded,
    side_by_side,
    steps,
)

Optimizer = torch.optim.Optimizer
Tensors = dict[str, Tensor]
X = inputs(3)


def own(model: nn.Module, factor: float = 0.7) -> Tensors:
    return {name: parameter.detach().clone().mul_(factor) for name, parameter in model.named_parameters()}


def squares(model: nn.Module, given: Tensors, x: Tensor) -> Tensor:
    out: Tensor = functional_call(model, given, (x,)).square().sum()
    return out


def flat(values: Tensors) -> Tensor:
    return torch.cat([value.flatten() for value in values.values()])


def evaluated(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return functional_call(model, own(model), (X,))


def as_parameters(model: nn.Module) -> Tensor:
    given = {name: nn.Parameter(value) for name, value in own(model).items()}
    squares(model, given, X).backward()
    return flat({name: value.grad for name, value in given.items() if value.grad is not None})


def some_of_a_group(model: nn.Module) -> Tensor:
    """The others of these groups are the model's own."""
    names = ("stem.weight", "blocks.1.inner.bias", "norm.weight")
    given = {name: own(model)[name].requires_grad_() for name in names}
    loss = squares(model, given, X)
    return torch.cat([value.flatten() for value in torch.autograd.grad(loss, list(given.values()))])


def one_group(model: nn.Module) -> Tensor:
    given = {name: value for name, value in own(model).items() if name.startswith("blocks.1")}
    with torch.no_grad():
        return functional_call(model, given, (X,))


def fast_weights(model: nn.Module) -> Tensor:
    """Gradients through an inner step, as meta-learning takes them."""
    given = {name: value.requires_grad_() for name, value in own(model).items()}
    gradients = torch.autograd.grad(squares(model, given, X), list(given.values()), create_graph=True)
    moved = {name: value - 0.1 * step for (name, value), step in zip(given.items(), gradients, strict=True)}
    squares(model, moved, inputs(4)).backward()
    return flat({name: value.grad for name, value in given.items() if value.grad is not None})


def weights_made_from_the_models(model: nn.Module) -> Tensor:
    given = {name: parameter * 0.5 for name, parameter in model.named_parameters()}
    gradients = torch.autograd.grad(squares(model, given, X), list(model.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients])


def of_gradients(model: nn.Module) -> Tensor:
    return flat(grad(lambda given: squares(model, given, X))(own(model)))


def of_parameters_themselves(model: nn.Module) -> Tensor:
    """Right after a step, when their updates may be under way."""
    return flat(grad(lambda given: squares(model, given, X))(dict(model.named_parameters())))


def of_each_row(model: nn.Module) -> Tensor:
    one = grad(lambda given, row: squares(model, given, row[None]))
    return flat(vmap(one, in_dims=(None, 0))(own(model), X))


def of_an_ensemble(model: nn.Module) -> Tensor:
    stacked = {name: torch.stack([value, 2 * value]) for name, value in own(model).items()}
    return vmap(lambda given: functional_call(model, given, (X,)))(stacked)


def of_curvature(model: nn.Module) -> Tensor:
    given = own(model)
    return hessian(lambda bias: squares(model, {**given, "head.bias": bias}, X))(given["head.bias"])


def of_directions(model: nn.Module) -> Tensor:
    given = own(model)
    return jvp(lambda values: functional_call(model, values, (X,)), (given,), (given,))[1]


WITH_OWN: dict[str, Callable[[nn.Module], Tensor]] = {
    function.__name__: function
    for function in (
        evaluated,
        as_parameters,
        some_of_a_group,
        one_group,
        fast_weights,
        weights_made_from_the_models,
        of_gradients,
        of_parameters_themselves,
        of_each_row,
        of_an_ensemble,
        of_curvature,
        of_directions,
    )
}


@in_turn
@pytest.mark.parametrize("call", WITH_OWN)
def test_calls_with_tensors_of_the_users_are_plain_ones(place: str, schedule: str, call: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        seen: list[Tensor] = []
        for seed in range(2):
            seen += steps(model, optimizer, [seed])
            seen.append(WITH_OWN[call](model).detach().clone())
        return seen + steps(model, optimizer, [7])

    side_by_side(loop, place, schedule=schedule)


@in_all_places
def test_between_a_forward_and_its_backward(place: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        seen = []
        for seed in range(2):
            loss = loss_of(model, seed)
            seen += [evaluated(model), fast_weights(model), of_parameters_themselves(model)]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return seen

    side_by_side(loop, place)


def test_a_call_of_the_users_tensors_brings_nothing_to_the_device() -> None:
    model = seeded(Tower)
    optimizer = adamw(model)
    with manage(model, optimizer, "streamed-host") as session:
        steps(model, optimizer)
        given = own(model)
        moved = session.stats().moved
        fetched = sum(chunk.num_fetches for chunk in session.stats().chunks)
        with torch.no_grad():
            functional_call(model, given, (X,))
        assert session.stats().moved == moved
        assert sum(chunk.num_fetches for chunk in session.stats().chunks) == fetched


TRANSFORMS: dict[str, Callable[[nn.Module], object]] = {
    "grad": lambda model: grad(lambda x: model(x).sum())(X),
    "vjp": lambda model: vjp(model, X),
    "vmap": lambda model: vmap(lambda row: model(row[None])[0])(X),
    "jacrev": lambda model: jacrev(model)(X),
    "jvp": lambda model: jvp(model, (X,), (X,)),
}


@in_all_places
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_around_the_models_own_weights_are_refused(place: str, transform: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        seen = steps(model, optimizer)
        if "step" in vars(optimizer):
            with pytest.raises(
                SessionError, match=r"a transform of torch.func calls .* give it weights of your own for the"
            ):
                TRANSFORMS[transform](model)
        return seen + steps(model, optimizer)

    side_by_side(loop, place)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_around_weights_that_stay_on_the_device_work(transform: str) -> None:
    plain, model = seeded(Tower), seeded(Tower)
    expected = TRANSFORMS[transform](plain)
    plan = lowtide.make_plan(model, weights="resident", update="device")
    with lowtide.manage(model, adamw(model), plan, device="cpu"):
        found = TRANSFORMS[transform](model)
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor)
        assert torch.equal(expected, found)


def test_tensors_on_another_device_are_refused() -> None:
    model = seeded(Tower)
    with manage(model, adamw(model), "streamed-host"):
        given = {name: value.to("meta") for name, value in own(model).items()}
        with pytest.raises(
            SessionError, match=r"a tensor \(16,\) on meta, and the model computes on cpu; bring it there"
        ):
            functional_call(model, {"norm.bias": given["norm.bias"]}, (X,))
        with pytest.raises(SessionError, match="on meta, and the model computes on cpu"):
            functional_call(model, given, (X,))


def test_a_parameter_that_was_replaced_for_good_is_not_taken_for_a_call() -> None:
    model = seeded(Tower)
    optimizer = adamw(model)
    with manage(model, optimizer, "streamed-host"):
        old = model.get_parameter("blocks.0.inner.weight")
        model.get_submodule("blocks.0.inner").weight = nn.Parameter(old.detach().clone())
        with pytest.raises(ModelChangedError, match="1 replaced"):
            steps(model, optimizer)
        model.get_submodule("blocks.0.inner").weight = old


@pytest.mark.parametrize("words", ["recompute", "recompute/2", "selective", "offload"])
@pytest.mark.parametrize("weights", ["resident", "streamed"])
def test_policies_that_run_a_block_again_refuse_parameters_of_one_call(words: str, weights: str) -> None:
    """They would run it again with the model's own: wrong gradients, and no word."""
    model = seeded(Tower)
    optimizer = adamw(model)
    plan = lowtide.make_plan(model, weights=weights, activations=words)
    with lowtide.manage(model, optimizer, plan, device="cpu"):
        given = {name: value.requires_grad_() for name, value in own(model).items()}
        with pytest.raises(
            ActivationError, match="gives Block at blocks.0 other parameters for this call, and its policy"
        ):
            functional_call(model, given, (X,))
        found = evaluated(model)
        given = dict(model.named_parameters())
        squares(model, given, X).backward()
        optimizer.step()
    assert_same_values([evaluated(seeded(Tower))], [found])


def test_a_table_on_the_host() -> None:
    def results(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        ids = torch.arange(6)
        seen = []
        for _ in range(2):
            held = model.get_parameter("0.weight").detach()
            model(ids).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(held.clone())
            given = {name: value.requires_grad_() for name, value in own(model).items()}
            seen += torch.autograd.grad(squares(model, given, ids), list(given.values()))
            seen += grad(lambda values: squares(model, values, ids))(own(model)).values()
        return seen

    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(40, 8), nn.Linear(8, 4))

    plain, model = seeded(build), seeded(build)
    expected, optimizer = results(plain, adamw(plain)), adamw(model)
    plan = lowtide.make_plan(model, weights={"0": "host", "1": "resident"}, update={"0": "host", "1": "device"})
    with lowtide.manage(model, optimizer, plan, device="cpu"):
        assert_same_values(expected, results(model, optimizer))
        with pytest.raises(ActivationError, match=r"embedding at '0', whose table \(1.2 KiB\) is on the host; give it"):
            vmap(lambda row: model(row[None]))(torch.arange(6))


def test_a_warm_up_goes_on_until_a_call_of_the_models_own() -> None:
    model = seeded(Tower)
    optimizer = adamw(model)
    plain = seeded(Tower)
    expected = steps(plain, adamw(plain), [0, 1])
    with lowtide.manage(model, optimizer, WarmUp(device_memory="1MiB"), device="cpu") as session:
        found = steps(model, optimizer, [0])
        as_parameters(model)
        assert session.is_warming_up
        found += steps(model, optimizer, [1])
        assert not session.is_warming_up
        assert_same_values([*expected, as_parameters(plain)], [*found, as_parameters(model)])
