"""ARCHITECTURE.md holds: imports go one way, each tool has its folder, and loading the plugin costs nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "pytest_fusion"
LONGEST = 500

# Where a user of the package starts; everything else has a folder.
AT_THE_ROOT = {"__init__.py", "errors.py", "py.typed"}
# A folder may import itself and the folders before it; folders in one entry do not know each other.
ORDER = (
    ("errors",),
    ("spec",),
    ("case",),
    ("interpreter",),
    ("run",),
    ("oracle",),
    ("checks",),
    ("diagnosis",),
    ("bench", "report"),
    ("engine",),
    ("canary",),
    ("plugin",),
)
RANKS = {folder: rank for rank, folders in enumerate(ORDER) for folder in folders}
MOST_IN_A_FOLDER = 21
MOST_SHARED_NAMES = 20
HEAVY = ("torch", "triton", "hypothesis", "numpy")
# Who may import a package: the stage of the importer.
OWNERS = {
    "hypothesis": {"case"},
    "_hypothesis_pytestplugin": set(),
    "reference_kernels": set(),
    "benchmarks": set(),
    "tests": set(),
    "pytest_benchmark": {"plugin"},
    "xdist": {"plugin"},
    "jaxtyping": set(),
    "prometheus_client": {"canary"},
    "jinja2": {"report"},
}


def _modules(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def _stage(module: str) -> str:
    """``"pytest_fusion.run.memory.fill"`` -> ``"run"``; the package itself is ``"__init__"``."""
    _, _, rest = module.partition(".")
    return rest.partition(".")[0] or "__init__"


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import, at module level, in functions, for type checkers, or by string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide their direction"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__") and node.args:
            target = node.args[0]
            if isinstance(target, ast.Constant) and isinstance(target.value, str):
                yield node.lineno, target.value


def _collected(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """Test functions and methods as pytest collects them; a function inside another one is that one's material."""
    for node in tree.body:
        for inner in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(inner, ast.FunctionDef) and inner.name.startswith("test_"):
                yield inner


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _wrong_way(module: str, imported: str) -> bool:
    """Whether ``module`` of the package imports a folder that is not before its own."""
    if imported.partition(".")[0] != "pytest_fusion":
        return False
    mine, theirs = _stage(module), _stage(imported)
    return mine != theirs and mine != "__init__" and RANKS.get(theirs, len(ORDER)) >= RANKS[mine]


def _not_theirs(module: str, imported: str) -> bool:
    """Whether ``imported`` is a package that belongs to other folders than that of ``module``."""
    owners = OWNERS.get(imported.partition(".")[0])
    return owners is not None and _stage(module) not in owners


@cache
def _found(path: Path) -> list[tuple[str, int, str]]:
    """Module, line and name of each import of a file."""
    module = _name(path)
    return [(module, line, name) for line, name in _imports(ast.parse(path.read_text(encoding="utf-8")))]


def test_imports_go_one_way() -> None:
    """No stage imports one beside it or after it, not even for a type or inside a function."""
    wrong = [
        f"{module}:{line} imports {name}"
        for path in _modules(PACKAGE)
        for module, line, name in _found(path)
        if _wrong_way(module, name)
    ]

    assert wrong == []


def test_each_tool_has_its_folder() -> None:
    """Only case/ imports Hypothesis, only plugin/ other plugins, and nothing imports the kernels or the tests."""
    wrong = [
        f"{module}:{line} imports {name}"
        for path in _modules(PACKAGE)
        for module, line, name in _found(path)
        if _not_theirs(module, name)
    ]

    assert wrong == []


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("from pytest_fusion.case.case_model import Case", False),
        ("from pytest_fusion import errors", False),
        ("import pytest_fusion.checks.verdict", True),
        ("from pytest_fusion import fused_equivalent", True),
        ("def f():\n    from pytest_fusion.report.record import TestRecord", True),
        ("if TYPE_CHECKING:\n    import pytest_fusion.plugin.hooks", True),
        ("importlib.import_module('pytest_fusion.diagnosis.text.message')", True),
        ("import hypothesis.strategies", True),
        ("from reference_kernels.softmax import SPEC", True),
    ],
)
def test_a_planted_import_is_seen(source: str, wrong: bool) -> None:
    """The rules above would see each way of writing a forbidden import in run/, and allow the others."""
    module = "pytest_fusion.run.outcome"
    names = [name for _, name in _imports(ast.parse(source))]

    assert any(_wrong_way(module, name) or _not_theirs(module, name) for name in names) is wrong


def test_the_root_holds_the_folders_of_the_data_path() -> None:
    """``errors.py`` and the folders in order, each with a row in ARCHITECTURE.md; nothing else."""
    found = {path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"}

    assert found == AT_THE_ROOT | (set(RANKS) - {"errors"})
    assert all(
        f"`{name}/`" in (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8") for name in set(RANKS) - {"errors"}
    )


def test_no_folder_is_crowded() -> None:
    """At most 21 modules stand directly in a folder."""
    counts = {str(path.parent.relative_to(PACKAGE)): 0 for path in _modules(PACKAGE)}
    for path in _modules(PACKAGE):
        counts[str(path.parent.relative_to(PACKAGE))] += path.name != "__init__.py"

    assert {folder: count for folder, count in counts.items() if count > MOST_IN_A_FOLDER} == {}


def test_few_files_share_a_name() -> None:
    """A file's name is its own in the whole package, or nearly so."""
    names = [path.name for path in _modules(PACKAGE) if path.name != "__init__.py"]
    shared = sorted(name for name in names if names.count(name) > 1)

    assert len(shared) <= MOST_SHARED_NAMES, shared


def _graph(imports: Mapping[str, Iterable[str]]) -> dict[str, set[str]]:
    """Module -> the modules of ``imports`` that it imports, also inside functions and for type checkers."""
    found: dict[str, set[str]] = {}
    for module, names in imports.items():
        found[module] = set()
        for name in names:
            # `from package.module import thing` is an import of package.module, and so is `import package.module`.
            target = name if name in imports else name.rpartition(".")[0]
            if target in imports and target != module:
                found[module].add(target)
    return found


def _circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, by Tarjan's algorithm for strongly connected components."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in sorted(graph[module]):
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                found.append(sorted(group))

    for module in sorted(graph):
        if module not in index:
            visit(module)
    return found


def test_no_modules_import_each_other() -> None:
    """There is no circle between modules, imports inside functions counted."""
    # The package itself names its interface for type checkers, from every folder.
    paths = [path for path in _modules(PACKAGE) if path.parent != PACKAGE or path.name != "__init__.py"]
    imports = {_name(path): [name for *_, name in _found(path)] for path in paths}

    assert _circles(_graph(imports)) == []


def test_a_planted_circle_is_seen() -> None:
    """A circle of three modules, one of whose imports stands inside a function, and none without that import."""
    texts = {
        "p.a": "from p.b import f",
        "p.b": "import p.c",
        "p.c": "def g():\n    from p import a",
        "p.d": "from p import a",
    }
    imports = {module: [name for _, name in _imports(ast.parse(text))] for module, text in texts.items()}

    assert _circles(_graph(imports)) == [["p.a", "p.b", "p.c"]]
    assert _circles(_graph(imports | {"p.c": []})) == []


def test_no_module_is_over_the_limit() -> None:
    """A module over 500 lines holds two nouns."""
    files = [
        path for folder in ("pytest_fusion", "reference_kernels", "benchmarks") for path in _modules(ROOT / folder)
    ]
    sizes = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in files}

    assert {name: lines for name, lines in sizes.items() if lines > LONGEST} == {}


def test_every_test_states_its_fact() -> None:
    """Each test function has a docstring: what is true when it passes."""
    silent = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for folder in ("tests", "reference_kernels")
        for path in _modules(ROOT / folder)
        if path.name.startswith("test_")
        for node in _collected(ast.parse(path.read_text(encoding="utf-8")))
        if not ast.get_docstring(node)
    ]

    assert silent == []


@pytest.mark.parametrize(
    "modules",
    [
        ["pytest_fusion"],
        ["pytest_fusion.plugin.hooks", "pytest_fusion.errors"],
        [
            f"pytest_fusion.report.{name}"
            for name in ("terminal", "html.page", "json_file", "ci.github", "ci.junit", "environment")
        ],
    ],
    ids=["package", "plugin", "reports"],
)
def test_loading_imports_nothing_heavy(modules: list[str]) -> None:
    """Whoever runs no fused test, or only gathers records, pays for no torch, triton, Hypothesis or numpy."""
    code = f"import sys, {', '.join(modules)}; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
