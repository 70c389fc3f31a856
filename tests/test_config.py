"""Dataclasses to plain data and back: round trips, strict types, near names, dotted overrides."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.config import from_plain, override, read_config, to_plain, write_config
from lowtide.errors import ConfigError


class Rounding(enum.StrEnum):
    NEAREST = "nearest"
    STOCHASTIC = "stochastic"


class Level(enum.Enum):
    LOW = 1
    HIGH = 2


@dataclass(frozen=True, kw_only=True)
class Keep:
    pass


@dataclass(frozen=True, kw_only=True)
class SaveOnHost:
    buffers: int = 2
    pinned: bool = True


@dataclass(frozen=True, kw_only=True)
class Optim:
    rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    rounding: Rounding = Rounding.NEAREST

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise ValueError(f"rate must be at least 0, got {self.rate}")


@dataclass(frozen=True, kw_only=True)
class Run:
    steps: int
    name: str = "run"
    seed: int | None = None
    compiled: bool = False
    level: Level = Level.LOW
    mode: Literal["fast", "exact", 1] = "fast"
    out: Path = Path("out")
    optim: Optim = Optim()
    warmup: Optim | None = None
    policy: Keep | SaveOnHost = Keep()
    stages: tuple[Optim, ...] = ()
    policies: tuple[Keep | SaveOnHost, ...] = ()
    pair: tuple[Keep, SaveOnHost] | None = None
    limit: int | float | str = 0
    tags: dict[str, int] = field(default_factory=dict)
    choice: Rounding | str | None = None
    derived: int = field(init=False, default=7)


FLOATS = st.floats(allow_nan=False, allow_infinity=False)
OPTIMS = st.builds(Optim, rate=st.floats(0, 1e300), betas=st.tuples(FLOATS, FLOATS), rounding=st.sampled_from(Rounding))
HOSTS = st.builds(SaveOnHost, buffers=st.integers(), pinned=st.booleans())
POLICIES = st.just(Keep()) | HOSTS
RUNS = st.builds(
    Run,
    steps=st.integers(),
    name=st.text(),
    seed=st.none() | st.integers(),
    compiled=st.booleans(),
    level=st.sampled_from(Level),
    mode=st.sampled_from(["fast", "exact", 1]),
    out=st.sampled_from([Path("a/b.json"), Path("/tmp")]),
    optim=OPTIMS,
    warmup=st.none() | OPTIMS,
    policy=POLICIES,
    stages=st.lists(OPTIMS, max_size=2).map(tuple),
    policies=st.lists(POLICIES, max_size=3).map(tuple),
    pair=st.none() | st.tuples(st.just(Keep()), HOSTS),
    limit=st.integers() | FLOATS | st.text(),
    tags=st.dictionaries(st.text(), st.integers(), max_size=3),
    choice=st.none() | st.sampled_from(Rounding) | st.just("other"),
)


@given(RUNS)
def test_plain_round_trip(run: Run) -> None:
    plain = to_plain(run)
    assert json.loads(json.dumps(plain)) == plain
    again = from_plain(Run, plain)
    # repr tells 1 from 1.0 from True, and an enum from its text, where == does not.
    assert again == run
    assert repr(again) == repr(run)


@given(run=RUNS, suffix=st.sampled_from([".json", ".yaml", ".yml"]))
def test_file_round_trip(run: Run, suffix: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / f"run{suffix}"
    write_config(run, path)
    assert repr(read_config(Run, path)) == repr(run)


@given(rate=st.floats(0, 1e300), steps=st.integers(), name=st.text(st.characters(exclude_categories=["C", "Z"])))
def test_overrides_equal_construction(rate: float, steps: int, name: str) -> None:
    changed = override(Run(steps=1), [f"optim.rate={rate!r}", f"steps={steps}", f"name={name}"])
    assert changed == Run(steps=steps, name=name, optim=Optim(rate=rate))


def test_plain_form_is_what_a_person_would_write() -> None:
    plain = to_plain(Run(steps=3, level=Level.HIGH, policy=SaveOnHost(), warmup=Optim()))
    assert plain["level"] == "high"
    assert plain["policy"] == {"kind": "save-on-host", "buffers": 2, "pinned": True}
    assert plain["warmup"] == {"rate": 1e-3, "betas": [0.9, 0.999], "rounding": "nearest"}
    assert "derived" not in plain


def test_defaults_fill_what_is_not_said() -> None:
    assert from_plain(Run, {"steps": 3}) == Run(steps=3)


def test_integer_serves_where_a_float_is_wanted() -> None:
    optim = from_plain(Optim, {"rate": 1})
    assert type(optim.rate) is float


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({}, "missing key 'steps', which has no default"),
        ({"steps": 1, "optm": {}}, "unknown key 'optm'; did you mean 'optim'"),
        ({"steps": 1, "optim": {"rat": 1}}, "unknown key 'optim.rat'; did you mean 'optim.rate'"),
        ({"steps": 1, "derived": 8}, "unknown key 'derived'"),
        ({"steps": True}, "'steps' must be an integer, got True"),
        ({"steps": 1.0}, "'steps' must be an integer, got 1.0"),
        ({"steps": "1"}, "'steps' must be an integer, got '1'"),
        ({"steps": 1, "compiled": 1}, "'compiled' must be true or false, got 1"),
        ({"steps": 1, "name": 5}, "'name' must be text, got 5"),
        ({"steps": 1, "name": None}, "'name' must be text, got None"),
        ({"steps": 1, "seed": "x"}, "'seed' must be an integer, got 'x'"),
        ({"steps": 1, "out": 5}, "'out' must be text, got 5"),
        ({"steps": 1, "optim": {"rate": "fast"}}, "'optim.rate' must be a number, got 'fast'"),
        ({"steps": 1, "optim": {"rate": float("inf")}}, "'optim.rate' must be a number, got inf"),
        ({"steps": 1, "optim": {"rate": 10**400}}, "'optim.rate' must be a number, got 1000"),
        ({"steps": 1, "optim": {"rate": -1}}, "'optim': rate must be at least 0, got -1.0"),
        ({"steps": 1, "optim": [1]}, r"'optim' must be a mapping of settings, got \[1\]"),
        ({"steps": 1, "optim": {"betas": [1.0]}}, "'optim.betas' must have 2 items, got 1"),
        ({"steps": 1, "optim": {"betas": 1.0}}, "'optim.betas' must be a list, got 1.0"),
        ({"steps": 1, "stages": [{}, {"rate": "x"}]}, r"'stages\[1\].rate' must be a number"),
        (
            {"steps": 1, "optim": {"rounding": "neerest"}},
            "'optim.rounding' cannot be 'neerest'; did you mean 'nearest'",
        ),
        ({"steps": 1, "level": 2}, "'level' cannot be 2; choose one of high, low"),
        ({"steps": 1, "mode": True}, "'mode' must be one of 'fast', 'exact', 1, got True"),
        ({"steps": 1, "tags": {"a": "b"}}, "'tags.a' must be an integer, got 'b'"),
        ({"steps": 1, "tags": {1: 1}}, "'tags' must be a mapping with text keys"),
        ({"steps": 1, "policy": {}}, "'policy.kind' is missing; choose one of keep, save-on-host"),
        ({"steps": 1, "policy": {"kind": "kep"}}, "'policy.kind' cannot be 'kep'; did you mean 'keep'"),
        ({"steps": 1, "policy": {"kind": "keep", "x": 1}}, "unknown key 'policy.x'; Keep has no settings"),
        ({"steps": 1, "warmup": {"rte": 1}}, "unknown key 'warmup.rte'; did you mean 'warmup.rate'"),
        (
            {"steps": 1, "limit": [1]},
            r"'limit': \[1\] fits none of the allowed types: it must be [^,]*; it must be [^,]*$",
        ),
        ([], r"the config must be a mapping of settings, got \[\]"),
    ],
)
def test_bad_data_is_refused_with_its_place(plain: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_plain(Run, plain)


def test_error_carries_the_dotted_key() -> None:
    with pytest.raises(ConfigError) as caught:
        from_plain(Run, {"steps": 1, "optim": {"rate": None}})
    assert caught.value.key == "optim.rate"


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        (["optim.rate=1e-4"], Run(steps=1, optim=Optim(rate=1e-4))),
        (["optim.betas=[0.8, 1]"], Run(steps=1, optim=Optim(betas=(0.8, 1.0)))),
        (["name=123"], Run(steps=1, name="123")),
        (["name=a=b"], Run(steps=1, name="a=b")),
        (["name="], Run(steps=1, name="")),
        (["name=[1"], Run(steps=1, name="[1")),
        (["seed=4", "seed=null"], Run(steps=1)),
        (["limit=3"], Run(steps=1, limit=3)),
        (["limit=3GiB"], Run(steps=1, limit="3GiB")),
        (["compiled=true"], Run(steps=1, compiled=True)),
        (["warmup.rate=2"], Run(steps=1, warmup=Optim(rate=2.0))),
        (["policy.kind=save-on-host", "policy.buffers=3"], Run(steps=1, policy=SaveOnHost(buffers=3))),
        (["policy.kind=save-on-host", "policy.buffers=3", "policy.kind=keep"], Run(steps=1)),
        (["tags.a=2"], Run(steps=1, tags={"a": 2})),
        (["choice=stochastic"], Run(steps=1, choice=Rounding.STOCHASTIC)),
        ([" steps = 5 "], Run(steps=5)),
    ],
)
def test_override(settings: list[str], changed: Run) -> None:
    assert repr(override(Run(steps=1), settings)) == repr(changed)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("steps", "the setting 'steps' is not of the form a.b=value"),
        ("=1", "the setting '=1' is not of the form a.b=value"),
        ("stps=1", "unknown key 'stps'; did you mean 'steps'"),
        ("optim.zzz=1", "unknown key 'optim.zzz'; choose one of optim.betas, optim.rate, optim.rounding"),
        ("rate=1", "unknown key 'rate'; did you mean 'optim.rate' or 'warmup.rate'"),
        ("rounding=nearest", "unknown key 'rounding'; did you mean 'optim.rounding' or 'warmup.rounding'"),
        ("optim.rte=1", "unknown key 'optim.rte'; did you mean 'optim.rate'"),
        ("steps=off", "'steps' must be an integer, got 'off'"),
        ("steps.x=1", "cannot set 'steps.x': 'steps' has no settings of its own"),
        ("optim.rate=-1", "'optim': rate must be at least 0"),
    ],
)
def test_override_refuses(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        override(Run(steps=1), [setting])


def test_override_leaves_the_original() -> None:
    run = Run(steps=1, tags={"a": 1})
    override(run, ["tags.a=2", "steps=2"])
    assert run == Run(steps=1, tags={"a": 1})


def test_read_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    with pytest.raises(ConfigError, match=r"cannot read the config file .*run\.yaml: No such file"):
        read_config(Run, path)
    path.write_text("steps: 1\nstps: 2\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"run\.yaml: unknown key 'stps'; did you mean 'steps'") as caught:
        read_config(Run, path)
    assert caught.value.key == "stps"
    path.write_bytes(b"steps: \xff")
    with pytest.raises(ConfigError, match=r"run\.yaml is not text in UTF-8"):
        read_config(Run, path)


def test_empty_yaml_means_defaults(tmp_path: Path) -> None:
    path = tmp_path / "optim.yaml"
    path.write_text("# all defaults\n", encoding="utf-8")
    assert read_config(Optim, path) == Optim()


def test_what_plain_data_cannot_hold_is_refused() -> None:
    @dataclass(frozen=True)
    class Odd:
        value: Any

    with pytest.raises(ConfigError, match="'value' is of type set, which a config cannot hold"):
        to_plain(Odd({1}))
    with pytest.raises(ConfigError, match="'rate' is nan, which JSON cannot hold"):
        to_plain(Optim(rate=float("nan")))
    with pytest.raises(ConfigError, match="the config is of type int, not a dataclass instance"):
        to_plain(3)
    with pytest.raises(ConfigError, match=r"'value' is declared as typing\.Any, which a config cannot hold"):
        from_plain(Odd, {"value": 1})


@dataclass(frozen=True, kw_only=True)
class ByHand:
    DEFAULT_KIND: ClassVar[str] = "hand-made"
    depth: int = 1


@dataclass(frozen=True, kw_only=True)
class Shared:
    share: float
    words: Keep | SaveOnHost | str | Mapping[str, Keep | SaveOnHost | str] | None = None


@dataclass(frozen=True, kw_only=True)
class Planned:
    plan: ByHand | Shared | None = ByHand()


class TestDefaultKind:
    @pytest.mark.parametrize(
        ("plan", "plain"),
        [
            (ByHand(depth=3), {"depth": 3}),
            (Shared(share=0.5), {"kind": "shared", "share": 0.5, "words": None}),
            (Shared(share=0.5, words={"a": "b"}), {"kind": "shared", "share": 0.5, "words": {"a": "b"}}),
            (Shared(share=0.5, words=Keep()), {"kind": "shared", "share": 0.5, "words": {"kind": "keep"}}),
            (
                Shared(share=0.5, words={"*": SaveOnHost(buffers=1)}),
                {
                    "kind": "shared",
                    "share": 0.5,
                    "words": {"*": {"kind": "save-on-host", "buffers": 1, "pinned": True}},
                },
            ),
        ],
    )
    def test_it_is_written_without_its_kind(self, plan: Any, plain: dict[str, Any]) -> None:
        assert to_plain(Planned(plan=plan)) == {"plan": plain}
        assert from_plain(Planned, {"plan": plain}) == Planned(plan=plan)

    def test_it_may_be_named(self) -> None:
        assert from_plain(Planned, {"plan": {"kind": "hand-made", "depth": 2}}) == Planned(plan=ByHand(depth=2))
        chosen = override(Planned(), ["plan.kind=shared", "plan.share=0.25"])
        assert chosen == Planned(plan=Shared(share=0.25))
        assert override(chosen, ["plan.kind=hand-made"]) == Planned()

    @pytest.mark.parametrize(
        ("plain", "message"),
        [
            (
                {"share": 0.5},
                "unknown key 'plan.share' of the kind hand-made: it is a setting of shared; set 'plan.kind' to that, or leave",
            ),
            (
                {"kind": "shared", "share": 1, "depth": 2},
                "unknown key 'plan.depth' of the kind shared: it is a setting of",
            ),
            ({"dpth": 2}, "unknown key 'plan.dpth'; did you mean 'plan.depth'"),
            ({"kind": "share"}, "'plan.kind' cannot be 'share'; did you mean 'shared'"),
        ],
    )
    def test_whose_setting_it_is(self, plain: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            from_plain(Planned, {"plan": plain})
