"""What a shadow run does around the operations: aliasing, random numbers, foreign code, precision switches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pytest_fusion.oracle import Drawn, run_lanes


@pytest.fixture
def x() -> Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(7))


def test_same_seed_same_lanes(x: Tensor) -> None:
    """Two runs with one seed give bitwise equal lanes, another seed gives others."""
    first, again, other = (run_lanes(lambda: [x.softmax(-1)], seed=s).outputs[0].lanes for s in (1, 1, 2))

    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_product_rounds_in_inference_mode(x: Tensor) -> None:
    """There ``matmul`` arrives whole, and its lanes are those of the product that it is."""

    def call() -> list[Tensor]:
        with torch.inference_mode():
            return [x @ x.t()]

    found, plain = run_lanes(call, seed=1), run_lanes(lambda: [x @ x.t()], seed=1)

    assert (found.outputs[0].lanes != found.outputs[0].oracle).any()
    assert torch.equal(found.outputs[0].lanes, plain.outputs[0].lanes)


def test_lists_return_what_torch_returns(x: Tensor) -> None:
    """An operation on lists has other 16-bit results than the same one on a tensor and a number: natively its own."""

    def call() -> list[Tensor]:
        values = [x.bfloat16(), x[:3].bfloat16()]
        torch._foreach_mul_(values, 0.3)
        return values

    found = run_lanes(call, seed=1)

    assert all(torch.equal(output.native, value) for output, value in zip(found.outputs, call(), strict=True))


def test_copies_that_do_not_block_have_lanes(x: Tensor) -> None:
    """``copy_(source, True)`` is a conversion like any other."""
    found = run_lanes(lambda: [torch.empty_like(x, dtype=torch.bfloat16).copy_(x * 1.1, True)], seed=1)

    assert found.fallbacks == ()


def test_global_random_state_is_left_alone(x: Tensor) -> None:
    """Lanes draw nothing from torch's global generator."""
    torch.manual_seed(3)
    before = torch.get_rng_state()

    run_lanes(lambda: [F.gelu(x @ x.t())], seed=1)

    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("how", ["whole", "part", "zero"])
def test_what_is_overwritten_decides_no_rounding(how: str, x: Tensor) -> None:
    """Memory from empty() holds anything: subnormals there cost no random number, or all later ones were others."""

    def lanes(found: float) -> Tensor:
        def call() -> list[Tensor]:
            whole = torch.full_like(x, found)
            if how == "zero":
                whole.zero_().add_(x)
            else:
                (whole if how == "whole" else whole[:]).copy_(x * 1.1)
            return [whole * x.exp()]

        return run_lanes(call, seed=3).outputs[0].lanes

    assert torch.equal(lanes(0.0), lanes(1e-40))


def test_random_references_are_reported_and_share_the_native_draw(x: Tensor) -> None:
    """Dropout zeroes the same elements in every lane as natively."""
    found = run_lanes(lambda: [F.dropout(x, 0.4)], seed=1)

    out = found.outputs[0]
    assert found.drawn == Drawn.OWN
    assert bool(((out.lanes == 0) == (out.native == 0)).all())
    torch.testing.assert_close(out.oracle, torch.where(out.native == 0, 0.0, x.double() / 0.6), rtol=1e-12, atol=0)


def test_draws_from_a_generator_that_is_passed_are_told_apart(x: Tensor) -> None:
    """Only these may be the same in every call; in place, and of integers, too."""

    def passed() -> list[Tensor]:
        generator = torch.Generator().manual_seed(3)
        noise = torch.rand(x.shape, generator=generator)
        return [x * noise.normal_(generator=generator), torch.randint(9, x.shape, generator=generator)]

    assert run_lanes(passed, seed=1).drawn == Drawn.PASSED
    assert run_lanes(lambda: [*passed(), torch.rand_like(x)], seed=1).drawn == Drawn.PASSED | Drawn.OWN


def test_kind_f_rounds_to_float32_inside(x: Tensor) -> None:
    """A bfloat16 reference of kind F scatters by float32's rounding, of kind E by bfloat16's."""
    low = x.bfloat16()
    errors = {}
    for kind in ("E", "F"):
        out = run_lanes(lambda: [(low * 1.1).exp() * 0.3], kind=kind, seed=1).outputs[0]
        errors[kind] = float(((out.lanes - out.oracle) / out.oracle).abs().max())

    assert 2**-10 < errors["E"] < 2**-5
    assert errors["F"] < 2**-19


def test_the_last_rounding_is_left_to_the_reader(x: Tensor) -> None:
    """Lanes of a single operation come before its rounding to the native dtype."""
    low = x.bfloat16()

    out = run_lanes(lambda: [low * 1.125], seed=1).outputs[0]

    assert torch.equal(out.lanes, (low.double() * 1.125).expand(6, 8, 32))


def test_a_number_that_float32_does_not_hold_is_off_alike_everywhere(x: Tensor) -> None:
    """Kernels hold 1.1 rounded, or as 1 + 0.1 rounded twice: one factor a lane, within a unit of float32."""
    out = run_lanes(lambda: [x * 1.1], seed=1).outputs[0]

    factors = out.lanes / (x.double() * 1.1)
    assert bool(((factors - factors[:, :1, :1]).abs() < 2**-50).all())
    sizes = (factors[:, 0, 0] - 1).abs()
    assert bool((sizes <= 2**-24).all())
    assert len(set(sizes.tolist())) == len(sizes)


def test_exact_values_stay_exact_in_every_lane(x: Tensor) -> None:
    """What float32 holds exactly is not disturbed by stochastic rounding: masks, zeros, powers of two, infinities."""
    bits = torch.tensor([0.0, 1.0, -2.0, 0.5, float("inf"), 1024.0])

    out = run_lanes(lambda: [(bits * 2.0 + 0.0) * 4.0], seed=1).outputs[0]

    assert torch.equal(out.lanes, (bits.double() * 8).expand(6, 6))


def test_inputs_written_in_place_are_results(x: Tensor) -> None:
    """A reference that writes its input through a view has lanes for what was written and what was not."""
    mine = x.clone()

    def reference() -> list[Tensor]:
        mine[2:4].mul_(1.1).exp_()
        return [mine, mine]

    first, second = run_lanes(reference, seed=1).outputs

    expected = x.double()
    expected[2:4] = (expected[2:4] * 1.1).exp()
    torch.testing.assert_close(first.oracle, expected, rtol=1e-12, atol=0)
    assert torch.equal(first.lanes[:, 0], x[0].double().expand(6, 32))
    assert not torch.equal(first.lanes[0, 2], first.lanes[1, 2])
    assert torch.equal(first.lanes, second.lanes)


def test_untouched_and_awkward_results(x: Tensor) -> None:
    """Inputs, scalars, empty, non-contiguous, integer and float64 results all have lanes of their shape."""
    results = _again(x)

    found = run_lanes(lambda: _again(x), seed=1)

    assert [tuple(o.lanes.shape) for o in found.outputs] == [(6, *r.shape) for r in results]
    assert found.outputs[4].lanes.dtype == torch.int64
    assert found.outputs[5].lanes.dtype == torch.bool
    assert all(torch.equal(o.native, r) for o, r in zip(found.outputs, results, strict=True))


def _again(x: Tensor) -> list[Tensor]:
    return [
        x,
        x.sum(),
        x[:0] * 1.1,
        (x * 1.1).t(),
        (x * 1.1).argmax(-1),
        x > 0,
        x.double() * 1.1,
        (x * 1.1)[None].expand(3, 8, 32),
    ]


def test_quantisation_happens_in_every_lane() -> None:
    """Values on a tie go both ways, codes far from one are the same in all lanes."""
    x = torch.tensor([[127.0, 10.5, 20.0, -33.5]])

    out = run_lanes(lambda: [(x / (x.amax() / 127)).round().to(torch.int8)], lanes=24, seed=1).outputs[0]

    assert set(out.lanes[:, 0, 1].tolist()) == {10, 11}
    assert set(out.lanes[:, 0, 2].tolist()) == {20}


def test_fp8_is_read_back_as_its_code() -> None:
    """What an fp8 tensor is used for sees the quantised value, in the oracle too; as a result it is unquantised."""
    x = torch.tensor([1.03, 200.7])

    def reference() -> list[Tensor]:
        q = (x * 1.5).to(torch.float8_e4m3fn)
        return [q, q.float()]

    codes, values = run_lanes(reference, seed=1).outputs

    torch.testing.assert_close(codes.oracle, x.double() * 1.5, rtol=1e-12, atol=0)
    assert values.oracle.tolist() == [1.5, 288.0]


def test_custom_function_and_unknown_operation(x: Tensor) -> None:
    """An autograd.Function is followed; an operation without a rule is run per lane and listed."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, value: Tensor) -> Tensor:
            return value * 2.2

        @staticmethod
        def backward(_ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2.2

    plain = run_lanes(lambda: [Doubled.apply(x.requires_grad_())], seed=1)  # type: ignore[no-untyped-call]
    unknown = run_lanes(lambda: [torch.polygamma(1, x.abs() + 1.1)], seed=1)

    torch.testing.assert_close(plain.outputs[0].oracle, x.detach().double() * 2.2, rtol=1e-12, atol=0)
    assert plain.fallbacks == ()
    assert unknown.fallbacks == ("polygamma",)
    torch.testing.assert_close(
        unknown.outputs[0].oracle, torch.polygamma(1, x.detach().double().abs() + 1.1), rtol=1e-12, atol=0
    )


def test_custom_operator_is_run_on_every_lane(x: Tensor) -> None:
    """A torch.library operator that insists on float32 runs on float32 lanes."""
    with torch.library._scoped_library("lanes_test", "FRAGMENT") as library:
        library.define("halve(Tensor x) -> Tensor")

        def halve(value: Tensor) -> Tensor:
            if value.dtype != torch.float32:
                raise TypeError("float32 only")
            return torch.from_numpy(value.numpy() * 0.55)

        library.impl("halve", halve, "CPU")
        found = run_lanes(lambda: [torch.ops.lanes_test.halve(x * 1.1)], seed=1)

    out = found.outputs[0]
    assert found.fallbacks == ("lanes_test::halve",)
    torch.testing.assert_close(out.oracle, x.double() * 1.1 * 0.55, rtol=1e-6, atol=0)
    assert not torch.equal(out.lanes[0], out.lanes[1])


def test_memory_written_behind_the_dispatcher_is_noticed(x: Tensor) -> None:
    """A result of empty() that no operation wrote came from a foreign kernel, and is listed as such."""

    def reference() -> list[Tensor]:
        out = torch.empty(8, 32)
        with torch.utils._python_dispatch._disable_current_modes():
            out.copy_(x * 1.1)
        return [out * 2]

    found = run_lanes(reference, seed=1)

    assert found.fallbacks == ("memory written outside ATen",)
    torch.testing.assert_close(found.outputs[0].oracle, x.double() * 1.1 * 2, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(32,), (8, 32), (1, 32), (3, 8, 32)])
def test_a_copy_in_place_is_of_the_new_value(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """``copy_`` into another dtype, or over more dimensions, leaves the source in every lane, not the old value."""
    old = torch.zeros(3, 8, 32, dtype=dtype)
    new = torch.randn(shape, generator=torch.Generator().manual_seed(3))

    def reference() -> list[Tensor]:
        old.copy_(new * 1.1)
        return [old]

    out = run_lanes(reference, seed=1, lanes=3).outputs[0]

    wanted = (new.double() * 1.1).expand(3, 8, 32)
    torch.testing.assert_close(out.oracle, wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close(out.lanes, wanted.expand(3, 3, 8, 32), rtol=1e-2, atol=0)


def test_a_custom_operator_that_writes(x: Tensor) -> None:
    """An operator that only writes its argument is run on copies of every lane, then natively."""
    with torch.library._scoped_library("lanes_test", "FRAGMENT") as library:
        library.define("scale_(Tensor(a!) x, float by) -> ()")
        library.impl("scale_", lambda value, by: (value.mul_(by), None)[1], "CPU")

        def reference() -> list[Tensor]:
            y = x * 1.1
            torch.ops.lanes_test.scale_(y[1:3], 0.3)
            return [y]

        found = run_lanes(reference, seed=1)

    expected = x.double() * 1.1
    expected[1:3] *= 0.3
    torch.testing.assert_close(found.outputs[0].oracle, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.outputs[0].native, expected.float())


def test_partial_sums_that_overflow_show_in_the_lanes() -> None:
    """Where an order of additions reaches an infinity, some lane holds it; where none does, no lane does."""
    x = torch.tensor([[3e38, 3e38, -3e38, -3e38], [3e38, -1e38, 1.0, 2.0]])

    out = run_lanes(lambda: [x.sum(-1)], seed=1).outputs[0]

    assert set(out.lanes[:, 0].isfinite().tolist()) == {True, False}
    assert bool(out.lanes[:, 1].isfinite().all())


def test_masked_rows_have_finite_lanes() -> None:
    """Minus infinity in a row of logits is a weight of exactly zero in every lane."""
    x = torch.randn(4, 8)
    x[:, 5:] = -torch.inf

    out = run_lanes(lambda: [x.softmax(-1)], seed=1).outputs[0]

    assert bool((out.lanes[..., 5:] == 0).all())
    assert bool(torch.isfinite(out.lanes).all())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_any_grad_mode(x: Tensor, mode: Any) -> None:
    """References run under no_grad and inference_mode alike."""

    def reference() -> list[Tensor]:
        with mode():
            return [F.layer_norm(F.linear(x, x), (8,))]

    found = run_lanes(reference, seed=1)

    expected = F.layer_norm(F.linear(x.double(), x.double()), (8,))
    assert found.fallbacks == ()
    torch.testing.assert_close(found.outputs[0].oracle, expected, rtol=1e-9, atol=1e-9)


def test_probabilities_are_rounded_where_a_kernel_would_store_them() -> None:
    """In ``softmax(q k) v`` with upcast inputs, lanes of kind E store the weights in the inputs' dtype, kind F do not.

    A float32 reference on float32 inputs keeps float32 weights: TF32 and bfloat16 shortcuts stay visible there.
    """
    generator = torch.Generator().manual_seed(2)
    q, v = torch.randn(8, 16, generator=generator), torch.randn(8, 16, generator=generator)

    def spread(low: bool, kind: str) -> float:
        a, b = (q.bfloat16().float(), v.bfloat16().float()) if low else (q, v)
        out = run_lanes(lambda: [(a @ a.t()).softmax(-1) @ b], kind=kind, seed=1).outputs[0]  # type: ignore[arg-type]
        return float((out.lanes - out.oracle).abs().max())

    assert spread(True, "E") > 2**-11
    assert spread(True, "F") < 2**-16
    assert spread(False, "E") < 2**-16


def test_masks_are_no_low_precision_input() -> None:
    """A product with a matrix of ones, as in a scan by matmul, does not excuse storing the other operand low."""
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(3)) * 1.1

    out = run_lanes(lambda: [torch.ones(16, 16).tril() @ (x * 1.125)], seed=1).outputs[0]

    assert float((out.lanes - out.oracle).abs().max()) < 2**-17


def test_subnormal_inputs_may_be_flushed() -> None:
    """Half of the lanes read subnormal float32 inputs as zero, the others as they are; a copy keeps them."""
    x = torch.full((4, 8), 1e-40)

    scaled, copied = run_lanes(lambda: [x * 1e10, x.clone()], seed=1).outputs

    assert (scaled.lanes == 0).flatten(1).all(-1).tolist() == [True, False] * 3
    assert torch.equal(copied.lanes, x.double().expand(6, 4, 8))


@pytest.mark.parametrize("loss", [F.mse_loss, F.huber_loss, F.smooth_l1_loss])
def test_the_gradient_of_a_mean_over_nothing_is_one_over_nothing(loss: Any) -> None:
    """ATen's decompositions divide by the number of elements; gradients of all losses by mean went unjudged."""
    x = torch.empty(0, 3, requires_grad=True)

    def gradient() -> list[torch.Tensor]:
        return list(torch.autograd.grad(loss(x, torch.empty(0, 3)), [x]))

    (lanes,) = run_lanes(gradient, lanes=2, seed=1).outputs
    assert lanes.native.shape == (0, 3)
