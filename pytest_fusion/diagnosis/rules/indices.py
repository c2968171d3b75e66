"""Causes in which element belongs where: inputs read at other indices, slices mixed up."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from pytest_fusion.case.case_model import Case
from pytest_fusion.case.plan import in_dtype
from pytest_fusion.checks import probe as probing
from pytest_fusion.checks.gradients import gradients
from pytest_fusion.checks.invariance.case_slices import Unsliceable, input_axes, selected, unsliceable
from pytest_fusion.diagnosis import edits
from pytest_fusion.diagnosis.edits import Edit
from pytest_fusion.diagnosis.experiments import Answer, Found, Lab, Wrong, ordinary
from pytest_fusion.diagnosis.readings import Reading, readings
from pytest_fusion.diagnosis.readings import of as readings_of
from pytest_fusion.errors import SpecError

# Two float32 numbers of one distribution agree to 5 digits once in some ten thousand pairs.
_SAME = 2e-5
# References that one diagnosis may evaluate on other inputs, at about a millisecond each.
_MOST_REFERENCES = 250
_SEEDS = 2
_MOST_CASES = 2
_LOUDER = 64.0
# Calls after the first: with small whole numbers, two equal it by chance.
_LATER = 4


def failing(lab: Lab) -> Iterator[Case]:
    """Plain float32 cases that fail whatever the seed, with enough elements to distinguish them."""
    plain = ordinary(lab.base.contiguous(), edits.free(lab.spec, lab.base))
    sizes = [lab.grown(plain), lab.grown(plain, (9, 18, 8, 12))]
    for block in lab.blocks[:2]:
        sizes += [case for name in lab.plain_sizes() if (case := lab.resized({name: 2 * block + 3}, lab.grown(plain)))]
    if "float32" in lab.spec.dtypes:
        sizes = [in_dtype(lab.spec, case, "float32") for case in sizes]
    singles = {case.key(): case for case in sizes}
    yield from itertools.islice(filter(lab.mostly_wrong, singles.values()), _MOST_CASES)


def misread(lab: Lab) -> Found | None:
    """The result is the reference's for inputs read at other indices."""
    budget = _MOST_REFERENCES
    for case in failing(lab):
        seeds = lab.seeds(case, _SEEDS)
        answers = [lab.attempt(case.with_(seed=seed)) for seed in seeds]
        first = answers[0].probe
        if first is None:
            continue
        for reading in readings(lab, first.logical):
            budget -= 1
            if budget < 0:
                return None
            if all(_equals(lab, answer, reading) for answer in answers):
                if reading.again and not _in_further_blocks(lab, case, reading):
                    continue
                if _any_place_does(lab, answers, reading):
                    continue
                return Found("wrong-index-map", [f"equals the reference with {reading}, for {len(seeds)} seeds"])
    lab.ruled_out.append("inputs read elsewhere: not the reference of any input turned, shifted, repeated or cut")
    return None


def _any_place_does(lab: Lab, answers: list[Answer], reading: Reading) -> bool:
    """Whether another index, read repeatedly, explains as much: equal shares do that, as in a mean."""
    first, last = " the first index ", " the last index "
    what = reading.what
    other = what.replace(first, last) if first in what else what.replace(last, first)
    if other == what:
        return False
    for answer in answers:
        same = _same_in(lab, answer, reading, other)
        if same is None or not _equals(lab, answer, same):
            return False
    return True


def _in_further_blocks(lab: Lab, case: Case, reading: Reading) -> bool:
    """Whether the reading explains longer cases too: past the first block, one element may agree by chance."""
    for times in (2, 3):
        longer = longer_by(lab, case, lambda size, times=times: times * size if size > reading.again else size)  # type: ignore[misc]
        if longer.key() != case.key():
            # A reading names the place by its axis, whatever the size.
            answer = lab.attempt(longer)
            same = _same_in(lab, answer, reading, reading.what)
            if not answer.wrong or same is None or not _equals(lab, answer, same):
                return False
    return True


def longer_by(lab: Lab, case: Case, length: Callable[[int], int]) -> Case:
    """The case with each dim of this length, as far as bounds allow."""
    for dim, size in case.sizes.items():
        if isinstance(size, int):
            case = lab.resized({dim: length(size)}, case) or case
    return case


def _same_in(lab: Lab, answer: Answer, reading: Reading, what: str) -> Reading | None:
    """The reading of the same inputs with this description, in another case."""
    if answer.probe is None:
        return None
    others = readings_of(lab, reading.names, answer.probe.logical[reading.names[0]])
    return next((other for other in others if other.what == what), None)


def _equals(lab: Lab, answer: Answer, reading: Reading) -> bool:
    found, wrong = answer.probe, lab.wrong_of(answer)
    if found is None or wrong is None:
        return False
    outputs = probing.right_of(lab.context, reading.applied(found.logical))
    other = outputs.get(wrong.name) if outputs is not None else None
    if other is not None and reading.back is not None:
        if other.dim() == 0 or other.shape[-1] != found.logical[reading.names[0]].shape[-1]:
            return False
        other = reading.back(other)
    if other is None or other.shape != wrong.got.shape:
        return False
    unwritten = found.unwritten.get(wrong.name)
    keep = ~unwritten if unwritten is not None else torch.ones_like(wrong.mask)
    if not bool((wrong.mask & keep).any()):
        return False
    if not wrong.got.is_floating_point():
        return bool((other == wrong.got)[keep].all())
    precise = max(_SAME, 16 * torch.finfo(wrong.got.dtype).eps)
    got, tried, right = (t.double()[keep] for t in (wrong.got, other, wrong.right))

    def close(t: torch.Tensor) -> bool:
        largest = float(t.abs().nan_to_num(0, 0, 0).max())
        return torch.allclose(got, t, precise, precise * largest, equal_nan=True)

    # If the right result is as close, closeness proves nothing.
    return close(tried) and not close(right)


def mixed(lab: Lab) -> Found | None:
    """Slices along a dim are right alone and wrong together, though they are independent in the reference."""
    # The error of a rare value needs the failing case itself, and values show it at single slices.
    for case in (*failing(lab), *([] if lab.check == gradients.NAME else [lab.base])):
        for dim, size in ((name, n) for name, n in case.sizes.items() if isinstance(n, int) and n >= 2):
            edits_of = slices_of(lab, case, dim)
            if edits_of is None:
                continue
            seeded, as_many = lab.telling(case, _SEEDS), True
            for each in seeded:
                whole = lab.attempt(each)
                wrong = _wrong_along(lab, whole, size)
                if wrong is None and lab.check != gradients.NAME:
                    break  # no element is far off: all of them together are
                if wrong is None and not lab.plainly_wrong(case):
                    break
                places = (0, 1, size - 1, *_worst_of_gradient(lab, whole, size)) if wrong is None else (0, *wrong[1])
                tried = dict.fromkeys(places)
                alone = [(i, lab.attempt(each, edit=edits_of([i]))) for i in tried]
                if not all(one.right and independent(lab, whole, one, [i], size) for i, one in alone):
                    break
                # An error of each slice by itself is within the allowed for few elements, and not for many.
                if wrong is not None and not any(changed_by_others(wrong[0], one, [i], size) for i, one in alone):
                    break
                as_many = as_many and wrong is not None and _wrong_among_copies(lab, each, *wrong, edits_of, size)
            else:
                fact = f"slices of {dim} that are wrong among others are right alone"
                if seeded and as_many:
                    return Found("batch-variant", [f"{fact}, and as wrong among copies of themselves"])
                if len(seeded) == _SEEDS:
                    return Found("wrong-index-map", [f"{fact}, whatever the size"])
    lab.ruled_out.append("slices mixed up: no slice of a dim is right alone and another among others")
    return None


def _wrong_along(lab: Lab, answer: Answer, size: int) -> tuple[Wrong, tuple[int, int]] | None:
    """The failing output, and the first and last wrong index along its axis of this size."""
    wrong = lab.wrong_of(answer) if lab.check != gradients.NAME else None
    axis = None if wrong is None else axis_of(wrong.mask, size)
    if wrong is None or axis is None:
        return None
    places = wrong.mask.movedim(axis, 0).reshape(size, -1).any(1).nonzero().flatten().tolist()
    return wrong, (places[0], places[-1])


def _wrong_among_copies(
    lab: Lab, case: Case, wrong: Wrong, places: tuple[int, int], edits_of: Callable[[Sequence[int]], Edit], size: int
) -> bool:
    """Whether copies of the first wrong slice all have its bits: it depends on neither its place nor the others."""
    copies = [places[0]] * size
    found, axis = lab.attempt(case, edit=edits_of(copies)).probe, axis_of(wrong.mask, size)
    got = found.got.get(wrong.name) if found is not None else None
    return got is not None and axis is not None and torch.equal(got, selected(wrong.got, axis, copies))


def _worst_of_gradient(lab: Lab, answer: Answer, size: int) -> list[int]:
    """The indices where the failing gradient is worst along its axis of this size: a rare value may be wrong alone."""
    found, name = answer.probe, lab.verdict.output
    pair = probing.gradient(found, name[1:]) if found is not None and name.startswith("d") else None
    axis = axis_of(pair[1], size) if pair is not None else None
    if pair is None or axis is None or pair[0].shape != pair[1].shape:
        return []
    off = (pair[0].double() - pair[1]).abs().nan_to_num(torch.inf)
    return [int(off.movedim(axis, 0).reshape(size, -1).amax(1).argmax())]


def changed_by_others(wrong: Wrong, one: Answer, chosen: Sequence[int], size: int) -> bool:
    """Whether other slices change the kernel's result for these slices by half of its error or more."""
    got = one.probe.got.get(wrong.name) if one.probe is not None else None
    axis = axis_of(wrong.mask, size)
    assert axis is not None
    among, right, mask = (selected(t, axis, list(chosen)) for t in (wrong.got, wrong.right, wrong.mask))
    if got is None or got.shape != among.shape or not bool(mask.any()):
        return False
    error, change = (among.double() - right.double()).abs(), (among.double() - got.double()).abs()
    return not bool((change < error / 2)[mask].all())


def axis_of(t: torch.Tensor, size: int) -> int | None:
    """The first axis of this size."""
    return next((axis for axis, n in enumerate(t.shape) if n == size), None)


def slices_of(lab: Lab, case: Case, dim: str) -> Callable[[Sequence[int]], Edit] | None:
    """Edits that select some slices of a dim; ``None`` if slices are not independent."""
    answer = lab.attempt(case)
    one = case.with_(sizes={**case.sizes, dim: 1})
    try:
        if unsliceable(lab.spec.with_(invariant=(dim,))) or answer.probe is None:
            return None
        axes = input_axes(lab.spec, case, one, answer.probe.logical, dim)
    except (SpecError, Unsliceable):
        return None
    # The gradient of a tensor that all slices share is a sum over them.
    if lab.check == gradients.NAME and lab.verdict.output[1:] not in axes:
        return None

    def cut(chosen: Sequence[int]) -> Edit:
        def apply(logical: dict[str, Any]) -> dict[str, Any]:
            return {
                name: selected(value, axes[name], list(chosen)) if name in axes else value
                for name, value in logical.items()
            }

        return Edit(f"only {dim} {', '.join(map(str, chosen))}", apply)

    return cut


def independent(lab: Lab, whole: Answer, one: Answer, chosen: Sequence[int], size: int) -> bool:
    """Whether the reference gives slices the same result alone, among the others, and among far larger ones."""
    together, single = _forward_of(lab, whole), _forward_of(lab, one)
    louder = _with_louder_others(whole, one, chosen, size)
    after = probing.right_of(lab.context, louder) if louder is not None else None
    if together is None or single is None or after is None:
        return False
    for name, right in together.items():
        alone, among = single.get(name), after.get(name)
        axis = axis_of(right, size)
        if alone is None or among is None or axis is None or not alone.dim() == among.dim() == right.dim():
            return False
        remaining = selected(right, axis, list(chosen)).double()
        for other in (alone, selected(among, axis, list(chosen))):
            if remaining.shape != other.shape or not torch.allclose(
                remaining, other.double(), 1e-3, 1e-5, equal_nan=True
            ):
                return False
    return True


def _with_louder_others(whole: Answer, one: Answer, chosen: Sequence[int], size: int) -> dict[str, Any] | None:
    """The inputs with all other slices far larger: a maximum does not change without an element that is not it."""
    if whole.probe is None or one.probe is None:
        return None
    louder = dict(whole.probe.logical)
    for name, value in whole.probe.logical.items():
        less = one.probe.logical.get(name)
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not isinstance(less, torch.Tensor):
            continue
        if value.shape == less.shape:
            continue
        axis = next(i for i, (n, m) in enumerate(zip(value.shape, less.shape, strict=True)) if n != m)
        if value.shape[axis] == size:
            others = [i for i in range(size) if i not in chosen]
            factors = torch.ones(size, dtype=value.dtype, device=value.device)
            factors[others] = _LOUDER
            louder[name] = value * factors.reshape(-1, *(1,) * (value.dim() - axis - 1))
    return louder


def _forward_of(lab: Lab, answer: Answer) -> Mapping[str, torch.Tensor] | None:
    """The reference's results; slices that these separate have separate gradients too."""
    if answer.probe is None:
        return None
    return probing.right_of(lab.context, answer.probe.logical) if lab.check == gradients.NAME else answer.probe.expected


def cached(lab: Lab) -> Found | None:
    """At a new size, the first call is right, and later ones use some input's values from the first."""
    plain = ordinary(lab.base.contiguous(), edits.free(lab.spec, lab.base))
    for least in ((14, 22, 6, 10), (15, 23, 10, 6)):
        case = lab.grown(plain, least)
        tried = (lab.attempt(case.with_(seed=seed)) for seed in lab.seeds(case, 1 + _LATER))
        first = next(tried)
        if not first.right or first.probe is None:
            continue
        later = list(itertools.takewhile(lambda answer: answer.wrong, tried))
        if len(later) < _LATER:
            continue
        for name, old in first.probe.logical.items():
            # If one element serves for all, as the first length for all lengths, equal ones are right.
            if not isinstance(old, torch.Tensor) or not _varies(old):
                continue
            remaining = Reading((name,), "", lambda _, t=old: t)  # type: ignore[misc]
            if all(_equals(lab, answer, remaining) for answer in later):
                return Found("cached-answer", [f"right in a first call; later ones use that call's {name}"])
        for name, old in first.probe.got.items():
            now = [answer.probe.got.get(name) for answer in later if answer.probe is not None]
            if _varies(old) and all(t is not None and t.shape == old.shape and torch.equal(t, old) for t in now):
                return Found("cached-answer", [f"right in a first call, whose {name} later ones give again"])
    return None


def _varies(t: torch.Tensor) -> bool:
    return t.numel() > 1 and bool((t != t.flatten()[0]).any())
