"""``torch.library.opcheck`` of one call, without opcheck's own failures.

opcheck copies and compares arguments with operators that lack some dtypes (float8 has no arithmetic) and fails on some
empty tensors (strides (57, 19, 1) of shape (0, 0, 16)). An operator that does almost nothing shows these limits.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from pytest_fusion.case.containers import tensors_of
from pytest_fusion.run.unguarded import bare
from pytest_fusion.spec.wording import brief, first_line

TESTS = ("test_schema", "test_autograd_registration", "test_faketensor")


def opcheck(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """The tests that the operator fails and those that opcheck cannot run, each with the first line of the reason."""
    failed: dict[str, str] = {}
    left: list[str] = []
    for test, reason in _failures(operator, args, kwargs, TESTS).items():
        tensors = tensors_of((args, kwargs))
        bare_of = next((t for t in tensors if _failures(_nothing(), (t.detach(),), {}, (test,)).get(test)), None)
        if bare_of is None:
            failed[test] = reason
        else:
            form = f"{str(bare_of.dtype).removeprefix('torch.')} {list(bare_of.shape)}"
            left.append(f"torch.library.opcheck cannot try a tensor {form} ({test}: {reason})")
    return failed, left


def _failures(
    operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], tests: tuple[str, ...]
) -> dict[str, str]:
    with bare(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = torch.library.opcheck(operator, args, dict(kwargs), test_utils=tests, raise_exception=False)
    return {
        test: brief(result)[:300] if isinstance(result, BaseException) else first_line(result)
        for test, result in results.items()
        if result != "SUCCESS"
    }


@functools.cache
def _nothing() -> Any:
    """A correct operator that returns zeros of its argument's shape."""

    def zeros(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)

    operator = torch.library.custom_op("pytest_fusion::zeros_of", zeros, mutates_args=())
    operator.register_fake(zeros)
    return operator
