"""Strict conversion between frozen dataclasses and plain data (dict, JSON, YAML), with dotted overrides.

A config is a frozen dataclass owned by the component that it configures. Here it is read and written: every type is
checked, an unknown key is an error that names the nearest known one, nothing is coerced except an int where a float is
wanted. Allowed field types: bool, int, float, str, Path, enums, Literal, None, tuples, `dict[str, X]`, `Mapping[str, X]`,
other dataclasses, and unions of these. In a union of several dataclasses the key `kind` says which one: the class name in
kebab case (`ChunkedLoss` is `chunked-loss`). A class may have a `DEFAULT_KIND`, which is its name then: where `kind` is left
out, that class is meant, and its own settings are written without one.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, TypeGuard, TypeVar, Union

from lowtide import plain_text
from lowtide.errors import ConfigError, did_you_mean, near
from lowtide.plain_text import Plain

T = TypeVar("T")

_SCALARS: dict[object, str] = {bool: "true or false", int: "an integer", float: "a number", str: "text"}


class _Typed(str):
    """Text from a command line: stands for the YAML value it spells or for itself, as the field's type decides."""


def to_plain(config: object) -> dict[str, Plain]:
    """A dataclass as nested dicts, lists and scalars; `from_plain` is its inverse."""
    return _plain_fields(config, "")


def from_plain(kind: type[T], plain: object) -> T:
    """A `kind` from plain data.

    Example:
        >>> @dataclasses.dataclass(frozen=True, kw_only=True)
        ... class Loop:
        ...     steps: int
        ...     rate: float = 0.1
        >>> from_plain(Loop, {"steps": 3})
        Loop(steps=3, rate=0.1)

    Raises:
        ConfigError: A key is unknown or missing, or a value has the wrong type or is refused by the class.
    """
    return _build(kind, plain, "")


def override(config: T, settings: Iterable[str]) -> T:
    """A copy of a dataclass with dotted settings applied, such as `optim.rate=1e-4`; later ones win.

    Text becomes what the field's type asks for: `8` is a number for an int field and text for a str field. Choosing
    another `kind` drops the settings of the old one.

    Raises:
        ConfigError: A setting has no `=`, names an unknown key, or its value does not fit.
    """
    return from_settings(type(config), to_plain(config), settings)


def from_settings(kind: type[T], plain: dict[str, Plain], settings: Iterable[str]) -> T:
    """A `kind` from plain data with dotted settings applied, which may also be what the data lacks.

    Raises:
        ConfigError: As for `override`.
    """
    plain = copy.deepcopy(plain)
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"the setting {setting!r} is not of the form a.b=value")
        _set(plain, key.strip().split("."), _Typed(text.strip()))
    return from_plain(kind, plain)


def read_config(kind: type[T], path: str | Path) -> T:
    """A `kind` from a .json, .yaml or .yml file; an empty YAML file means all defaults.

    Raises:
        ConfigError: The file does not exist, is not valid, repeats a key, or does not fit `kind`.
    """
    path = Path(path)
    plain = plain_text.read(path, "config file")
    try:
        return from_plain(kind, {} if plain is None else plain)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", key=error.key) from error


def write_config(config: object, path: str | Path) -> None:
    """Write a dataclass to a .json, .yaml or .yml file, every field spelt out."""
    path = Path(path)
    path.write_text(plain_text.render(to_plain(config), plain_text.format_of(path)), encoding="utf-8")


def require_least(settings: object, least: int, *keys: str) -> None:
    """Refuse fields of settings that are below a least value; None is taken for what it means there.

    Raises:
        ConfigError: One is below; the message names the field.
    """
    for key in keys:
        value = getattr(settings, key)
        if value is not None and value < least:
            raise ConfigError(f"{key} is {value}; give {least} or more", key=key)


def _set(plain: dict[str, Plain], keys: list[str], text: _Typed) -> None:
    """Put text at a dotted path, making the dicts on the way where there is nothing yet."""
    *parents, last = keys
    for index, key in enumerate(parents):
        child = plain.get(key)
        if child is None:
            child = plain[key] = {}
        if not isinstance(child, dict):
            where = ".".join(keys[: index + 1])
            raise ConfigError(f"cannot set {'.'.join(keys)!r}: {where!r} has no settings of its own", key=where)
        plain = child
    if last == "kind" and plain.get("kind") != text:
        plain.clear()
    plain[last] = text


# From dataclass to plain data


def _plain_fields(config: object, path: str) -> dict[str, Plain]:
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise _refused(path, f"is of type {type(config).__name__}, not a dataclass instance")
    hints = _hints(type(config))
    return {
        field.name: _plain(hints[field.name], getattr(config, field.name), _join(path, field.name))
        for field in dataclasses.fields(config)
        if field.init
    }


def _plain(annotation: object, value: object, path: str) -> Plain:
    if isinstance(value, enum.Enum):
        return next(text for text, member in _enum_choices(type(value)).items() if member is value)
    if isinstance(value, float) and not math.isfinite(value):
        raise _refused(path, f"is {value}, which JSON cannot hold; use None or a finite number")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple):
        items = zip(_item_types(annotation, len(value)), value, strict=True)
        return [_plain(kind, item, f"{path}[{index}]") for index, (kind, item) in enumerate(items)]
    if isinstance(value, dict):
        (kind,) = _item_types(annotation, 1, of=dict)
        return {key: _plain(kind, item, _join(path, key)) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # The name is needed exactly where the reader would otherwise have to guess the class.
        several = sum(map(_is_config, _members(annotation))) > 1
        is_named = several and not _is_default(type(value))
        return ({"kind": _kind_name(type(value))} if is_named else {}) | _plain_fields(value, path)
    raise _refused(path, f"is of type {type(value).__name__}, which a config cannot hold")


def _item_types(annotation: object, count: int, of: type = tuple) -> tuple[object, ...]:
    """The declared types of a tuple's `count` items (or of a dict's values), looked for inside a union too."""
    for member in _members(annotation):
        arguments = typing.get_args(member)
        if typing.get_origin(member) is not of and not (of is dict and _is_mapping(member)):
            continue
        if of is dict:
            return (arguments[1],)
        if arguments[-1] is Ellipsis:
            return (arguments[0],) * count
        if len(arguments) == count:
            return arguments
    return (object,) * count


# From plain data to dataclass


def _build(kind: type[T], plain: object, path: str) -> T:
    if not dataclasses.is_dataclass(kind):
        raise ConfigError(f"{kind.__name__} is not a dataclass", key=path or None)
    if not isinstance(plain, dict):
        raise _refused(path, f"must be a mapping of settings, got {_shown(plain)}")
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    for key in plain:
        if key not in fields:
            advice = _advice(kind, str(key), path) or f"{kind.__name__} has no settings"
            raise ConfigError(f"unknown key {_join(path, str(key))!r}; {advice}", key=_join(path, str(key)))
    for name, field in fields.items():
        optional = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if name not in plain and not optional:
            raise ConfigError(f"missing key {_join(path, name)!r}, which has no default", key=_join(path, name))
    hints = _hints(kind)
    values = {key: _value(hints[key], value, _join(path, key)) for key, value in plain.items()}
    try:
        return kind(**values)
    except (ValueError, TypeError) as error:
        # The class knows what is wrong but not where in the file it stands.
        raise ConfigError(f"{_named(path)}: {error}" if path else str(error), key=path or None) from error


def _advice(kind: type, key: str, path: str) -> str:
    """Which keys may have been meant, each whole: a near one, or one of a part that was typed without the part's name."""
    names = [field.name for field in dataclasses.fields(kind) if field.init]
    if not near(key, names):
        inner = [
            _join(path, f"{name}.{field.name}")
            for name in names
            for part in _members(_hints(kind)[name])
            if _is_config(part)
            for field in dataclasses.fields(part)
            if field.init and field.name == key
        ]
        if inner:
            return f"did you mean {' or '.join(map(repr, inner))}?"
    return did_you_mean(key, names, prefix=_join(path, ""))


def _value(annotation: object, plain: object, path: str) -> object:
    """Plain data checked against, and turned into, what a field's annotation asks for."""
    if isinstance(plain, _Typed):
        return _typed_value(annotation, plain, path)
    members = _members(annotation)
    if len(members) > 1:
        return _union_value(members, plain, path)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return _choice(_enum_choices(annotation), plain, path)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        # The type is part of the choice: 1 == True, and neither may stand for the other.
        if any(type(plain) is type(choice) and plain == choice for choice in arguments):
            return plain
        raise _refused(path, f"must be one of {', '.join(map(repr, arguments))}, got {_shown(plain)}")
    if origin is tuple:
        if not isinstance(plain, list | tuple):
            raise _refused(path, f"must be a list, got {_shown(plain)}")
        if arguments[-1] is not Ellipsis and len(arguments) != len(plain):
            raise _refused(path, f"must have {len(arguments)} items, got {len(plain)}")
        items = zip(_item_types(annotation, len(plain)), plain, strict=True)
        return tuple(_value(kind, item, f"{path}[{index}]") for index, (kind, item) in enumerate(items))
    if _is_mapping(annotation):
        if not isinstance(plain, dict) or not all(isinstance(key, str) for key in plain):
            raise _refused(path, f"must be a mapping with text keys, got {_shown(plain)}")
        return {key: _value(arguments[1], item, _join(path, key)) for key, item in plain.items()}
    if _is_config(annotation):
        return _build(annotation, plain, path)
    return _scalar(annotation, plain, path)


def _scalar(annotation: object, plain: object, path: str) -> object:
    if annotation is types.NoneType:
        if plain is not None:
            raise _refused(path, f"must be null, got {_shown(plain)}")
        return None
    if annotation is Path:
        return Path(str(_scalar(str, plain, path)))
    if annotation is float and type(plain) is int and abs(plain) < 2**1023:
        return float(plain)
    if annotation not in _SCALARS:
        raise _refused(path, f"is declared as {annotation}, which a config cannot hold")
    # `type is`, not isinstance: true is an int to Python and would be read as 1.
    if type(plain) is not annotation or (isinstance(plain, float) and not math.isfinite(plain)):
        raise _refused(path, f"must be {_SCALARS[annotation]}, got {_shown(plain)}")
    return plain


def _union_value(members: tuple[object, ...], plain: object, path: str) -> object:
    kinds = {_kind_name(member): member for member in members if _is_config(member)}
    mappings = [member for member in members if _is_mapping(member)]
    if isinstance(plain, dict) and len(kinds) > 1 and ("kind" in plain or not mappings):
        default = next((kind for kind in kinds.values() if _is_default(kind)), None)
        is_left_out = default is not None and "kind" not in plain
        kind = default if is_left_out else _choice(kinds, plain.get("kind"), _join(path, "kind"))
        assert isinstance(kind, type)
        settings = {key: value for key, value in plain.items() if key != "kind"}
        _refuse_another_kinds(settings, kind, kinds, path)
        return _build(kind, settings, path)
    # One dataclass or dict: its own error says more than "none of these fits".
    only_mapping = mappings if len(kinds) > 1 else [*kinds.values(), *mappings]
    if isinstance(plain, dict) and len(only_mapping) == 1:
        return _value(only_mapping[0], plain, path)
    errors = []
    for member in sorted(members, key=lambda member: (member in (str, Path), member is not type(plain))):
        try:
            return _value(member, plain, path)
        except ConfigError as error:
            errors.append(error)
    if len(errors) == 2 and types.NoneType in members:
        # `X | None`: what X says is the useful part.
        raise next(error for error in errors if "must be null" not in str(error))
    # What all of them repeat is said once.
    reasons = [str(error).removeprefix(f"{_named(path)} ").removesuffix(f", got {_shown(plain)}") for error in errors]
    raise ConfigError(
        f"{_named(path)}: {_shown(plain)} fits none of the allowed types: it {'; it '.join(reasons)}", key=path
    )


def _refuse_another_kinds(settings: Iterable[object], kind: type, kinds: Mapping[str, type], path: str) -> None:
    """Say whose setting it is, where somebody forgot to choose the kind."""
    names = {name: {field.name for field in dataclasses.fields(other)} for name, other in kinds.items()}
    own = names[_kind_name(kind)]
    for key in map(str, settings):
        owners = [name for name, others in names.items() if key in others]
        if key not in own and owners:
            raise ConfigError(
                f"unknown key {_join(path, key)!r} of the kind {_kind_name(kind)}: it is a setting of {' and '.join(owners)}; set "
                f"{_join(path, 'kind')!r} to that, or leave it out",
                key=_join(path, key),
            )


def _typed_value(annotation: object, text: _Typed, path: str) -> object:
    try:
        parsed = plain_text.parse(text, "yaml")
    except ConfigError:
        return _value(annotation, str(text), path)
    try:
        return _value(annotation, parsed, path)
    except ConfigError as first:
        try:
            return _value(annotation, str(text), path)
        except ConfigError:
            raise first from None


def _choice(choices: Mapping[str, object], plain: object, path: str) -> object:
    # `kind` reaches this as command line text, which is a str too.
    if isinstance(plain, str) and plain in choices:
        return choices[plain]
    if plain is None:
        raise _refused(path, f"is missing; choose one of {', '.join(choices)}")
    raise _refused(path, f"cannot be {_shown(plain)}; {did_you_mean(str(plain), choices)}")


# What the annotations say


@functools.cache
def _hints(kind: type) -> dict[str, object]:
    return typing.get_type_hints(kind)


def _members(annotation: object) -> tuple[object, ...]:
    return typing.get_args(annotation) if typing.get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _enum_choices(kind: type[enum.Enum]) -> dict[str, enum.Enum]:
    """By value where all values are text, as people would write them; by lower-case name otherwise."""
    if all(isinstance(member.value, str) for member in kind):
        return {member.value: member for member in kind}
    return {member.name.lower(): member for member in kind}


def _is_config(annotation: object) -> TypeGuard[type]:
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)


def _is_mapping(annotation: object) -> bool:
    return typing.get_origin(annotation) in (dict, Mapping)


def _is_default(kind: type) -> bool:
    return "DEFAULT_KIND" in vars(kind)


def _kind_name(kind: type) -> str:
    if _is_default(kind):
        return str(vars(kind)["DEFAULT_KIND"])
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", kind.__name__).lower()


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _named(path: str) -> str:
    return repr(path) if path else "the config"


def _shown(plain: object) -> str:
    text = repr(plain)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _refused(path: str, words: str) -> ConfigError:
    return ConfigError(f"{_named(path)} {words}", key=path or None)
