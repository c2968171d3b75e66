"""Hazard `tf32-products`: a result that is right if ``tl.dot`` may round its factors to TF32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePath

import torch

from pytest_fusion.checks.context import CaseResult, Context, conclude
from pytest_fusion.checks.verdict import Verdict, hazard
from pytest_fusion.interpreter.bridge.lane_state import products_into
from pytest_fusion.interpreter.memory.memory_findings import Site
from pytest_fusion.interpreter.scoped import holding
from pytest_fusion.oracle.rounding import tf32_factors
from pytest_fusion.oracle.tolerance import ValuesVerdict
from pytest_fusion.run.compiled import tf32_products
from pytest_fusion.spec.dtypes import NARROW


@dataclass(slots=True)
class _State:
    """Products of one case that are ``compiled``, possibly in TF32; ``excused``: results are right only with those."""

    compiled: dict[Site, None] = field(default_factory=dict)
    excused: bool = False


@contextmanager
def noted(context: Context, result: CaseResult) -> Iterator[None]:
    """Around all calls of a case; adds the hazard to its right results."""
    # Interpreted products are in float32 here, but coarser on a GPU.
    state, interpreted, compiled = context.state(_State), dict[Site, None](), dict[Site, None]()
    with holding(state, compiled=compiled, excused=False):
        with products_into(interpreted), tf32_products(compiled):
            yield
        sites = compiled if state.excused else interpreted
    dtypes = {tensor.dtype for tensor in result.case.tensors.values()}
    right = result.failure is None and any(one.check == "values" and one.status == "pass" for one in result.verdicts)
    if sites and right and "float32" in dtypes and not dtypes & NARROW:
        conclude(context, result, _rounded(list(sites)))


def judged(context: Context, native: torch.Tensor, judge: Callable[[], ValuesVerdict]) -> ValuesVerdict:
    """``judge()``; if wrong, and a compiled kernel has products in TF32, judged again with their rounding."""
    verdict, state = judge(), context.state(_State)
    if verdict.ok or native.dtype != torch.float32 or not state.compiled:
        return verdict
    with tf32_factors():
        again = judge()
    state.excused = state.excused or again.ok
    return again if again.ok else verdict


def _rounded(sites: list[Site]) -> Verdict:
    lines = ", ".join(f"{site.kernel} at {PurePath(site.file).name}:{site.line} ({site.code})" for site in sites)
    return hazard(
        "values",
        "tf32-products",
        f"float32 factors of a product keep 10 of 23 mantissa bits on a GPU, tl.dot's default (TF32): {lines}; with "
        'input_precision="ieee" there the result is right',
        identity="values:tf32-products",
        kernel=sites[0].kernel,
        file=sites[0].file,
        line=sites[0].line,
    )
