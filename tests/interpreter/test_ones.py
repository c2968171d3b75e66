"""Integer arguments that are 1, which Triton's compiler takes for constants."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from pytest_fusion.interpreter import interpreted


def _filled(out, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK).to(tl.int64)
    tl.store(out + at, count.to(tl.float32), mask=at < count)


def _documented(out: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK).to(tl.int64)
    tl.store(out + at, count.to(tl.float32), mask=at < count)


def _cast(out, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK).to(tl.int64)
    tl.store(out + at, tl.cast(count, tl.float32) + (count * at).to(tl.float32) * 0, mask=at < count)


def _drawn(out, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, (tl.rand(count, at) < 2).to(tl.float32), mask=at < tl.core.to_tensor(count).to(tl.int64))


def _typed(out, count: tl.int64, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, count.to(tl.float32), mask=at < count)


plain, documented, cast, typed = triton.jit(_filled), triton.jit(_documented), triton.jit(_cast), triton.jit(_typed)
drawn = triton.jit(_drawn)
unspecialised = triton.jit(do_not_specialize=["count"])(_filled)
by_position = triton.jit(do_not_specialize=[1])(_filled)


def launched(kernel: Any, count: int, executor: str) -> torch.Tensor:
    out = torch.zeros(16)
    with interpreted(executor=executor):
        kernel[(1,)](out, count, BLOCK=16)
    return out


@pytest.mark.parametrize("executor", ["batched", "serial"])
@pytest.mark.parametrize("kernel", [plain, documented], ids=["plain", "documented"])
def test_a_constant_has_no_dtype(kernel: Any, executor: str) -> None:
    """As the compiler says, in its words, with what to write instead."""
    assert launched(kernel, 2, executor).tolist() == [2.0, 2.0] + [0.0] * 14
    with pytest.raises(Exception, match=r"'int' object has no attribute 'to': count is 1.*tl\.cast\(count"):
        launched(kernel, 1, executor)


@pytest.mark.parametrize("executor", ["batched", "serial"])
@pytest.mark.parametrize(
    "kernel",
    [cast, drawn, typed, unspecialised, by_position],
    ids=["cast", "drawn", "typed", "name", "position"],
)
def test_what_compiles_runs(kernel: Any, executor: str) -> None:
    """A cast, a seed, an annotated argument, and one that is not to be specialised."""
    assert launched(kernel, 1, executor).tolist() == [1.0] + [0.0] * 15
