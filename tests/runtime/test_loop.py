"""The training loop as users write it: accumulation, several backwards, evaluation, batches of any shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.errors import HigherOrderError, SecondBackwardError, StaleBackwardError
from tests.runtime.side_by_side import (
    Tower,
    adamw,
    in_all_places,
    inputs,
    loss_of,
    manage,
    seeded,
    side_by_side,
    steps,
    with_both_schedules,
)
from tests.zoo import zoo

Optimizer = torch.optim.Optimizer


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@in_all_places
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_over_four_backwards_with_clipping(place: str, set_to_none: bool) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        seen = []
        for step in range(3):
            for part in range(4):
                loss = loss_of(model, 4 * step + part) / 4
                loss.backward()
                seen.append(loss.detach())
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            seen += gradients(model)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        return seen

    side_by_side(loop, place)


@in_all_places
def test_two_backwards_through_one_graph(place: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        seen = []
        for seed in range(3):
            loss = loss_of(model, seed)
            loss.backward(retain_graph=True)
            seen += gradients(model)
            (2 * loss).backward()
            seen += gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        return seen

    side_by_side(loop, place)


@in_all_places
def test_two_losses_that_share_a_part_of_the_graph(place: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        assert isinstance(model, Tower)
        seen = []
        for seed in range(3):
            hidden = model.blocks[0](model.stem(inputs(seed)))
            hidden.square().mean().backward(retain_graph=True)
            model.head(model.norm(model.blocks[1](hidden))).square().mean().backward()
            seen += gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        return seen

    side_by_side(loop, place)


@in_all_places
@with_both_schedules
def test_backward_of_the_sum_of_two_forwards(place: str, schedule: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        seen = []
        for seed in range(3):
            loss = loss_of(model, seed) + loss_of(model, seed + 100, size=7)
            loss.backward()
            seen.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        return seen

    side_by_side(loop, place, schedule=schedule)


@in_all_places
@with_both_schedules
def test_the_graph_of_an_unused_forward_harms_nothing(place: str, schedule: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        unused = []
        seen = []
        for seed in range(3):
            unused.append(loss_of(model, seed + 50))
            seen += [unused[-1].detach().clone(), *steps(model, optimizer, [seed])]
        return seen

    side_by_side(loop, place, schedule=schedule)


@in_all_places
def test_gradients_by_autograd_grad(place: str) -> None:
    """They are taken of parameters, of inputs, of both; nothing is put at the parameters."""

    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        seen: list[Tensor] = []
        parameters = list(model.parameters())
        for seed in range(3):
            batch = inputs(seed).requires_grad_()
            loss = model(batch).square().mean()
            seen += torch.autograd.grad(loss, [batch, *parameters[::3]], retain_graph=True)
            seen += torch.autograd.grad(loss, parameters)
            assert all(parameter.grad is None for parameter in parameters)
            seen += steps(model, optimizer, [seed])
        return seen

    side_by_side(loop, place)


@in_all_places
def test_a_backward_into_chosen_parameters(place: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        seen: list[Tensor] = []
        parameters = list(model.parameters())
        for seed in range(3):
            loss_of(model, seed).backward(inputs=parameters[1::2])
            seen += gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        return seen

    side_by_side(loop, place)


@in_all_places
def test_gradients_of_inputs(place: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        seen = []
        for seed in range(3):
            batch = inputs(seed).requires_grad_()
            model(batch).square().mean().backward()
            assert batch.grad is not None
            seen.append(batch.grad)
            optimizer.step()
            optimizer.zero_grad()
        return seen

    side_by_side(loop, place)


@in_all_places
@with_both_schedules
def test_either_zero_grad_at_either_end(place: str, schedule: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        seen = []
        for seed in range(6):
            if seed % 3 == 0:
                model.zero_grad()
            elif seed % 3 == 1:
                optimizer.zero_grad(False)
            else:
                model.zero_grad(set_to_none=False)
            loss = loss_of(model, seed)
            loss.backward()
            optimizer.step()
            seen.append(loss.detach())
        return seen

    side_by_side(loop, place, schedule=schedule)


@in_all_places
@with_both_schedules
def test_evaluation_between_steps(place: str, schedule: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        seen = []
        for seed in range(4):
            seen += steps(model, optimizer, [seed])
            model.eval()
            with torch.no_grad():
                seen.append(model(inputs(seed + 10, size=9)))
            with torch.inference_mode():
                seen.append(model(inputs(seed + 20)).clone())
            model.train()
            seen.append(model(inputs(seed + 30)).detach())
        return seen

    side_by_side(loop, place, schedule=schedule, build=lambda: nn.Sequential(Tower(), nn.Dropout(0.2)))


@in_all_places
def test_evaluation_between_forward_and_backward(place: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        seen = []
        for seed in range(3):
            loss = loss_of(model, seed)
            with torch.no_grad():
                seen.append(model(inputs(seed + 10)))
            loss.backward()
            with torch.inference_mode():
                seen.append(model(inputs(seed + 20)).clone())
            seen += gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        return seen

    side_by_side(loop, place)


@in_all_places
@with_both_schedules
def test_batches_of_changing_shape(place: str, schedule: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        seen = []
        for seed, size in enumerate((4, 1, 9, 2, 4)):
            loss = loss_of(model, seed, size)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach())
        return seen

    side_by_side(loop, place, schedule=schedule)


@in_all_places
@with_both_schedules
def test_step_with_a_closure(place: str, schedule: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        def closure(seed: int) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, seed)
            loss.backward()
            return loss

        return [optimizer.step(lambda seed=seed: closure(seed)).detach() for seed in range(3)]

    side_by_side(loop, place, schedule=schedule)


@in_all_places
def test_parts_of_the_model_called_by_themselves(place: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        assert isinstance(model, Tower)
        seen = []
        for seed in range(3):
            out = model.blocks[2](model.blocks[0](model.stem(inputs(seed))))
            out.square().mean().backward()
            with torch.no_grad():
                seen.append(model.blocks[1](out))
            optimizer.step()
            optimizer.zero_grad()
        return seen

    side_by_side(loop, place)


@pytest.mark.parametrize("place", ["streamed-host", "mixed"])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_generate(name: str, place: str) -> None:
    model = zoo(name)

    def loop(network: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        seen: list[Any] = []
        for batch in model.batches(2):
            model.loss(network, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            network.eval()
            prompt = batch["input_ids"][:2, :5]
            for use_cache in (True, False):
                seen.append(
                    network.generate(  # type: ignore[operator]
                        prompt,
                        attention_mask=torch.ones_like(prompt),
                        max_new_tokens=6,
                        do_sample=True,
                        use_cache=use_cache,
                        pad_token_id=0,
                    )
                )
            network.train()
        return seen

    side_by_side(loop, place, build=lambda: model.build(False, torch.float32))


@pytest.mark.parametrize("place", ["streamed-host", "streamed-device"])
def test_gradients_of_gradients_through_streamed_weights_are_refused(place: str) -> None:
    model = seeded(Tower)
    with manage(model, adamw(model), place):
        with pytest.raises(HigherOrderError, match="create_graph=True .*make its group resident"):
            loss_of(model, 0).backward(create_graph=True)
        model.zero_grad()


@in_all_places
def test_backward_through_updated_weights_raises(place: str) -> None:
    model = seeded(Tower)
    optimizer = adamw(model)
    with manage(model, optimizer, place):
        old = loss_of(model, 0)
        steps(model, optimizer)
        with pytest.raises((StaleBackwardError, RuntimeError), match="3 update|modified by an inplace operation"):
            old.backward()
        optimizer.zero_grad()


@in_all_places
def test_second_backward_in_backward_raises(place: str) -> None:
    model = seeded(Tower)
    optimizer = adamw(model)
    with manage(model, optimizer, place, "in_backward"):
        loss_of(model, 0).backward()
        with pytest.raises(SecondBackwardError, match="second backward reached group .*'deferred'"):
            loss_of(model, 1).backward()
        optimizer.zero_grad()
