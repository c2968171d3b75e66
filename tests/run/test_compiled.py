"""Launches of compiled kernels, as they are recorded."""

from __future__ import annotations

from typing import Any

import pytest
import triton.language as tl
from triton.runtime.jit import JITFunction

from pytest_fusion.run.compiled import observe_compiled


def _copy(x: Any, out: Any, n: Any, BLOCK: tl.constexpr = 64, WARPS: tl.constexpr = 4) -> None:
    """Stands for a kernel; it is never compiled."""


@pytest.mark.parametrize(("given", "block"), [({}, 64), ({"BLOCK": 16}, 16)])
def test_a_grid_gets_default_arguments_too(given: dict[str, int], block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Triton calls it: the block of FlagGems' log_softmax is a default argument, which the grid did not get."""
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, **kwargs: None)
    kernel = JITFunction(_copy)
    seen: list[Any] = []
    with observe_compiled(seen.append):
        kernel.run(None, None, 130, grid=lambda meta: (-(-meta["n"] // meta["BLOCK"]),), warmup=False, **given)
    (launch,) = seen
    assert launch.grid == (-(-130 // block), 1, 1)
    assert launch.constexprs == {"BLOCK": block, "WARPS": 4}
