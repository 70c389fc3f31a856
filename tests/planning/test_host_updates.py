"""Which updates a plan gives to the host: those whose gradients a backward completes first, the last layers'."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lowtide.memory.chunk import Layout, lay_out
from lowtide.memory.groups import REST, find_groups
from lowtide.planning.budget_plans import StaticPartition, StepSample, WarmUp, partition, plan_after
from lowtide.planning.hand_plan import make_plan
from lowtide.planning.placement import is_trained
from lowtide.planning.plan import Plan, Schedule, Site
from tests.zoo import ZOO, ZooModel

STATE = 2.0
"""Bytes of state for each byte of weights."""


def half_by_hand(layout: Layout) -> Plan:
    return make_plan(layout, update=0.5, schedule="in_backward")


def static_partition(layout: Layout) -> Plan:
    """With room for about half of the model: weights and state, and windows."""
    config = StaticPartition(share=1.0, schedule=Schedule.IN_BACKWARD)
    return partition(layout, 2 * num_bytes(layout), config, state_bytes_per_parameter_byte=STATE)


def warm_up(layout: Layout) -> Plan:
    """With room for the weights and the state of about half of them."""
    config = WarmUp(device_share=1.0, margin_share=1.0, schedule=Schedule.IN_BACKWARD)
    samples = [StepSample(number=0, group="", phase="forward", used_bytes=0, chunk_bytes=0)]
    return plan_after(layout, samples, config, 5 * num_bytes(layout) // 2, state_bytes_per_parameter_byte=STATE)


def num_bytes(layout: Layout) -> int:
    return sum(chunk.nbytes for chunk in layout.chunks)


def completed(zoo: ZooModel, model: nn.Module) -> list[str]:
    """Names of the parameters, in the order in which a backward of plain torch completes their gradients."""
    order: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    zoo.loss(model, zoo.make_batch(0)).backward()
    return order


def sites(layout: Layout, plan: Plan) -> dict[str, Site]:
    """By trained chunk."""
    return {
        chunk.name: site
        for spec in plan.groups
        for chunk, site in zip(layout.chunks_of(spec.name), spec.sites, strict=True)
        if is_trained(chunk)
    }


@pytest.mark.parametrize("make", [half_by_hand, static_partition, warm_up])
@pytest.mark.parametrize("name", ZOO)
def test_the_host_has_the_gradients_that_come_first(name: str, make: Callable[[Layout], Plan]) -> None:
    model = ZOO[name].build(False, torch.float32)
    layout = lay_out(find_groups(model))
    chosen = sites(layout, make(layout))
    places = {parameter: place for place, parameter in enumerate(completed(ZOO[name], model))}
    # The rest of the model has parameters of its beginning and of its end: no place in the order is its own.
    ready = {
        chunk.name: max(places[span.parameter.name] for span in chunk.spans)
        for chunk in layout.chunks
        if chunk.name in chosen and chunk.group != REST
    }
    order = [chosen[chunk] for chunk in sorted(ready, key=ready.__getitem__)]
    num_on_host = order.count(Site.HOST)
    assert 0 < num_on_host < len(order)
    assert order == [Site.HOST] * num_on_host + [Site.DEVICE] * (len(order) - num_on_host)


def test_half_of_a_llama() -> None:
    layout = lay_out(find_groups(ZOO["llama"].build(False, torch.float32)))
    chosen = sites(layout, half_by_hand(layout))
    assert {name: site.value for name, site in chosen.items()} == {
        "model.embed_tokens/0": "device",
        "model.layers.0/0": "device",
        "model.layers.1/0": "host",
        "model.layers.2/0": "host",
        "lm_head/0": "host",
        "/0": "host",
    }
    on_host = [chunk.nbytes for chunk in layout.chunks if chosen[chunk.name] is Site.HOST]
    assert sum(on_host) >= num_bytes(layout) / 2 > sum(on_host[1:])
