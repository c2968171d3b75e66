"""What is measured: a `Row` of the table, the `Problem` it makes, the calls that solve it, the bars it is held to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

# "both" is forward and backward together; "backward" is what that takes beyond forward alone.
Span = Literal["forward", "both", "backward"]
Call = Callable[..., Any]


class UnknownName(ValueError):
    """A name on the command line that fits nothing; the message says what there is."""


OURS, EAGER, COMPILE, LIGER, BEST = "ours", "eager", "compile", "Liger", "best"


@dataclass(frozen=True, slots=True)
class Way:
    """Another way to the same result. ``mutates``: in which passes it writes into its inputs, which are then its own
    and put back before each sample. ``part``: it does less, and shows what the rest costs; it is no rival. ``plain``:
    why no CUDA graph has it. A capture that fails is worse than none: torch 2.11 gives none of the process's cached
    memory back from then on (seen on an H200), and later rows run out of it."""

    call: Call
    mutates: tuple[Span, ...] = ()
    part: bool = False
    plain: str = ""


@dataclass(frozen=True, slots=True)
class Work:
    """What a pass has to do at least: bytes moved once, floating-point operations of its products."""

    bytes: int = 0
    flops: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops)


@dataclass(slots=True)
class Problem:
    """Inputs on a device, and calls that take them by name.

    ``others`` are Liger and libraries by their names in the table. ``truth`` names the way whose result the others are
    compared with; where results are random, ``agrees(inputs, result)`` says instead what is wrong with one, or "".
    ``mutates`` says in which passes every way writes its results into the inputs, which need not be put back: called
    again it does the same work. ``compiles`` is what torch.compile is given, by default ``eager``; ``None`` where it
    has nothing to do.
    """

    inputs: dict[str, Any]
    ours: Call
    eager: Call | None
    work: Work
    others: Mapping[str, Way] = field(default_factory=dict)
    backward: Work = field(default_factory=Work)
    grads: tuple[str, ...] = ()
    compiles: Call | Literal["eager"] | None = "eager"
    truth: str = EAGER
    mutates: tuple[Span, ...] = ()
    agrees: Callable[[Mapping[str, Any], Any], str] | None = None

    def ways(self) -> dict[str, Way]:
        """All of them but torch.compile's, ours first."""
        eager = {} if self.eager is None else {EAGER: Way(self.eager)}
        return {OURS: Way(self.ours), **eager, **self.others}

    def to_compile(self) -> Call | None:
        return self.eager if self.compiles == "eager" else self.compiles

    def work_of(self, span: Span) -> Work:
        if span == "both":
            return self.work + self.backward
        return self.work if span == "forward" else self.backward


@dataclass(frozen=True, slots=True)
class Bar:
    """A least or a most for one figure of ours.

    ``of`` is ``"copy"`` (bytes a second over a copy's), ``"matmul"`` (operations a second over a product's),
    ``"tflops"``, ``"us"``, ``"gib"`` (peak memory beyond the inputs), ``"best"`` (time of the fastest of eager,
    torch.compile and Liger over ours), or the name of a way, whose time over ours it is. A ``goal`` is to be aimed at.
    """

    of: str
    bound: float
    span: Span = "forward"
    goal: bool = False

    @property
    def at_most(self) -> bool:
        return self.of in ("us", "gib")


@dataclass(frozen=True, slots=True)
class Row:
    """One problem of the table. ``make(device, **sizes)`` makes it; ``small`` sizes are for machines without a GPU."""

    family: str
    text: str
    make: Callable[..., Problem]
    sizes: Mapping[str, Any]
    small: Mapping[str, Any]
    bars: tuple[Bar, ...] = ()
    backward: bool = False

    @property
    def name(self) -> str:
        return f"{self.family}: {self.text}"


def bars(*found: Bar | tuple[Bar, ...]) -> tuple[Bar, ...]:
    """Bars and groups of bars, flat."""
    return tuple(bar for each in found for bar in (each if isinstance(each, tuple) else (each,)))


def over(span: Span = "forward", goal: bool = False, **times: float) -> tuple[Bar, ...]:
    """How many times as fast as each way, by keyword: ``over(eager=2.6, compile=0.97, Liger=1.0, best=0.98)``."""
    return tuple(Bar(way, bound, span, goal) for way, bound in times.items())


def moved(*tensors: torch.Tensor | None) -> int:
    """Bytes of the elements of ``tensors``."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
