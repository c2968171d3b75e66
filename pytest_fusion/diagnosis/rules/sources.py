"""Causes in which input element reaches which result element, found by changing single elements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pytest_fusion.case.case_model import Case
from pytest_fusion.checks import probe as probing
from pytest_fusion.checks.gradients import gradients
from pytest_fusion.diagnosis import edits
from pytest_fusion.diagnosis.edits import Edit
from pytest_fusion.diagnosis.experiments import Answer, Found, Lab, ordinary
from pytest_fusion.diagnosis.rules.indices import longer_by
from pytest_fusion.oracle.tolerance.output_verdict import index_of
from pytest_fusion.spec.wording import grouped

# One reference runs for each element and change, at half a millisecond, and far fewer runs of the kernel.
_MOST_ELEMENTS = 40
_MOST_SOURCES = 12
_STRETCHED = 4
_MOST_WRONG = 2
_SEEDS, _AGREEING = 16, 2
# In one of so many seeds a condition holds and a factor is not 0.
_STRUCTURAL = 10
# A share of a diagnosis's runs, so that later rules have some.
_MOST_RUNS = 50
# Changes by so many times the largest element, up and down, change a selection (a maximum, values above 0) as well as a
# sum; the last one preserves an element's size.
_CHANGES = ((1.0, 3.0), (1.0, -3.0), (-0.5, 0.0))
# The least change of the kernel's element, as a share of the larger value, that counts.
_CHANGED = 1e-2

Place = tuple[str, int]


@dataclass(frozen=True, slots=True)
class _Changed:
    """One way to change elements of the inputs, each a tensor's name and a flat index."""

    way: int
    places: tuple[Place, ...]
    # An element's new value, by way, in tensors with narrowed values.
    spans: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def edit(self) -> Edit:
        factor, steps = _CHANGES[self.way]

        def apply(logical: dict[str, Any]) -> dict[str, Any]:
            changed = dict(logical)
            for name, places in itertools.groupby(sorted(self.places), key=lambda place: place[0]):
                t = logical[name].clone(memory_format=torch.contiguous_format)
                step = steps * float(t.double().abs().nan_to_num(0, 0, 0).max())
                for _, index in places:
                    free = name not in self.spans
                    t.view(-1)[index] = factor * t.view(-1)[index] + step if free else self.spans[name][self.way]
                changed[name] = t
            return changed

        return Edit(f"change {self.way} of {self.places}", apply)


def scattered(lab: Lab) -> Found | None:
    """Stores meet in one element, and another one of a result gets none: they go to the wrong places."""
    if not lab.verdict.identity.startswith("repeat:racing-stores"):
        return None
    # A case may want other gradients than the one with the race.
    probes = [lab.attempt(case).probe for case in lab.telling(lab.base, _AGREEING)]
    masks = [one for found in probes if found is not None for one in probing.unwritten(found).items()]
    if not masks:
        return None
    name, mask = masks[0]
    fact = f"{int(mask.sum())} of {mask.numel()} element(s) of {name} get none of the stores that meet elsewhere"
    return Found("wrong-index-map", [f"{fact}, the first at {mask.nonzero()[0].tolist()}"])


def elsewhere(lab: Lab) -> Found | None:
    """Wrong elements depend on input elements that the right ones do not use, and not on some that they do.

    A wrong formula depends on the same elements as the right one, a wrong mask on fewer or more.
    """
    fact, tried = _facts(lab, instead=True)
    if tried and len(fact) < _AGREEING:
        lab.ruled_out.append(
            "single elements: changed one by one, none reaches a wrong result that it should not, in place of another"
        )
    return _agreed(fact)


def beyond(lab: Lab) -> Found | None:
    """Wrong elements depend on input elements that no seed's right ones use, and on all that they should.

    Several seeds, because a factor of 0 hides in one call what another formula multiplies by it.
    """
    fact = _facts(lab, instead=False)[0]
    end = _one_past(lab) if len(fact) >= _AGREEING else None
    return Found("off-by-one-mask", [end, "the same for other values"]) if end else _agreed(fact)


def _one_past(lab: Lab) -> str | None:
    """That the extra elements are right before or after the proper ones along one axis, as text.

    So it is in a sliding window that is one too wide. In a long dim, wrapped or next-row elements are no neighbours.
    """
    plain = ordinary(lab.base.contiguous(), edits.free(lab.spec, lab.base))
    for name, size in sorted(lab.plain_sizes().items(), key=lambda dim: -dim[1]):
        case = lab.resized({name: size + _STRETCHED}, plain)
        if case is not None:
            # Along a dim that is not the window's own, two elements are neighbours at either end.
            fact = [_beside(lab, case.with_(seed=seed)) for seed in lab.seeds(case, _AGREEING)]
            if all(fact):
                return fact[0]
    return None


def _beside(lab: Lab, case: Case) -> str | None:
    """The extra neighbours that change a wrong element, as text; empty if others do too, ``None`` if unknown."""
    answer, spans = lab.attempt(case), edits.ranged(lab.spec, lab.base)
    found, wrong = answer.probe, lab.wrong_of(answer)
    places = _places(lab, answer, spans)
    known = _known_to(lab, found.logical, wrong.name, places, spans) if found and wrong and places else None
    if found is None or wrong is None or known is None or not bool(wrong.mask.any()):
        return None
    element = _worst(wrong.got, wrong.right, wrong.mask)[0]
    before = _value(wrong.got, element)
    near = [place for place in places if known[place][element]]
    shapes = {name: tuple(found.logical[name].shape) for name, _ in places}
    tried: str | None = None

    def run(edit: Edit) -> Answer:
        return lab.attempt(case, edit=edit)

    for axis, step in itertools.product(range(max(map(len, shapes.values()))), (1, -1)):
        beside = _next_to(near, shapes, axis, step)
        if not beside:
            continue
        tried = ""
        # With two keys the query counts as well, which a softmax over one key does not use.
        rest = tuple(place for place in _akin(near, places) if not known[place][element] and place not in beside)
        if rest and any(value != before for value in _values(run, rest, wrong.name, element, spans)):
            continue
        extra = next(_reaching(run, beside, wrong.name, element, spans, before), None)
        if extra is not None:
            text = _sentence(found.logical, wrong.name, wrong.got.shape, element, None, extra)
            return f"{text}: one past those that it must know along axis {axis}"
    return tried


def _next_to(near: list[Place], shapes: Mapping[str, tuple[int, ...]], axis: int, step: int) -> tuple[Place, ...]:
    """The elements right after (``step`` 1) or before those in each line of an axis; none if both its ends adjoin."""
    beside: list[Place] = []
    for name, shape in shapes.items():
        if axis >= len(shape):
            continue
        places = [index_of(flat, shape) for owner, flat in near if owner == name]
        lines = grouped(((*at[:axis], *at[axis + 1 :]), at[axis]) for at in places)
        for others, line in lines.items():
            if len(line) + 1 == shape[axis]:
                return ()
            end = max(line) + 1 if step > 0 else min(line) - 1
            if 0 <= end < shape[axis]:
                at = (*others[:axis], end, *others[axis:])
                beside.append((name, int(np.ravel_multi_index(at, shape))))
    return tuple(beside)


def _agreed(fact: list[str]) -> Found | None:
    return Found("wrong-index-map", [f"{fact[0]}; the same for other values"]) if len(fact) >= _AGREEING else None


def _facts(lab: Lab, *, instead: bool) -> tuple[list[str], bool]:
    """Sentences on single elements, for as many seeds as must agree; and whether any was tried."""
    if lab.check == gradients.NAME:
        return [], False
    plain = ordinary(lab.base.contiguous(), edits.free(lab.spec, lab.base))
    fact: list[str] = []
    tried = False
    budget = lab.runs + _MOST_RUNS
    # Longer along sizes above 1: to be another dim's bound, a size must be small.
    stretched = longer_by(lab, plain, lambda size: _STRETCHED if 1 < size < _STRETCHED else size)
    cases = [plain, lab.grown(plain, (2, 2, 2, 2)), stretched]
    # With two elements, both neighbours of one are the same element.
    cases += [] if instead else [lab.grown(plain, (3, 3, 3, 3))]
    for case in {each.key(): each for each in cases}.values():
        silent = 0
        for seed in lab.seeds(case, _SEEDS):
            if silent == _AGREEING or lab.runs > budget:
                break
            seeded = case.with_(seed=seed)
            answer = lab.attempt(seeded)
            if answer.wrong:
                text = _elsewhere(
                    lab, answer, lambda edit, seeded=seeded: lab.attempt(seeded, edit=edit), instead=instead
                )
                fact += [text] if text else []
                silent += not text
                tried |= text is not None
            if len(fact) == _AGREEING:
                return fact, tried
    return fact, tried


def _elsewhere(lab: Lab, answer: Answer, run: Any, *, instead: bool) -> str | None:
    """Which element reaches a wrong one instead of another, or besides all proper ones, as text; empty if none does.

    ``None`` if unknown: the inputs have values of their own, or each element reaches all results.
    """
    spans = edits.ranged(lab.spec, lab.base)
    # Tensors with narrowed values too, but not at the expense of free ones.
    text = _among(lab, answer, run, spans, instead=instead)
    return _among(lab, answer, run, {}, instead=instead) if text is None and spans else text


def _among(lab: Lab, answer: Answer, run: Any, spans: Mapping[str, tuple[float, ...]], *, instead: bool) -> str | None:
    found, wrong = answer.probe, lab.wrong_of(answer)
    if found is None or wrong is None or not wrong.far_off:
        return None
    places = _places(lab, answer, spans)
    if not places:
        return None
    known = _known_to(lab, found.logical, wrong.name, places, spans)
    if known is not None and not instead:
        known = _known_to_any(lab, answer, known, wrong.name, spans)
    if known is None:
        return None
    tried: str | None = None
    for element in _worst(wrong.got, wrong.right, wrong.mask):
        near = [place for place in places if known[place][element]]
        far = tuple(place for place in places if not known[place].any() or not known[place][element])
        if not near or not far or len(near) > _MOST_SOURCES:
            continue
        tried = ""
        before = _value(wrong.got, element)
        akin = _akin(near, far)
        ordered = (*akin, *(place for place in far if place not in akin))
        if not any(_moved(before, after) for after in _values(run, far, wrong.name, element, spans)):
            continue
        if not instead:
            extra = next(_reaching(run, ordered, wrong.name, element, spans, before), None)
            if extra is not None:
                return _sentence(found.logical, wrong.name, wrong.got.shape, element, None, extra)
            continue
        for place in near:
            after = _values(run, (place,), wrong.name, element, spans)
            if len(list(itertools.takewhile(before.__eq__, after))) == len(_CHANGES):
                extra = next(_reaching(run, ordered, wrong.name, element, spans, before), None)
                if extra is not None:
                    return _sentence(found.logical, wrong.name, wrong.got.shape, element, place, extra)
    return tried


def _akin(near: Sequence[Place], places: Sequence[Place]) -> tuple[Place, ...]:
    """The places in tensors with a proper element: other tensors that a wrong one of these adds are not at fault."""
    names = {name for name, _ in near}
    return tuple(place for place in places if place[0] in names)


def _places(lab: Lab, answer: Answer, spans: Mapping[str, tuple[float, ...]]) -> list[Place]:
    """The elements of the inputs that may have other values; none if there are too many to try."""
    found = answer.probe
    if found is None:
        return []
    tensors = {name: found.logical.get(name) for name in (*edits.free(lab.spec, lab.base), *spans)}
    places = [(name, i) for name, t in tensors.items() if isinstance(t, torch.Tensor) for i in range(t.numel())]
    return places if 1 < len(places) <= _MOST_ELEMENTS else []


def _reaching(
    run: Any,
    far: tuple[Place, ...],
    output: str,
    element: int,
    spans: Mapping[str, tuple[float, ...]],
    before: float,
) -> Iterator[Place]:
    """The places that change the kernel's element."""
    return (p for p in far if any(_moved(before, v) for v in _values(run, (p,), output, element, spans)))


def _known_to_any(
    lab: Lab, answer: Answer, known: dict[Place, torch.Tensor], output: str, spans: Mapping[str, tuple[float, ...]]
) -> dict[Place, torch.Tensor] | None:
    """The same for any of several seeds of the case."""
    assert answer.probe is not None
    case = answer.probe.result.case
    for seed in lab.seeds(case, _STRUCTURAL):
        other = lab.attempt(case.with_(seed=seed)).probe
        masks = _known_to(lab, other.logical, output, list(known), spans) if other is not None else None
        if masks is None or any(masks[place].shape != mask.shape for place, mask in known.items()):
            return None
        known = {place: mask | masks[place] for place, mask in known.items()}
    return known


def _known_to(
    lab: Lab, logical: Mapping[str, Any], output: str, places: list[Place], spans: Mapping[str, tuple[float, ...]]
) -> dict[Place, torch.Tensor] | None:
    """By place, a flat mask of the elements of the right result that change with it; ``None`` if unknown."""
    before = probing.right_of(lab.context, logical)
    if before is None or output not in before:
        return None
    masks: dict[Place, torch.Tensor] = {}
    for place in places:
        mask = torch.zeros(before[output].numel(), dtype=torch.bool)
        for way in range(len(_CHANGES)):
            after = probing.right_of(lab.context, _Changed(way, (place,), spans).edit().apply(dict(logical)))
            if after is None or after[output].shape != before[output].shape:
                return None
            a, b = (t.detach().cpu().flatten() for t in (before[output], after[output]))
            mask |= (a != b) & ~(torch.isnan(a) & torch.isnan(b)) if a.is_floating_point() else a != b
        masks[place] = mask
    return masks


def _worst(got: torch.Tensor, right: torch.Tensor, mask: torch.Tensor) -> list[int]:
    """The flat indices of the wrong elements that are furthest off."""
    off = (got.double() - right.double()).abs().nan_to_num(0.0, 0.0, 0.0) * mask
    return [int(i) for i in off.flatten().argsort(descending=True)[:_MOST_WRONG] if bool(mask.flatten()[i])]


def _values(
    run: Any, places: tuple[Place, ...], output: str, element: int, spans: Mapping[str, tuple[float, ...]]
) -> Iterator[float]:
    """The kernel's element under each change of these places that can be run."""
    for way in range(len(_CHANGES)):
        answer = run(_Changed(way, places, spans).edit())
        got = answer.probe.got.get(output) if answer.probe is not None else None
        if got is not None and element < got.numel():
            yield _value(got, element)


def _value(t: torch.Tensor, element: int) -> float:
    return float(t.detach().flatten()[element])


def _moved(before: float, after: float) -> bool:
    if not math.isfinite(before) or not math.isfinite(after):
        return False
    return abs(after - before) > _CHANGED * max(abs(before), abs(after))


def _sentence(
    logical: Mapping[str, Any],
    output: str,
    shape: tuple[int, ...],
    element: int,
    instead_of: Place | None,
    taken: Place,
) -> str:
    def at(name: str, flat: int, sizes: tuple[int, ...]) -> str:
        return f"{name}[{', '.join(map(str, index_of(flat, sizes)))}]"

    one = at(*taken, tuple(logical[taken[0]].shape))
    fact = f"{at(output, element, shape)} changes with {one}, which it must not"
    if instead_of is None:
        return fact
    return f"{fact}, and not with {at(*instead_of, tuple(logical[instead_of[0]].shape))}, which it must"
