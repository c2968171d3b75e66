"""What a call would launch on a GPU, with kernels that are interpreted."""

from __future__ import annotations

import torch

from pytest_fusion.run.fused import bare
from pytest_fusion.run.measure.launches import Modelled, count, modelled
from tests.interpreted import triton_interpreted

triton = triton_interpreted("the interpreter would stay on for tests of a GPU")

tl = triton.language
T = torch.Tensor
X = torch.randn(100)


@triton.jit
def double_kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)


@triton.autotune([triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64})], key=["n"], reset_to_zero=["out"])
@triton.jit
def tuned_kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)


def doubled(x: T) -> T:
    out = torch.empty_like(x)
    double_kernel[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), BLOCK=64)
    return out


@torch.library.custom_op("fusion_counting::launched", mutates_args=())
def launched(x: T) -> T:
    return doubled(x)


def restore(x: T) -> None:
    x.fill_(1)


def seen(call: object, x: T = X) -> Modelled:
    with bare():
        return modelled(lambda: call(x), x)  # type: ignore[operator]


def test_launches_count_in_and_outside_of_operators() -> None:
    """A launch is a kernel by its own name, and the operator around it is none."""
    for call in (doubled, launched):
        found = seen(call)
        assert found.counts.names == (("double_kernel", 1),)
        assert found.counts.doubts == ()
    assert seen(lambda x: doubled(doubled(x))).counts.names == (("double_kernel", 2),)


def test_a_launch_of_no_programs_is_none() -> None:
    """Triton does not launch an empty grid."""
    assert seen(lambda x: double_kernel[(0,)](x, x, 0, BLOCK=64)).counts.kernels == 0


def test_what_a_kernel_gets_lies_on_the_device() -> None:
    """A fill counts once a kernel gets its memory; what was computed on the host and brought over does not."""

    def fused(x: T) -> T:
        out = torch.zeros(100, device=x.device)
        table = torch.arange(100).mul(2).to(x.device)
        double_kernel[(2,)](table, out, 100, BLOCK=64)
        return x

    assert seen(fused).counts.names == (("aten::zeros", 1), ("double_kernel", 1))


def test_tuning_is_not_counted() -> None:
    """A call that tunes clears what `reset_to_zero` names; counting starts after one."""

    def fused(x: T) -> T:
        out = torch.empty_like(x)
        tuned_kernel[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](x, out, 100)
        return out

    found = count(lambda: fused(X), X, torch.device("cpu"))
    assert getattr(found, "names", None) == (("tuned_kernel", 1),), found


def test_calls_that_write_find_their_inputs_put_back() -> None:
    """`prepare` runs before the call that counts, and is not counted."""
    x = torch.ones(3)
    values: list[float] = []

    def fused() -> None:
        values.append(float(x[0]))
        x.mul_(2)

    found = count(fused, x, torch.device("cpu"), prepare=lambda: restore(x))
    assert values == [1.0, 1.0]
    assert getattr(found, "names", None) == (("aten::mul_", 1),), found
