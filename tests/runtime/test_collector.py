"""Objects are set aside while sessions run, and come back with the last one."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from lowtide.runtime.session import ObjectsAside


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    gc.unfreeze()  # Python may start with some
    yield
    gc.unfreeze()


def test_until_the_last_session_ends() -> None:
    first = ObjectsAside()
    assert gc.get_freeze_count() > 1000
    second = ObjectsAside()
    second.bring_back()
    second.bring_back()
    assert gc.get_freeze_count() > 1000
    first.bring_back()
    assert gc.get_freeze_count() == 0


def test_a_forgotten_session_ends_too() -> None:
    aside = ObjectsAside()
    del aside
    assert gc.get_freeze_count() == 0


def test_what_the_user_set_aside_stays_so() -> None:
    gc.freeze()
    ObjectsAside().bring_back()
    assert gc.get_freeze_count() > 1000


def test_new_garbage_is_collected_meanwhile() -> None:
    class Node:
        other: object = None

    died: list[bool] = []

    class Loud(Node):
        def __del__(self) -> None:
            died.append(True)

    aside = ObjectsAside()
    one, two = Loud(), Loud()
    one.other, two.other = two, one
    del one, two
    gc.collect()
    aside.bring_back()
    assert died == [True, True]
