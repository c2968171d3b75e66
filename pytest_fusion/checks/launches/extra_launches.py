"""The part of check `launches` that finds which kernels of a call are too many, and what helps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from pytest_fusion.run.measure.launches import Counts, Work

_MOST_NAMES = 8
_TORCH = ("aten::", "at::", "torch.")
_FILLS = frozenset(
    f"aten::{name}" for name in "zeros zeros_like new_zeros zero_ full full_like new_full ones fill_".split()
)
# Unless they are there for the layout.
_CASTS = ("aten::_to_copy", "aten::copy_")


@dataclass(frozen=True, slots=True)
class Surplus:
    """The names that are too many, the evidence, and advice."""

    names: Counter[str]
    because: str
    advice: str


def surplus(counts: Counts, work: list[Work], *, plain: Counts | None, fewest: Counter[str] | None) -> Surplus:
    """What is too many in ``counts``, by comparison with calls within bounds, where there are any.

    ``plain`` is the same case with contiguous inputs, ``fewest`` another case. ``work``: the known operators behind
    counts.
    """
    names, allow = Counter(dict(counts.names)), f"allow it: max_launches={counts.kernels}"
    if plain is not None:
        extra = names - Counter(dict(plain.names))
        because = f"with contiguous inputs it launches {plain.kernels}: {words(extra)} is there for the layout alone"
        return Surplus(extra, because, f"pass strides to the kernel, refuse other layouts (rejects=), or {allow}")
    if fewest is not None and names - fewest:
        extra = names - fewest
        because = f"another case takes {fewest.total()}, without {words(extra)}"
        return Surplus(extra, because, f"{_helps(work, extra)}, or {allow}")
    torchs = Counter({name: count for name, count in names.items() if name.startswith(_TORCH)})
    if torchs and torchs != names:
        because = f"{torchs.total()} of them {'is' if torchs.total() == 1 else 'are'} torch's own: {words(torchs)}"
        return Surplus(torchs, because, f"{_helps(work, torchs)}, or {allow}")
    return Surplus(names, "no case took fewer", f"{_helps(work, names)}, or {allow}")


def _helps(work: list[Work], extra: Counter[str]) -> str:
    """Advice by torch's operators among the surplus; a GPU's kernel names do not show their operators."""
    torchs = [one for one in work if one.kind == "kernel" and one.name.startswith(_TORCH)]
    if set(extra) <= {one.name for one in work}:
        torchs = [one for one in torchs if one.name in extra]
    if any(one.name in _FILLS for one in torchs):
        return "let the kernel write every element itself"
    if any(one.name in _CASTS and "strides" not in one.detail for one in torchs):
        return "convert inside the kernel, after the load or before the store"
    return "compute that inside the kernel" if torchs else "make one kernel of them"


def words(names: Counter[str]) -> str:
    """The names with their counts, sorted."""
    return ", ".join(_times(name, count) for name, count in sorted(names.items()))


def listed(counts: Counts, work: Iterable[Work]) -> str:
    """The kernels of a call, with place and arguments where known."""
    first = {one.name: one for one in reversed([one for one in work if one.kind == "kernel"])}
    ordered = sorted(counts.names, key=lambda entry: -entry[1])
    shown = [_times(name, count) + _place(first.get(name)) for name, count in ordered[:_MOST_NAMES]]
    left = len(ordered) - len(shown)
    behind = [one.name + _place(one) for name, one in sorted(first.items()) if name not in dict(counts.names)]
    return (
        ", ".join(shown)
        + (f" and {left} more" if left > 0 else "")
        + (f", through {', '.join(behind[:_MOST_NAMES])}" if behind else "")
    )


def _times(name: str, count: int) -> str:
    return f"{count} x {name[:100]}" if count > 1 else name[:100]


def _place(one: Work | None) -> str:
    if one is None:
        return ""
    return (f" at {one.where}" if one.where else "") + (f" ({one.detail})" if one.detail else "")
