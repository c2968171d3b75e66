"""What a kernel owes today, as JSON: both kernels are held to it, whatever the incumbent's own spec said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.promises import Tolerance

_AS_IT_IS = ("grad", "deterministic", "invariant", "mutates", "clobbers", "max_launches", "max_recompiles", "compile")


def contract(spec: FusionSpec) -> dict[str, Any]:
    """The part of a spec that says what is asked of a kernel, and has a form in JSON."""
    found: dict[str, Any] = {name: getattr(spec, name) for name in _AS_IT_IS}
    tolerance = spec.tolerance
    found["tolerance"] = (
        {"rtol": tolerance.rtol, "atol": tolerance.atol} if isinstance(tolerance, Tolerance) else tolerance
    )
    found["without"] = dict(spec.without)
    return found


def held_to(spec: FusionSpec, asked: Mapping[str, Any]) -> FusionSpec:
    """``spec`` with another's contract. Raises ``SpecError`` where it cannot be one of its kernel."""
    changes = dict(asked)
    if isinstance(changes["tolerance"], Mapping):
        changes["tolerance"] = Tolerance(**changes["tolerance"])
    for name in _AS_IT_IS:
        if isinstance(changes[name], list):
            changes[name] = tuple(changes[name])
    return spec.with_(**changes)
