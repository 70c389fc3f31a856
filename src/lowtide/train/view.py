"""What a person sees of a run: a few calm lines on a terminal, or one line now and then where there is none."""

from __future__ import annotations

import time
from dataclasses import replace

from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from lowtide.report.palette import PEAK_COLOUR
from lowtide.report.table import STYLES, Tone
from lowtide.train.progress import RunStatus, TierStatus
from lowtide.units import format_bytes, format_count, format_seconds

_QUIET = STYLES[Tone.QUIET]
_BLOCKS = "▁▂▃▄▅▆▇█"
_CURVE = 24
"""Characters of the curve of losses."""
_BAR = 24
_NEARLY_FULL = 0.97


class RunView:
    """The state of a run as rich draws it, made anew at each refresh.

    Args:
        title: The model, and where the run writes.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._status: RunStatus | None = None
        self._words = "starting"

    def say(self, words: str) -> None:
        """What is done before the training, and after it, when the last figures stay."""
        self._words = words
        if self._status is not None:
            self._status = replace(self._status, words=words)

    def show(self, status: RunStatus) -> None:
        """How far the training is."""
        self._status = status

    def end(self) -> None:
        """Nothing more will come."""
        self.say("ended")
        if self._status is not None:
            self._status = replace(self._status, is_saving=False, left_s=None)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self._title, style="bold", no_wrap=True, overflow="ellipsis")
        if self._status is None:
            yield Text(self._words, style=_QUIET, no_wrap=True, overflow="ellipsis")
            return
        yield progress_line(self._status)
        yield Segment.line()
        yield facts(self._status, time.monotonic())


def progress_line(status: RunStatus) -> Table:
    """What is being done, the steps, and a bar over the rest of the width."""
    line = Table.grid(padding=(0, 2), expand=True)
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True, justify="right")
    share = status.step / max(1, status.steps)
    line.add_row(
        Text.assemble(f"{status.words}, step ", (f"{status.step:,}", "bold"), f" of {status.steps:,}"),
        ProgressBar(total=status.steps, completed=status.step, complete_style="cyan", finished_style="cyan"),
        Text(f"{percent(share)}%", style=_QUIET),
    )
    return line


def percent(share: float) -> int:
    """Whole percents, of which 100 means the end."""
    return int(100 * share)


def facts(status: RunStatus, now_s: float) -> Table:
    """A row for each thing that a person asks a run."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style=_QUIET, no_wrap=True, min_width=10)
    table.add_column(no_wrap=True, overflow="ellipsis")
    table.add_row("loss", _loss(status))
    table.add_row("speed", _speed(status))
    for tier in status.tiers:
        table.add_row(tier.name, tier_line(tier))
    table.add_row("time left", Text("" if status.left_s is None else f"about {words_of_time(status.left_s)}"))
    table.add_row("checkpoint", checkpoint_words(status, now_s))
    return table


def _loss(status: RunStatus) -> Text:
    if status.loss is None:
        return Text("–", style=_QUIET)
    text = Text.assemble((f"{status.loss:<9.4f}", "bold"), (f"{curve(status.losses):<{_CURVE}}", "cyan"))
    if status.evaluation is not None:
        step, loss = status.evaluation
        text.append(f"  held out {loss:.4f} at step {step:,}", style=_QUIET)
    return text


def _speed(status: RunStatus) -> Text:
    if status.tokens_per_s is None or status.step_s is None:
        return Text("–", style=_QUIET)
    text = Text(f"{format_count(round(status.tokens_per_s))} tokens/s")
    text.append(f"  {format_seconds(status.step_s)} a step", style=_QUIET)
    if status.bound_by is not None:
        text.append(f", bound by {status.bound_by}", style=_QUIET)
    return text


def curve(values: tuple[float, ...], width: int = _CURVE) -> str:
    """Values as a row of blocks, the newest at the right; neighbours are averaged where there are more than fit.

    Example:
        >>> curve((1.0, 2.0, 3.0))
        '▁▅█'
    """
    if not values:
        return ""
    per = -(-len(values) // width)
    start = len(values) % per
    parts = [values[:start]] if start else []
    parts += [values[place : place + per] for place in range(start, len(values), per)]
    means = [sum(part) / len(part) for part in parts]
    least, most = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (most - least) if most > least else 0.0
    return "".join(_BLOCKS[int((mean - least) * scale + 0.5)] for mean in means)


def tier_line(tier: TierStatus) -> Text:
    """How full a tier was at most, as a bar where it has a budget."""
    if not tier.budget_bytes:
        return Text(format_bytes(tier.peak_bytes))
    share = min(1.0, tier.peak_bytes / tier.budget_bytes)
    filled = min(_BAR, int(share * _BAR + 0.5))
    style = PEAK_COLOUR if share >= _NEARLY_FULL else "cyan"
    text = Text.assemble(("━" * filled, style), ("─" * (_BAR - filled), "bright_black"))
    return text.append(f"  {format_bytes(tier.peak_bytes)} of {format_bytes(tier.budget_bytes)}")


def checkpoint_words(status: RunStatus, now_s: float) -> Text:
    """Which step is saved, since when, and whether another one is being written."""
    if status.saved_step is None:
        words = "none yet"
    else:
        age = "" if status.saved_at_s is None else f", {words_of_time(now_s - status.saved_at_s)} ago"
        words = f"step {status.saved_step:,}{age}"
    text = Text(words)
    if status.is_saving:
        text.append("  writing the next one", style="cyan")
    return text


def words_of_time(seconds: float) -> str:
    """A stretch of time as a person says it.

    Example:
        >>> words_of_time(7), words_of_time(200), words_of_time(9000)
        ('7 s', '3 min', '2.5 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def plain_line(status: RunStatus) -> str:
    """The same in one line, for a file or a pipe."""
    parts = [f"step {status.step:,} of {status.steps:,}"]
    if status.words != "training":
        parts.append(status.words)
    if status.loss is not None:
        parts.append(f"loss {status.loss:.4f}")
    if status.tokens_per_s is not None:
        parts.append(f"{format_count(round(status.tokens_per_s))} tokens/s")
    parts += [
        f"{tier.name} {format_bytes(tier.peak_bytes)}"
        + (f" of {format_bytes(tier.budget_bytes)}" if tier.budget_bytes else "")
        for tier in status.tiers
    ]
    if status.bound_by is not None:
        parts.append(f"bound by {status.bound_by}")
    if status.left_s is not None:
        parts.append(f"{words_of_time(status.left_s)} left")
    if status.saved_step is not None:
        parts.append(f"saved step {status.saved_step:,}")
    return ", ".join(parts)
