"""Failures that need the calls before them: the cause says so, and so does a replay that passes."""

from __future__ import annotations

import pytest

from tests.plugin.conftest import Project

CACHED = """
def table(x, base):
    return torch.cos(torch.arange(x.shape[-1], dtype=torch.float32) / base)

CACHE = {}

def by_width(x, base):
    if x.shape[-1] not in CACHE:
        CACHE[x.shape[-1]] = table(x, base)
    return (x.float() * CACHE[x.shape[-1]]).to(x.dtype)

def tabled(x, base):
    return (x.float() * table(x, base)).to(x.dtype)

I = {**X, "base": st.sampled_from([3.0, 7.0])}

@fused_equivalent(tabled, inputs=I)
def test_cached(x, base):
    return by_width(x, base)

@fused_equivalent(tabled, inputs=I)
def test_wrong(x, base):
    return (x.float() * table(x, base + (x.shape[-1] > 6))).to(x.dtype)

@fused_equivalent(tabled, inputs=I)
def test_right(x, base):
    return tabled(x, base)
"""


@pytest.mark.slow
def test_a_table_of_another_call_is_named_and_its_replay_says_why_it_passes(project: Project) -> None:
    """A cache whose key lacks a scalar; beside it a kernel that is wrong in any call, and one that is right."""
    project.write(CACHED)
    project.run(fork=True).assert_outcomes(failed=2, passed=1)
    cached, wrong = project.tests["test_cached"], project.tests["test_wrong"]

    assert (cached["failed_check"], cached["cause"]) == ("values", "cached-answer")
    assert cached["diagnosis"]["evidence"][0] == "right as the first call of a new process, wrong after others"
    assert wrong["cause"] != "cached-answer"

    project.run("-k", "cached", "--fusion-replay", cached["replay"], fork=True).assert_outcomes(passed=1)
    assert any("after other calls" in note for note in project.tests["test_cached"]["notes"])

    project.run("-k", "wrong", "--fusion-replay", wrong["replay"], fork=True).assert_outcomes(failed=1)
