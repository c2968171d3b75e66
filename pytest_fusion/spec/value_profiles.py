"""Value profiles that plugins add, by the name that ``values="name"`` uses."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_fusion.errors import FusionError, SpecError
from pytest_fusion.spec import values
from pytest_fusion.spec.values import Function, ValueProfile
from pytest_fusion.spec.wording import did_you_mean

_added: dict[str, ValueProfile | Function] = {}


def extend(profiles: Iterable[tuple[str, ValueProfile | Function]]) -> None:
    """Make these the profiles of plugins. Raises ``FusionError`` for a name that is taken, or for no profile."""
    found: dict[str, ValueProfile | Function] = {}
    for name, profile in profiles:
        if not isinstance(profile, ValueProfile) and not callable(profile):
            raise FusionError(
                f"pytest_fusion_value_profiles: {name!r} is neither a profile of pytest_fusion.values nor a function "
                "of (shape, dtype, generator)"
            )
        if name in found or getattr(getattr(values, name, None), "__module__", "") == values.__name__:
            raise FusionError(f"pytest_fusion_value_profiles: another profile has the name {name!r}; choose another")
        found[name] = profile
    _added.clear()
    _added.update(found)


def named(name: str, where: str) -> ValueProfile | Function:
    """The profile of this name. Raises ``SpecError``."""
    if name not in _added:
        known = ", ".join(_added) or "none; our own are functions, as values.normal()"
        raise SpecError(
            f"{where}: no plugin gives a value profile {name!r}{did_you_mean(name, _added)} (known: {known})"
        )
    return _added[name]
