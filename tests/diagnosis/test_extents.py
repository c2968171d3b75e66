"""Causes in how much there is, beside what only looks like them in small cases, whole tiles or one seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pytest_fusion import dim, tensor, values
from pytest_fusion.case.case_model import Case
from pytest_fusion.checks.gradients import gradients
from pytest_fusion.diagnosis.diagnose import diagnose
from tests.sweeps import sweep

T = torch.Tensor


def shifted_up(x: T, by: T) -> T:
    return x + by.sum()


def shifted_up_to_a_bound(x: T, by: T) -> T:
    """The loop over tiles of 16 ends too early: where ``by`` is empty at once, and else after the first tile or so."""
    done = -(-len(by) // 16) * 16
    return torch.cat([shifted_up(x[:done], by), torch.zeros_like(x[done:])])


def last_of_all(rows: T, x: T) -> T:
    return rows + x[len(x) - len(rows) :]


def last_two_of_all(rows: T, x: T) -> T:
    """A window that is one too long, in what is read from a whole tile on."""
    before = torch.cat([torch.zeros(1), x[:-1]])
    before[: (len(x) - len(rows)) // 16 * 16 + 1] = 0
    return last_of_all(rows, x) + last_of_all(torch.zeros_like(rows), before)


@pytest.mark.slow
def test_a_bound_that_is_0_for_nothing_and_too_low_for_much_is_no_matter_of_size_0(lab_of: Any) -> None:
    """Small cases with a size of 1 are right; one longer than a block is not."""
    inputs = {"x": tensor("hidden"), "by": tensor("rows")}
    sizes = {"dim hidden": 1, "dim rows": 0}
    found = diagnose(lab_of(shifted_up_to_a_bound, shifted_up, inputs, sizes, blocks=(16,), dtypes="float32"))
    assert found.cause == "block-limit", found


@pytest.mark.slow
def test_a_window_that_is_right_at_whole_tiles_of_one_row_is_no_partial_tile(lab_of: Any) -> None:
    """With a whole tile of rows too it is wrong."""
    inputs = {"rows": tensor("m"), "x": tensor("m+extra")}
    sizes = {"dim m": 1, "dim extra": 1}
    found = diagnose(lab_of(last_two_of_all, last_of_all, inputs, sizes, blocks=(16,), dtypes="float32"))
    assert found.cause == "off-by-one-mask", found
    assert " changes with x[" in found.evidence[0]


def whole_tiles_of_16(x: T) -> T:
    return torch.cat([x[:, : x.shape[1] // 16 * 16], torch.zeros_like(x[:, x.shape[1] // 16 * 16 :])], 1) * 2


@pytest.mark.parametrize(("multiple_of", "wrong_at"), [(1, 17), (8, 24)])
def test_a_partial_tile_is_as_long_as_bounds_admit(lab_of: Any, multiple_of: int, wrong_at: int) -> None:
    """Where a dim is a multiple of 8 no size is one past a tile of 16."""
    bounds = {"hidden": dim(multiple_of=multiple_of)}
    sizes = {"dim rows": 1, "dim hidden": 8}
    inputs = {"x": tensor("rows hidden")}
    lab = lab_of(whole_tiles_of_16, lambda x: x * 2, inputs, sizes, blocks=(16,), dims=bounds, dtypes="float32")
    found = diagnose(lab)
    assert found.cause == "tail-mask", found
    assert f"right at hidden=16 and 32, wrong at {wrong_at}" in found.evidence


def causal(q: T, k: T, v: T, *, counted: bool = True) -> T:
    """Attention below the diagonal that ends in the last key, in tiles of 16 keys."""
    rows, columns = torch.arange(len(q))[:, None] + len(k) - len(q), torch.arange(len(k))
    scores = (q @ k.T).masked_fill(columns > rows, -torch.inf)
    most, total, out = torch.full((len(q), 1), -1e30), torch.zeros(len(q), 1), torch.zeros(len(q), v.shape[1])
    for first in range(0, len(k), 16):
        tile = scores[:, first : first + 16]
        now = torch.maximum(most, tile.amax(-1, keepdim=True))
        weight = torch.exp(tile - now)
        out = out * torch.exp(most - now) + weight @ v[first : first + 16]
        total = total * torch.exp(most - now) + (weight.sum(-1, keepdim=True) if counted or not first else 0)
        most = now
    return out / total.clamp(min=1e-30)


@pytest.mark.slow
def test_a_row_that_alone_reaches_the_last_tile_of_another_dim_is_no_end(lab_of: Any) -> None:
    """Below a causal mask the last of the queries sees the one key past a tile; of more keys other queries see some."""
    inputs = {"q": tensor("m d"), "k": tensor("n d"), "v": tensor("n d")}
    sizes = {"dim m": 2, "dim n": 17, "dim d": 2}
    lab = lab_of(lambda q, k, v: causal(q, k, v, counted=False), causal, inputs, sizes, blocks=(16,), dtypes="float32")
    found = diagnose(lab)
    assert found.cause == "block-limit", found


def below(q: T, k: T, v: T) -> T:
    rows, columns = torch.arange(len(q))[:, None] + len(k) - len(q), torch.arange(len(k))
    return (q @ k.T).masked_fill(columns > rows, -torch.inf).softmax(-1) @ v


def below_of_numbers(q: T, k: T, v: T) -> T:
    """NaN counts as 0, of keys that a query reaches as well."""
    return below(q, k, v.nan_to_num(0.0))


def below_or_nothing(q: T, k: T, v: T) -> T:
    return below(q, k, v) if len(k) > len(q) else torch.zeros_like(q)


@pytest.mark.parametrize(
    ("fused", "reference", "regime", "cause"),
    [(below, below_of_numbers, "nan", "nan-mishandled"), (below_or_nothing, below, "unit", "zero-size")],
)
def test_nan_that_an_input_holds_is_no_matter_of_a_size_of_0(
    lab_of: Any, fused: Any, reference: Any, regime: str, cause: str
) -> None:
    """No change of a number moves what is NaN; where none is drawn, what fails with no more keys than queries does."""
    inputs = {name: tensor(shape) for name, shape in (("q", "m d"), ("k", "m+extra d"), ("v", "m+extra d"))}
    sizes = {"dim m": 2, "dim extra": 0, "dim d": 1, "dtype": "float32"}
    lab = lab_of(fused, reference, inputs, sizes, dims={"m": dim(1), "d": dim(1)}, dtypes="float32",
                 change=lambda case: case.with_tensor("v", regime=regime).with_(seed=1))  # fmt: skip
    found = diagnose(lab)
    assert found.cause == cause, found


@pytest.mark.slow
def test_one_wrong_distance_is_no_limit(lab_of: Any) -> None:
    """A table of distances with one wrong entry is wrong from that one on, at few places; with a cap at many."""

    def biased(x: T, wrong: Callable[[T], T]) -> T:
        places = torch.arange(x.shape[1])
        return x + torch.sin(wrong((places[:, None] - places).abs()).float())[: len(x)]

    def of(wrong: Callable[[T], T]) -> Any:
        inputs, bounds = {"x": tensor("n n", values=values.normal())}, {"n": dim(1, 200)}
        fused = lambda x: biased(x, wrong)  # noqa: E731
        right = lambda x: biased(x, lambda d: d)  # noqa: E731
        return diagnose(lab_of(fused, right, inputs, {"dim n": 21}, dims=bounds, dtypes="float32"))

    once = of(lambda d: torch.where(d == 20, 3, d))
    assert once.cause != "block-limit", once
    assert any(what.startswith("block limit: past n=20 all but") for what in once.ruled_out)
    capped = of(lambda d: d.clamp(max=19))
    assert capped.cause == "block-limit", capped


def test_what_fails_below_a_block_has_no_limit_there(lab_of: Any) -> None:
    """What is wrong at 4 elements is not right up to 64, whatever it is beyond and at some sizes between."""

    def fused(x: T) -> T:
        return -x if len(x) == 4 or len(x) > 64 else x * 1.0

    sizes = {"dim n": 4}
    found = diagnose(lab_of(fused, lambda x: x * 1, {"x": tensor("n")}, sizes, blocks=(64,), dtypes="float32"))
    assert found.cause != "block-limit", found


def pooled(gradient_of: Callable[[T, T], T], scaled: Callable[[T, T], T]) -> Callable[[T, T], T]:
    """What ``scaled`` gives, with the gradient of ``w`` that a function of ``x`` and the upstream gradient makes."""

    class Pooled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: T, w: T) -> T:
            ctx.save_for_backward(x)
            return scaled(x, w)

        @staticmethod
        def backward(ctx: Any, g: T) -> tuple[None, T]:
            return None, gradient_of(*ctx.saved_tensors, g)

    def fused(x: T, w: T) -> T:
        return Pooled.apply(x, w)  # type: ignore[no-any-return,no-untyped-call]

    return fused


def sloped(x: T, w: T) -> T:
    return torch.where(x > 0, x, x * w)


def slope_of_whole_tiles(x: T, g: T) -> T:
    parts = torch.where(x > 0, 0.0, x * g)
    return parts[: max(len(x) // 16, 1) * 16].sum(0)


def by_most(x: T, w: T) -> T:
    return x.amax(0) * w


def most_in_padded_tiles(x: T, g: T) -> T:
    return F.pad(x, (0, 0, 0, len(x) % 2)).amax(0) * g


@sweep(
    ("gradient_of", "reference", "sizes", "block", "cause"),
    [
        (slope_of_whole_tiles, sloped, {"dim rows": 17, "dim hidden": 1}, 16, "tail-mask"),
        # The largest of three is below 0 once in eight columns.
        (most_in_padded_tiles, by_most, {"dim rows": 3, "dim hidden": 24}, 2, "wrong-neutral-element"),
    ],
    ids=["a dropped part", "a padded maximum"],
    fast=("a padded maximum",),
)
def test_a_gradient_that_is_0_tells_of_no_padding(
    lab_of: Any,
    gradient_of: Callable[[T, T], T],
    reference: Callable[[T, T], T],
    sizes: dict[str, int],
    block: int,
    cause: str,
) -> None:
    """A slope's gradient is 0 above 0, where the forward is not; that of a maximum counts what pads below 0 alone."""

    def plainly(case: Case) -> Case:
        return case.with_(seed=next(filter(gradients.all_gradients, range(100))))

    inputs = {"x": tensor("rows hidden"), "w": tensor("hidden")}
    more: dict[str, Any] = {"dtypes": "float32", "grad": ("w",), "dims": {"rows": dim(1)}}
    fused = pooled(gradient_of, reference)
    found = diagnose(lab_of(fused, reference, inputs, sizes, blocks=(block,), change=plainly, **more))
    assert found.cause == cause, found
