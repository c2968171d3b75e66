"""Check `repeat`: the same inputs give the same bits, and changed inputs a changed answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pytest_fusion.checks.verdict import Evidence, Verdict, failed, passed

# Later calls agree: something that the first one left, a cache or workspace, decides them.
FIRST = "between the first call on these inputs and later ones, which agree"
# Why a result may depend on the order of programs and lanes.
ORDERED = "atomics on floats, what an atomic gave back, or a race"

# An integer type of each element size, to compare bits.
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def differing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Elements that differ in any bit; two NaN are equal with any payload."""
    if a.is_complex():
        a, b = (torch.view_as_real(t.resolve_conj().resolve_neg()) for t in (a, b))
        return differing(a, b).any(-1)
    word = WORDS[a.element_size()]
    different = a.resolve_neg().contiguous().view(word) != b.resolve_neg().contiguous().view(word)
    if a.is_floating_point() and bool(different.any()):
        x, y = (t.float() if t.element_size() == 1 else t for t in (a, b))  # torch has no isnan for some fp8 formats
        different &= ~(x.isnan() & y.isnan())
    return different


def differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether any bit, the shape or the dtype differs."""
    return first_difference({"": a}, {"": b}) is not None


def first_difference(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> tuple[str, torch.Tensor] | None:
    """The first output that differs between two runs, with the mask of its differing elements."""
    for name, tensor in a.items():
        other = b.get(name)
        if other is None or other.shape != tensor.shape or other.dtype != tensor.dtype:
            return name, torch.ones(tensor.shape if tensor.numel() else (1,), dtype=torch.bool)
        mask = differing(tensor, other)
        if bool(mask.any()):
            return name, mask
    return None


def changed(now: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors with other bits than ``before``, each as the mask of its differing elements."""
    masks = {name: differing(t, before[name]) for name, t in now.items()}
    return {name: mask for name, mask in masks.items() if bool(mask.any())}


def distances(a: torch.Tensor, b: torch.Tensor, mask: torch.Tensor) -> torch.Tensor | None:
    """Units in the last place between the elements in ``mask``, float64; ``None`` where there are none to count."""
    if not a.is_floating_point():
        return None
    finite = [torch.isfinite(t.float() if t.element_size() == 1 else t) for t in (a, b)]
    if not bool((finite[0] & finite[1])[mask].all()):
        return None
    word = torch.int8 if a.element_size() == 1 else WORDS[a.element_size()]
    i, j = (t.contiguous().view(word)[mask].to(torch.int64) for t in (a, b))
    magnitude = (1 << (8 * a.element_size() - 1)) - 1
    p, q = i & magnitude, j & magnitude
    return torch.where((i < 0) == (j < 0), (p - q).abs().double(), p.double() + q.double())


@dataclass(frozen=True, slots=True)
class Variation:
    """How one output varied in several runs: differing elements, and their units in the last place, if countable."""

    output: str
    count: int
    total: int
    first: list[int]
    median_ulp: float | None = None
    most_ulp: float | None = None

    def __str__(self) -> str:
        text = f"{self.count} of {self.total} element(s) of {self.output}"
        if self.most_ulp is None:
            return text
        most = "" if self.median_ulp == self.most_ulp else f", at most {self.most_ulp:.0f}"
        return f"{text} (by {self.median_ulp:.0f} ulp{most})"


@dataclass(frozen=True, slots=True)
class Variance(Evidence):
    """Outputs that differ between calls; ``order`` is the other order of programs that shows it."""

    worst: Variation
    varied: list[Variation]
    runs: int | None = None
    order: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The worst output's fields beside the others."""
        found = Evidence.as_json(self)
        return {**found.pop("worst"), **found}


def variations(base: Mapping[str, torch.Tensor], runs: Iterable[Mapping[str, torch.Tensor]]) -> list[Variation]:
    """Every output of ``base`` that has other bits in one of ``runs``."""
    masks: dict[str, torch.Tensor] = {}
    ulps: dict[str, list[torch.Tensor | None]] = {}
    for run in runs:
        for name, tensor in base.items():
            found = first_difference({name: tensor}, run)
            if found is None:
                continue
            mask, other = found[1], run.get(name)
            here, before = mask.cpu(), masks.get(name)
            masks[name] = here if before is None or before.shape != here.shape else here | before
            alike = other is not None and tensor.shape == other.shape and tensor.dtype == other.dtype
            ulps.setdefault(name, []).append(distances(tensor, other, mask) if alike and other is not None else None)
    return [_variation(name, mask, ulps[name]) for name, mask in masks.items()]


def seen(name: str, mask: torch.Tensor) -> Variation:
    """The variation of one difference of unknown size."""
    return _variation(name, mask.cpu(), [None])


def _variation(name: str, mask: torch.Tensor, ulps: Sequence[torch.Tensor | None]) -> Variation:
    count, first = int(mask.sum()), [int(i) for i in mask.nonzero()[0]]
    known = [found for found in ulps if found is not None]
    if len(known) < len(ulps):
        return Variation(name, count, mask.numel(), first)
    every = torch.cat(known)
    return Variation(name, count, mask.numel(), first, float(every.median()), float(every.max()))


def check_repeat(varied: Sequence[Variation], runs: int) -> Verdict:
    """The verdict on outputs that ``varied`` between ``runs`` runs on equal inputs in equal surroundings."""
    if not varied:
        return passed("repeat", runs=runs)
    return varies(varied, f"between {runs} runs on the same inputs", runs=runs)


def varies_wrongly(wrong: Verdict, when: str) -> Verdict:
    """The failure of an output, or gradient, that may vary and is ``wrong`` in value ``when``."""
    reason = f"{when}, {wrong.reason}; deterministic= lets it vary, within what is right"
    return replace(wrong, check="repeat", reason=reason, identity=f"repeat:{wrong.output}:wrong", inner=wrong.check)


def varies(varied: Sequence[Variation], when: str, *, runs: int | None = None, order: str | None = None) -> Verdict:
    """The failure of outputs that differ ``when``."""
    worst, *rest = varied
    others = f"; so do {', '.join(map(str, rest))}" if rest else ""
    names = ", ".join('"' + v.output.removesuffix(" (in place)") + '": False' for v in varied)
    advice = (
        "something kept between calls, a counter or a workspace, is not set back"
        if when == FIRST
        else f"declare deterministic={{{names}}}, or deterministic=False for all outputs, if that is meant"
    )
    return failed(
        "repeat",
        f"{worst} differ {when}, the first at {worst.first}{others}; {advice}",
        identity=f"repeat:{worst.output}",
        output=worst.output,
        cause="cached-answer" if when == FIRST else None,
        evidence=Variance(worst, list(varied), runs, order),
    )
