"""Plans as JSON, read strictly."""

from __future__ import annotations

from pathlib import Path

from lowtide import plain_text
from lowtide.config import from_plain, to_plain
from lowtide.errors import BadRecordError, ConfigError
from lowtide.planning.plan import PLAN_VERSION, Plan


def plan_to_json(plan: Plan) -> str:
    """The plan as JSON, every field spelt out; `plan_from_json` is the inverse."""
    return plain_text.render(to_plain(plan), "json")


def plan_from_json(text: str) -> Plan:
    """The plan that the text holds.

    Raises:
        BadRecordError: The text is not whole JSON, not a plan, or of another version.
        ConfigError: A key is unknown, missing or given twice, or a value has the wrong type.
    """
    try:
        plain = plain_text.parse(text, "json")
    except ConfigError as error:
        if error.key is not None:
            raise
        raise BadRecordError(f"this is no plan: {error}; make the plan again") from error
    if not isinstance(plain, dict) or "groups" not in plain:
        raise BadRecordError("this is JSON, but no plan: a plan is an object with 'groups'; make the plan again")
    # First of all: the keys of another version would only look unknown.
    version = plain.get("version", PLAN_VERSION)
    if version != PLAN_VERSION:
        raise BadRecordError(
            f"this plan has version {version!r}, this Lowtide reads version {PLAN_VERSION}; make the plan again"
        )
    return from_plain(Plan, plain)


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan to a file."""
    Path(path).write_text(plan_to_json(plan), encoding="utf-8")


def load_plan(path: str | Path) -> Plan:
    """Read a plan from a file; errors are those of `plan_from_json`, with the file's name.

    Raises:
        BadRecordError: The file does not exist or holds no plan of this version.
        ConfigError: A key or a value of it is wrong.
    """
    try:
        return plan_from_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadRecordError(f"cannot read the plan {path}: {error}") from error
    except BadRecordError as error:
        raise BadRecordError(f"{path}: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", key=error.key) from error
