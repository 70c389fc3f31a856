"""Arguments of `manage` that cannot be meant."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import lowtide
import lowtide.activations
from lowtide.errors import ActivationError, ConfigError, HardwareError, PlanError, SessionError
from lowtide.planning.plan import Schedule, Site


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))


def test_the_optimizer_of_a_copy_is_refused() -> None:
    model = small()
    optimizer = torch.optim.AdamW(copy.deepcopy(model).parameters())
    with pytest.raises(SessionError, match="holds none of the model's 4 trained parameters; its 4 belong to something"):
        lowtide.manage(model, optimizer, lowtide.make_plan(model), device="cpu")
    assert type(model[0].weight) is nn.Parameter


def test_an_optimizer_over_a_part_of_the_model_is_fine() -> None:
    model = small()
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    before = model[0].weight.detach().clone()
    with lowtide.manage(model, optimizer, lowtide.make_plan(model), device="cpu"):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    assert torch.equal(before, model[0].weight)


def test_what_is_no_plan_is_refused() -> None:
    model = small()
    with pytest.raises(SessionError, match=r"the plan is a str; give one from lowtide.make_plan\(model, ...\)"):
        lowtide.manage(model, None, "streamed", device="cpu")  # type: ignore[arg-type]  # what the test is about


@pytest.mark.parametrize(
    "make", [lambda word: lowtide.WarmUp(schedule=word), lambda word: lowtide.StaticPartition(share=0.5, schedule=word)]
)
def test_schedules_by_name(make: object) -> None:
    assert make("in_backward").schedule is Schedule.IN_BACKWARD  # type: ignore[operator]  # either of the two
    with pytest.raises(ConfigError, match="schedule is 'inbak'; give 'deferred' or 'in_backward'"):
        make("inbak")  # type: ignore[operator]  # either of the two


def test_swapped_and_unmade_arguments() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = lowtide.make_plan(model)
    with pytest.raises(ConfigError, match=r"not a torch.nn.Module \(model and optimizer are swapped\)"):
        lowtide.manage(optimizer, model, plan, device="cpu")  # type: ignore[arg-type]  # what the test is about
    with pytest.raises(ConfigError, match=r"make it first: optimizer\(model.parameters\(\)\)"):
        lowtide.manage(model, torch.optim.SGD, plan, device="cpu")  # type: ignore[arg-type]  # what the test is about


@pytest.mark.parametrize("device", ["meta", "cpu:1", "gpu", "mps"])
def test_devices_that_cannot_be_managed(device: str) -> None:
    model = small()
    with pytest.raises(ConfigError, match="device"):
        lowtide.manage(model, None, lowtide.make_plan(model), device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_a_device_that_is_not_there() -> None:
    model = small()
    with pytest.raises(HardwareError, match="device='cpu' to emulate one"):
        lowtide.manage(model, None, lowtide.make_plan(model), device="cuda")


@pytest.mark.parametrize("norm", [0, -1.0, math.nan, "1", True])
def test_norms_that_nothing_can_be_clipped_to(norm: float) -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=f"max_grad_norm is {norm!r}; give a number above 0, or None"):
        lowtide.manage(model, optimizer, lowtide.make_plan(model), device="cpu", max_grad_norm=norm)
    assert type(model[0].weight) is nn.Parameter


def test_a_norm_without_an_optimizer_is_refused() -> None:
    model = small()
    with pytest.raises(ConfigError, match="max_grad_norm=1.0 is about updates, and there is no optimizer"):
        lowtide.manage(model, None, lowtide.make_plan(model), device="cpu", max_grad_norm=1.0)


def test_a_norm_without_an_end_only_measures() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lowtide.manage(model, optimizer, lowtide.make_plan(model), device="cpu", max_grad_norm=math.inf) as session:
        model(torch.ones(3, 4)).sum().backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
        assert session.last_grad_norm is not None
        assert float(session.last_grad_norm) == float(nn.utils.get_total_norm(gradients))


def test_half_a_group_ahead_is_refused() -> None:
    with pytest.raises(ConfigError, match="prefetch_depth is 1.5; give a whole number"):
        lowtide.make_plan(small(), prefetch_depth=1.5)  # type: ignore[arg-type]  # what the test is about


def test_statistics_of_a_closed_session_and_of_no_direction() -> None:
    model = small()
    session = lowtide.manage(model, None, lowtide.make_plan(model), device="cpu")
    with pytest.raises(ConfigError, match="give 'to device' or 'to host'"):
        session.stats().moved_bytes("todevice")
    session.close()
    with pytest.raises(SessionError, match=r"read stats\(\) and timeline\(\) before close"):
        session.stats()


def test_a_bad_loss_given_up_by_the_models_own_zero_grad() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lowtide.manage(model, optimizer, lowtide.make_plan(model), device="cpu"):
        (model(torch.ones(3, 4)).sum() * float("nan")).backward()
        model.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def taken_calls(model: nn.Module) -> int:
    return sum(module._compiled_call_impl is not None for module in model.modules())


def test_a_refused_table_leaves_everything_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4)))
    optimizer = torch.optim.AdamW(model.parameters())
    plan = lowtide.make_plan(model, weights={"0": "host"})
    with pytest.raises(ConfigError, match="is a Linear"):
        lowtide.manage(model, optimizer, plan, device="cpu")
    assert taken_calls(model) == 0
    assert "step" not in vars(optimizer)
    assert all(not parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def test_a_model_with_policies_of_its_own_is_left_with_them() -> None:
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    optimizer = torch.optim.AdamW(blocks.parameters())
    with lowtide.activations.apply(blocks, "recompute") as applied:
        plan = lowtide.make_plan(blocks, activations="offload")
        with pytest.raises(ActivationError, match="policy"):
            lowtide.manage(blocks, optimizer, plan, device="cpu")
        assert "step" not in vars(optimizer)
        blocks(torch.ones(1, 4)).sum().backward()
        assert applied.stats().num_recomputed == 3


def test_policies_without_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match="is for repeated blocks"):
        lowtide.make_plan(nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8)), activations="recompute")


def test_tiles_are_no_blocks() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(2))
            self.head = nn.Linear(64, 4096)

    model = Model()
    lowtide.activations.tile(model, {"head": 4})
    plan = lowtide.make_plan(model, activations="recompute")
    recomputed = [group.name for group in plan.groups if group.activation != lowtide.activations.Keep()]
    assert recomputed == ["layers.0", "layers.1"]


def test_staging_below_two_chunks_is_refused() -> None:
    model = small()
    plan = lowtide.make_plan(model, staging_memory=16)
    with pytest.raises(PlanError, match=r"staging_memory is 16 B .*need at least"):
        lowtide.manage(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, device="cpu")


def test_plans_that_were_written_wrongly() -> None:
    class WithLoose(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.scale = nn.Embedding(4096, 8), nn.Parameter(torch.ones(1))

    model = WithLoose()
    plan = lowtide.make_plan(model, weights={"embed": "host"})
    changed = {
        "": {"activation": lowtide.activations.Recompute()},
        "embed": {"sites": (Site.DEVICE,)},
    }
    for name, message in (("", "is not one module's call"), ("embed", "its update is on the device")):
        groups = tuple(replace(group, **changed[name]) if group.name == name else group for group in plan.groups)
        with pytest.raises(PlanError, match=message):
            lowtide.manage(model, None, replace(plan, groups=groups), device="cpu")


def test_an_optimizer_of_what_was_replaced_is_warned_of() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[1] = nn.Linear(8, 2)
    with pytest.warns(UserWarning, match=r"holds 2 parameters that are not the model's, and not 2 that are trained"):
        lowtide.manage(model, optimizer, lowtide.make_plan(model), device="cpu").close()


def test_state_that_is_added_while_it_visits_is_refused() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = lowtide.make_plan(model, update="paged")
    with lowtide.manage(model, optimizer, plan, device="cpu", precision="fp32"):
        for momentum in (0.0, 0.9):
            optimizer.param_groups[0]["momentum"] = momentum
            model(torch.ones(3, 4)).sum().backward()
            if momentum:
                with pytest.raises(ConfigError, match=r"adds state \(momentum_buffer\) was switched on"):
                    optimizer.step()
            else:
                optimizer.step()
            optimizer.zero_grad()
