"""What tells launches apart: all that a kernel reads beside memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from pytest_fusion import interpreter
from pytest_fusion.interpreter import interpreted
from pytest_fusion.interpreter.control import launch_replay

interpreter.enable()
triton = pytest.importorskip("triton")
if not interpreter.installed():
    pytest.skip(str(interpreter.problem()), allow_module_level=True)

tl = triton.language
SCALE = tl.constexpr(2)
SETTINGS = ModuleType("settings")
SETTINGS.SHIFT = tl.constexpr(0)
LIST = [tl.constexpr(2)]
OBJECT = SimpleNamespace(SCALE=tl.constexpr(2))


class AB(NamedTuple):
    """Scale first."""

    scale: float
    shift: float


class BA(NamedTuple):
    """Shift first."""

    shift: float
    scale: float


@triton.jit
def scaled(value):
    return value * SCALE + SETTINGS.SHIFT


@triton.jit
def doubled(value):
    return value * 2


CHOSEN = doubled


@triton.jit
def kernel(x, out):
    tl.store(out, scaled(tl.load(x)))


@triton.jit
def applying_kernel(x, out, ACT: tl.constexpr):
    tl.store(out, ACT(tl.load(x)))


@triton.jit
def chosen_kernel(x, out):
    tl.store(out, CHOSEN(tl.load(x)))


@triton.jit
def late_kernel(x, out, MODE: tl.constexpr):
    tl.store(out, tl.load(x))
    if MODE:
        tl.store(out, LATE)  # noqa: F821 - a global that tests make and take away


@triton.jit
def object_kernel(x, out):
    tl.store(out, tl.load(x) * OBJECT.SCALE)


@triton.jit
def listed_kernel(x, out):
    tl.store(out, tl.load(x) * LIST[0])


@triton.jit
def pair_kernel(x, out, pair):
    tl.store(out, tl.load(x) * pair.scale + pair.shift)


@triton.jit
def printing_kernel(x, out):
    print("a launch")
    tl.store(out, tl.load(x))


@triton.jit
def hinted_kernel(x, out, WIDTH: tl.constexpr):
    tl.store(out, tl.load(tl.multiple_of(x, WIDTH)))


@triton.jit
def wide_kernel(x, out, n):
    tl.store(out, tl.load(x) + n.to(tl.float32))


@triton.jit
def chooser_kernel(x, out, KEY: tl.constexpr):
    tl.store(out, tl.load(x))


@triton.jit
def constant_kernel(x, out, N: tl.constexpr):
    tl.store(out, tl.load(x) + (N > 5))


Change = Callable[[pytest.MonkeyPatch], object]


def launched(run: Callable[[torch.Tensor], object], *changes: Change) -> tuple[list[bool], list[float]]:
    """``run`` before and after each change, each time twice: whether it was replayed, and what it stored."""
    outs = []
    with pytest.MonkeyPatch.context() as patch, launch_replay.allowed(), interpreted() as session:
        for change in (lambda _: None, *changes):
            change(patch)
            for _ in range(2):
                out = torch.zeros(1)
                run(out)
                outs.append(out.item())
    return [launch.replayed for launch in session.launches], outs


def one() -> torch.Tensor:
    return torch.ones(1)


def set_global(name: str, value: Any) -> Change:
    return lambda patch: patch.setitem(kernel.fn.__globals__, name, value)


KNOWN: dict[str, tuple[Callable[[torch.Tensor], object], Change, list[float]]] = {
    "global of a function": (
        lambda out: kernel[(1,)](one(), out),
        set_global("SCALE", tl.constexpr(3)),
        [2, 2, 3, 3],
    ),
    "attribute of a module": (
        lambda out: kernel[(1,)](one(), out),
        lambda patch: patch.setattr(SETTINGS, "SHIFT", tl.constexpr(4)),
        [2, 2, 6, 6],
    ),
    "function": (
        lambda out: chosen_kernel[(1,)](one(), out),
        set_global("CHOSEN", scaled),
        [2, 2, 2, 2],
    ),
    "global of a constant": (
        lambda out: applying_kernel[(1,)](one(), out, ACT=scaled),
        set_global("SCALE", tl.constexpr(5)),
        [2, 2, 5, 5],
    ),
    "constexpr in place": (
        lambda out: kernel[(1,)](one(), out),
        lambda patch: patch.setattr(SCALE, "value", 7),
        [2, 2, 7, 7],
    ),
    "name that appears": (
        lambda out: late_kernel[(1,)](one(), out, MODE="LATE" in kernel.fn.__globals__),
        set_global("LATE", tl.constexpr(9.0)),
        [1, 1, 9, 9],
    ),
}


@pytest.mark.parametrize("name", list(KNOWN))
def test_a_constant_that_changes_makes_another_launch(name: str) -> None:
    """Replayed as long as it is what it was."""
    run, change, wanted = KNOWN[name]
    if name == "name that appears":
        kernel.fn.__globals__.pop("LATE", None)
    assert launched(run, change) == ([False, True] * 2, wanted)


def test_a_function_that_is_changed_after_it_was_exchanged() -> None:
    """What the new one reads counts from then on."""

    def run(out: torch.Tensor) -> None:
        chosen_kernel[(1,)](one(), out)

    changes = set_global("CHOSEN", scaled), set_global("SCALE", tl.constexpr(3))
    assert launched(run, *changes) == ([False, True] * 3, [2, 2, 2, 2, 3, 3])


def enclosed(factor: Any) -> tuple[Any, Callable[[Any], None]]:
    """A kernel that multiplies by a variable of its own function."""

    @triton.jit
    def inner(x, out):
        tl.store(out, tl.load(x) * factor)

    def turn(value: Any) -> None:
        nonlocal factor
        factor = value

    return inner, turn


def test_enclosing_variables_count() -> None:
    """A cell of the kernel's closure."""
    inner, turn = enclosed(tl.constexpr(2))
    found = launched(lambda out: inner[(1,)](one(), out), lambda _: turn(tl.constexpr(5)))
    assert found == ([False, True] * 2, [2, 2, 5, 5])


def test_tuples_of_equal_values_have_types() -> None:
    """Fields by name: scale and shift change places."""
    pairs = [AB(2.0, 3.0)]
    found = launched(lambda out: pair_kernel[(1,)](one(), out, pairs[0]), lambda _: pairs.__setitem__(0, BA(2.0, 3.0)))
    assert found == ([False, True] * 2, [5, 5, 5, 5])
    assert launched(lambda out: pair_kernel[(1,)](2 * one(), out, pairs[0]))[1] == [8, 8]


class Raising:
    """A constant that lets nobody look at it."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


UNKNOWN: dict[str, Callable[[torch.Tensor], object]] = {
    "an object's attribute": lambda out: object_kernel[(1,)](one(), out),
    "a list": lambda out: listed_kernel[(1,)](one(), out),
    "plain Python": lambda out: applying_kernel[(1,)](one(), out, ACT=lambda value: value),
    "a clock": lambda out: chooser_kernel[(1,)](one(), out, KEY=time.time),
    "print": lambda out: printing_kernel[(1,)](one(), out),
    "a hint of 128 bytes": lambda out: hinted_kernel[(1,)](aligned(), out, WIDTH=128),
}


def aligned() -> torch.Tensor:
    """One element at a multiple of 128 bytes."""
    memory = torch.ones(64)
    return memory[-memory.data_ptr() // 4 % 32 :][:1]


@pytest.mark.parametrize("name", list(UNKNOWN))
def test_what_cannot_be_compared_is_run_again(name: str) -> None:
    """With it in reach of a kernel nothing is replayed."""
    assert launched(UNKNOWN[name])[0] == [False, False]


def test_pure_functions_are_what_they_are() -> None:
    """Of the standard library, in reach of a kernel."""
    assert launched(lambda out: constant_kernel[(1,)](one(), out, N=math.exp(2)))[0] == [False, True]
    assert launched(lambda out: chooser_kernel[(1,)](one(), out, KEY=math.floor))[0] == [False, True]


def test_a_hint_of_few_bytes_is_replayed() -> None:
    """As all allocations keep it. One tensor serves both launches: two may begin at other offsets of their storage."""
    x = aligned()
    assert launched(lambda out: hinted_kernel[(1,)](x, out, WIDTH=16))[0] == [False, True]


def test_an_argument_that_is_a_constant_is_another_one() -> None:
    """Triton makes an ``int`` of 1 a constant, which has no ``.to``; numpy's 1 is a number."""
    with launch_replay.allowed(), interpreted() as session:
        out = torch.zeros(1)
        wide_kernel[(1,)](one(), out, np.int32(1))
        with pytest.raises(Exception, match="has no attribute 'to'"):
            wide_kernel[(1,)](one(), out, 1)
    assert [launch.replayed for launch in session.launches] == [False]


def test_odd_constants_raise_nothing() -> None:
    """A number of 5,000 digits, and an object that nobody may look at."""
    assert launched(lambda out: constant_kernel[(1,)](one(), out, N=10**5000)) == ([False, True], [2, 2])
    assert launched(lambda out: late_kernel[(1,)](one(), out, MODE=False))[0] == [False, True]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(kernel.fn.__globals__, "LATE", Raising())
        assert launched(lambda out: late_kernel[(1,)](one(), out, MODE=False))[0] == [False, False]
