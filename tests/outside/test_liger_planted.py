"""Liger's kernels with one wrong element, in a result or in a gradient: found with all that their specs accept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("liger_kernel")

from pytest_fusion import FusionSpec
from pytest_fusion.plugin.testing import examine
from tests.outside import test_liger

SPECS = {
    name: getattr(test_liger, f"test_{name}").fusion_spec
    for name in (
        *("rms_norm_llama", "rms_norm_gemma", "rope", "swiglu", "geglu"),
        *("cross_entropy", "fused_linear_cross_entropy"),
    )
}


class OneWrong(torch.autograd.Function):
    """Its input, in its memory; of its gradient the last element is half again as large."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return one_wrong(gradients[0])


def one_wrong(t: torch.Tensor) -> torch.Tensor:
    """A copy whose last element is half again as large."""
    factor = torch.ones(t.numel(), dtype=t.dtype, device=t.device)
    factor[-1:] = 1.5
    return t * factor.reshape(t.shape)


def planted(spec: FusionSpec, where: str) -> Callable[..., Any]:
    """The fused call of a spec with one wrong element of its first result, or of its first gradient."""
    first = next(iter(spec.tensors))

    def fused(**arguments: Any) -> Any:
        if where == "gradient":
            return spec.fused(**{**arguments, first: OneWrong.apply(arguments[first])})
        found = spec.fused(**arguments)
        return (one_wrong(found[0]), *found[1:]) if isinstance(found, tuple) else one_wrong(found)

    return fused


@pytest.mark.slow
@pytest.mark.parametrize("where", ["result", "gradient"])
@pytest.mark.parametrize("name", SPECS)
def test_one_wrong_element_is_found(tmp_path: Path, name: str, where: str) -> None:
    """Nothing that a spec accepts hides it."""
    spec = SPECS[name].with_(dtypes="float32")
    record = examine(spec.with_(fused=planted(spec, where)), max_cases=30, first=True, root=tmp_path)
    expected = "values" if where == "result" else "gradients"
    assert (record.verdict, record.failed_check) == ("fail", expected), record.message
