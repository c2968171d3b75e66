"""Every operation of the Triton language, batched against one program at a time: the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pytest_fusion import interpreter

interpreter.enable()
triton = pytest.importorskip("triton")
if not interpreter.installed():
    pytest.skip(str(interpreter.problem()), allow_module_level=True)

from pytest_fusion.interpreter import interpreted  # noqa: E402 - the lane must be on before Triton is imported
from tests.interpreter.differential import operations  # noqa: E402
from tests.interpreter.differential.harness import Kernel, assert_same, imported, launched  # noqa: E402
from tests.sweeps import sweep  # noqa: E402

KERNELS = operations.kernels()
# Of each family two dtypes run each time, as below.
NARROW = ("-int8", "-int16", "-int32", "-int64", "-uint8", "-uint16", "-uint64", "-fp16", "-fp32", "-fp64")
# Many programs cost most one after the other: two dtypes of each family, and a sixth of what their kernels store.
MANY = [k.thinned(6, i) for i, k in enumerate(KERNELS) if k.name.rpartition("-")[2] in {"bf16", "uint32"}]

tl = triton.language


@pytest.mark.filterwarnings("ignore:view is deprecated")
@sweep("kernel", KERNELS, ids=lambda kernel: kernel.name, fast={k.name for k in KERNELS if not k.name.endswith(NARROW)})
def test_an_operation_is_the_same_batched(kernel: Kernel, tmp_path: Path) -> None:
    """The batched executor stores the bits that the serial one stores."""
    assert_same(kernel, tmp_path, (3,))


@pytest.mark.filterwarnings("ignore:view is deprecated")
@sweep(
    "kernel",
    MANY,
    ids=lambda kernel: kernel.name,
    fast={kernel.name for kernel in MANY if kernel.name.endswith("bf16")},
)
def test_operations_are_the_same_in_any_number_of_programs(kernel: Kernel, tmp_path: Path) -> None:
    """So they are for one program, for two, and for so many that numpy takes its vectorised loops."""
    assert_same(kernel, tmp_path, (1, 2, 70))


@triton.jit
def grid_kernel(out, marks, N: tl.constexpr):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = (x * tl.num_programs(1) + y) * tl.num_programs(2) + z
    i = tl.arange(0, N)
    tl.store(out + at * N + i, x * 100 + y * 10 + z + i * 1000)
    if z == 1:
        tl.store(marks + at, tl.num_programs(0) * 10000 + y - x)
    turn = tl.atomic_add(marks + tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2), 1)
    tl.store(out + at * N, turn)


@pytest.mark.parametrize("grid", [(2, 3, 4), (5, 1, 2), (1, 7), (6, 10, 5)])
def test_programs_are_numbered_alike(grid: tuple[int, ...]) -> None:
    """Three-dimensional grids: each program knows its place, and programs come in one order, the last axis fastest."""
    count = torch.Size(grid).numel()
    stored = []
    for executor in ("serial", "batched"):
        out, marks = torch.zeros(count, 4, dtype=torch.int32), torch.zeros(count + 1, dtype=torch.int32)
        launched(lambda out=out, marks=marks: grid_kernel[grid](out, marks, N=4), executor)
        stored.append((out, marks))
    assert torch.equal(stored[0][0], stored[1][0])
    assert torch.equal(stored[0][1], stored[1][1])
    assert stored[1][0][:, 0].tolist() == list(range(count))


_PRINTING = """
import triton
import triton.language as tl

@triton.jit
def kernel(x, FIRST: tl.constexpr):
    p = tl.program_id(0)
    v = tl.load(x + p * 4 + tl.arange(0, 4))
    tl.device_print("loaded", v)
    if p % 2 == 1:
        tl.device_print("odd", p, hex=FIRST)
    for i in range(p):
        tl.device_print("turn", i, v * i)
    tl.device_print("last")
"""


@pytest.mark.parametrize("first", [False, True])
def test_programs_print_the_same(first: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each program prints its own lines with its own values; one statement prints for its programs in their order."""
    module = imported(_PRINTING, tmp_path)
    printed = {}
    for executor in ("serial", "batched"):
        with interpreted(executor=executor) as session:
            module.kernel[(4,)](torch.arange(16.0), FIRST=first)
        lines = capsys.readouterr().out.splitlines()
        programs = [line.partition(")")[0] for line in lines]
        printed[executor] = {program: [line for line in lines if line.startswith(program)] for program in programs}
        loaded = [program for line, program in zip(lines, programs, strict=True) if "loaded" in line]
        assert loaded == [f"({p}, 0, 0" for p in range(4)]
        assert {record.executor for record in session.launches} == {executor}
    assert printed["serial"] == printed["batched"]
