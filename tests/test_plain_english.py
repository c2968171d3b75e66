"""Docstrings' first lines, names and messages of the package use the field's words (CONTRIBUTING, habit 11)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "pytest_fusion"

# Each has a plainer word: report, show, need, check, message, stored, is at, allows, nothing, the user, correct.
_WORDS = "told tell tells ask asks asked said lie lies bear bears somebody nobody mend mends mended".split()
_PROSE = re.compile(rf"\b(?:{'|'.join(_WORDS)}|such(?! as\b)|of which|what of|for want of)\b", re.IGNORECASE)
_NAME = re.compile(rf"(?:^|_)(?:{'|'.join(_WORDS)}|kept|such)(?:_|$)", re.IGNORECASE)
# Names that stand in files or in the public interface, and would change with them.
_ALLOWED: frozenset[str] = frozenset()


def _docstrings(tree: ast.AST) -> Iterator[tuple[int, ast.Constant]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                yield first.lineno, first.value


def _names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names where they are made: functions, classes, parameters, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def found(source: str) -> list[str]:
    """``"line: text"`` of each first line, name and message with a word to replace."""
    tree = ast.parse(source)
    docstrings = list(_docstrings(tree))
    first_lines = [(line, str(constant.value).strip().partition("\n")[0]) for line, constant in docstrings]
    # A message has a blank; a word alone is a key or a slug.
    documented = {id(constant) for _, constant in docstrings}
    messages = [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
        if id(node) not in documented
    ]
    wrong = [(line, text) for line, text in [*first_lines, *messages] if _PROSE.search(text)]
    for line, name in _names(tree):
        if name not in _ALLOWED and _NAME.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)):
            wrong.append((line, name))
    return [f"{line}: {text}" for line, text in sorted(set(wrong))]


def test_the_package_speaks_plainly() -> None:
    """No first line, name or message has one of the words."""
    files = sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)
    wrong = [f"{path.relative_to(PACKAGE)}:{one}" for path in files for one in found(path.read_text(encoding="utf-8"))]

    assert wrong == []


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('def f():\n    """What the kernel is told."""', 1),
        ('def f():\n    """The device.\n\n    It is told so."""', 0),
        ("def told(): ...", 1),
        ("class NotAsked: ...", 1),
        ("asked_for = 1", 1),
        ("self.kept = 1", 1),
        ('raise ValueError(f"{x} lies outside")', 1),
        ('key = "asked"', 0),
        ('text = "a value such as 3"', 0),
        ("untold = retold = task = 1", 0),
    ],
)
def test_a_planted_word_is_seen(source: str, count: int) -> None:
    """Each place where a word counts, and neighbours that are fine."""
    assert len(found(source)) == count
