"""Compiling ahead on a GPU: what a dry run compiles, and that it launches nothing."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

pytestmark = pytest.mark.gpu


def test_what_is_compiled_ahead_includes_the_backward_pass() -> None:
    """A dry run compiles the kernels of forward and backward, the longest rows first, and runs none of them."""
    from triton.runtime.jit import JITFunction

    from benchmarks.checks.kernels import specs
    from pytest_fusion.case.choosing import search
    from pytest_fusion.engine.campaign import Campaign
    from pytest_fusion.engine.profiles import profile
    from pytest_fusion.engine.request import Request

    spec = specs()["rms_norm"]

    def outer() -> None: ...

    search.adopt(outer, outer)
    request = Request("dry", "cuda", profile("dev").counted, seed=0, max_cases=60)
    campaign = Campaign(spec, request, outer, {}, dry=True)
    compiled: list[tuple[str, int]] = []
    launched: list[str] = []
    run = JITFunction.run

    def watched(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        (compiled if warmup else launched).append((self.fn.__name__, kwargs["BLOCK"]))  # type: ignore[arg-type]
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", watched)
        for worker in (0, 1):  # one of them has the widest rows, the other the most
            campaign.compile_share(itertools.count(worker, 20))

    assert not launched
    assert {name for name, _ in compiled} == {"rms_norm_forward", "rms_norm_backward"}
    assert max(block for _, block in compiled) == 131072
