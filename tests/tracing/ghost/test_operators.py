"""What an operator writes and returns, against torch's own schemas and against what torch really does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowtide.tracing.ghost.operators import READERS, describe

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("overload", "writes", "returns", "names"),
    [
        (aten.add.Tensor, (), (None,), ()),
        (aten.add_.Tensor, (0,), (0,), ()),
        (aten.add.out, (), (None,), ("out",)),
        (aten.view.default, (), (None,), ()),
        (aten.copy_.default, (0,), (0,), ()),
        (aten._foreach_add_.Scalar, (0,), (), ()),
        (aten.native_dropout.default, (), (None, None), ()),
        (aten.index_put_.default, (0,), (0,), ()),
    ],
)
def test_writes_and_returns(
    overload: Any, writes: tuple[int, ...], returns: tuple[Any, ...], names: tuple[str, ...]
) -> None:
    op = describe(overload)
    assert op.writes == writes
    assert op.returns_written == returns
    assert [name for name in op.written_names if name in names] == list(names)


def test_every_in_place_operator_returns_what_it_wrote() -> None:
    """All of aten at once: `x.op_()` gives x."""
    count = 0
    for name in dir(aten):
        packet = getattr(aten, name)
        if not name.endswith("_") or name.startswith("_") or not hasattr(packet, "overloads"):
            continue
        for overload in packet.overloads():
            schema = getattr(packet, overload)._schema
            if (
                len(schema.returns) == 1
                and schema.returns[0].alias_info is not None
                and schema.returns[0].alias_info.is_write
            ):
                op = describe(getattr(packet, overload))
                assert op.returns_written == (0,), (name, overload)
                assert 0 in op.writes
                count += 1
    assert count > 100


@pytest.mark.parametrize("overload", [aten.native_dropout.default, aten.rand.default, aten.bernoulli_.float, aten.normal_.default,
                                      aten.multinomial.default, aten.empty.memory_format, aten.randperm.default])  # fmt: skip
def test_chance(overload: Any) -> None:
    assert describe(overload).is_chance


@pytest.mark.parametrize(
    "overload", [aten.arange.default, aten.layer_norm.default, aten.ones.default, aten.expand.default]
)
def test_no_chance(overload: Any) -> None:
    # A norm has "norm" in its name, not "normal"; it is computed, not drawn.
    assert not describe(overload).is_chance


def test_readers_are_operators_of_torch() -> None:
    for name in READERS:
        assert hasattr(aten, name.removeprefix("aten.")), name


@pytest.mark.parametrize(
    ("overload", "reads"),
    [
        (aten._local_scalar_dense.default, True),
        (aten.nonzero.default, True),
        (aten.repeat_interleave.Tensor, True),
        (aten.repeat_interleave.self_int, False),
        (aten.mm.default, False),
    ],
)
def test_who_reads_values(overload: Any, reads: bool) -> None:
    assert describe(overload).reads_values is reads
