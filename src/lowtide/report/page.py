"""The frame of every page: `page.html` with the style, the data and the scripts put into it, and what all pages have.

A content security policy in its head forbids every request, so that a report of a private model can be opened anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from string import Template

from lowtide.report.palette import COLOURS, DARK_COLOURS, PEAK_COLOUR, STACK_ORDER
from lowtide.report.table import Value, value_html


def fill_page(
    *, title: str, contents: str, body: str, styles: Iterable[str], data: object, scripts: Iterable[str]
) -> str:
    """The whole page as text.

    Args:
        title: Plain text, of the heading and of the browser's tab.
        contents: Escaped HTML below the heading.
        body: Escaped HTML.
        styles: Style sheets as text, after the page's own.
        data: Plain data for the scripts.
        scripts: As text, in the order in which they run.
    """
    return Template(read_asset("page.html")).substitute(
        title=escape(title),
        contents=contents,
        body=body,
        style="".join([_colours(), read_asset("page.css"), *styles]),
        # "<" could end the script element, wherever a name holds it; inside JSON it can only be in a string.
        data=json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False).replace("<", "\\u003c"),
        script="\n".join(scripts),
    )


def read_asset(name: str, package: str = "lowtide.report") -> str:
    """The text of a template, style sheet or script that lies beside the modules of a package."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


def figures(items: Iterable[tuple[str, Value, Value]]) -> str:
    """The large numbers at the top of a section: name, value and a detail below it."""
    boxes = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{value_html(value)}<small>{value_html(detail)}</small></dd></div>"
        for name, value, detail in items
    )
    return f'<dl class="figures">{boxes}</dl>'


def section(
    kind: str, key: str, title: str, pieces: Iterable[str], *, lines: Sequence[str] = (), is_emulated: bool = False
) -> str:
    """A part of the page: its heading, lines about it, and pieces of escaped HTML.

    Args:
        kind: Classes of the style sheet.
        key: The id that links lead to.
        title: Plain text.
        pieces: In their order.
        lines: Plain text, below the title.
        is_emulated: Whether the device was host memory, which stands out.
    """
    badge = ' <em class="emulated">emulated device</em>' if is_emulated else ""
    said = "".join(f"<p>{escape(line)}</p>" for line in lines)
    return (
        f'<section class="{kind}" id="{key}" aria-labelledby="name-{key}">'
        f'<header><h2 id="name-{key}">{escape(title)}{badge}</h2>{said}</header>{"".join(pieces)}</section>'
    )


def folded(summary: str, html: str) -> str:
    """What is shown only when it is asked for."""
    return f"<details><summary>{escape(summary)}</summary>{html}</details>"


def notes(lines: Sequence[str], *, title: str = "Notes", kind: str = "notes") -> str:
    """What the reader must know about how the numbers were made; "" without lines."""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<aside class="{kind}"><h3>{title}</h3><ul>{items}</ul></aside>' if lines else ""


def prose(text: str) -> str:
    """Plain text as paragraphs; blank lines separate them."""
    paragraphs = [part.strip() for part in text.split("\n\n") if part.strip()]
    return "".join(f"<p>{escape(paragraph)}</p>" for paragraph in paragraphs)


def contents(links: Iterable[tuple[str, str, str]]) -> str:
    """Links to the sections: the id of each, its name, and what it is."""
    items = "".join(
        f'<li><a href="#{target}">{escape(name)}</a>{f" {escape(kind)}" if kind else ""}</li>'
        for target, name, kind in links
    )
    return f'<nav aria-label="Sections"><ul>{items}</ul></nav>'


def _colours() -> str:
    light, dark = (
        "".join(f"--{category.value}:{colours[category]};" for category in STACK_ORDER)
        for colours in (COLOURS, DARK_COLOURS)
    )
    return f":root{{{light}--peak:{PEAK_COLOUR};}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"
