"""The specs of adamw: several tensors in one launch, of any size, with and without masters, strided gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from hypothesis import strategies as st

from pytest_fusion import FusionSpec, dim, tensor, values
from reference_kernels.adamw.kernel import adamw
from reference_kernels.adamw.reference import adamw_reference

DENSE = ("contiguous", "offset")
NUMBERS = {
    "step": st.sampled_from((1, 2, 1000)),
    "lr": st.sampled_from((1e-3, 0.5)),
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": st.sampled_from((0.01, 0.0)),
}
HALF = (torch.bfloat16, torch.float16)


def _lists(named: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs named ``parameters0``, ``parameters1``, ... as lists: a spec has tensors, and no lists of them."""
    lists: dict[str, Any] = {name: value for name, value in named.items() if not name[-1].isdigit()}
    for name, value in named.items():
        if name[-1].isdigit():
            lists.setdefault(name[:-1], []).append(value)
    return lists


def _fused(**named: Any) -> None:
    adamw(**_lists(named))


def _reference(**named: Any) -> None:
    adamw_reference(**_lists(named))


def _inputs(
    shapes: tuple[str, ...], gradient_layouts: tuple[str, ...] | None = DENSE, masters: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Inputs by name, and the names of those that are written."""
    wide, positive = torch.float32, values.one_of(values.uniform(0.0, 4.0), values.constant(0.0))
    found: dict[str, Any] = {}
    for index, shape in enumerate(shapes):
        found |= {
            f"parameters{index}": tensor(shape, layouts=DENSE),
            f"gradients{index}": tensor(shape, layouts=gradient_layouts),
            f"first{index}": tensor(shape, dtype=wide, layouts=DENSE, values=values.normal()),
            f"second{index}": tensor(shape, dtype=wide, layouts=DENSE, values=positive),
        }
        if masters:
            found[f"masters{index}"] = tensor(shape, dtype=wide, layouts=DENSE)
    written = [name for name in found if not name.startswith("gradients")]
    return {**found, **NUMBERS}, written


def _spec(name: str, inputs: tuple[Mapping[str, Any], list[str]], **more: Any) -> FusionSpec:
    return FusionSpec(
        name=name,
        fused=_fused,
        reference=_reference,
        malformed=True,
        strict=True,
        inputs=inputs[0],
        mutates=inputs[1],
        **more,
    )


LONG = {"long": dim(0, 1000)}
SPEC = _spec(
    "adamw", _inputs(("rows columns", "long")), dims=LONG | {"rows": dim(0, 9), "columns": dim(0, 40)}, max_launches=1
)

# Parameters of 16 bits are their masters, rounded, whatever they were before.
MASTERS = _spec("adamw_masters", _inputs(("long",), masters=True), dims=LONG, dtypes=HALF, max_launches=1)

# Gradients that lie in memory otherwise than their parameter are copied first.
STRIDED = _spec("adamw_strided_gradients", _inputs(("rows columns",), gradient_layouts=None))

# 16 tensors of 4096 x 4096, as one: the size of each does not matter to the kernel.
FULL = SPEC.with_(
    name="adamw_full",
    dims={},
    requires="cuda",
    bench=[{"long": 16 * 4096 * 4096, "rows": 4096, "columns": 4096, "step": 2, "lr": 1e-3, "weight_decay": 0.01}],
)

SPECS = [SPEC, MASTERS, STRIDED, FULL]
