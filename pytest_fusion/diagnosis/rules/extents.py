"""Causes in how much there is: nothing, a partial tile, more than a block holds."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pytest_fusion.case.case_model import Case
from pytest_fusion.case.sizes import count
from pytest_fusion.checks import probe as probing
from pytest_fusion.checks.gradients import gradients
from pytest_fusion.checks.gradients.upstream import NoGraph, Upstream
from pytest_fusion.diagnosis import edits
from pytest_fusion.diagnosis.edits import Edit
from pytest_fusion.diagnosis.experiments import Answer, Found, Lab
from pytest_fusion.oracle.reference import ReferenceFailed
from pytest_fusion.oracle.rounding import GRIDS
from pytest_fusion.spec.dims import Size

# A smaller size is no block: a vector, a group, a window.
_SMALLEST_LIMIT = 8
# After this shift a padded 0 has no weight in a softmax of float32, also with scores scaled down tenfold.
_SHIFT = 1000.0
_FEW_SEEDS, _SEEDS, _MANY_SEEDS = 2, 4, 6
# How many of the learned block sizes to try.
_BLOCKS = 2
# A smaller share of the largest element is no change.
_CHANGED = 1e-3
# 16 bytes of a 16-bit dtype, and a multiple of the two or four parts into which work is often split.
_VECTOR = 8


def zero(lab: Lab) -> Found | None:
    """Wrong where a size is 0, right with 1 in its place and with more."""
    filled: dict[str, Size] = {}
    for name, size in lab.base.sizes.items():
        if size == 0 or (isinstance(size, tuple) and 0 in size):
            filled[name] = tuple(max(n, 1) for n in size) if isinstance(size, tuple) else 1
    if not filled:
        return None
    case = lab.resized(filled)
    if case is None:
        return None
    for other in (case, lab.grown(case)):
        if any(lab.attempt(other.with_(seed=seed)).wrong for seed in lab.seeds(other, _SEEDS)):
            if _only_where_nothing_counts(lab, case, lab.grown(case, (12, 12, 12, 12))):
                fact = f"wrong with {', '.join(filled)} of 0, and with more where no element of any input counts"
                return Found("zero-size", [fact, "right in every element that some input has a part in"])
            lab.ruled_out.append("size 0: wrong without one too")
            lab.base = other
            return None
    if not all(lab.attempt(case.with_(seed=seed)).right for seed in lab.seeds(case, _SEEDS)):
        return None
    # A loop bound that drops the last iteration shows in a small case only if it drops all.
    for block, name in itertools.product(lab.blocks[:_BLOCKS], lab.plain_sizes()):
        past = _just_past(lab, case, name, block)
        if past and any(lab.attempt(past.with_(seed=seed)).wrong for seed in lab.seeds(past, _FEW_SEEDS)):
            lab.ruled_out.append("size 0: wrong past a block without one too")
            lab.base = past
            return None
    shown = ", ".join(filled)
    return Found("zero-size", [f"right with {shown} of 1 or more, wrong with 0"])


def _just_past(lab: Lab, case: Case, name: str, tile: int) -> Case | None:
    """The case one longer than a tile along a dim, or by its bound's least step; ``None`` if those are tiles."""
    step = lab.spec.bound(name).multiple_of
    size = (tile // step + 1) * step if isinstance(step, int) else tile + 1
    return lab.resized({name: size}, case) if size % tile else None


def _only_where_nothing_counts(lab: Lab, small: Case, larger: Case) -> bool:
    """Whether the wrong elements are all ones that the reference computes without the inputs' floating values.

    Each place that is wrong in a larger case must be right for a seed with which it depends on them: a last bag that is
    always wrong is not wrong because it is empty.
    """
    if lab.verdict.check != "values" or lab.check == gradients.NAME:
        return False
    telling = 0
    wrong: dict[str, torch.Tensor] = {}
    right: dict[str, torch.Tensor] = {}
    for case, most in ((small, _MANY_SEEDS), (larger, 2 * _MANY_SEEDS)):
        for seed in lab.seeds(case, most):
            masks = _counting(lab, lab.attempt(case.with_(seed=seed)))
            if masks is None:
                return False
            for name, (off, depends) in masks.items():
                if bool((off & depends).any()):
                    return False
                telling += bool(depends.any())
                if case is larger:
                    wrong[name] = off | wrong.get(name, off)
                    right[name] = depends | right.get(name, depends)
    return telling > _SEEDS and not any(bool((off & ~right[name]).any()) for name, off in wrong.items())


def _counting(lab: Lab, answer: Answer) -> dict[str, tuple[torch.Tensor, torch.Tensor]] | None:
    """By output, which elements are wrong, and which the reference changes with the floating inputs; or ``None``."""
    found, wrong = answer.probe, lab.wrong_of(answer)
    names = [n for n, t in found.logical.items() if getattr(t, "dtype", None) in GRIDS] if found is not None else []
    if found is None or not names or not (answer.right or (answer.wrong and wrong is not None)):
        return None
    # NaN hides any other change; replacing it changes each result that contains it.
    cured = edits.finite(names)
    changes = (cured, edits.positive(names), edits.negative(names), edits.shifted(names, 0.7), edits.scaled(names, 2))
    others = [probing.right_of(lab.context, edit.apply(dict(found.logical))) for edit in changes]
    masks = {}
    for name, right in found.expected.items():
        depends = torch.zeros(right.shape, dtype=torch.bool, device=right.device)
        for other in others:
            if other is None or name not in other or other[name].shape != right.shape:
                return None
            depends |= (other[name] != right) & ~(other[name].isnan() & right.isnan())
        off = wrong.mask if answer.wrong and wrong is not None and wrong.name == name else torch.zeros_like(depends)
        masks[name] = off, depends
    return masks


def tail(lab: Lab, changes: Sequence[Edit] = ()) -> Found | None:
    """Right at whole tiles and wrong one past them, for every seed, with unchanged values or those of ``changes``."""
    # An error that one row shows by luck, a few rows always show.
    for base in dict.fromkeys((lab.base.key(), lab.grown().key())):
        case = lab.base if base == lab.base.key() else lab.grown()
        for name, size in lab.lengths().items():
            # Learned block sizes, the power of two to which a one-tile kernel pads a row, and a vector's size.
            tiles = dict.fromkeys((*lab.blocks, 1 << max(size - 1, 1).bit_length(), _VECTOR))
            found = next(filter(None, (_tail(lab, case, name, tile, changes) for tile in tiles)), None)
            if found is not None:
                return found
    lab.ruled_out.append("partial tile: no size of a dim is right at whole tiles and wrong one past them")
    return None


def _tail(lab: Lab, base: Case, name: str, tile: int, changes: Sequence[Edit] = ()) -> Found | None:
    """Whether whole tiles along a dim are right and the case past them is wrong, for no other reason."""
    past = _just_past(lab, base, name, tile)
    whole = [case for n in (tile, 2 * tile, tile // 2) if n and (case := lab.resized({name: n}, base))][:2]
    if past is None or len(whole) < 2 or count(whole[0].sizes[name]) != tile:
        return None
    # One run in place of five for most dims: four dims and as many blocks used up a rule's runs before the right dim.
    if not changes and lab.attempt(whole[0]).wrong:
        return None
    names = edits.free(lab.spec, past)
    # A wrong 0 wins a maximum only if all else is below it, a minimum only if all is above.
    one_sided = (
        () if changes or not names or lab.attempt(past).right else (edits.negative(names), edits.positive(names))
    )
    tried: Sequence[Edit | None] = changes or (None, *one_sided)
    for edit in tried:
        if not lab.mostly_wrong(past, edit=edit):
            continue
        if not all(lab.always_right(case, edit=edit) for case in whole):
            return None
        if not lab.plainly_wrong(past, edit=edit):
            continue
        # A bound aligned down to a tile also makes whole tiles right, by luck for one row, but not for many.
        if _of_its_values(lab, base, name, tile, edit) or lab.mostly_wrong(
            _all_whole(lab, whole[0], name, tile), edit=edit
        ):
            return None
        sizes = " and ".join(str(count(case.sizes[name])) for case in whole)
        given = f", given {edit.name}" if edit else ""
        evidence = [f"right at {name}={sizes}, wrong at {count(past.sizes[name])}{given}"]
        return _neutral(lab, past, name, evidence) or Found("tail-mask", evidence)
    return None


def _of_its_values(lab: Lab, base: Case, dim: str, tile: int, edit: Edit | None) -> bool:
    """Whether a whole tile of one element and zeros is wrong too: then its content is the reason, not a tile's end.

    The largest of a whole tile of normal numbers is 2 to 3, a single one is any number: an exponent that rounds up from
    1.5 on was right at 32 and 64 and wrong at 33.
    """
    whole = lab.resized({dim: 2 * tile}, base)
    if whole is None:
        return False
    scalable = edits.scalable(lab.spec, whole)
    places = [(name, axis) for name, axis in lab.axes_of(dim, whole).items() if name in scalable]
    return bool(places) and lab.mostly_wrong(whole, edit=edits.both(edit, edits.ended(places, tile + 1)))


def _all_whole(lab: Lab, case: Case, name: str, tile: int) -> Case | None:
    """The case with whole tiles along all other dims too, as far as bounds allow; ``None`` without a change."""
    larger = case
    for other, size in lab.plain_sizes().items():
        if other != name and size % tile:
            larger = lab.resized({other: tile}, larger) or larger
    return larger if larger.key() != case.key() else None


def _neutral(lab: Lab, past: Case, dim: str, evidence: list[str]) -> Found | None:
    """The partial tile is right once the values make its padding weigh nothing."""
    names = edits.free(lab.spec, past)
    for chosen in ([name] for name in names):
        changes: list[tuple[Edit, str]] = [
            (edits.positive(chosen), "where every value is above 0"),
            (edits.negative(chosen), "where every value is below 0"),
            (edits.shifted(chosen, _SHIFT), "where every value is far above 0"),
            (edits.shifted(chosen, -_SHIFT), "where every value is far below 0"),
            (edits.centred(chosen), "where rows have a mean of 0"),
        ]
        for edit, when in changes:
            if lab.always_right(past, edit=edit) and _still_shows(lab, past, edit, dim):
                return Found("wrong-neutral-element", [*evidence, f"right there too {when} ({chosen[0]})"])
    return None


def _still_shows(lab: Lab, case: Case, edit: Edit, dim: str) -> bool:
    """Whether an error could show with these values: the result is finite, not all zero, and uses the last index.

    Every tensor with the dim must have an effect there: if a softmax gives all weight to another index, a loop that
    drops the last one is right too. For a failing gradient both hold of it, not of the forward: the gradient of a slope
    is 0 without values below 0, and a kernel that drops the last tile of its sum is right there.
    """
    found = lab.attempt(case, edit=edit).probe
    before = _right_with(lab, found, found.logical) if found is not None else None
    if found is None or before is None:
        return False
    floating = [right.double() for right in before.values() if right.numel() and right.is_floating_point()]
    if not any(bool(torch.isfinite(t).all()) and bool((t != 0).any()) for t in floating):
        return False
    size = count(case.sizes[dim])
    # For a gradient that depends only on the upstream gradient, as a ReLU's, the last index counts through that.
    last = _right_with(lab, found, found.logical, louder=size)
    if last is not None and _differ(before, last):
        return True
    axes = lab.axes_of(dim, case)
    for name in filter(axes.__contains__, edits.free(lab.spec, case)):
        axis, others = axes[name], []
        for factor in (3.0, 1 / 3):
            changed = found.logical[name].clone()
            changed.select(axis, -1).mul_(factor)
            others.append(_right_with(lab, found, {**found.logical, name: changed}))
        if not any(other is not None and _differ(before, other) for other in others):
            return False
    return True


def _right_with(
    lab: Lab, found: probing.Probe, logical: Mapping[str, Any], *, louder: int | None = None
) -> dict[str, torch.Tensor] | None:
    """The reference's results for these values: the gradient that failed, or the outputs.

    ``louder``: triple the last index of each axis of this size in the upstream gradient; ``None`` without one.
    """
    name = lab.verdict.output
    if lab.check != gradients.NAME or not name.startswith("d") or found.trial is None:
        return probing.right_of(lab.context, logical) if louder is None else None
    trial = found.trial.with_(logical, found.trial.result.case)
    upstream = Upstream.of(trial, gradients.wanted(trial))
    if louder is not None:
        axes = [(output, axis) for output, t in upstream.upstream.items() for axis in range(t.dim())]
        axes = [(output, axis) for output, axis in axes if upstream.upstream[output].shape[axis] == louder]
        if not axes:
            return None
        for output, axis in axes:
            given = upstream.upstream[output].clone()
            given.select(axis, -1).mul_(3)
            upstream.upstream[output] = given
    try:
        lanes = upstream.lanes(1)
    except (NoGraph, ReferenceFailed):
        return None
    return {name: lanes[name[1:]].oracle} if name[1:] in lanes else None


def _differ(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> bool:
    return any(
        t.shape != after[name].shape
        or bool(((t.double() - after[name].double()).abs() > _CHANGED * t.double().abs().max()).any())
        for name, t in before.items()
        if t.numel()
    )


# A table with one wrong entry is wrong only at that distance: at few of the elements past it.
_SHARE_PAST = 0.1


def limit(lab: Lab) -> Found | None:
    """Right up to a size and wrong at every larger one, whole multiples too."""
    names = edits.free(lab.spec, lab.base)
    # A missing carry or rescaling shows only with values that grow on the way.
    changes = (None, edits.rising(names)) if names else (None,)
    for name, size in lab.lengths().items():
        for most, edit in itertools.product(dict.fromkeys((size - 1, *lab.blocks)), changes):
            # A failure below a block's size is not that block's limit.
            if most < _SMALLEST_LIMIT or most >= size:
                continue
            below = [lab.resized({name: n}) for n in (most, most // 2)]
            above = [case for n in (most + 1, 2 * most, 3 * most) if (case := lab.resized({name: n}))]
            if None in below or len(above) < 2 or not all(_fails(lab, case, edit, most) for case in above):
                continue
            if all(lab.always_right(case, edit=edit) for case in below):
                when = " where values grow along the way" if edit is not None else ""
                evidence = [f"right up to {name}={most}, wrong at {most + 1}, {2 * most} and more{when}"]
                where, share = _all_past(lab, lab.attempt(above[1], edit=edit), most)
                if share < _SHARE_PAST:
                    lab.ruled_out.append(
                        f"block limit: past {name}={most} all but {share:.1%} of the elements are right"
                    )
                    return None
                return Found("block-limit", [*evidence, where] if where else evidence)
    lab.ruled_out.append("block limit: no dim is right up to a size and wrong at every larger one")
    return None


def _fails(lab: Lab, case: Case, edit: Edit | None, most: int) -> bool:
    """Whether it is mostly and plainly wrong; past a block's size, being far off at times suffices (no rounding is)."""
    if lab.mostly_wrong(case, edit=edit):
        return lab.plainly_wrong(case, edit=edit)
    if most not in lab.blocks:
        return False
    wrongs = [lab.wrong_of(lab.attempt(case.with_(seed=seed), edit=edit)) for seed in lab.seeds(case, _MANY_SEEDS)]
    return any(wrong.far_off for wrong in wrongs if wrong is not None)


def _all_past(lab: Lab, answer: Answer, most: int) -> tuple[str, float]:
    """The axis along which all wrong elements are past the limit, as text, and the wrong share of what is past it."""
    wrong = lab.wrong_of(answer)
    if wrong is None:
        return "", 1.0
    past = torch.zeros_like(wrong.mask)
    where = ""
    for axis, size in enumerate(wrong.mask.shape):
        if size < 2 * most:
            continue
        past.narrow(axis, most, size - most).fill_(True)
        if not where and not bool(wrong.mask.narrow(axis, 0, most).any()):
            where = f"every wrong element of {wrong.name} is past the first {most} along axis {axis}"
    return where, float(wrong.mask[past].double().mean()) if bool(past.any()) else 1.0
