"""``pytest_fusion.interpreter``: the lane as a tool by itself."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_fusion import interpreter
from pytest_fusion.errors import FusionError, MemoryFinding
from pytest_fusion.interpreter import Execution, Finding, interpreted
from pytest_fusion.interpreter.control.executor import ENVIRONMENT, listening

interpreter.enable()
triton = pytest.importorskip("triton")
if not interpreter.installed():
    pytest.skip(str(interpreter.problem()), allow_module_level=True)

from tests.interpreter.planted.model import Memory  # noqa: E402 - its neighbours import Triton

tl = triton.language
ROOT = Path(__file__).parents[2]
each_executor = pytest.mark.parametrize("executor", ["batched", "serial"])


@triton.jit
def copy_kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i)
    tl.store(out + i, value, mask=i < n)


@triton.jit
def write_kernel(out, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.zeros([BLOCK], tl.float32) + 2.0)


@triton.jit
def shift_kernel(x, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    left = tl.load(x + i - 1, mask=i > 0, other=0.0)
    tl.store(x + i, left)


@triton.jit
def increment_kernel(x, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i) + 1.0)


@triton.jit
def leaving_kernel(out):
    pid = tl.program_id(0)
    for i in range(4):
        if i == pid:
            break
        tl.store(out + pid, i)


@triton.jit
def one_name_kernel(x, out, USED: tl.constexpr):
    pid = tl.program_id(0)
    if pid % 2 == 0:
        part = tl.load(x + tl.arange(0, 8))
        tl.store(out + pid, tl.sum(part))
    if pid % 3 == 1:
        part = tl.load(x + tl.arange(0, 4))
        tl.store(out + pid, tl.sum(part))
    if USED and pid == 1:
        tl.store(out + pid, tl.sum(part) + 1)


def kinds(findings: list[Finding]) -> list[str]:
    return [finding.kind for finding in findings]


@each_executor
def test_the_first_finding_is_raised_before_it_happens(executor: Any) -> None:
    """MemoryFinding carries the facts in .finding, is its own message, and no byte outside was written."""
    memory = Memory()
    out = memory.zeros(20)
    with (
        pytest.raises(MemoryFinding, match="out-of-bounds-store in write_kernel") as caught,
        interpreted(executor=executor) as session,
    ):
        write_kernel[(3,)](out, BLOCK=8)
    finding = caught.value.finding
    assert isinstance(finding, Finding)
    assert str(finding) == str(caught.value)
    assert (finding.kind, finding.kernel, finding.argument) == ("out-of-bounds-store", "write_kernel", "out")
    assert (finding.program, finding.offset, finding.index, finding.count) == ((2, 0, 0), 20, None, 4)
    assert (finding.shape, finding.strides, finding.dtype) == ((20,), (1,), "float32")
    assert Path(finding.file) == Path(__file__)
    assert finding.code == "tl.store(out + i, tl.zeros([BLOCK], tl.float32) + 2.0)"
    assert isinstance(caught.value, FusionError)
    assert (session.findings, session.launches) == ([], [])
    assert memory.intact()


@each_executor
def test_findings_can_be_collected(executor: Any) -> None:
    """A refused load yields NaN, a refused store changes nothing, and all the rest of the launches is done."""
    memory = Memory()
    x, out, narrow = memory.range(20), memory.zeros(24), memory.zeros(20)
    with interpreted(executor=executor, findings="collect") as session:
        copy_kernel[(3,)](x, out, 24, BLOCK=8)
        write_kernel[(3,)](narrow, BLOCK=8)
    assert kinds(session.findings) == ["out-of-bounds-load", "out-of-bounds-store"]
    assert [(f.kernel, f.argument, f.count) for f in session.findings] == [
        ("copy_kernel", "x", 4),
        ("write_kernel", "out", 4),
    ]
    assert torch.equal(out[:20], x)
    assert out[20:].isnan().all()
    assert narrow.eq(2).all()
    assert memory.intact()


def test_a_line_is_accused_once() -> None:
    """Two launches with one fault at one line are one finding that counts the lanes of both."""
    out = torch.zeros(6)
    with interpreted(findings="collect") as session:
        write_kernel[(1,)](out, BLOCK=8)
        write_kernel[(1,)](out, BLOCK=8)
    assert [finding.count for finding in session.findings] == [4]


@each_executor
def test_launches_are_listed_in_order(executor: Any) -> None:
    """Each launch that came to its end, with its grid in three dimensions and how it was run."""
    x, out = torch.ones(16), torch.zeros(16)
    with interpreted(executor=executor) as session:
        copy_kernel[(2,)](x, out, 16, BLOCK=8)
        write_kernel[(1, 2)](out, BLOCK=16)
    assert session.launches == [
        Execution("copy_kernel", (2, 1, 1), executor),
        Execution("write_kernel", (1, 2, 1), executor),
    ]
    assert torch.equal(out, torch.full((16,), 2.0))


def test_a_launch_says_why_it_was_not_batched() -> None:
    """Programs that break at different turns run serially, for a reason with the line; asked for, serial needs none."""
    with interpreted() as session:
        leaving_kernel[(3,)](torch.zeros(3))
    (launch,) = session.launches
    assert launch.executor == "serial"
    line = leaving_kernel.fn.__code__.co_firstlineno + 5
    assert launch.reason == f"`break` at {__file__}:{line} in a branch that only some programs take"
    with interpreted(executor="serial") as session:
        leaving_kernel[(3,)](torch.zeros(3))
    assert [(launch.executor, launch.reason) for launch in session.launches] == [("serial", "")]


@pytest.mark.parametrize("used", [False, True])
def test_a_name_of_several_types_parts_the_batch_where_it_is_used(used: bool) -> None:
    """A compiler forgets what a branch assigned; who asks for it all the same, which none compiles, runs alone."""
    out = torch.zeros(3)
    with interpreted() as session:
        one_name_kernel[(3,)](torch.ones(8), out, USED=used)
    (launch,) = session.launches
    reason = "a variable is <['4'], fp32> in some programs and <['8'], fp32> in others"
    assert (launch.executor, launch.reason) == (("serial", reason) if used else ("batched", ""))
    assert out.tolist() == [8, 5 if used else 4, 8]


@each_executor
def test_unchecked_leaves_races_out_and_still_refuses_what_is_outside(executor: Any) -> None:
    """checked=False needs no record of accesses: races and unwritten loads go unseen, the storage's end does not."""
    with interpreted(executor=executor, findings="collect") as session:
        shift_kernel[(4,)](torch.arange(32.0), BLOCK=8)
        increment_kernel[(1,)](torch.empty(8), torch.zeros(8), BLOCK=8)
    assert kinds(session.findings) == ["racing-load", "unwritten-load"]

    memory = Memory()
    with interpreted(executor=executor, findings="collect", checked=False) as session:
        shift_kernel[(4,)](torch.arange(32.0), BLOCK=8)
        increment_kernel[(1,)](torch.empty(8), torch.zeros(8), BLOCK=8)
        write_kernel[(2,)](memory.zeros(12), BLOCK=8)
    assert kinds(session.findings) == ["out-of-bounds-store"]
    assert memory.intact()


def fill(x: torch.Tensor) -> None:
    x.fill_(1.0)


def store(x: torch.Tensor) -> None:
    write_kernel[(1,)](x, BLOCK=8)


@each_executor
@pytest.mark.parametrize("make", [lambda: torch.empty(8), lambda: torch.zeros(8).new_empty(8)], ids=["empty", "new"])
def test_what_torch_empty_gives_holds_no_value(make: Callable[[], torch.Tensor], executor: Any) -> None:
    """Loading it is a finding, until a kernel or an operator of torch has written it."""
    with interpreted(executor=executor, findings="collect") as session:
        increment_kernel[(1,)](make(), torch.zeros(8), BLOCK=8)
    assert kinds(session.findings) == ["unwritten-load"]
    assert (session.findings[0].index, session.findings[0].count) == ((0,), 8)

    for write in (fill, store):
        with interpreted(executor=executor) as session:
            x, out = make(), torch.zeros(8)
            write(x)
            increment_kernel[(1,)](x, out, BLOCK=8)
        assert torch.equal(out, x + 1)


def test_what_was_made_before_the_block_counts_as_written() -> None:
    """Nobody watched it being written, so nobody accuses whoever loads it."""
    x = torch.empty(8)
    with interpreted() as session:
        increment_kernel[(1,)](x, torch.zeros(8), BLOCK=8)
    assert len(session.launches) == 1


def test_a_session_inside_another_one_keeps_its_findings() -> None:
    """The inner block's findings are its own; launches are told to both, and the outer block goes on as it was."""
    with interpreted(findings="collect") as outer:
        write_kernel[(1,)](torch.zeros(6), BLOCK=8)
        with interpreted(findings="collect", executor="serial") as inner:
            shift_kernel[(2,)](torch.arange(16.0), BLOCK=8)
        assert torch.zeros(1).is_cuda
        copy_kernel[(1,)](torch.zeros(6), torch.zeros(6), 6, BLOCK=8)
    assert kinds(inner.findings) == ["racing-load"]
    assert kinds(outer.findings) == ["out-of-bounds-store", "out-of-bounds-load"]
    assert [(launch.kernel, launch.executor) for launch in inner.launches] == [("shift_kernel", "serial")]
    assert [(launch.kernel, launch.executor) for launch in outer.launches] == [
        ("write_kernel", "batched"),
        ("shift_kernel", "serial"),
        ("copy_kernel", "batched"),
    ]


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="tensors answer for themselves where there is a device")
def test_is_cuda_says_yes_inside_and_no_afterwards() -> None:
    """Launchers that assert is_cuda run inside the block; afterwards tensors tell the truth, however it ended."""
    x = torch.zeros(4)
    with interpreted():
        assert x.is_cuda
    assert not x.is_cuda
    with pytest.raises(MemoryFinding), interpreted():
        write_kernel[(1,)](x, BLOCK=8)
    assert not x.is_cuda


def test_findings_outside_of_any_session_are_raised() -> None:
    """A plain launch is refused what would corrupt memory, and nobody records its accesses."""
    shift_kernel[(4,)](torch.arange(32.0), BLOCK=8)
    with pytest.raises(MemoryFinding, match="out-of-bounds-store"):
        write_kernel[(1,)](torch.zeros(6), BLOCK=8)


@pytest.mark.parametrize(("value", "expected"), [(None, "batched"), ("serial", "serial"), ("batched", "batched")])
def test_the_environment_chooses_for_launches_outside_of_a_session(
    monkeypatch: pytest.MonkeyPatch, value: str | None, expected: str
) -> None:
    """PYTEST_FUSION_EXECUTOR=serial runs them one program after the other, without a reason."""
    assert ENVIRONMENT == "PYTEST_FUSION_EXECUTOR"
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    if value is not None:
        monkeypatch.setenv(ENVIRONMENT, value)
    seen: list[Execution] = []
    with listening(seen.append):
        write_kernel[(2,)](torch.zeros(16), BLOCK=8)
    assert seen == [Execution("write_kernel", (2, 1, 1), expected)]


def fresh(script: str) -> str:
    """The output of ``script`` in a process that was told nothing about the lane."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_triton_imported_before_and_not_interpreted_is_an_error() -> None:
    """Entering a session says what to do, rather than running nothing of what was asked for."""
    script = """
        import triton
        from pytest_fusion.interpreter import interpreted
        try:
            with interpreted():
                print("entered")
        except Exception as error:
            print(type(error).__name__, error)
    """
    text = fresh(script)
    assert text.startswith("FusionError Triton was imported, and this kernel made, before")
    assert "TRITON_INTERPRET=1" in text


@pytest.mark.slow
def test_importing_the_module_switches_the_lane_on() -> None:
    """Imported before Triton, it needs no environment variable, and brings in neither Triton nor torch by itself."""
    script = """
        import sys
        from pytest_fusion.interpreter import interpreted
        print(sorted({"triton", "torch"} & set(sys.modules)))
        with interpreted() as session:
            import triton
            print(type(triton.jit(lambda: None)).__name__, session.launches)
    """
    first, second = fresh(script).splitlines()
    assert first == "[]"
    assert second == "InterpretedFunction []"
