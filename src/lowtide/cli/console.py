"""What all commands share on the terminal: the two consoles, progress, errors, where reports go."""

from __future__ import annotations

import contextlib
import errno
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from lowtide.errors import ConfigError, LowtideError
from lowtide.report.html import PlanSection, Section, render_page
from lowtide.tracing.trace_json import save_trace

OUT = Console()
ERR = Console(stderr=True)

UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES})
"""What a place that cannot be written to answers, at the start or after hours."""

Gpu = Annotated[str, typer.Option(help="the hardware to predict for: a name, a capacity such as 24GiB, or this")]
Json = Annotated[bool, typer.Option("--json", help="machine-readable on the standard output")]
Recipes = Annotated[list[Path] | None, typer.Option(help="a folder with more recipes; may be repeated")]

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
    """Lowtide's own errors, and a disk that takes no more, become one message and an exit code; warnings become a line.

    Anything else is a bug and keeps its traceback.
    """
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _say_warning
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


def _say_warning(message: Warning | str, *_: object, **__: object) -> None:
    # Without the line of code that Python adds, which is ours and not the user's.
    ERR.print(Text.assemble(("warning", "bold yellow"), f": {message}"), highlight=False)


def _say_error(kind: str, message: str) -> None:
    # In one piece, so that the first line is broken where the terminal ends.
    ERR.print(Text.assemble((kind, "bold red"), f": {message}"), highlight=False)


def require_writable(option: str, paths: Iterable[Path | None], *, are_folders: bool = False) -> None:
    """Find out before the work begins whether its results can be written; nothing is left behind, nor changed.

    Args:
        option: That the paths were given with, such as `--report`.
        paths: Files that will be written; None for those that will not.
        are_folders: Whether they are folders that files will be written to.

    Raises:
        ConfigError: One of them cannot be written.
    """
    for path in paths:
        try:
            if path is not None:
                _try_to_write(path / "file" if are_folders else path)
        except OSError as error:
            what = "a folder" if are_folders else "a file in a folder"
            raise ConfigError(
                f"{option} {str(path)!r} cannot be written: {error.strerror}; give {what} that can be written to",
                key=option.removeprefix("--"),
            ) from error


def _try_to_write(path: Path) -> None:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        # Where it would go, without making its folders: another command may be about to use them.
        with tempfile.TemporaryFile(dir=next(folder for folder in path.absolute().parents if folder.exists())):
            return
    if path.is_file() or path.is_dir():  # not a pipe or a terminal: to open one is to use it
        with path.open("ab"):
            pass


def require_reports(paths: list[Path]) -> None:
    """Find out before the work begins whether the reports of a step can be written.

    Raises:
        ConfigError: A name does not say which kind of report it is, or one cannot be written.
    """
    for path in paths:
        if not path.name.lower().endswith(REPORT_SUFFIXES):
            raise ConfigError(
                f"--report {str(path)!r} names no kind of report: use one of {', '.join(REPORT_SUFFIXES)}", key="report"
            )
    require_writable("--report", paths)


def write_reports(paths: list[Path], section: Section | PlanSection) -> None:
    """One file per path, which `require_reports` has seen; its suffix says which kind."""
    title = f"{section.trace.model} on {section.trace.target.card}"
    for path in paths:
        name = path.name.lower()
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".html"):
            path.write_text(render_page([section], title=title), encoding="utf-8")
        elif name.endswith((".json", ".json.gz")):
            save_trace(section.trace, path)
        else:
            from lowtide.report.figures import save_png  # matplotlib takes a second to import

            save_png(section.trace, path, section.observed if isinstance(section, Section) else None)
        ERR.print(f"wrote {path}")
