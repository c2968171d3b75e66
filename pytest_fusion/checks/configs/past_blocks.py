"""Sizes past the blocks of every config of an autotuned kernel: those met so far, and the next case.

A loop over blocks runs once if one block holds the row, so only cases larger than the config's own block show what its
second trip gets wrong. The dim that a block divides is unknown. So each dim in turn exceeds one block by one, and two
by whole vectors; the others stay small. Last, all dims together exceed a block in elements, for kernels that treat a
tensor as one row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from pytest_fusion.case import counter_random, regimes, sizes
from pytest_fusion.case.case_model import Case
from pytest_fusion.case.make import ImpossibleCase, shape_of
from pytest_fusion.case.plan import Plan, build
from pytest_fusion.checks.gradients import gradients
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import TensorSpec, unwrap

# A config: the name of its kernel, and its number there.
Key = tuple[str, int]
# Why a config met no axis longer than a block: `dims=` allows none, the case is too large, was rejected, or not made.
Reason = Literal["dims", "limits", "rejected", "cases"]

# Other sizes beside a long one: several rows show a wrong pitch, but the limits may allow only one.
_BESIDE = (3, 1)
# In place of a dim: the elements of the largest tensor.
_ELEMENTS = ""
# What a case of more than two blocks adds: with `K % 16 == 0` a fast path may take whole blocks of a larger size, and
# 16 is a rest of any block above it.
_REST = 16
# Enough that some seed requires all gradients with a random upstream one: two in seven do.
_TURNS = 64


@dataclass(frozen=True, slots=True)
class Past:
    """Something longer than a block: a dim, an axis of an input, elements; ``twice``: longer than two, with a rest."""

    what: str
    block: int
    twice: bool = False


@dataclass(frozen=True, slots=True)
class Aim:
    """A case, and the configs that it takes past something new."""

    case: Case
    configs: tuple[Key, ...]


@dataclass(slots=True)
class Reach:
    """How far past its own blocks each config came in a test."""

    blocks: dict[Key, frozenset[int]] = field(default_factory=dict)
    _met: dict[Key, set[Past]] = field(default_factory=dict)
    _tried: dict[Key, set[Past]] = field(default_factory=dict)
    _made: set[Past] = field(default_factory=set)
    _too_large: set[Past] = field(default_factory=set)

    def add(self, key: Key, blocks: Mapping[str, int]) -> None:
        """Enter a config and its possible block sizes, by name."""
        self.blocks[key] = frozenset(blocks.values())
        self._met[key], self._tried[key] = set(), set()

    def drop(self, key: Key) -> None:
        """Leave out a config that the kernel refuses."""
        self.blocks[key] = frozenset()

    def note(self, key: Key, spec: FusionSpec, case: Case) -> None:
        """Note a config that was right on this case, or that pruning drops there."""
        if not any(regimes.is_special(tensor.regime) for tensor in case.tensors.values()):
            self._met[key] |= set(_passed(spec, case, self.blocks[key]))

    def following(self, plan: Plan, base: int, most: int) -> Aim | None:
        """The next case, for up to ``most`` configs, or ``None``. Longest blocks first: one case serves all."""
        dims = plan.spec.sized
        rank = {name: position for position, name in enumerate((_ELEMENTS, *dims))}
        while True:
            wanted = {key: set(_wanted(dims, own)) - self._met[key] for key, own in self.blocks.items()}
            left = {past for key, found in wanted.items() for past in found - self._tried[key]}
            if not left:
                return None
            past = max(left, key=lambda one: (one.what != _ELEMENTS, one.twice, one.block, rank[one.what]))
            case = self._built(plan, past, base)
            gains = {
                key: set() if case is None else found & set(_passed(plan.spec, case, self.blocks[key]))
                for key, found in wanted.items()
            }
            gaining = sorted((key for key in gains if gains[key]), key=lambda key: past not in gains[key])
            for key in wanted:
                if key not in gaining[most:]:
                    self._tried[key].add(past)
            if case is not None and gaining:
                return Aim(case, tuple(gaining[:most]))

    def lacking(self, key: Key, spec: FusionSpec) -> dict[int, Reason]:
        """The blocks that no axis of a case exceeded, each with the reason."""
        passed = {past.block for past in self._met[key] if past.what != _ELEMENTS}
        return {block: self._why(key, block, spec) for block in sorted(self.blocks[key] - passed)}

    def _why(self, key: Key, block: int, spec: FusionSpec) -> Reason:
        wanted = {Past(name, block) for name in spec.sized}
        if wanted - self._tried[key]:
            return "cases"
        if wanted & self._too_large:
            return "limits"
        return "rejected" if wanted & self._made else "dims"

    def _built(self, plan: Plan, past: Past, base: int) -> Case | None:
        spec, seed = plan.spec, _seed(plan.spec, base, past)
        for beside in _BESIDE:
            try:
                case = _grown(plan, past, beside, seed)
            except ImpossibleCase:
                continue
            if any(found.what == past.what for found in _passed(spec, case, frozenset({past.block}))):
                self._made.add(past)
                return case
        most = None if past.what == _ELEMENTS else spec.bound(past.what).max
        if most is None or most > past.block:
            self._too_large.add(past)
        return None


def _wanted(dims: tuple[str, ...], blocks: frozenset[int]) -> Iterator[Past]:
    for block in blocks:
        yield Past(_ELEMENTS, block)
        for name in dims:
            yield Past(name, block)
            yield Past(name, block, twice=True)


def _passed(spec: FusionSpec, case: Case, blocks: frozenset[int]) -> Iterator[Past]:
    """The axes of a case that are longer than blocks; none if it has no elements."""
    shapes = {
        name: shape_of(inner, case.sizes)
        for name, declared in spec.inputs.items()
        if name not in case.absent and isinstance(inner := unwrap(declared), TensorSpec)
    }
    lengths = {name: sizes.count(case.sizes[name]) for name in spec.sized}
    lengths |= {f"{name}[{axis}]": size for name, shape in shapes.items() for axis, size in enumerate(shape)}
    if 0 in lengths.values():
        return
    for what, size in lengths.items():
        yield from (Past(what, block, size > 2 * block and size % block > 0) for block in blocks if size > block)
    elements = max(map(math.prod, shapes.values()), default=0)
    yield from (Past(_ELEMENTS, block) for block in blocks if elements > block)


def _grown(plan: Plan, past: Past, beside: int, seed: int) -> Case:
    """A plain case, so that only the size can fail. Raises ``ImpossibleCase``."""
    spec, block = plan.spec, past.block
    rest = _REST if block > _REST else block // 2 + 1
    longer = block + 1 if not (past.twice or past.what == _ELEMENTS) else 2 * block + rest
    choice = {f"dim {name}": beside for name in spec.sized}
    if past.what != _ELEMENTS:
        choice[f"dim {past.what}"] = longer
        case = build(plan, choice, seed)
        size = sizes.count(case.sizes[past.what])
        if size > block:
            return case
        # Rounded down to a multiple: take the next one.
        choice[f"dim {past.what}"] = size + sizes.step_of(spec.bound(past.what), case.sizes)
        return build(plan, choice, seed)
    left = longer
    for name in reversed(spec.sized):
        most = spec.bound(name).max
        choice[f"dim {name}"] = size = left if most is None else min(left, most)
        left = -(-left // max(size, 1))
    return build(plan, choice, seed)


def _seed(spec: FusionSpec, base: int, past: Past) -> int:
    """A seed that requires every gradient of a random upstream one, where the spec has gradients."""
    words = ("past a block", past.what, past.block, past.twice)
    seeds = [counter_random.mix(base, *words, turn) >> 33 for turn in range(_TURNS)]
    return next((seed for seed in seeds if not spec.grad or gradients.all_gradients(seed)), seeds[0])
