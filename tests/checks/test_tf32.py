"""Hazard `tf32-products`: float32 factors that a GPU rounds to TF32, right otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pytest_fusion.case.case_model import Case, TensorCase
from pytest_fusion.checks.context import CaseResult
from pytest_fusion.checks.kernels import tf32
from pytest_fusion.checks.verdict import Verdict
from pytest_fusion.interpreter.memory.memory_findings import Site
from pytest_fusion.run import pristine
from pytest_fusion.run.compiled import products_in
from pytest_fusion.spec.inputs import tensor
from tests.interpreted import triton_interpreted

triton = triton_interpreted("kernels on tensors of the CPU")

tl = triton.language
T = torch.Tensor
INPUTS = {"a": tensor("16 16", layouts="contiguous"), "b": tensor("16 16", layouts="contiguous")}


@triton.jit
def dot_kernel(a, b, y, PRECISION: tl.constexpr):
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    product = tl.dot(tl.load(a + at).to(tl.float32), tl.load(b + at).to(tl.float32), input_precision=PRECISION)
    tl.store(y + at, product)


LINE = dot_kernel.fn.__code__.co_firstlineno + 3


def by_kernel(precision: str | None) -> Callable[[T, T], T]:
    def fused(a: T, b: T) -> T:
        y = torch.empty_like(a)
        dot_kernel[(1,)](a, b, y, PRECISION=precision)
        return y

    return fused


def product(a: T, b: T) -> T:
    return a @ b


def cut(x: T, bits: int) -> T:
    """Without the last bits, as tensor cores take float32."""
    return (x.contiguous().view(torch.int32) & -(1 << bits)).view(torch.float32)


def by_tensor_cores(a: T, b: T) -> T:
    return cut(a, 13) @ cut(b, 13)


def in_bfloat16(a: T, b: T) -> T:
    return a.bfloat16().float() @ b.bfloat16().float()


def hazards(result: CaseResult) -> list[Verdict]:
    return [verdict for verdict in result.verdicts if verdict.status == "hazard"]


@pytest.fixture
def judge(judge_one: Any) -> Any:
    def judged(fused: Callable[[T, T], T], dtype: str = "float32", **keywords: Any) -> CaseResult:
        case = Case({}, dtype, {name: TensorCase(dtype) for name in INPUTS}, seed=1)
        result = judge_one(fused, product, INPUTS, case=case, dtypes=dtype, **keywords)
        assert isinstance(result, CaseResult)
        return result

    return judged


@pytest.mark.parametrize("precision", [None, "tf32"])
def test_a_float32_product_in_the_default_precision_is_named_with_its_line(precision: str | None, judge: Any) -> None:
    """The lane computes it in float32, where it is right; a GPU does not."""
    result = judge(by_kernel(precision))
    assert result.failure is None
    (found,) = hazards(result)
    assert (found.check, found.code) == ("values", "tf32-products")
    assert f"dot_kernel at test_tf32.py:{LINE} (product = tl.dot(" in found.reason
    assert 'input_precision="ieee"' in found.reason


@pytest.mark.parametrize("precision", ["ieee", "tf32x3"])
def test_products_that_keep_float32_are_no_hazard(precision: str, judge: Any) -> None:
    """As written, or in three products."""
    result = judge(by_kernel(precision))
    assert (result.failure, hazards(result)) == (None, [])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_tf32_holds_is_no_hazard(dtype: str, judge: Any) -> None:
    """Factors that were 16 bits lose nothing."""
    result = judge(by_kernel(None), dtype)
    assert (result.failure, hazards(result)) == (None, [])


@pytest.fixture
def compiled() -> Iterator[None]:
    """As where a kernel with such a product was compiled and launched."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tf32, "tf32_products", _Noting)
        pristine.take()
        yield
    pristine.take()


class _Noting:
    def __init__(self, into: dict[Site, None]) -> None:
        into[Site("dot_kernel", __file__, LINE)] = None

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("gradients", [False, True])
def test_what_tf32_explains_is_right(gradients: bool, judge: Any) -> None:
    """By the second yardstick, whose factors are rounded before they are multiplied; gradients too."""
    result = judge(_with_backward if gradients else by_tensor_cores, grad=gradients)
    assert result.failure is None, result.failure.reason
    assert [verdict.code for verdict in hazards(result)] == ["tf32-products"]


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("fused", [in_bfloat16, lambda a, b: by_tensor_cores(a, b) * 1.01])
def test_what_tf32_does_not_explain_is_wrong(fused: Any, judge: Any) -> None:
    """Factors of fewer bits, and another result."""
    result = judge(fused)
    assert (result.failure.check, hazards(result)) == ("values", [])


def test_without_a_product_in_tf32_nothing_is_excused(judge: Any) -> None:
    """The yardstick is for kernels that were seen to have one."""
    assert judge(by_tensor_cores).failure.check == "values"


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: T, b: T) -> T:
        ctx.save_for_backward(a, b)
        return by_tensor_cores(a, b)

    @staticmethod
    def backward(ctx: Any, grad: T) -> tuple[T, T]:  # type: ignore[override]
        a, b = ctx.saved_tensors
        return by_tensor_cores(grad, b.T), by_tensor_cores(a.T, grad)


def _with_backward(a: T, b: T) -> T:
    found: T = _Backward.apply(a, b)
    return found


PTX = """
\t.loc\t1 40 8
\tmma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r1 }, { %r2 }, { %r3 }, { %r1 };
\t.loc\t1 45 20
\tINSTRUCTION
\t.loc\t1 46 20
\tst.global.b32 [ %rd1 ], %r1;
\t.file\t1 "/home/me/kernels.py"
"""


@pytest.mark.parametrize(
    "instruction",
    [
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 { %r1 }, { %r2 }, { %r3 }, { %r1 };",
        "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 {%r255}, %rd77, %rd78, %p1, 1, 1;",
        "@%p10 tcgen05.mma.cta_group::1.kind::tf32 [ %r304 + 0 ], %rd209, %rd77, %r143, %p9;",
    ],
)
def test_machine_code_says_which_line_multiplies_in_tf32(instruction: str) -> None:
    """Of Ampere, Hopper and Blackwell, as Triton 3.7.1 writes it."""
    assert products_in(PTX.replace("INSTRUCTION", instruction), "k") == [Site("k", "/home/me/kernels.py", 45)]
    assert products_in(PTX, "k") == []
