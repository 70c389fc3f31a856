"""How many launches an update on a GPU is, and what happens where there is no Triton to launch; no GPU is needed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import fields, replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide import compat
from lowtide.optim import reference
from lowtide.optim.device import kernel as device_kernel
from lowtide.optim.device.table import TILE, Variant
from lowtide.optim.rules import Adam, ElementwiseRule
from lowtide.optim.state import new_state
from lowtide.optim.update_types import Moments, Numerics, Piece, Rounding, Turn
from tests.optim import matrix_cases
from tests.optim.device.counted_launches import Launches, counted_launches
from tests.optim.test_reference import piece_of

RULE = Adam(lr=1e-2, weight_decay=0.1)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return counted_launches(monkeypatch)


def pieces(rule: ElementwiseRule, num_pieces: int, size: int = 3 * TILE) -> list[Piece]:
    weights = [torch.zeros(size, dtype=torch.bfloat16) for _ in range(num_pieces)]
    return [
        piece_of(weight, torch.zeros(size), new_state(weight, rule, Numerics()), rule, key=index)
        for index, weight in enumerate(weights)
    ]


def launch_all(made: list[Piece]) -> None:
    device_kernel.launch_all(made, rounding=Rounding.EXACT, moments=Moments.FP32, gradient_factor=1.0)


def test_many_pieces_are_one_launch(launches: Launches) -> None:
    launch_all(pieces(RULE, 40))
    assert [(num_pieces, num_tiles) for _, num_pieces, num_tiles in launches] == [(40, 40 * 3)]


def test_groups_with_other_rates_share_a_launch(launches: Launches) -> None:
    rates = [Adam(lr=10.0**-power, beta1=0.5 + power / 10, weight_decay=power, maximize=power == 2) for power in (1, 2)]
    launch_all([piece for rule in rates for piece in pieces(rule, 20)])
    assert [num_pieces for _, num_pieces, _ in launches] == [40]


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (pieces(Adam(lr=1e-2, is_decoupled=False), 3), {"is_decoupled": (True, False)}),
        (pieces(Adam(lr=1e-2, amsgrad=True), 3), {"num_states": (2, 3)}),
        (pieces(RULE, 3, size=TILE + 1), {"is_aligned": (True, False)}),
    ],
    ids=["decay", "amsgrad", "odd sizes"],
)
def test_two_variants_are_two_launches(
    launches: Launches, other: list[Piece], difference: dict[str, tuple[object, object]]
) -> None:
    # In turns: what is alike need not lie together.
    launch_all([piece for pair in zip(pieces(RULE, 3), other, strict=True) for piece in pair])
    assert [num_pieces for _, num_pieces, _ in launches] == [3, 3]
    one, two = (variant for variant, _, _ in launches)
    found = {field.name: (getattr(one, field.name), getattr(two, field.name)) for field in fields(Variant)}
    assert {name: pair for name, pair in found.items() if pair[0] != pair[1]} == difference


def test_nothing_to_update_is_no_launch(launches: Launches) -> None:
    launch_all(pieces(RULE, 2, size=0))
    assert launches == []


# A GPU without Triton


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has warned of nothing."""
    monkeypatch.setattr(compat, "has_triton", lambda: False)
    device_kernel._warn_once.cache_clear()
    yield
    device_kernel._warn_once.cache_clear()


WARNING = (
    r"^device updates run through torch's operators, several times slower than the Triton kernels .*: the package 'triton' "
    "is not installed; run: pip install triton$"
)


@pytest.mark.usefixtures("without_triton")
def test_a_gpu_without_triton_is_warned_of_once() -> None:
    # A warning that is not expected would be an error here.
    assert not device_kernel.can_launch(torch.device("cpu"))
    with pytest.warns(RuntimeWarning, match=WARNING) as caught:
        assert not device_kernel.can_launch(torch.device("cuda", 0))
    assert [warning.filename for warning in caught] == [__file__]
    assert not device_kernel.can_launch(torch.device("cuda", 1))


def test_a_gpu_with_triton_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "has_triton", lambda: True)
    assert device_kernel.can_launch(torch.device("cuda"))
    assert not device_kernel.can_launch(torch.device("cpu"))


@pytest.mark.usefixtures("without_triton")
@pytest.mark.parametrize("is_whole", [False, True], ids=["elementwise", "whole"])
def test_updates_on_a_gpu_without_triton_are_the_reference(is_whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    updated: list[object] = []
    for name in ("update", "update_matrices"):
        monkeypatch.setattr(reference, name, lambda pieces, **settings: updated.extend(pieces))
    rule = matrix_cases.RULE if is_whole else RULE
    with FakeTensorMode():  # tensors that say they are on a GPU, where there is none
        weight = torch.zeros(16, 16, device="cuda")
        state = new_state(weight, rule, Numerics())
        whole = matrix_cases.piece_of((weight, state), torch.ones_like(weight), 1)
        piece = piece_of(weight, torch.ones_like(weight), state, rule)

        def update() -> None:
            if is_whole:
                device_kernel.update_matrices([whole], rounding=Rounding.NEAREST)
            else:
                device_kernel.update([piece], rounding=Rounding.NEAREST, moments=Moments.FP32)

        with pytest.warns(RuntimeWarning, match=WARNING) as caught:
            update()
        assert len(caught) == 1
        update()
    assert updated == [whole if is_whole else piece] * 2


def test_launches_that_are_made_again_send_what_new_ones_would(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[Variant, torch.Tensor, torch.Tensor]] = []
    counted_launches(monkeypatch)
    monkeypatch.setattr(
        sys.modules["lowtide.optim.device.triton"],
        "launch",
        lambda variant, table, floats, factor, num_tiles: sent.append((variant, table.clone(), floats.clone())),
    )
    other = Adam(lr=1e-2, is_decoupled=False)
    first = [piece for pair in zip(pieces(RULE, 3), pieces(other, 3), strict=True) for piece in pair]
    launches = device_kernel.Launches(first, Rounding.EXACT, Moments.FP32)
    launches.run(Turn.of(first), 1.0)
    later = [
        replace(
            piece,
            weight=piece.weight.clone(),
            gradient=piece.gradient.clone(),
            rule=replace(piece.rule, lr=0.5 + number),
            step=7 + number % 3,
            key=100 + number,
        )
        for number, piece in enumerate(first)
    ]
    sent.clear()
    assert launches.fits(Turn.of(later))
    launches.run(Turn.of(later), 0.25)
    device_kernel.Launches(later, Rounding.EXACT, Moments.FP32).run(Turn.of(later), 0.25)
    again, new = sent[:2], sent[2:]
    for (kind, table, floats), (other_kind, other_table, other_floats) in zip(again, new, strict=True):
        assert kind == other_kind
        assert torch.equal(table, other_table)
        assert torch.equal(floats, other_floats)


def test_launches_do_not_fit_addresses_of_another_kernel() -> None:
    made = pieces(RULE, 2)
    launches = device_kernel.Launches(made, Rounding.EXACT, Moments.FP32)
    turn = Turn.of(made)
    assert launches.fits(turn)
    turn.gradients[1] += 4
    assert not launches.fits(turn)
