"""The same launch once more: replayed where all that it loads is what it was, else run as any other."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_fusion import interpreter
from pytest_fusion.interpreter import Session, interpreted
from pytest_fusion.interpreter.control import launch_replay
from pytest_fusion.interpreter.control.executor import ordered
from tests.sweeps import first_of_each, sweep

interpreter.enable()
triton = pytest.importorskip("triton")
if not interpreter.installed():
    pytest.skip(str(interpreter.problem()), allow_module_level=True)

tl = triton.language
FOLDER = "tests.interpreter"
planted = importlib.import_module(f"{FOLDER}.planted.model")
cases = importlib.import_module(f"{FOLDER}.adversarial.cases")
_honest = "honest_layouts honest_order honest_alone honest_control"
for _name in f"bounds tiles control gaps races stale unwritten hints {_honest}".split():
    importlib.import_module(f"{FOLDER}.planted.{_name}")
for _name in ("synchronised", "flow", "styles", "wrong"):
    importlib.import_module(f"{FOLDER}.adversarial.{_name}")

BATCHED = [case for case in (*cases.HONEST, *cases.BUGS) if case.executor == "batched"]
# Planted kernels use both, which newer Tritons still have.
pytestmark = [
    pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated"),
    pytest.mark.filterwarnings("ignore:tl.cat.*is deprecated"),
]


def twice(run: Callable[[Any], Any]) -> list[tuple[Session, Any, list[torch.Tensor]]]:
    """Sessions, memories and results of two runs in memory of their own, of which the second may be replayed."""
    found = []
    with launch_replay.allowed():
        for _ in range(2):
            memory = planted.Memory(1 << 19)
            with interpreted(findings="collect") as session:
                pairs = run(memory)
            found.append((session, memory, [got for got, _ in pairs or ()]))
    return found


def told(session: Session) -> list[Any]:
    """Its findings, without the addresses that their details name."""
    return [(f.kind, f.line, f.argument, f.program, f.index, f.offset, f.count, f.other) for f in session.findings]


def replayed(session: Session) -> list[bool]:
    """Of each launch, whether it was."""
    return [launch.replayed for launch in session.launches]


@pytest.mark.parametrize("case", BATCHED, ids=lambda case: case.run.__name__)
def test_kernels_written_to_break_the_lane_say_the_same_again(case: Any) -> None:
    """Honest or not: the same findings, the same bits, and nothing else touched."""
    (first, _, once), (second, memory, again) = twice(case.run)
    assert told(second) == told(first)
    assert memory.intact()
    for a, b in zip(once, again, strict=True):
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def named(plant: Any) -> str:
    return f"{Path(plant.file).stem}-{plant.name}"


@sweep("bug", [True, False], ids=["bug", "honest"])
@sweep("plant", planted.PLANTS, ids=named, fast=first_of_each(planted.PLANTS, lambda plant: plant.kinds, named))
def test_a_planted_bug_is_found_again(plant: Any, bug: bool) -> None:
    """A launch with a finding is run as any other, and its twin is not accused."""
    (first, *_), (second, memory, _) = twice(lambda memory: plant.run(memory, bug))
    assert told(second) == told(first)
    assert bool(second.findings) is bug
    assert memory.intact()


@pytest.mark.slow
def test_most_honest_kernels_are_replayed() -> None:
    """Else the two tests above would tell of nothing."""
    sessions = [twice(case.run)[1][0] for case in cases.HONEST if case.executor == "batched"]
    every = [launch for session in sessions for launch in replayed(session)]
    assert sum(every) > len(every) / 2


@triton.jit
def scaled_kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, 2 * tl.load(x + i, mask=i < n, other=0.0), mask=i < n)


def launches(*calls: Callable[[], object]) -> list[bool]:
    """Whether each of the calls, one launch each, was replayed."""
    with launch_replay.allowed(), interpreted() as session:
        for call in calls:
            call()
    return replayed(session)


def doubled(x: torch.Tensor, n: int | None = None, block: int = 16) -> torch.Tensor:
    """Twice ``x``, by the kernel."""
    out = torch.zeros_like(x)
    count = x.numel() if n is None else n
    scaled_kernel[(triton.cdiv(x.numel(), block),)](x, out, count, BLOCK=block)
    return out


def test_values_decide() -> None:
    """Equal ones elsewhere are replayed, others are computed: also where only the last element differs."""
    x = torch.arange(100.0)
    other = x.clone()
    other[-1] = 7
    outs: list[torch.Tensor] = []
    values = (x, x.clone(), other, other.clone(), x)
    assert launches(*(lambda x=x: outs.append(doubled(x)) for x in values)) == [False, True, False, True, False]
    for given, out in zip(values, outs, strict=True):
        assert torch.equal(out, 2 * given)


def test_zeros_of_both_signs_and_nan_have_bits() -> None:
    """-0.0 equals 0.0 and NaN nothing: bits are compared."""
    zero, nan = torch.zeros(20), torch.full((20,), float("nan"))
    calls = [lambda x=x: doubled(x) for x in (zero, -zero, nan, nan.clone())]
    assert launches(*calls) == [False, False, False, True]


def test_arguments_decide() -> None:
    """Another number, constant, grid, layout, dtype or order is another launch; outside of ``kept`` all are."""
    x, wide = torch.arange(64.0), torch.arange(128.0)

    def reversed_order() -> None:
        with ordered("reversed"):
            doubled(x)

    assert launches(
        lambda: doubled(x),
        lambda: doubled(x, n=63),
        lambda: doubled(x, block=32),
        lambda: doubled(wide[:64]),
        lambda: doubled(x.double()),
        reversed_order,
        lambda: doubled(x),
    ) == [False] * 6 + [True]
    with interpreted() as session:
        doubled(x)
        doubled(x)
    assert replayed(session) == [False, False]


@triton.jit
def increment_kernel(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < n, other=0) + 1, mask=i < n)
    if tl.load(x) > 5:
        tl.store(x + i, -1, mask=i < n)


def test_in_place_and_undone() -> None:
    """What an abandoned replay had stored is put back before the launch is run: the branch sees one increment."""
    first, second = torch.zeros(40, dtype=torch.int32), torch.zeros(40, dtype=torch.int32)
    second[39] = 1

    def call(x: torch.Tensor) -> None:
        increment_kernel[(1,)](x, 40, BLOCK=64)

    assert launches(lambda: call(first), lambda: call(first), lambda: call(second)) == [False, False, False]
    assert first.tolist() == [2] * 40
    assert second.tolist() == [1] * 39 + [2]


@triton.jit
def counting_kernel(counter, out, n, LOOPS: tl.constexpr):
    pid = tl.program_id(0)
    taken = tl.atomic_add(counter, 1)
    total = 0
    for k in range(pid % LOOPS):
        total += k * taken
    if pid % 2 == 0:
        tl.store(out + pid, total)


def test_atomics_and_branches() -> None:
    """Programs that take part differ from step to step; a counter that was not set to zero is another value."""
    outs = [torch.full((9,), -1, dtype=torch.int32) for _ in range(3)]
    counters = [torch.zeros(1, dtype=torch.int32) for _ in range(2)]

    def call(counter: torch.Tensor, out: torch.Tensor) -> None:
        counting_kernel[(9,)](counter, out, 9, LOOPS=4)

    found = launches(*(lambda c=c, o=o: call(c, o) for c, o in zip((*counters, counters[1]), outs, strict=True)))
    assert found == [False, True, False]
    assert torch.equal(outs[0], outs[1])
    assert [c.item() for c in counters] == [9, 18]
    assert not torch.equal(outs[2], outs[1])


@triton.jit
def printing_kernel(x, out):
    value = tl.load(x)
    tl.device_print("value", value)
    tl.store(out, value)


@triton.jit
def address_kernel(x, out):
    tl.store(out, tl.load(x) + (x.to(tl.int64) % 16 == 0).to(tl.float32))


@triton.jit
def table_kernel(table, out):
    x = tl.load(table).to(tl.pointer_type(tl.float32))
    tl.store(out, tl.load(x) + 1)


def test_what_no_step_says_is_done_again(capsys: pytest.CaptureFixture[str]) -> None:
    """It prints, computes with an address, or follows one out of its arguments."""
    x, out = torch.ones(1), torch.zeros(1)
    table = torch.tensor([x.data_ptr()])
    for kernel, given in ((printing_kernel, x), (address_kernel, x), (table_kernel, table)):
        assert launches(*[lambda kernel=kernel, given=given: kernel[(1,)](given, out)] * 2) == [False, False]
    assert capsys.readouterr().out.count("value") == 2


@triton.jit
def copy_kernel(x, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i))


def test_memory_that_holds_nothing_is_found() -> None:
    """Fresh memory has the bits that a kernel wrote into other such memory, and nobody wrote them."""
    with launch_replay.allowed(), interpreted(findings="collect") as session:
        written, blank = torch.empty(16), torch.empty(16)
        copy_kernel[(1,)](blank.clone(), written, BLOCK=16)
        doubled(written)
        assert session.findings == []
        doubled(blank)
    assert [finding.kind for finding in session.findings] == ["unwritten-load"]
    assert replayed(session) == [False, False, False]


def test_who_loads_other_values_each_time_is_left_alone() -> None:
    """After three abandoned replays in a row the launch is run, and no tape of it kept."""
    calls = [lambda x=x: doubled(x) for x in (*map(torch.clone, torch.eye(5, 40)), torch.zeros(40), torch.zeros(40))]
    assert launches(*calls) == [False] * 7


def test_tapes_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past it nothing more is kept, and what was kept before still is."""
    small, large = torch.arange(16.0), torch.arange(4096.0)
    monkeypatch.setattr(launch_replay, "_ROOM", 1 << 14)
    calls = [lambda x=x: doubled(x) for x in (small, large, large, small)]
    assert launches(*calls) == [False, False, False, True]
