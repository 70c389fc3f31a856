"""The shape of the source tree: imports go one way, private torch stays in one file, every file says what it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "lowtide"
FILES = sorted(PACKAGE.rglob("*.py"))
ROOT = "(package root)"

# A part may import from its own line and from the lines above it. The root, which gathers the public names, may use all
# but the command line.
LAYERS = (
    ("errors", "units", "plain_text", "config", "compat"),
    ("hardware",),
    ("memory",),
    ("distributed",),
    ("activations",),
    ("tracing",),
    ("optim",),
    ("planning",),
    ("runtime",),
    ("multilevel",),
    ("report",),
    ("models", "lab", "integrations", "train"),
    (ROOT,),
    ("cli", "__main__"),
)
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}

MOST_FILES = 298
PLANNER = (
    "planning/", "lab/calibration/", "hardware/rates", "hardware/calibration", "hardware/known", "runtime/planner",
    "runtime/plan_problem",
    "runtime/replanning", "runtime/step_planner", "runtime/feasibility", "cli/plan", "cli/hardware", "report/plan_tables",
)  # fmt: skip
"""Where the search for plans and the calibration of a machine are."""
CHECKPOINTS = ("runtime/checkpoints/",)
RANKS = (
    "distributed/", "lab/check_ranks", "runtime/agreement", "runtime/passes/exchange", "runtime/passes/spread",
    "runtime/passes/device", "runtime/passes/replicas", "runtime/parameters/pieces", "memory/parts", "train/team",
    "hardware/links", "planning/rank_costs", "runtime/rank_ways", "cli/plan_ranks", "runtime/parameters/deferred_weights",
    "runtime/parameters/recorded_operators",
)  # fmt: skip
TRAIN = ("train/", "cli/train")
MOST_LINES = {RANKS: 4_700, PLANNER: 8_100, CHECKPOINTS: 3_850, TRAIN: 2_450}
"""Lines without docstrings of the files whose paths begin so. A later feature adds a row of its own."""
MOST_OTHER_LINES = 43_800
"""The same of all other files: 42,000, and 1,800 for what checkpoints, runs, ranks and parts changed in the session, its
parameters, updates and errors."""


def part_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return ROOT if first == "__init__.py" else first.removesuffix(".py")


def imported_parts(tree: ast.Module, parts: frozenset[str]) -> Iterator[tuple[int, str]]:
    """(line, part) of each import of the package itself; imports inside functions and TYPE_CHECKING count too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            if node.module == "lowtide":
                names = names[1:]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == "lowtide":
                first = rest.partition(".")[0]
                yield node.lineno, first if first in parts else ROOT


def upward_imports(source: str, part: str, parts: frozenset[str]) -> list[str]:
    return [
        f"line {line}: {part} imports {target}"
        for line, target in imported_parts(ast.parse(source), parts)
        if RANK[target] > RANK[part]
    ]


def private_torch(source: str) -> list[str]:
    """Uses of names that torch does not promise: `torch._C`, `torch.utils._pytree`, `from torch.x import _y`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            continue
        found += [
            f"line {node.lineno}: {name}"
            for name in names
            if name.startswith("torch.") and any(is_private(word) for word in name.split("."))
        ]
    return found


def is_private(word: str) -> bool:
    return word.startswith("_") and not word.startswith("__")


PARTS = frozenset(part_of(path) for path in FILES) | frozenset(path.name for path in PACKAGE.iterdir() if path.is_dir())
by_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))


@by_file
def test_imports_go_one_way(path: Path) -> None:
    assert part_of(path) in RANK, f"{path.name} belongs to no layer; add its part to LAYERS"
    assert upward_imports(path.read_text(encoding="utf-8"), part_of(path), PARTS) == []


@by_file
def test_private_torch_stays_in_compat(path: Path) -> None:
    if path.parent.name != "compat":
        assert private_torch(path.read_text(encoding="utf-8")) == []


@by_file
def test_file_opens_with_a_docstring(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), "the first line of a file says what its one idea is"


@by_file
def test_annotations_are_never_evaluated(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    code = [node for node in tree.body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    assert not code or ast.unparse(code[0]) == "from __future__ import annotations"


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports for types alone count too: a cycle means that two files are one idea, or that one knows too much."""
    edges = {name: imports_of(path) for name, path in MODULES.items()}
    assert cycles_in(edges) == []


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(("lowtide", *(parts[:-1] if parts[-1] == "__init__" else parts)))


MODULES = {module_name(path): path for path in FILES}


def imports_of(path: Path) -> set[str]:
    """The package's own modules that a file imports, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            # A name of a package may be a module of it.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in MODULES else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return (found & MODULES.keys()) - {module_name(path)}


def cycles_in(edges: dict[str, set[str]]) -> list[list[str]]:
    """What is left when modules that import none of the others are taken away again and again, from both ends."""
    left = {name: set(targets) for name, targets in edges.items()}
    while True:
        imported = {target for targets in left.values() for target in targets}
        leaving = {name for name, targets in left.items() if not targets or name not in imported}
        if not leaving:
            return [[name, *sorted(targets)] for name, targets in sorted(left.items())]
        left = {name: targets - leaving for name, targets in left.items() if name not in leaving}


def test_the_cycle_check_sees_cycles() -> None:
    assert cycles_in({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert cycles_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [["b", "c"], ["c", "b"]]


def test_every_folder_is_a_package() -> None:
    folders = {path.parent for path in FILES}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []
    assert (PACKAGE / "py.typed").exists()


@pytest.mark.parametrize(
    ("part", "source", "num_upward"),
    [
        ("tracing", "from lowtide.planning import search", 1),
        ("tracing", "def f():\n    import lowtide.cli.main", 1),
        ("tracing", "from lowtide import planning", 1),
        ("tracing", "import lowtide", 1),
        ("tracing", "from lowtide import trace", 1),
        ("tracing", "from lowtide.hardware.card import Card\nfrom lowtide import errors\nimport torch", 0),
        ("planning", "from lowtide.tracing.step_trace import StepTrace", 0),
        ("cli", "import lowtide\nfrom lowtide.report import html", 0),
        (ROOT, "from lowtide.cli.main import app", 1),
    ],
)
def test_the_import_check_sees_upward_edges(part: str, source: str, num_upward: int) -> None:
    parts = frozenset({"errors", "hardware", "tracing", "planning", "report", "cli"})
    assert len(set(upward_imports(source, part, parts))) == num_upward


def test_the_private_check_sees_private_names() -> None:
    assert len(private_torch("from torch.utils._pytree import tree_map")) == 1
    assert len(private_torch("from torch import _C")) == 1
    assert len(private_torch("import torch._dynamo")) == 1
    assert len(private_torch("torch._foreach_add_(a, b)")) == 1
    assert private_torch("from torch import nn\ntorch.__version__\nnn.Module._x\nself._torch.y") == []


def num_code_lines(source: str) -> int:
    """Lines of a file that belong to no docstring, nor to the text below a field; comments and blank lines count."""
    docs = [
        statement
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for statement in node.body
        if isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    ]
    return len(source.splitlines()) - sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in docs)


def test_the_package_stays_small() -> None:
    assert len(FILES) <= MOST_FILES, f"{len(FILES)} files: merge those that are one idea"
    lines = {path.relative_to(PACKAGE).as_posix(): num_code_lines(path.read_text(encoding="utf-8")) for path in FILES}
    for beginnings, most in MOST_LINES.items():
        own = sum(lines.pop(path) for path in list(lines) if path.startswith(beginnings))
        assert own <= most, f"{own:,} lines in {', '.join(beginnings)}: look for what is written twice"
    assert sum(lines.values()) <= MOST_OTHER_LINES, f"{sum(lines.values()):,} lines: look for what is written twice"


def test_the_count_leaves_docstrings_out() -> None:
    source = (
        '"""File.\n\nMore."""\n\nclass A:\n    """A."""\n\n    x: int\n    """Field."""\n    # why\n    y = "text"\n'
    )
    assert num_code_lines(source) == 6
