"""Functions that launchers have under torch.compile."""

from __future__ import annotations

import pytest

from pytest_fusion.run import compilers


def test_more_variants_than_torch_compiles_are_announced_and_run() -> None:
    """At its limit of 8 a function under ``fullgraph=True`` raises; no caller has as many shapes as a test."""
    import torch._dynamo

    doubled = torch.compile(lambda x: x * 2, backend="eager", dynamic=False, fullgraph=True)
    sizes = range(2, 14)
    told: list[str] = []
    with compilers.announced(told.append, lambda: told.append("done")):
        assert all(len(doubled(torch.ones(size))) == size for size in sizes)
        torch._dynamo.reset()
    assert told == ["a function under torch.compile", "done"] * len(sizes)

    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        all(len(doubled(torch.ones(size))) == size for size in sizes)
    assert len(told) == 2 * len(sizes)
