"""Policies by word, by path and in files."""

from __future__ import annotations

import pytest
from torch import nn

from lowtide.activations import CompileBudget, Keep, Offload, Policy, Recompute, Selective, policy_of, resolve
from lowtide.errors import ConfigError, UnknownNameError
from tests.activations.measured import stack


@pytest.mark.parametrize(
    ("word", "policy"),
    [("keep", Keep()), ("selective", Selective()), ("recompute", Recompute()), ("offload", Offload())],
)
def test_a_word_is_the_policy_with_its_defaults(word: str, policy: Policy) -> None:
    assert policy_of(word) == policy
    assert policy_of(policy) is policy


def test_unknown_words_name_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="no activation policy named 'recomput'; did you mean 'recompute'"):
        policy_of("recomput")
    for word, fault in (("compile-budget", "and has no default"), ("compile-budget/half", "not 'half'")):
        with pytest.raises(
            ConfigError, match=rf"is a number,? {fault}; write 'compile-budget/0.5' or CompileBudget\(share=0.5\)"
        ):
            policy_of(word)
    with pytest.raises(ConfigError, match="share is 2.0"):
        policy_of("compile-budget/2")
    with pytest.raises(UnknownNameError, match="choose one of .*recompute/N"):
        policy_of("xyz")


def test_words_with_a_number() -> None:
    assert policy_of("recompute/4") == Recompute(segment=4)
    assert policy_of("offload/all") == Offload(recompute=False)
    assert policy_of("compile-budget/0.5") == CompileBudget(share=0.5)
    for word in ("recompute/0", "recompute/x"):
        with pytest.raises(ConfigError, match="give a number of blocks, 1 or more"):
            policy_of(word)
    for word in ("recompute/", "offload/4"):
        with pytest.raises(UnknownNameError, match="recompute|offload"):
            policy_of(word)


@pytest.mark.parametrize("what", [Recompute, None, 3, [], object()])
def test_what_is_no_policy(what: object) -> None:
    with pytest.raises(ConfigError, match="is no activation policy"):
        policy_of(what)  # type: ignore[arg-type]  # what the test is about
    with pytest.raises(ConfigError, match="is no activation policy"):
        resolve(stack(2), {"blocks.0": what})  # type: ignore[dict-item]  # what the test is about


def test_settings_that_are_none() -> None:
    with pytest.raises(ConfigError, match="recompute is 'no'; give True or False"):
        Offload(recompute="no")  # type: ignore[arg-type]  # what the test is about
    with pytest.raises(ConfigError, match="segment is True"):
        Recompute(segment=True)
    with pytest.raises(ConfigError, match="min_bytes is '1MiB'"):
        Offload(min_bytes="1MiB")  # type: ignore[arg-type]  # what the test is about


def test_one_policy_is_for_all_blocks() -> None:
    assert resolve(stack(3), "recompute") == {f"blocks.{index}": Recompute() for index in range(3)}


def test_paths_and_the_rest() -> None:
    chosen = resolve(
        stack(4), {"blocks.1": "keep", "blocks.2.up": "offload", "*": Recompute(segment=2), "first": "keep"}
    )
    assert list(chosen.items()) == [
        ("first", Keep()),
        ("blocks.0", Recompute(segment=2)),
        ("blocks.1", Keep()),
        ("blocks.2.up", Offload()),
        ("blocks.3", Recompute(segment=2)),
    ]
    assert list(resolve(stack(2), {"": "recompute", "*": "keep"})) == [""]


def test_wrong_paths_are_refused() -> None:
    model = stack(3)
    with pytest.raises(UnknownNameError, match="no module named 'blocks.7'; did you mean"):
        resolve(model, {"blocks.7": "keep"})
    with pytest.raises(ConfigError, match="'blocks' is a ModuleList"):
        resolve(model, {"blocks": "keep"})
    with pytest.raises(ConfigError, match="'blocks.0' holds 'blocks.0.up'"):
        resolve(model, {"blocks.0": "keep", "blocks.0.up": "keep"})
    model.again = model.blocks[0]
    with pytest.raises(ConfigError, match=r"'blocks.0' and 'again' are the same module|'again' and 'blocks.0'"):
        resolve(model, {"blocks.0": "keep", "again": "keep"})
    with pytest.raises(ConfigError, match="Linear has no repeated blocks"):
        resolve(nn.Linear(2, 2), "recompute")


def test_settings_of_other_types() -> None:
    for share in ("half", True):
        with pytest.raises(ConfigError, match=f"share is {share!r}; give a number from 0 to 1"):
            CompileBudget(share=share)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ConfigError, match="rule is 'mm'; give a function"):
        Selective(rule="mm")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ConfigError, match="1 is no path of a module; give a string, '1'"):
        resolve(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), {1: "keep"})  # type: ignore[dict-item]  # on purpose
    with pytest.raises(ConfigError, match="other than single layers such as Linear"):
        resolve(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "recompute")
