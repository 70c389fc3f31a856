"""Every optimizer class of torch and of the packages around it: as in plain torch to the bit, or refused in one sentence.

The table in docs/supported_optimizers.md is made from the record that is compared with here.
"""

from __future__ import annotations

import functools

import pytest

from benchmarks.optim.classes import DIFFERENT, PACKAGES, PLANS, SCHEMA, all_classes, installed_packages, survey
from benchmarks.records import RESULTS, newest

RECORDED = {
    str(row["name"]): row for row in newest(RESULTS / "optim", SCHEMA, "classes_*").rows("rows", ("name", *PLANS))
}
found = functools.cache(all_classes)


def test_the_record_has_all_classes_that_are_installed() -> None:
    missing = set(PACKAGES) - set(installed_packages())
    expected = {name for name in RECORDED if name.partition(".")[0] not in missing}
    assert set(found()) == expected, "run python -m benchmarks.optim.classes, and make docs"
    assert not any(DIFFERENT in row.values() for row in RECORDED.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDED)
def test_the_class_is_identical_or_refused_as_recorded(name: str) -> None:
    if name.partition(".")[0] not in installed_packages_by_name():
        pytest.skip("not installed; make setup installs it")
    row = {"name": name, **survey(found()[name])}
    assert row == RECORDED[name]
    assert row.get("reason", "").count("\n") == 0


@functools.cache
def installed_packages_by_name() -> frozenset[str]:
    return frozenset(installed_packages())
