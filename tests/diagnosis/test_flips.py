"""What a size, equal slices or lost digits seem to explain, beside the kernels of which they are true."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_fusion.case.case_model import Case
from pytest_fusion.checks.gradients import blame, gradients
from pytest_fusion.diagnosis.diagnose import diagnose
from pytest_fusion.diagnosis.rules import roundings
from pytest_fusion.diagnosis.rules.roundings import stands_apart
from pytest_fusion.spec.inputs import tensor
from tests.diagnosis.wrong import ROWS, scaled

T = torch.Tensor
MERGED = {"o": tensor("parts hidden"), "lse": tensor("parts")}


def double(x: T) -> T:
    return x * 2


def coarse_everywhere(x: T) -> T:
    """An error that only the average over 16 elements and more shows."""
    exact = x.double() * 2
    return (exact * (1 + 1.4 * 2.0**-24 * torch.sign(torch.sin(1e6 * exact)))).to(x.dtype)


def stops_at_fifteen(x: T) -> T:
    return torch.cat([x[:15] * 2, torch.zeros_like(x[15:])])


@pytest.mark.parametrize(("fused", "cause"), [(coarse_everywhere, "unexplained"), (stops_at_fifteen, "block-limit")])
def test_a_size_from_which_an_average_is_taken_is_no_limit(lab_of: Any, fused: Any, cause: str) -> None:
    """Below 16 elements there is no average to be wrong; what is not stored past 15 is a limit all the same."""
    lab = lab_of(fused, double, {"x": tensor("n")}, {"dim n": 16, "dtype": "float32"}, dtypes="float32")
    assert diagnose(lab).cause == cause


def merged(o: T, lse: T) -> T:
    return (torch.softmax(lse, 0)[:, None] * o).sum(0)


def merged_by_mean(o: T, lse: T) -> T:
    return o.sum(0) / max(len(lse), 1)


def merged_in_turn(o: T, lse: T) -> T:
    """Each part with the share of the next one, but for the first two columns."""
    turned = merged(o.roll(1, 0), lse)
    return torch.cat([merged(o, lse)[:2], turned[2:]])


def unbiased(x: T) -> T:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) * (x.shape[1] - 1) / x.shape[1] + 0.1).sqrt()


def biased(x: T) -> T:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 0.1).sqrt()


@pytest.mark.slow
def test_equal_slices_tell_places_from_shares(lab_of: Any) -> None:
    """Of equal parts any mean is right; a part with another one's share is a matter of places."""
    choice = {"dim parts": 4, "dim hidden": 6, "dtype": "float32"}
    for fused, causes in ((merged_by_mean, {"unexplained"}), (merged_in_turn, {"wrong-index-map"})):
        found = diagnose(lab_of(fused, merged, MERGED, choice, dtypes="float32"))
        assert found.cause in causes, found


@pytest.mark.slow
def test_equal_slices_without_variance_tell_nothing(lab_of: Any) -> None:
    """Where all elements of a row are equal a norm is 0, whatever it divides by."""
    choice = {"dim rows": 3, "dim hidden": 6, "dtype": "float32"}
    found = diagnose(lab_of(biased, unbiased, ROWS, choice, dtypes="float32"))
    assert found.cause == "unexplained", found


def misplaced_floor(x: T) -> T:
    """Off by about a millionth, by a smooth function of the values."""
    return (x.double() * (1 + 3e-6 * torch.cos(x.double()) * (x != x.round()))).to(x.dtype)


@pytest.mark.slow
def test_an_error_that_stays_is_no_lost_digit(lab_of: Any) -> None:
    """The error of a formula is nearly the same for values that are a little larger."""
    choice = {"dim rows": 3, "dim hidden": 6, "dtype": "float32"}
    found = diagnose(lab_of(misplaced_floor, lambda x: x * 1, ROWS, choice, dtypes="float32"))
    assert found.cause != "low-precision-accumulation", found


def codes(x: T, factor: float = 1.0) -> T:
    scales = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
    return (x.float() / scales * factor).clamp(-448, 448).to(torch.float8_e4m3fn)


def codes_of_sixteen_bits(x: T) -> T:
    scales = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
    return (x.float() / scales).bfloat16().to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("fused", "cause"),
    [(codes_of_sixteen_bits, "cast-order"), (lambda x: codes(x, 0.985), None)],
    ids=["cast", "factor"],
)
def test_a_rounding_before_that_of_codes_is_named(lab_of: Any, fused: Any, cause: str | None) -> None:
    """With a scale that follows the values its error stays; one of a factor is far from the middle of two codes too."""
    lab = lab_of(fused, codes, ROWS, {"dim rows": 6, "dim hidden": 40, "dtype": "float32"}, dtypes="float32")
    found = roundings.digits(lab)
    assert (found.cause if found is not None else None) == cause, found


def test_parts_of_other_places_are_told_from_other_parts() -> None:
    """What a kernel gives single elements is another one's, a sum along an axis, or neither."""
    right = torch.rand(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert blame.rearranged(right.flip(0)[[0, 2]], right, (6,), [0, 2]) is True
    assert blame.rearranged(right.reshape(2, 3, 5).sum(1)[[0]], right, (2, 3), [0]) is True
    assert blame.rearranged(right[[0, 2]] * 0.9 + 0.01, right, (6,), [0, 2]) is False
    assert blame.rearranged(right[[0, 2]], right, (6,), [0, 2]) is None


def asking_plainly(case: Case) -> Case:
    return case.with_(seed=next(filter(gradients.all_gradients, range(100))))


@pytest.mark.parametrize(("how", "places"), [("mean", False), ("backwards", True)])
def test_an_upstream_of_equal_numbers_tells_places_from_parts(lab_of: Any, how: str, places: bool) -> None:
    """Of equal numbers nothing is lost but the mean, and their order is none; only one of them is a wrong place."""
    inputs = {"x": tensor("rows hidden"), "w": tensor("hidden")}
    choice = {"dim rows": 1, "dim hidden": 6, "dtype": "float32"}
    more: dict[str, Any] = {"dtypes": "float32", "grad": ("x",), "change": asking_plainly}
    lab = lab_of(scaled(how), scaled("right"), inputs, choice, **more)
    assert lab.verdict.check == "gradients"
    assert (lab.verdict.cause == "wrong-index-map") == places, lab.verdict


def test_a_rounding_of_a_gradient_is_no_wrong_place(lab_of: Any) -> None:
    """What is right of ones and of threes, and off by a thousandth elsewhere, was rounded on the way."""

    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: T) -> T:
            return x * 2

        @staticmethod
        def backward(_: Any, g: T) -> T:
            return g.bfloat16().to(g.dtype) * 2

    choice = {"dim rows": 2, "dim hidden": 6, "dtype": "float32"}
    more: dict[str, Any] = {"dtypes": "float32", "grad": True, "change": asking_plainly}
    lab = lab_of(Rounded.apply, double, ROWS, choice, **more)
    assert lab.verdict.check == "gradients"
    assert lab.verdict.cause is None, lab.verdict


def shares(x: T) -> T:
    return torch.softmax(x.float(), -1).to(x.dtype)


def share_of_rounded_products(x: T, g: T) -> T:
    """Products with ones are exact in 16 bits."""
    y = shares(x)
    return (y.float() * (g.float() - (g * y).float().sum(-1, keepdim=True))).to(x.dtype)


def share_without_upstream(x: T, g: T) -> T:
    return 2 * x * torch.ones_like(g)


def through_few_bits(x: T, g: T) -> T:
    """171 has 8 bits, as many as bfloat16 keeps, and 3 times 171 has 10."""
    return 2 * x * ((g.float() * 171).bfloat16().float() / 171).to(x.dtype)


def square(x: T) -> T:
    return x.float().square().to(x.dtype)


def function_of(forward_of: Callable[[T], T], backward_of: Callable[[T, T], T]) -> Callable[[T], T]:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: T) -> T:
            ctx.save_for_backward(x)
            return forward_of(x)

        @staticmethod
        def backward(ctx: Any, g: T) -> T:
            return backward_of(*ctx.saved_tensors, g)

    def fused(x: T) -> T:
        return Function.apply(x)  # type: ignore[no-any-return,no-untyped-call]

    return fused


@pytest.mark.parametrize(
    ("forward", "backward", "dtype", "left_out", "seeds"),
    [
        (square, through_few_bits, "float32", False, ()),
        (square, share_without_upstream, "bfloat16", True, ()),
        (square, share_without_upstream, "float32", True, ()),
    ],
)
def test_a_rounding_that_ones_do_not_show_is_no_factor(
    lab_of: Any, forward: Any, backward: Any, dtype: str, left_out: bool, seeds: tuple[int, ...]
) -> None:
    """What is right of ones and not of threes may be a product that is rounded; a factor left out is off by 2/3."""
    choice = {"dim rows": 3, "dim hidden": 4, "dtype": dtype}
    for seed in seeds or (next(filter(gradients.all_gradients, range(100))),):
        more: dict[str, Any] = {"change": lambda case, seed=seed: case.with_(seed=seed), "grad": True, "dtypes": dtype}
        lab = lab_of(function_of(forward, backward), forward, ROWS, choice, **more)
        assert lab.verdict.check == "gradients"
        assert (lab.verdict.cause == "gradient-scale") == left_out, lab.verdict
    assert (diagnose(lab).cause == "gradient-scale") == left_out


def test_a_factor_of_each_case_is_not_said_to_be_one_of_all(lab_of: Any) -> None:
    """A mean of what is kept, whose backward divides by all: the share of the kept ones is another for other values."""

    def kept(x: T) -> T:
        return x.clamp(min=0).sum() / (x > 0).sum()

    def by_all(x: T, g: T) -> T:
        return g * (x > 0) / x.numel()

    choice = {"dim rows": 3, "dim hidden": 4, "dtype": "float32"}
    seed = next(filter(gradients.all_gradients, range(100)))
    more: dict[str, Any] = {"change": lambda case: case.with_(seed=seed), "grad": True, "dtypes": "float32"}
    found = diagnose(lab_of(function_of(kept, by_all), kept, ROWS, choice, **more))
    assert found.cause == "gradient-scale", found
    assert re.fullmatch(r"0\.\d+ times .* here; in \d+ cases .* another constant each, from .*", found.evidence[0]), (
        found
    )


@pytest.mark.parametrize(("dim", "apart"), [("rows", True), ("hidden", False)])
def test_rows_of_a_softmax_stand_apart(lab_of: Any, dim: str, apart: bool) -> None:
    """Nothing adds up along a dim whose slices do not know each other, and a later one knows all before it."""
    for whole in (shares, lambda x: x.cumsum(-1), lambda x: x.flip(-1).cumsum(-1)):
        lab = lab_of(lambda x, whole=whole: whole(x) * 2, whole, ROWS, {"dim rows": 3, "dim hidden": 4})
        assert stands_apart(lab, dim) == apart


def left_out_last(q: T, k: T, v: T) -> T:
    """One key short where keys do not fill a tile of 16."""
    n = k.shape[0] - (k.shape[0] % 16 != 0)
    return attention(q, k[:n], v[:n])


def attention(q: T, k: T, v: T) -> T:
    return torch.softmax(q @ k.T, -1) @ v


@pytest.mark.slow
def test_a_key_that_a_softmax_ignores_is_no_padding(lab_of: Any) -> None:
    """Far queries give all to one key; a loop that ends one short is right then, and has no neutral element."""
    inputs = {"q": tensor("rows hidden"), "k": tensor("keys hidden"), "v": tensor("keys hidden")}
    choice = {"dim rows": 1, "dim hidden": 4, "dim keys": 17, "dtype": "float32"}
    found = diagnose(lab_of(left_out_last, attention, inputs, choice, blocks=(16,), dtypes="float32"))
    assert found.cause in ("tail-mask", "off-by-one-mask"), found


def by_largest(x: T) -> T:
    return x / (x.abs().amax(-1, keepdim=True) + 0.1)


def by_largest_of_the_last_tile(x: T) -> T:
    last = (x.shape[1] - 1) // 32 * 32
    return x / (x[:, last:].abs().amax(-1, keepdim=True) + 0.1)


@pytest.mark.slow
def test_slices_that_share_a_maximum_are_not_apart(lab_of: Any) -> None:
    """The largest of 33 is mostly one of the first 32, which look right by themselves; what is lost is the carry."""
    choice = {"dim rows": 1, "dim hidden": 33, "dtype": "float32"}
    lab = lab_of(by_largest_of_the_last_tile, by_largest, ROWS, choice, blocks=(32,), dtypes="float32")
    assert diagnose(lab).cause == "block-limit"
