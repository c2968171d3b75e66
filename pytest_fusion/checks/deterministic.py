"""Whether what ``deterministic=`` names exists: outputs, known once the reference has run, and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pytest_fusion.checks.context import Context
from pytest_fusion.checks.outputs import Outputs, spellings
from pytest_fusion.errors import SpecError
from pytest_fusion.oracle.reference import takes
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import ConstantSpec, TensorSpec, unwrap
from pytest_fusion.spec.wording import did_you_mean

# After so many cases an output that none of them had is none; more where a flag or an absent input may decide.
_SETTLED, _SETTLED_IF_DRAWN = 8, 50


@dataclass(slots=True)
class _Seen:
    """The outputs of any case: an optional input may decide whether there is one."""

    outputs: dict[str, None] = field(default_factory=dict)


def note(context: Context, expected: Outputs) -> None:
    """Remember what the outputs of this case are called."""
    if not isinstance(context.spec.deterministic, bool):
        context.state(_Seen).outputs.update(dict.fromkeys((*expected.tensors, *expected.plain)))


def notes(context: Context, judged: int) -> list[str]:
    """What is to be told of a name that is neither an output of any of the ``judged`` cases nor a gradient.

    Raises ``SpecError`` where no other case and no other parametrization that the reference is told of could make it
    one: the name of an input says by itself that its gradient is meant.
    """
    spec, seen = context.spec, context.state(_Seen).outputs
    if isinstance(spec.deterministic, bool) or not seen:
        return []
    gradients = list(_gradients(spec))
    known = {*gradients, *(name for output in seen for name in spellings(output))}
    plain = all(isinstance(declared, TensorSpec | ConstantSpec) for declared in spec.inputs.values())
    enough = _SETTLED if plain else _SETTLED_IF_DRAWN
    said = []
    for name in spec.deterministic:
        if name in known:
            continue
        told = f"outputs: {', '.join(seen)}; gradients: {', '.join(gradients) or 'none, as grad= asks for none'}"
        # Nearer than any name that is spelled alike: the gradient of x is called dx.
        hint = did_you_mean(name, [f"d{name}"] if f"d{name}" in gradients else known)
        hint = hint if "did you mean" in hint else ""
        text = f"deterministic={{{name!r}: ...}} names neither an output nor a gradient{hint} ({told})"
        if judged >= enough and (name in spec.inputs or not takes(spec.reference, context.extra)):
            raise SpecError(f"{spec.name}: {text}")
        said.append(text)
    return said


def _gradients(spec: FusionSpec) -> Iterator[str]:
    """The gradients that ``grad=`` asks for in any case."""
    among = spec.inputs if spec.grad is True else spec.grad or ()
    assert not isinstance(among, bool | str)
    for name in among:
        mine = unwrap(spec.inputs[name])
        if name not in spec.mutates and (not isinstance(mine, TensorSpec) or mine.may_float()):
            yield f"d{name}"
