"""Whether the names in ``deterministic=`` exist: outputs, known once the reference has run, and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pytest_fusion.checks.context import Context, Outputs, spellings
from pytest_fusion.errors import SpecError
from pytest_fusion.oracle.reference import takes
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import ConstantSpec, TensorSpec, unwrap
from pytest_fusion.spec.wording import did_you_mean

# After so many cases an output that none had does not exist, even if a flag or an absent input decides.
_SETTLED_IF_DRAWN = 50


@dataclass(slots=True)
class _Seen:
    """The outputs of all cases; an optional input may decide whether one exists."""

    outputs: dict[str, None] = field(default_factory=dict)


def note(context: Context, expected: Outputs) -> None:
    """Note the names of this case's outputs; raises as :func:`notes` does."""
    if isinstance(context.spec.deterministic, bool):
        return
    context.state(_Seen).outputs.update(dict.fromkeys((*expected.tensors, *expected.plain)))
    # A reference may return early if there is nothing to compute.
    if all(isinstance(declared, TensorSpec | ConstantSpec) for declared in context.spec.inputs.values()):
        notes(context, _SETTLED_IF_DRAWN if any(t.numel() for t in expected.tensors.values()) else 0)


def notes(context: Context, judged: int) -> list[str]:
    """Notes on names that are no output of the ``judged`` cases and no gradient.

    Raises ``SpecError`` if no other case or parametrization can have one, or an input has the name (use its
    gradient's).
    """
    spec, seen = context.spec, context.state(_Seen).outputs
    if isinstance(spec.deterministic, bool) or not seen:
        return []
    gradients = list(_gradients(spec))
    known = {*gradients, *(name for output in seen for name in spellings(output))}
    notes = []
    for name in spec.deterministic:
        if name in known:
            continue
        known_names = f"outputs: {', '.join(seen)}; gradients: {', '.join(gradients) or 'none, as grad= names none'}"
        # Nearer than any similar spelling: the gradient of x is called dx.
        hint = did_you_mean(name, [f"d{name}"] if f"d{name}" in gradients else known)
        hint = hint if "did you mean" in hint else ""
        text = f"deterministic={{{name!r}: ...}} names neither an output nor a gradient{hint} ({known_names})"
        if judged >= _SETTLED_IF_DRAWN and (name in spec.inputs or not takes(spec.reference, context.extra)):
            raise SpecError(f"{spec.name}: {text}")
        notes.append(text)
    return notes


def _gradients(spec: FusionSpec) -> Iterator[str]:
    """The gradients that ``grad=`` names in any case."""
    among = spec.inputs if spec.grad is True else spec.grad or ()
    assert not isinstance(among, bool | str)
    for name in among:
        mine = unwrap(spec.inputs[name])
        if name not in spec.mutates and (not isinstance(mine, TensorSpec) or mine.may_float()):
            yield f"d{name}"
