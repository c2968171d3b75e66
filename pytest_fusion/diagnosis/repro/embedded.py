"""The part of a stand-alone script that is the same in each: our own sources as one text, without imports of us."""

from __future__ import annotations

import ast
import inspect
from types import ModuleType
from typing import Any

from pytest_fusion.case import counter_random, make, patterns, regimes
from pytest_fusion.diagnosis.repro.standalone import failure, project, tensors

# What the copied functions find elsewhere at home.
_GLUE = '''
ImpossibleCase = SpecError = Impossible
counter_random = types.SimpleNamespace(mix=mix, uniform=uniform, normal=normal, integers=integers)
patterns = types.SimpleNamespace(
    booleans=booleans, ended=ended, flags=flags, probabilities=probabilities, rounded=rounded, runs=runs
)
regimes = types.SimpleNamespace(make=make)


def _bound(value: Any, sizes: Any) -> Any:
    return value


def generated(profile: Any, regime: str, shape: Sequence[int], dtype: str, seed: int) -> Callable[[str], torch.Tensor]:
    """The values of a tensor that is too large to be written down, made on the device that the case runs on."""
    kind = getattr(torch, dtype)
    return lambda device: _from_profile(profile, regime, tuple(shape), kind, seed, torch.device(device), {})
'''


def machinery(*, generator: bool) -> str:
    """Imports and definitions for the end of a script; ``generator`` adds that of large tensors.

    Raises ``OSError`` where the sources are not at hand.
    """
    parts: list[Any] = [project, tensors, failure]
    if generator:
        parts += [counter_random, patterns, regimes, make._narrow, make._default, make._from_profile]
    imports: dict[str, set[str]] = {"": {"torch", "types"}}
    bodies = [_body(inspect.getsource(part), imports, whole=isinstance(part, ModuleType)) for part in parts]
    plain = [f"import {module}" for module in sorted(imports.pop(""))]
    chosen = [f"from {module} import {', '.join(sorted(taken))}" for module, taken in sorted(imports.items())]
    return "\n".join([*plain, *chosen, "", "", "\n\n\n".join(bodies), *([_GLUE] if generator else [""])])


def _body(source: str, imports: dict[str, set[str]], *, whole: bool) -> str:
    """The source without its docstring and imports, which are added to ``imports``: those of a module are its own."""
    if not whole:
        return source.strip()
    tree, lines = ast.parse(source), source.splitlines()
    for node in tree.body:
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not (text or isinstance(node, ast.Import | ast.ImportFrom)):
            continue
        for line in range(node.lineno - 1, node.end_lineno or node.lineno):
            lines[line] = ""
        if isinstance(node, ast.Import):
            imports[""].update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(("pytest_fusion", "__future__")):
            imports.setdefault(str(node.module), set()).update(alias.name for alias in node.names)
    return "\n".join(lines).strip()
