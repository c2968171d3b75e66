"""What a kernel keeps between calls, told from chance by the rule that its results follow."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pytest_fusion import FusionSpec, dim, tensor, values
from pytest_fusion.plugin.testing import examine

T = torch.Tensor


def never_cleared(dtype: torch.dtype) -> Callable[[T], T]:
    kept: dict[int, T] = {}

    def fused(x: T) -> T:
        total = kept.setdefault(x.shape[1], torch.zeros(x.shape[1]))
        total += x.float().sum(0)
        return total.to(dtype, copy=True)

    return fused


def in_turn() -> Callable[[T], T]:
    calls = itertools.count()
    return lambda x: x.sum(0) + 0.25 * (next(calls) % 2)


def by_chance() -> Callable[[T], T]:
    # By one unit in the last place, which is right wherever two calls agree.
    return lambda x: x.sum(0) * (1 + 2.0**-23 * float(torch.rand(()) < 0.5))


def drifting() -> Callable[[T], T]:
    calls = itertools.count()
    return lambda x: x.sum(0) * 1.5 ** (next(calls) % 40)


@pytest.mark.parametrize(
    ("fused", "dtype", "cause", "said"),
    [
        (never_cleared(torch.float32), "float32", "stale-memory", "each further call on the same inputs adds the same"),
        (never_cleared(torch.float16), "float16", "stale-memory", "each further call on the same inputs adds the same"),
        (in_turn(), "float32", "stale-memory", "calls on the same inputs give 2 results of out in turn"),
        (by_chance(), "float32", "nondeterministic", ""),
        (drifting(), "float32", "nondeterministic", ""),
    ],
    ids=["never cleared", "never cleared, float16", "in turn", "by chance", "by no rule"],
)
def test_a_rule_is_no_chance(fused: Callable[[T], T], dtype: str, cause: str, said: str, tmp_path: Path) -> None:
    """Sums that are not cleared and buffers in turn are told; coins, and factors, are not taken for either."""
    spec = FusionSpec(
        fused=fused,
        reference=lambda x: x.float().sum(0).to(x.dtype),
        inputs={"x": tensor("rows n", values=values.normal())},
        dims={"rows": dim(1, 20), "n": dim(1, 20)},
        dtypes=dtype,
        name="column sums",
    )
    record = examine(spec, seed=0, root=tmp_path)
    assert (record.failed_check, record.cause) == ("repeat", cause), record.message
    assert said in record.message
