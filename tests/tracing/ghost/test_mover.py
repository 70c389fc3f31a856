"""Ghosts between the tiers: what the card holds while copies are under way, as with a CUDA mover."""

from __future__ import annotations

import pytest
import torch

from lowtide.activations.stash import Stash
from lowtide.tracing.ghost.mover import GhostMover
from tests.tracing.ghost.ghost_process import GhostProcess, Lab

SIZE = 2**21
"""Bytes of a tensor here: enough for its copy on the host to be a ghost."""


def ghost(lab: Lab) -> torch.Tensor:
    found: torch.Tensor = lab.ghost(SIZE // 4)
    return found


@pytest.mark.parametrize("is_part", [False, True])
def test_a_mover_holds_nothing(ghosts: GhostProcess, is_part: bool) -> None:
    def step(lab: Lab) -> int:
        mover = GhostMover(lab.machine.device)
        source = lab.ghost(2, SIZE // 8)[0] if is_part else ghost(lab)
        mover.to_host(mover.host_buffer(source.nbytes).view(torch.float32), source, keep=False)
        del source
        return int(lab.live_bytes)

    assert ghosts(step) == 0


class TestStash:
    def test_views_of_one_storage_go_once_and_come_back_as_they_were(self, ghosts: GhostProcess) -> None:
        def step(lab: Lab) -> tuple[int, int, list[bool]]:
            stash = Stash(GhostMover(lab.machine.device))
            parcel = stash.open_parcel(0)
            whole = lab.ghost(4, SIZE // 16)
            views = [whole[index] for index in range(4)] + [whole.t()]
            saved = [stash.put(parcel, view) for view in views]
            wanted = [(view.shape, view.stride(), view.storage_offset(), view.dtype) for view in views]
            del whole, views
            others = [stash.put(parcel, ghost(lab)) for _ in range(2)]  # now the first may go
            gone = lab.live_bytes
            back = [item.peek() for item in saved]
            found = [(view.shape, view.stride(), view.storage_offset(), view.dtype) for view in back]
            same = [left == right for left, right in zip(wanted, found, strict=True)]
            return stash.num_put - len(others), (lab.live_bytes - gone) // SIZE, same

        num_put, num_back, same = ghosts(step)
        assert (num_put, num_back, same) == (1, 1, [True] * 5)

    def test_a_small_view_of_a_large_storage_goes_alone(self, ghosts: GhostProcess) -> None:
        def step(lab: Lab) -> tuple[int, bool]:
            stash = Stash(GhostMover(lab.machine.device))
            part = lab.ghost(8, SIZE // 4)[3]
            saved = stash.put(stash.open_parcel(0), part)
            return stash.put_bytes, saved.peek().shape == part.shape

        assert ghosts(step) == (SIZE, True)


def test_a_ghost_mover_has_no_windows(ghosts: GhostProcess) -> None:
    def step(lab: Lab) -> None:
        mover = GhostMover(lab.machine.device)
        mover.shrink(mover.device_buffer(SIZE), [])

    with pytest.raises(AssertionError, match="cannot be taken away"):
        ghosts(step)
