"""Makes a process import from a checkout instead of the work tree, and finds imports that were not redirected."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Folders of installed packages, which may be inside a work tree.
_INSTALLED = frozenset({"site-packages", "dist-packages"})


def moved(path: str, top: Path, checkout: Path) -> str:
    """``path`` moved from the work tree ``top`` to ``checkout``; unchanged outside it and for installed packages."""
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(top) or real.is_relative_to(checkout) or _INSTALLED & set(real.parts):
        return path
    return os.fspath(checkout / real.relative_to(top))


def redirect(top: Path, checkout: Path) -> None:
    """Makes this process import from ``checkout`` what it would import from ``top``.

    ``sys.path`` has the folders of ``PYTHONPATH`` and of editable installs; the finders of setuptools' editable
    installs keep a mapping of their own.
    """
    sys.path[:] = [moved(path, top, checkout) if path else path for path in sys.path]
    for name, module in list(sys.modules.items()):
        if not name.startswith("__editable__"):
            continue
        mapping: Any = getattr(module, "MAPPING", {})
        for package, path in list(mapping.items()):
            mapping[package] = moved(path, top, checkout)
        spaces: Any = getattr(module, "NAMESPACES", {})
        for package, paths in list(spaces.items()):
            spaces[package] = [moved(path, top, checkout) for path in paths]


def caches() -> list[Path]:
    """The folders of compiled code of Triton and Inductor, which all processes share by the hash of the source."""
    given = [os.environ.get(name) for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")]
    own = Path(os.environ.get("TRITON_HOME") or Path.home(), ".triton")
    return [own.resolve(), *(Path(path).resolve() for path in given if path)]


def imported_from(top: Path, without: Iterable[Path]) -> list[str]:
    """Files below ``top`` from which this process imported modules, except installed ones and those ``without``."""
    others = tuple(without)
    found = set()
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str):
            continue
        real = Path(os.path.realpath(file))
        inside = real.is_relative_to(top) and not _INSTALLED & set(real.parts)
        if inside and not any(real.is_relative_to(other) for other in others):
            found.add(os.fspath(real))
    return sorted(found)
