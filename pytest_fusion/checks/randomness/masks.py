"""Which elements a kernel with dropout keeps, seen in its own answers.

The reference does not know a kernel's random numbers, but knows each element's kept and dropped value: it is called
with masks of ones, zeros and random bits. In outputs that follow the random bits element by element, each value shows
what the kernel did. Calls use positive values, where kept and dropped differ; where they do not, the case's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pytest_fusion.case import counter_random
from pytest_fusion.case.case_model import Case
from pytest_fusion.case.layouts import geometry
from pytest_fusion.case.plan import regimes_of
from pytest_fusion.checks.context import Context, call, collect, other_values, reader
from pytest_fusion.errors import SpecError
from pytest_fusion.oracle.reference import ReferenceFailed, run_reference, takes
from pytest_fusion.run.fused import Outcome, run_fused
from pytest_fusion.run.memory import FILLS
from pytest_fusion.run.placing import Placed, laid_apart, place
from pytest_fusion.run.seeded import MaskedReference, Seeded, plain
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import TensorSpec, unwrap
from pytest_fusion.spec.random_numbers import Rng

# Fits every integer type that a kernel may take.
_SEED_BITS = 31
# Bits lost by a seed cut to its lowest 8 or 16, or converted to float32.
_UPPER_BITS = (8, 28, 16, 24, 12, 20)
# Further values for elements that are 0 both kept and dropped.
_OTHERS = 8
# The difference allowed between two computations of a value, in units of the output's precision.
_ROUNDINGS = 4
# An element is dropped if this near to the dropped value, relative to the kept one. A kernel that forgets the scale
# 1/(1-p) keeps it all the same, which is left to `values`.
_NEAR = 1 / 16


class LookFailed(Exception):
    """The kernel raised in a call for its mask, with this ``outcome``."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(str(outcome.error))
        self.outcome = outcome


@dataclass(frozen=True, slots=True)
class Mask:
    """``keep``: the kernel keeps the element; ``known``: that is visible. Both bool, of one shape.

    Where unknown, rounding hides the difference, and ``keep`` is the nearer of the two.
    """

    keep: torch.Tensor
    known: torch.Tensor

    @property
    def count(self) -> int:
        return int(self.known.sum())

    def differs(self, other: Mask) -> torch.Tensor:
        """Elements known in both that only one keeps."""
        return (self.keep != other.keep) & self.known & other.known


@dataclass(frozen=True, slots=True)
class Side:
    """Float64 values of an output with all kept and with all dropped, and where they are distinguishable."""

    full: torch.Tensor
    dropped: torch.Tensor
    apart: torch.Tensor
    rounding: torch.Tensor

    def read(self, got: torch.Tensor, shape: torch.Size) -> Mask | None:
        """The mask of ``shape`` that a result shows; ``None`` for another shape than the reference's."""
        if got.shape != self.full.shape:
            return None
        value, between = got.detach().to(torch.float64), (self.full - self.dropped).abs()
        near = torch.maximum(_NEAR * between, torch.minimum(self.rounding / 2, between / 2))
        away = (value - self.dropped).abs()
        # Where indistinguishable: the exactly equal one, including NaN, else the nearer.
        nearer = torch.where(_same(value, self.dropped), False, (value - self.full).abs() <= away)
        guess = (_same(value, self.full) | nearer) & ~_same(self.full, self.dropped)
        known = _reduced(self.apart, shape)
        return Mask(torch.where(known, _reduced((away > near) & self.apart, shape), _reduced(guess, shape)), known)


def _same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a == b) | (a.isnan() & b.isnan())


def _reduced(t: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """``t`` reduced by any to ``shape``, which broadcasts to its own."""
    while t.dim() > len(shape):
        t = t.any(0)
    for axis, size in enumerate(shape):
        if size == 1 and t.shape[axis] != 1:
            t = t.any(axis, keepdim=True)
    return t


def sides_of(
    reference: Callable[[torch.Tensor], Mapping[str, torch.Tensor]],
    shape: torch.Size,
    device: torch.device,
    *,
    broadcast: bool,
) -> tuple[dict[str, Side], bool]:
    """The tensors that follow a mask element by element, with everything kept and dropped; whether it affects any.

    ``reference`` returns the tensors for a mask. ``broadcast``: an element of the mask may stand for several.
    """
    ones = torch.ones(shape, dtype=torch.bool, device=device)
    whole, without = reference(ones), reference(~ones)
    seen = [(mask, reference(mask)) for mask in _some_masks(shape, device)]
    found: dict[str, Side] = {}
    matters = False
    for name, full in whole.items():
        dropped = without.get(name)
        if dropped is None or full.shape != dropped.shape:
            continue
        matters |= bool((~_same(full, dropped)).any())
        if not full.dtype.is_floating_point:
            continue
        allowed = _ROUNDINGS * torch.finfo(full.dtype).eps
        t, f = full.detach().to(torch.float64), dropped.detach().to(torch.float64)
        size = torch.maximum(t.abs(), f.abs())
        apart = (t - f).abs() > allowed * torch.where(size.isinf(), 1.0, size)
        if all(_follows(mask, got.get(name), t, f, allowed * size, broadcast=broadcast) for mask, got in seen):
            found[name] = Side(t, f, apart, allowed * size)
    return found, matters


def _follows(
    mask: torch.Tensor,
    got: torch.Tensor | None,
    full: torch.Tensor,
    dropped: torch.Tensor,
    allowed: torch.Tensor,
    *,
    broadcast: bool,
) -> bool:
    if got is None or got.shape != full.shape:
        return False
    if mask.shape != got.shape:
        fits = mask.dim() <= got.dim() and all(
            m in (1, g) for m, g in zip(mask.shape[::-1], got.shape[::-1], strict=False)
        )
        if not broadcast or not fits:
            return False
    expected, found = torch.where(mask, full, dropped), got.detach().to(torch.float64)
    return bool((_same(found, expected) | ((found - expected).abs() <= allowed)).all())


def _some_masks(shape: torch.Size, device: torch.device) -> list[torch.Tensor]:
    """A mask of random bits and its complement, each with both values if it has two elements."""
    bits = counter_random.uniform(tuple(shape), counter_random.mix("some mask"), device) < 0.5
    flat = bits.view(-1)
    if flat.numel() > 1:
        flat[0], flat[1] = True, False
    return [bits, ~bits]


def probability(rng: Rng, logical: Mapping[str, Any]) -> float | None:
    """The probability to drop an element in this case; ``None`` where it is unknown."""
    value = rng.p
    if callable(value):
        try:
            value = value(**takes(value, dict(logical)))
        except Exception as error:
            raise SpecError(f"rng(p=...) raised {type(error).__name__}: {error}; it gets inputs by name") from error
    elif isinstance(value, str):
        value = logical[value]
    if isinstance(value, torch.Tensor):
        value = float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) and 0 <= value <= 1 else None


def positive(context: Context, case: Case, logical: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs with numbers from 1/2 to 3/2 in every floating tensor whose values are not narrowed."""
    given = dict(logical)
    rng = context.spec.random
    assert rng is not None
    for name, declared in context.spec.inputs.items():
        inner, value = unwrap(declared), logical[name]
        if not isinstance(inner, TensorSpec) or not isinstance(value, torch.Tensor) or name in (rng.seed, rng.p):
            continue
        if not value.dtype.is_floating_point or not regimes_of(inner, covered=False):
            continue
        expanded = geometry(tuple(value.shape), case.tensors[name].layout).expanded
        made = tuple(min(size, 1) if axis in expanded else size for axis, size in enumerate(value.shape))
        fresh = counter_random.uniform(made, counter_random.mix("positive", name), value.device) + 0.5
        given[name] = fresh.to(torch.float32).to(value.dtype).expand(value.shape).contiguous()
    return given


def fresh_seed(case: Case, number: int = 0) -> int:
    """A seed of 31 bits that no other case has."""
    return (counter_random.mix(case.seed, "rng") >> (64 - _SEED_BITS)) // 2 + number


def upper_bits(turn: int, *, every: bool) -> Sequence[int]:
    """The bits of a seed to test in this look, one or ``every``; other seeds differ in one of them."""
    return _UPPER_BITS if every else (_UPPER_BITS[turn % len(_UPPER_BITS)],)


def can_reseed(spec: FusionSpec, logical: Mapping[str, Any]) -> bool:
    """Whether this case has a seed; an optional one may be absent."""
    name = spec.random.seed if spec.random is not None else None
    value = logical[name] if name is not None else 0
    return not value.dtype.is_floating_point if isinstance(value, torch.Tensor) else isinstance(value, int)


def reseeded(context: Context, logical: Mapping[str, Any], seed: int, calls: int = 1) -> tuple[Context, dict[str, Any]]:
    """The context and inputs for another seed; the last of ``calls`` from torch's generator counts."""
    rng = context.spec.random
    assert rng is not None
    if rng.seed is None:
        fused = Seeded(plain(context.spec.fused), seed, calls)
        return replace(context, spec=context.spec.with_(fused=fused)), dict(logical)
    before = logical[rng.seed]
    if isinstance(before, torch.Tensor):
        seed %= torch.iinfo(before.dtype).max
        return context, {**logical, rng.seed: torch.full_like(before, seed)}
    return context, {**logical, rng.seed: seed}


def seeded(context: Context, case: Case) -> Context:
    """The context for one case: torch's generator is seeded by the case, for a kernel that draws from it."""
    rng = context.spec.random
    if rng is None or rng.seed is not None:
        return context
    return reseeded(context, {}, fresh_seed(case))[0]


@dataclass(frozen=True, slots=True)
class Draws:
    """How to read the masks of a case, and the mask of its own call."""

    masks: Masks
    mask: Mask

    def context(self, context: Context) -> Context:
        """The context with a reference that applies this mask."""
        return replace(context, spec=context.spec.with_(reference=self.masks.masked_reference(self.mask)))


def drawn(
    context: Context, case: Case, logical: Mapping[str, Any], first: Outcome, placed: Placed
) -> tuple[Context, Draws | None]:
    """The context whose reference applies the case's mask, after its first call, and the draws.

    Raises ``LookFailed`` (the kernel raises), ``ReferenceFailed`` (it rejects the case), ``SpecError`` (no visible
    mask).
    """
    rng = context.spec.random
    if rng is None or rng.mask is None:
        return context, None
    masks = Masks(context, case, logical)
    if first.error is None:
        draws = Draws(masks, _completed(context, case, logical, masks.own(first, placed)))
    else:
        draws = Draws(masks, masks.any_accepted(first))
    return draws.context(context), draws


def drawn_alike(context: Context, case: Case, logical: Mapping[str, Any], draws: Draws | None) -> Context:
    """The context for other values at the same seed, and more of their mask. Raises ``ReferenceFailed``."""
    # An element that another input masks is 0 in the case, kept or dropped, and may not be here.
    if draws is None or bool(draws.mask.known.all()):
        return context
    more = _seen_too(context, case, logical, draws.mask)
    return context if more is None else more.context(context)


def _seen_too(context: Context, case: Case, logical: Mapping[str, Any], mask: Mask) -> Draws | None:
    """``mask`` with the elements that a call on other values shows; ``None`` where it shows none."""
    case = laid_apart(case, logical)
    masks = Masks(context, case, logical)
    outcome, placed = call(context, case, logical, FILLS[0])
    if outcome.error is not None:
        return None
    try:
        fresh = masks.own(outcome, placed)
    except LookFailed:
        return None
    if fresh.keep.shape != mask.keep.shape:
        return None
    return Draws(masks, Mask(torch.where(mask.known, mask.keep, fresh.keep), mask.known | fresh.known))


def _completed(context: Context, case: Case, logical: Mapping[str, Any], mask: Mask) -> Mask:
    """``mask`` completed by other values: first the case's without zeros."""
    for turn in range(_OTHERS):
        values = logical if turn == 0 else other_values(context, case, logical, "mask", turn)[1]
        if values is None or bool(mask.known.all()):
            break
        other = _without_zeros(values)
        # The case did not ask for these values; the reference may reject them, or they show nothing.
        with contextlib.suppress(ReferenceFailed, SpecError):
            more = _seen_too(context, case, other, mask)
            mask = mask if more is None else more.mask
        if not any(
            isinstance(t, torch.Tensor) and t.is_floating_point() and bool((t == 0).any()) for t in other.values()
        ):
            break  # other values do not help: another input hides the rest
    return mask


def _without_zeros(logical: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs with each 0 of a floating one replaced by another of its numbers, as ``values=`` allows."""
    found = dict(logical)
    for name, value in logical.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 1:
            zero, others = value == 0, value[value != 0]
            if others.numel():
                turns = torch.arange(int(zero.sum()), device=value.device) % others.numel()
                found[name] = value.masked_scatter(zero, others[turns])
    return found


class Masks:
    """The masks of one case: at its own seed, at others, in other layouts."""

    def __init__(self, context: Context, case: Case, logical: Mapping[str, Any]) -> None:
        rng = context.spec.random
        assert rng is not None
        assert rng.mask is not None
        self.rng, self.name, self.case = rng, rng.mask, case
        self.p = probability(rng, logical)
        self.logical = dict(logical)
        self.probe = positive(context, case, logical)
        self.shape = torch.Size()
        self.sides: dict[str, Side] = {}
        self._context = context

    def own(self, first: Outcome, placed: Placed) -> Mask:
        """The mask of the case itself, given its own call. Raises ``LookFailed``, ``ReferenceFailed``."""
        if self.rng.recover is not None:
            return self._recovered(self._context, self.logical)
        outcome, where = call(self._context, self.case, self.probe, FILLS[0])
        if outcome.error is not None:
            raise LookFailed(outcome)
        got = self._outputs(outcome, where)
        self._choose(got)
        mask = self._read(self.sides, got)
        if not bool(mask.known.all()):
            mask = self._filled(mask, self._outputs(first, placed))
        return mask

    def any_accepted(self, first: Outcome) -> Mask:
        """A mask that the reference takes, where the kernel raised and shows none."""
        refused: ReferenceFailed | None = None
        for shape in self._shapes({}):
            ones = torch.ones(shape, dtype=torch.bool, device=self._context.device)
            try:
                self._references(self.logical, ones)
            except ReferenceFailed as error:
                refused = error
                continue
            return Mask(ones, ~ones)
        # Both raise the same: the case is outside of both domains.
        if refused is not None and type(refused.__cause__) is type(first.error):
            raise refused
        raise LookFailed(first)

    def at(
        self, seed: int | None = None, *, context: Context | None = None, case: Case | None = None, calls: int = 1
    ) -> Mask | None:
        """The mask for another seed, layout or spec; ``None`` where that call raises."""
        context, probe, case = context or self._context, self.probe, case or self.case
        if self.rng.recover is not None:
            probe = self.logical
        if seed is not None:
            context, probe = reseeded(context, probe, seed, calls)
        if self.rng.recover is not None:
            return self._recovered(context, probe, case)
        outcome, where = call(context, case, probe, FILLS[0])
        return None if outcome.error is not None else self._read(self.sides, self._outputs(outcome, where))

    def masked_reference(self, mask: Mask) -> MaskedReference:
        """The reference with this mask."""
        return MaskedReference(plain(self._context.spec.reference), self.name, mask.keep, self.logical)

    def _outputs(self, outcome: Outcome, placed: Placed) -> dict[str, torch.Tensor]:
        return collect(outcome.result, placed.arguments, self._context.spec.mutates).tensors

    def _references(self, logical: Mapping[str, Any], mask: torch.Tensor) -> dict[str, torch.Tensor]:
        context = self._context
        spec = context.spec.with_(reference=MaskedReference(plain(context.spec.reference), self.name, mask, logical))
        with context.clock.phase("reference"):
            run = run_reference(spec, logical, context.extra, reader(spec), lanes=0, seed=0)
        return collect(run.result, run.arguments, spec.mutates).tensors

    def _sides(self, logical: Mapping[str, Any], shape: torch.Size) -> tuple[dict[str, Side], bool]:
        """The outputs that show the mask, and whether it affects any."""
        broadcast, device = self.rng.dims is not None, self._context.device
        return sides_of(lambda mask: self._references(logical, mask), shape, device, broadcast=broadcast)

    def _choose(self, got: Mapping[str, torch.Tensor]) -> None:
        """Choose the mask's shape and outputs that show it. Raises ``ReferenceFailed`` if the reference takes none."""
        refused: ReferenceFailed | None = None
        hidden = False
        for shape in self._shapes(got):
            try:
                sides, matters = self._sides(self.probe, shape)
            except ReferenceFailed as error:
                refused = refused or error
                continue
            if sides or not matters:
                self.shape, self.sides = shape, sides
                return
            hidden = True
        if hidden or refused is None:
            raise SpecError(
                f"{self._context.spec.name}: no output of the reference follows {self.name!r} element by element, so "
                "none shows what the kernel dropped; return the dropped values too, or give rng(recover=...), a "
                "function of inputs that returns the kernel's mask (dims= where one element of it decides about more)"
            )
        raise refused

    def _shapes(self, got: Mapping[str, torch.Tensor]) -> list[torch.Size]:
        if self.rng.dims is not None:
            return [torch.Size(self.rng.dims.evaluate(self.case.sizes))]
        # Inputs last: their shape is the mask's if the kernel's outputs have a wrong one.
        outputs = [t.shape for t in got.values() if t.dtype.is_floating_point]
        inputs = [t.shape for t in self.logical.values() if isinstance(t, torch.Tensor) and t.dtype.is_floating_point]
        ordered = [
            *sorted(outputs, key=torch.Size.numel, reverse=True),
            *sorted(inputs, key=torch.Size.numel, reverse=True),
        ]
        return list(dict.fromkeys(ordered))

    def _read(self, sides: Mapping[str, Side], got: Mapping[str, torch.Tensor]) -> Mask:
        keep = torch.zeros(self.shape, dtype=torch.bool, device=self._context.device)
        known = keep.clone()
        for name, side in sides.items():
            seen = side.read(got[name], self.shape) if name in got else None
            if seen is not None:
                keep = torch.where(known, keep, seen.keep)
                known = known | seen.known
        return Mask(keep, known)

    def _filled(self, mask: Mask, got: Mapping[str, torch.Tensor]) -> Mask:
        """``mask`` with elements that the case's own values show and the positive ones do not."""
        try:
            sides, _ = self._sides(self.logical, self.shape)
        except ReferenceFailed:
            return mask
        own = self._read(sides, got)
        return Mask(torch.where(mask.known, mask.keep, own.keep), mask.known | own.known)

    def _recovered(self, context: Context, logical: Mapping[str, Any], case: Case | None = None) -> Mask:
        recover = self.rng.recover
        assert recover is not None
        placed = place(logical, case or self.case, context.device, FILLS[0])
        outcome = run_fused(lambda **given: recover(**takes(recover, given)), placed, {}, programs=context.programs)
        mask = outcome.result
        if outcome.error is not None or not isinstance(mask, torch.Tensor):
            what = f"raised {outcome.error!r}" if outcome.error is not None else f"returned {type(mask).__name__}"
            raise SpecError(
                f"{context.spec.name}: rng(recover=...) {what}; it must return the kernel's mask as a tensor"
            )
        keep = mask.detach() != 0
        self.shape = keep.shape
        return Mask(keep, torch.ones_like(keep))
