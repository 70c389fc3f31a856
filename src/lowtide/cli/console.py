"""What all commands share on the terminal: the two consoles, progress, errors, where reports go."""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from lowtide.errors import ConfigError, LowtideError
from lowtide.report.html import Section, render_page
from lowtide.tracing.trace_json import save_trace

OUT = Console()
ERR = Console(stderr=True)

UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES})
"""What a place that cannot be written to answers, at the start or after hours."""

REPORT_SUFFIXES = (".html", ".png", ".pdf", ".svg", ".json", ".json.gz")


@contextlib.contextmanager
def progress(title: str) -> Iterator[Callable[[str], None]]:
    """A line on the error stream that says what is being done and for how long; silent when nobody is watching."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=ERR, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(title)
        yield lambda text: bar.update(task, description=f"{title}: {text}")


@contextlib.contextmanager
def friendly_errors() -> Iterator[None]:
    """Lowtide's own errors, and a disk that takes no more, become one message and an exit code.

    Anything else is a bug and keeps its traceback.
    """
    try:
        yield
    except LowtideError as error:
        _say_error(type(error).__name__, str(error))
        raise typer.Exit(2 if isinstance(error, ValueError) else 1) from error
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        _say_error(type(error).__name__, f"{error}; make room, or have it written elsewhere")
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(130) from error


def _say_error(kind: str, message: str) -> None:
    # In one piece, so that the first line is broken where the terminal ends.
    ERR.print(Text.assemble((kind, "bold red"), f": {message}"), highlight=False)


def write_reports(paths: list[Path], section: Section, title: str) -> None:
    """One file per path; its suffix says which kind."""
    for path in paths:
        name = path.name.lower()
        if not name.endswith(REPORT_SUFFIXES):
            raise ConfigError(
                f"cannot write a report to {str(path)!r}: use one of {', '.join(REPORT_SUFFIXES)}", key="report"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".html"):
            path.write_text(render_page([section], title=title), encoding="utf-8")
        elif name.endswith((".json", ".json.gz")):
            save_trace(section.trace, path)
        else:
            from lowtide.report.png import save_png  # matplotlib takes a second to import

            save_png(section.trace, path, section.observed)
        ERR.print(f"wrote {path}")
