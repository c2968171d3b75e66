"""Runs a reference once, with its lanes in lock-step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pytest_fusion.oracle.lane_mode import LaneMode
from pytest_fusion.oracle.lane_result import Kind, LaneRun, OutputLanes
from pytest_fusion.oracle.lane_store import Lanes
from pytest_fusion.oracle.outside import noting, priced
from pytest_fusion.oracle.rounding import Noise
from pytest_fusion.run.precision import full_precision


class Contracting(TorchFunctionMode):
    """Makes ``torch.einsum`` over a dim of one element a batched product, as at any other size.

    ATen drops the dim and multiplies elements. A kernel that stores its probabilities in 16 bits before
    ``torch.einsum("bnm,bme->bne", p, v)`` then failed where ``m`` is 1, and so did its backward.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = _contracted(args) if func is torch.functional.einsum and not kwargs else None
        return func(*args, **(kwargs or {})) if found is None else found


def _contracted(args: Sequence[Any]) -> Tensor | None:
    """The product; ``None`` where there is none, several terms, or no plain equation."""
    equation, *rest = args
    operands = rest[0] if len(rest) == 1 and isinstance(rest[0], list | tuple) else rest
    if not isinstance(equation, str) or len(operands) != 2 or not all(isinstance(t, Tensor) for t in operands):
        return None
    given, arrow, out = equation.replace(" ", "").partition("->")
    left, _, right = given.partition(",")
    if not arrow:
        out = "".join(sorted(letter for letter in set(left) | set(right) if given.count(letter) == 1))
    a, b = operands
    if not _plain(left, right, out) or (len(left), len(right)) != (a.dim(), b.dim()) or not set(out) <= set(given):
        return None
    size, other = dict(zip(left, a.shape, strict=True)), dict(zip(right, b.shape, strict=True))
    both = [letter for letter in left if letter in other]
    rows, columns = [n for n in left if n not in both], [n for n in right if n not in both]
    batch, summed = [n for n in both if n in out], [n for n in both if n not in out]
    # Equal sizes, all summed letters in both operands, and one element in these.
    if not summed or not {*rows, *columns} <= set(out) or any(size[n] != other[n] for n in both):
        return None
    size |= other
    if any(size[n] != 1 for n in summed):
        return None
    many, high, broad = (math.prod(size[n] for n in names) for names in (batch, rows, columns))
    order = [*batch, *rows, *columns]
    one = a.permute([left.index(n) for n in (*batch, *rows, *summed)]).reshape(many, high, 1)
    two = b.permute([right.index(n) for n in (*batch, *summed, *columns)]).reshape(many, 1, broad)
    return torch.bmm(one, two).reshape([size[n] for n in order]).permute([order.index(n) for n in out])


def _plain(*names: str) -> bool:
    """Letters, none twice in a tensor: no ellipsis and no diagonal."""
    return all((not name or name.isalpha()) and len(set(name)) == len(name) for name in names)


def run_lanes(
    call: Callable[[], Sequence[Tensor]],
    *,
    lanes: int = 6,
    kind: Kind = "E",
    seed: int,
    limit_s: float = math.inf,
    numbers: frozenset[float] = frozenset(),
) -> LaneRun:
    """Run ``call`` once; its results natively, in float64, and in ``lanes`` randomly rounded versions.

    ``call`` runs the reference and returns a flat sequence of result tensors, which may include inputs that it wrote;
    backward passes inside it are followed. For ``kind`` see `LaneMode`. Only ``call`` changes the global random state.
    ``numbers`` are those of an earlier run. Raises what ``call`` raises, and ``TooSlow`` in it after ``limit_s``
    seconds.
    """
    noise = Noise(lanes, kind, seed, numbers)
    mode = LaneMode(noise, limit_s)
    with full_precision(), noting(mode.taken, mode), Contracting(), mode:
        results = list(call())
    outputs = [_output(mode, result.detach(), lanes) for result in results]
    outside = tuple(f"what became of numbers outside of torch, by {name}" for name in sorted(set(mode.taken)))
    return LaneRun(outputs, (*mode.fallbacks, *outside), mode.drawn, frozenset(noise.numbers))


def _output(mode: LaneMode, native: Tensor, count: int) -> OutputLanes:
    with torch.no_grad():
        lanes: Lanes = mode.lanes_of(native)
        if mode.taken:
            lanes = priced(mode.noise, lanes, native, mode.store.tracks(native))
    # Integers are returned as their codes, floating results before their last rounding.
    value = lanes.raw
    noisy = value[1:] if value.shape[0] > 1 else value.expand(count, *value.shape[1:])
    return OutputLanes(native, value[0], noisy, moved=value.shape[0] == 1)
