"""Objects by their names, ``module:name``: specs, functions, classes."""

from __future__ import annotations

import sys
from functools import reduce
from importlib import import_module
from typing import Any

from pytest_fusion.errors import CanaryError, SpecError
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.wording import brief, did_you_mean


def path_of(value: Any) -> str:
    """``module:name`` of a function or class, as it states it itself."""
    return f"{value.__module__}:{value.__qualname__}"


def at(path: str) -> Any:
    """The object at ``path``. Raises ``ImportError``, ``AttributeError``, or what its module raises."""
    module, _, names = path.partition(":")
    return reduce(getattr, names.split("."), import_module(module))


def named(text: str, *, folders: tuple[str, ...] = ()) -> Any:
    """The object that a user names; ``folders`` come after ``sys.path``. Raises ``CanaryError`` with advice."""
    module, _, names = text.partition(":")
    if not module or not names:
        raise CanaryError(f"{text!r} names nothing; expected module:name, as in my_kernels.norm:rms_norm")
    sys.path += [folder for folder in folders if folder not in sys.path]
    try:
        found: Any = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise CanaryError(f"{text}: importing {module} raised {brief(error)}") from None
        raise CanaryError(
            f"{text}: there is no module {error.name!r}; is its folder in PYTHONPATH, or the package installed?"
        ) from None
    except Exception as error:
        raise CanaryError(f"{text}: importing {module} raised {brief(error)}") from error
    for name in names.split("."):
        if not hasattr(found, name):
            hint = did_you_mean(name, [known for known in dir(found) if not known.startswith("_")])
            raise CanaryError(f"{text}: {module} has no {name!r}{hint if '?' in hint else ''}")
        found = getattr(found, name)
    return found


def spec_of(found: Any) -> FusionSpec | None:
    """A ``FusionSpec``, or that of a test; ``None`` for anything else."""
    spec = getattr(found, "fusion_spec", found)
    return spec if isinstance(spec, FusionSpec) else None


def named_spec(text: str, *, folders: tuple[str, ...] = ()) -> FusionSpec:
    """The spec that ``module:SPEC`` names, or that of a test. Raises ``CanaryError``; ``SpecError`` from its module."""
    try:
        spec = spec_of(named(text, folders=folders))
    except CanaryError as error:
        if isinstance(error.__cause__, SpecError):
            raise error.__cause__ from None
        raise
    if spec is None:
        raise CanaryError(f"{text} is no FusionSpec and no test of one")
    if spec.fixtures:
        raise CanaryError(f"{text} is a test that takes fixtures ({', '.join(spec.fixtures)}), which only pytest makes")
    return spec


def named_kernel(text: str, *, folders: tuple[str, ...] = ()) -> Any:
    """The function that ``module:function`` names; of a spec or a test, its fused call. Raises ``CanaryError``."""
    found = named(text, folders=folders)
    spec = spec_of(found)
    fused = spec.fused if spec is not None else found
    if not callable(fused):
        raise CanaryError(f"{text} cannot be called; name the function")
    return fused
