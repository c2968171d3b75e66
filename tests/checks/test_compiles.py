"""Check ``error``: what Triton's compiler refuses is no pass, though the interpreter runs it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_fusion.run.measure.resources import front_end
from pytest_fusion.spec.dims import dim
from pytest_fusion.spec.inputs import tensor
from tests.interpreted import triton_interpreted

triton = triton_interpreted("kernels on tensors of the CPU")

tl = triton.language
from triton.language import reduce as tree  # noqa: E402 - the lane replaces it

T = torch.Tensor
INPUTS = {"x": tensor("n", layouts="contiguous")}
SIZES = {"n": dim(1, 40)}
LIMIT = 9999
TWICE = tl.constexpr(2)


@triton.jit
def leaves_a_loop(x, y, n):
    for i in range(n):
        if i > 9999:
            break
        tl.store(y + i, tl.load(x + i) * 2)


@triton.jit
def returns_in_a_loop(x, y, n):
    for i in range(n):
        if i > 9998:
            return
        tl.store(y + i, tl.load(x + i) * 2)


@triton.jit
def with_a_dict(x, y, n):
    scale = {"by": 2}
    for i in range(n):
        tl.store(y + i, tl.load(x + i) * scale["by"])


@triton.jit
def branches_of_other_dtypes(x, y, n):
    if n > 9999:
        value = 2
    else:
        value = 2.0
    for i in range(n):
        tl.store(y + i, tl.load(x + i) * value)


@triton.jit
def accumulator_of_another_dtype(x, y, n):
    for i in range(n):
        total = 0
        for _ in range(2):
            total += tl.load(x + i)
        tl.store(y + i, total)


@triton.jit
def reads_a_number_of_its_module(x, y, n):
    for i in range(n):
        tl.store(y + i, tl.load(x + i) * 2, mask=i < LIMIT)


@triton.jit
def add(a, b):
    return a + b


@triton.jit
def honest(x, y, n, BLOCK: tl.constexpr, TYPE: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0.0).to(TYPE)
    if tree(value, 0, add) != 12345.0:
        value = tl.where(at < n, value, tl.max(value) - tl.exp(value))
    tl.store(y + at, value * TWICE, mask=at < n)


@triton.jit
def for_other_targets(x, y, n, LEAST: tl.constexpr):
    tl.static_assert(LEAST > 1)
    for i in range(n):
        tl.store(y + i, tl.load(x + i) * 2)


def refused(helper: Any) -> Any:
    """A kernel without a name in a module, around a function of its closure."""

    @triton.jit
    def outer(x, y, n):
        helper(x, y, n)

    return outer


def launcher(kernel: Any, **constants: Any) -> Callable[[T], T]:
    def fused(x: T) -> T:
        y = torch.empty_like(x)
        kernel[(1,)](x, y, x.numel(), **constants)
        return y

    return fused


def twice(x: T) -> T:
    return x * 2


REFUSED = {
    leaves_a_loop: ("break", "unsupported AST node type: Break"),
    returns_in_a_loop: ("if i > 9998:", "`return` statements inside `while` or `for`"),
    with_a_dict: ('scale = {"by": 2}', "unsupported AST node type: Dict"),
    branches_of_other_dtypes: ("if n > 9999:", "between then block (int32) and else block (fp32)"),
    accumulator_of_another_dtype: ("for _ in range(2):", "initial type int32 but is re-assigned to fp32 in loop"),
    reads_a_number_of_its_module: ("tl.store(y + i, tl.load(x + i) * 2, mask=i < LIMIT)", "global variable LIMIT"),
    refused(leaves_a_loop): ("break", "unsupported AST node type: Break"),
}


def noted(*calls: Callable[[T], T], dtype: torch.dtype = torch.float32) -> front_end.Launched:
    launched = front_end.Launched()
    with front_end.launched(launched):
        for call in calls:
            call(torch.ones(7, dtype=dtype))
    return launched


def test_what_the_compiler_refuses_has_its_line_and_sentence() -> None:
    """Each of these kernels is right in every case that is interpreted, and no GPU can run it."""
    found = front_end.compiled_by_front_end(noted(*map(launcher, REFUSED)))
    assert len(found) == len(REFUSED)
    for one, (line, sentence) in zip(found, REFUSED.values(), strict=True):
        assert (one.status, one.file, one.line) == ("refused", __file__, line_of(line)), one
        assert sentence in one.reason


@triton.jit
def through_a_block(x, y, n):
    block = tl.make_block_ptr(x, (n,), (1,), (0,), (8,), (0,))
    at = tl.arange(0, 8)
    tl.store(y + at, tl.load(block, boundary_check=(0,)) * 2, mask=at < n)


def test_a_warning_of_triton_is_no_refusal() -> None:
    """Block pointers are deprecated, and many a project has warnings as errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        launched = noted(launcher(through_a_block))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (found,) = front_end.compiled_by_front_end(launched)
    assert found.status not in ("refused", "unknown"), found


def test_a_refused_kernel_fails_its_test(examine: Any) -> None:
    """With the line, what stands there, and the compiler's own sentence."""
    record = examine(launcher(leaves_a_loop), twice, INPUTS, dims=SIZES, cases=1)
    assert (record.verdict, record.failed_check, record.cause) == ("fail", "error", "does-not-compile")
    assert f"test_compiles.py:{line_of('break')} (break): unsupported AST node type: Break" in record.message


def line_of(code: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.strip() == code)


@pytest.mark.usefixtures("unexplained")
def test_what_does_not_compile_is_found_beside_what_is_wrong(examine: Any) -> None:
    """One run reports both."""
    record = examine(launcher(leaves_a_loop), lambda x: x * 3, INPUTS, dims=SIZES, cases=1)
    assert {found["check"] for found in record.findings} == {"values", "error"}
    assert "does-not-compile" in {found["code"] for found in record.findings}


def test_a_kernel_that_compiles_passes(examine: Any) -> None:
    """With a function from ``triton.language``, a constexpr of its module, a dtype as an argument, another kernel."""
    kernel = launcher(honest, BLOCK=64, TYPE=tl.float32)
    record = examine(kernel, twice, INPUTS, dims=SIZES, cases=1)
    assert (record.verdict, record.checks["error"]["verdict"]) == ("pass", "pass"), record.message


def test_each_kind_of_argument_is_compiled_and_no_size_twice() -> None:
    """Blocks of other sizes are compiled once for each dtype, and no tensor's memory is held until then."""
    launched = front_end.Launched()
    with front_end.launched(launched):
        for dtype in (torch.float16, torch.float32):
            for block in (64, 128, 256):
                launcher(honest, BLOCK=block, TYPE=tl.float32)(torch.zeros(7, dtype=dtype))
    assert [live.specialised[0][0] for live in launched.launches] == ["*fp16", "*fp32"]
    assert not any(isinstance(value, T) for live in launched.launches for value in live.bound.values())


def test_without_a_child_nothing_is_known_and_nothing_fails(examine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no process can be forked, whether the kernels compile is not known."""
    monkeypatch.setattr(front_end, "can_fork", lambda: "no fork here")
    record = examine(launcher(leaves_a_loop), twice, INPUTS, dims=SIZES, cases=1)
    assert (record.verdict, record.checks["error"]["verdict"]) == ("pass", "unknown")
    assert "no fork here" in record.checks["error"]["reason"]


def test_a_kernel_that_refuses_the_target_itself_is_unknown() -> None:
    """A ``static_assert`` is the kernel's own: for another target it may hold."""
    launched = noted(launcher(for_other_targets, LEAST=2))
    launched.launches[0].bound["LEAST"] = 1
    (found,) = front_end.compiled_by_front_end(launched)
    assert found.status == "unknown"
    assert "static_assert" in found.reason
