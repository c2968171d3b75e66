"""What an incumbent is called."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pytest_fusion.canary.offline.incumbent.incumbents import IncumbentName, parse
from pytest_fusion.errors import CanaryError


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("git:HEAD~1", IncumbentName("revision", "HEAD~1")),
        ("HEAD~1", IncumbentName("revision", "HEAD~1")),
        ("origin/main", IncumbentName("revision", "origin/main")),
        ("v1.2.3", IncumbentName("revision", "v1.2.3")),
        ("git:v1:odd", IncumbentName("revision", "v1:odd")),
        ("a.b:c.d", IncumbentName("function", "a.b:c.d")),
        (f"python:{sys.executable}", IncumbentName("python", sys.executable)),
    ],
)
def test_names(text: str, named: IncumbentName, tmp_path: Path) -> None:
    """A colon that no prefix explains is one of ``module:function``, since no revision has any."""
    assert parse(text, tmp_path) == named


def test_an_interpreter_is_named_from_where_one_stands(tmp_path: Path) -> None:
    """A link is kept as it is: what it leads to is the interpreter without the environment."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    assert parse("python:bin/python", tmp_path).target == str(tmp_path / "bin" / "python")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no name"),
        ("git:", "has no name"),
        ("pyhton:/usr/bin/python", "did you mean 'python'?"),
        ("a-b:c", "cannot be read"),
        ("python:nowhere", "there is no program"),
        ("python:env", "did you mean python:"),
        (sys.executable, f"python:{sys.executable}"),
    ],
)
def test_what_is_no_name(text: str, words: str, tmp_path: Path) -> None:
    """It is refused with the three forms, or with the one that was meant."""
    (tmp_path / "env" / "bin").mkdir(parents=True)
    (tmp_path / "env" / "bin" / "python").write_text("")
    with pytest.raises(CanaryError) as raised:
        parse(text, tmp_path)
    assert words in str(raised.value)
