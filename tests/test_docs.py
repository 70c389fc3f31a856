"""The documentation cannot rot: its examples run, its tables and its chart are what the records say, its links lead somewhere.

Its form is tested too: the width of its text, how a page opens, the size of the README.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks import chart, render
from benchmarks.records import WIDTH

REPO = Path(__file__).resolve().parent.parent
README = REPO / "README.md"
DOCUMENTS = render.documents(REPO)
PAGES = [*DOCUMENTS, REPO / "CONTRIBUTING.md", render.RESULTS / "README.md"]


def named(path: Path) -> str:
    """A page as its test is called."""
    return str(path.relative_to(REPO))


by_document = pytest.mark.parametrize("path", DOCUMENTS, ids=named)
by_page = pytest.mark.parametrize("path", PAGES, ids=named)


def blocks(text: str, language: str) -> Iterator[tuple[int, str, str]]:
    """(line, source, the text before it) of each fenced block in a language."""
    lines = text.split("\n")
    start: int | None = None
    fence, before = "", ""
    for number, line in enumerate(lines):
        opening = re.match(r"(`{3,}|~{3,})\s*(\w*)", line)
        if not fence and opening:
            fence, start = opening[1], number + 1 if opening[2] == language else None
            before = next((text for text in reversed(lines[:number]) if text.strip()), "").strip()
        elif fence and line.strip() == fence:
            if start is not None:
                yield start + 1, "\n".join(lines[start:number]), before
            fence = ""


def python_blocks(text: str) -> Iterator[tuple[int, str]]:
    """(line, source) of each ```python block that no `<!-- not run: reason -->` stands right before."""
    for line, source, before in blocks(text, "python"):
        if not re.fullmatch(r"<!-- not run: .*\S.* -->", before):
            yield line, source


def as_script(text: str) -> str:
    """One script of the blocks, in order; lines keep their numbers, so that a traceback points into the document."""
    script: list[str] = []
    for line, source in python_blocks(text):
        script += [""] * (line - 1 - len(script)) + source.split("\n")
    return "\n".join(script)


def commands(text: str) -> str:
    """One script of the ```bash blocks that `<!-- run -->` stands right before."""
    return "\n".join(source for _, source, before in blocks(text, "bash") if before == "<!-- run -->")


def having(script_of: Callable[[str], str]) -> list[Path]:
    return [path for path in DOCUMENTS if script_of(path.read_text(encoding="utf-8")).strip()]


by_script = pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=() if path == README else pytest.mark.slow, id=named(path))
        for path in having(as_script)
    ],
)
"""Each takes seconds, most of them for imports: `make test` runs the README's."""


@by_script
def test_examples_run(path: Path, tmp_path: Path) -> None:
    script = as_script(path.read_text(encoding="utf-8"))
    file = tmp_path / f"{path.stem}.py"
    file.write_text(script, encoding="utf-8")
    # A process of its own, in an empty folder: what a reader who copies the blocks into a file gets.
    done = subprocess.run(
        [sys.executable, file], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"{path.name}: {done.stderr[-3000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("path", having(commands), ids=named)
def test_commands_run(path: Path, tmp_path: Path) -> None:
    script = commands(path.read_text(encoding="utf-8"))
    around = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euc", script], cwd=tmp_path, env=around, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"{path.name}: {done.stdout[-1500:]}{done.stderr[-1500:]}"


BEFORE_THE_DIFF = """
import torch
from lowtide.models.gpt import GPT, GPTConfig

torch.backends.mkldnn.enabled = False  # bf16 products on any processor
torch.manual_seed(0)
config = GPTConfig(vocab_size=64, context_length=16, num_layers=2, hidden_size=32, num_heads=2)
model = GPT(config).to(torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters())
device = "cuda" if torch.cuda.is_available() else "cpu"
ids = torch.randint(64, (2, 16), device=device)
loader = [{"input_ids": ids, "labels": ids}] * 3
before = [parameter.clone() for parameter in model.parameters()]
"""
AFTER_THE_DIFF = """
assert all((new != old.to(new.device)).any() for new, old in zip(model.parameters(), before))
"""


def test_the_loop_with_the_readmes_diff_applied_trains(tmp_path: Path) -> None:
    ((_, diff, _),) = blocks(README.read_text(encoding="utf-8"), "diff")
    applied = [line[1:] for line in diff.split("\n") if not line.startswith("-")]
    file = tmp_path / "loop.py"
    file.write_text(BEFORE_THE_DIFF + "\n".join(applied) + AFTER_THE_DIFF, encoding="utf-8")
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@by_document
def test_tables_are_what_the_records_say(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert render.fill(text, render.RESULTS) == text, "run python -m benchmarks.render"


@by_document
def test_links_to_files_lead_somewhere(path: Path) -> None:
    prose = re.sub(r"^(`{3,}).*?^\1", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose)
    files = [target for target in targets if not re.match(r"[a-z]+:", target)]
    assert [target for target in files if not (path.parent / target).exists()] == []


def test_the_chart_is_what_the_records_say() -> None:
    assert render.CHART in README.read_text(encoding="utf-8")
    drawn = (REPO / render.CHART).read_text(encoding="utf-8")
    assert chart.description(drawn) == chart.describe(render.RESULTS), "run python -m benchmarks.render"


def test_the_chart_is_drawn_from_records_alone() -> None:
    assert chart.draw(render.RESULTS) == chart.draw(render.RESULTS)


# Their form


def prose(text: str) -> str:
    """The text, with nothing left of fenced blocks, rendered tables, comments and rows of tables but their lines."""
    empty = lambda match: "\n" * match[0].count("\n")  # noqa: E731 - so short
    text = re.sub(r"^(`{3,}|~{3,}).*?^\1", empty, text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!-- rendered: .*?<!-- end -->", empty, text, flags=re.DOTALL)
    return re.sub(r"^(?:\||<!--).*$", "", text, flags=re.MULTILINE)


@by_page
def test_text_wraps_at_one_width(path: Path) -> None:
    lines = prose(path.read_text(encoding="utf-8")).split("\n")
    # A link, or code without a place to break, may be longer than a line.
    broken = [re.sub(r"!?\[[^\]]*\]\([^)]*\)|`[^`]*`", "", line) for line in lines]
    long = [n for n, line in enumerate(lines, start=1) if len(line) > WIDTH and " " in broken[n - 1].strip(" -.,;:()")]
    assert long == [], f"lines of {named(path)} with more than {WIDTH} columns"


@by_page
def test_a_page_opens_with_its_purpose_in_one_sentence(path: Path) -> None:
    title, blank, *rest = path.read_text(encoding="utf-8").split("\n")
    assert title.startswith("# ")
    assert blank == ""
    opening = " ".join(rest[: rest.index("")])
    assert re.match(r"[A-Z][a-z]", opening)
    assert opening.endswith(".")
    num_sentences = 2 if path == README else 1
    assert len(re.findall(r"[.!?](?= |$)", opening)) == num_sentences, opening


@by_page
def test_sentences_begin_with_their_subject(path: Path) -> None:
    text = " ".join(prose(path.read_text(encoding="utf-8")).split())
    assert re.findall(r"(?:^|[.!?:|] |\*\* )Of \w+ \w+", text) == []


def test_the_readme_is_one_screen_and_a_little() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.split()) <= 900
    first_screen = text.partition("\n## ")[0]
    assert first_screen.count("\n") < 60
    for part in ("step_time.svg", "pip install", "```diff", "lowtide.trace(", "DeepSpeed", "**Runs on**"):
        assert part in first_screen


def test_every_page_is_on_the_index() -> None:
    index = (REPO / "docs" / "index.md").read_text(encoding="utf-8")
    pages = {path.relative_to(REPO / "docs").as_posix() for path in DOCUMENTS if path != README}
    assert {page for page in pages - {"index.md"} if f"]({page})" not in index} == set()


@by_document
def test_links_to_headings_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", prose(text)):
        page = (path.parent / target) if target else path
        headings = re.findall(r"^#+ (.*)$", prose(page.read_text(encoding="utf-8")), flags=re.MULTILINE)
        assert anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# The functions above, against documents whose answer is known

FENCE = "```"
SAMPLE = f"""# Title

{FENCE}python
a = 1
b = a + 1
{FENCE}

<!-- not run: needs a GPU -->

{FENCE}python
raise SystemExit
{FENCE}

<!-- not run: -->
{FENCE}python
c = b
{FENCE}

{FENCE}bash
{FENCE}python
rm -rf nothing
{FENCE}
"""


def test_blocks_are_found_with_their_lines() -> None:
    assert list(python_blocks(SAMPLE)) == [(4, "a = 1\nb = a + 1"), (16, "c = b")]


def test_script_keeps_line_numbers() -> None:
    assert as_script(SAMPLE).split("\n")[3:5] == ["a = 1", "b = a + 1"]
    assert as_script(SAMPLE).split("\n")[15] == "c = b"
