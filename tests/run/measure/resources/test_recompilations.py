"""Why kernels are compiled again: each reason alone, the nearest explanation, and sweeps that compile once."""

from __future__ import annotations

import pytest

from pytest_fusion.run.measure.resources.specialisation import Argument, Json, Place, Specialisation, recompilations

PLACE = Place("/m.py", 3)


def _launch(*arguments: Argument, kernel: str = "k", **options: Json) -> Specialisation:
    return Specialisation(kernel, PLACE, arguments, options)


X = Argument("x", "*fp16", "D")
N = Argument("n", "i32", "D")


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (N, Argument("n", "i32", ""), "divisibility by 16 of n"),
        (N, Argument("n", "constexpr", None, 1), "n equal to 1 or not"),
        (N, Argument("n", "i64", "D"), "type of n i32 or i64"),
        (X, Argument("x", "*fp16", ""), "divisibility by 16 of the address of x"),
        (X, Argument("x", "*fp32", "D"), "type of x *fp16 or *fp32"),
        (X, Argument("x", "constexpr", None, None), "x is None or not"),
        (Argument("B", "constexpr", None, 64), Argument("B", "constexpr", None, 128), "constexpr B 64 or 128"),
    ],
)
def test_each_change_is_named(before: Argument, after: Argument, reason: str) -> None:
    """One changed argument is one recompilation, and going back to the first kernel is none."""
    assert recompilations([_launch(before), _launch(after), _launch(before)]) == [(f"k: {reason}", 1)]


def test_a_changed_option_is_named() -> None:
    """Options of the compiler count as arguments do."""
    launches = [_launch(N, num_warps=4), _launch(N, num_warps=8), _launch(N)]

    assert recompilations(launches) == [("k: num_warps 4 or 8", 1), ("k: num_warps given or not", 1)]


def test_the_nearest_earlier_kernel_explains() -> None:
    """Of several earlier kernels the one that differs in the fewest arguments is told, and equal reasons add up."""
    odd, even = Argument("n", "i32", ""), N
    first, second = Argument("B", "constexpr", None, 64), Argument("B", "constexpr", None, 128)
    launches = [_launch(even, first), _launch(odd, first), _launch(even, second), _launch(odd, second)]

    assert recompilations(launches) == [("k: constexpr B 64 or 128", 2), ("k: divisibility by 16 of n", 1)]


def test_each_kernel_has_its_first_compilation_free() -> None:
    """Two kernels launched twice alike recompile nothing."""
    assert recompilations([_launch(N), _launch(N, kernel="other")] * 2) == []


def test_no_launch_is_no_recompilation() -> None:
    """An empty sweep has no reasons."""
    assert recompilations([]) == []
