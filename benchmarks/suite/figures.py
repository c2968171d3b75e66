"""What was measured of one pass of one row, what follows from it, and whether it meets a bar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from benchmarks.suite.model import BEST, COMPILE, EAGER, LIGER, OURS, Bar, Span, Work

Outcome = Literal["met", "missed", "not measured"]
_GIB = 1 << 30
# The rivals of section 5: what a user has without writing a kernel, or installs.
RIVALS = (EAGER, COMPILE, LIGER)


@dataclass(frozen=True, slots=True)
class Figures:
    """Seconds of each way, and why some have none; the ceilings that were measured among the same samples.

    ``memory`` are peak bytes beyond the inputs, results included. ``spread`` is half the distance of a way's quartiles
    over its median. ``timers`` has for each way ``"graph"``, or ``"events"`` where it could not be captured. ``parts``
    are ways that do less, hence no rivals.
    """

    family: str
    text: str
    span: Span
    work: Work
    seconds: Mapping[str, float] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    spread: Mapping[str, float] = field(default_factory=dict)
    timers: Mapping[str, str] = field(default_factory=dict)
    copy_bytes_per_s: float | None = None
    matmul_flops_per_s: float | None = None
    samples: int = 0
    parts: tuple[str, ...] = ()

    @property
    def ours(self) -> float | None:
        return self.seconds.get(OURS)

    def bytes_per_s(self) -> float | None:
        return self.work.bytes / self.ours if self.ours and self.work.bytes else None

    def flops_per_s(self) -> float | None:
        return self.work.flops / self.ours if self.ours and self.work.flops else None

    def fastest(self, among: Sequence[str] = ()) -> tuple[str, float] | None:
        """The fastest rival and its seconds; ``among`` some, by default all."""
        found = {
            name: each
            for name, each in self.seconds.items()
            if name != OURS and name not in self.parts and (not among or name in among)
        }
        return min(found.items(), key=lambda item: item[1]) if found else None

    def as_json(self) -> dict[str, Any]:
        best = self.fastest()
        return {
            **asdict(self),
            "bytes_per_s": self.bytes_per_s(),
            "flops_per_s": self.flops_per_s(),
            "best": None if best is None else {"way": best[0], "over_ours": best[1] / self.ours if self.ours else None},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Figures:
        """What `as_json` made, without what follows from the rest."""
        own = {each.name: data[each.name] for each in fields(cls) if each.name in data}
        return cls(**{**own, "work": Work(**data["work"]), "parts": tuple(data.get("parts", ()))})


@dataclass(frozen=True, slots=True)
class Judged:
    """A bar, what was found, and what that says; ``why`` there is nothing to say."""

    bar: Bar
    outcome: Outcome
    value: float | None = None
    why: str = ""

    def __str__(self) -> str:
        bar = self.bar
        name, unit = {"us": ("", " us"), "gib": ("memory", " GiB"), "tflops": ("", " TFLOP/s")}.get(
            bar.of, (bar.of, "")
        )
        if not unit and bar.of not in ("copy", "matmul"):
            name, unit = f"{bar.of}/ours", ""
        value = "" if self.value is None else f"{self.value:.3g} "
        sign = "<=" if bar.at_most else ">="
        head = f"{'goal ' if bar.goal else ''}{name}{' ' if name else ''}{value}{sign} {bar.bound:g}{unit}"
        return f"{head}: {self.outcome}" + (f": {shortened(self.why)}" if self.outcome == "not measured" else "")


def shortened(text: str, most: int = 60) -> str:
    """``text`` in at most ``most`` characters."""
    return text if len(text) <= most else text[: most - 3] + "..."


def judged(bar: Bar, figures: Figures) -> Judged:
    """``bar`` against the figures of its own pass."""
    value = _value(bar, figures)
    if isinstance(value, str):
        return Judged(bar, "not measured", None, value)
    meets = value <= bar.bound if bar.at_most else value >= bar.bound
    return Judged(bar, "met" if meets else "missed", value)


def _value(bar: Bar, figures: Figures) -> float | str:
    ours = figures.ours
    if ours is None:
        return figures.words.get(OURS, "ours was not timed")
    if bar.of == "us":
        return 1e6 * ours
    if bar.of == "gib":
        peak = figures.memory.get(OURS)
        return "its memory was not measured" if peak is None else peak / _GIB
    if bar.of == "tflops":
        return figures.work.flops / ours * 1e-12 if figures.work.flops else "it has no products"
    if bar.of in ("copy", "matmul"):
        ceiling = figures.copy_bytes_per_s if bar.of == "copy" else figures.matmul_flops_per_s
        amount = figures.work.bytes if bar.of == "copy" else figures.work.flops
        if not ceiling:
            return f"no {bar.of} was timed beside it"
        return amount / ours / ceiling if amount else f"it has no {'bytes' if bar.of == 'copy' else 'products'}"
    if bar.of == BEST:
        best = figures.fastest(RIVALS)
        return best[1] / ours if best is not None else "no rival was timed"
    rival = figures.seconds.get(bar.of)
    return rival / ours if rival is not None else figures.words.get(bar.of, f"{bar.of} was not timed")


def difference(both: Figures, forward: Figures, work: Work) -> Figures:
    """The backward pass: what both passes take beyond forward alone, of each way that has both.

    A way whose forward alone is not faster than both passes (a gradient computed forward, or noise) has no number.
    """
    seconds, words = {}, dict(both.words)
    for way, whole in both.seconds.items():
        alone = forward.seconds.get(way)
        if alone is None:
            words[way] = forward.words.get(way, "its forward pass was not timed alone")
        elif whole <= alone:
            words[way] = "both passes take no longer than forward alone"
        else:
            seconds[way] = whole - alone
    return Figures(
        both.family,
        both.text,
        "backward",
        work,
        seconds,
        words,
        timers={**forward.timers, **both.timers},
        copy_bytes_per_s=both.copy_bytes_per_s,
        matmul_flops_per_s=both.matmul_flops_per_s,
        samples=both.samples,
        parts=both.parts,
    )
