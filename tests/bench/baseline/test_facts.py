"""Exact facts: which are worse, which are better, and which nobody can say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pytest_fusion.bench.baseline.facts import compare_facts, compare_names, direction
from pytest_fusion.run.measure.resources.targets import Occupancy, Resources, figures


@pytest.mark.parametrize(
    ("fact", "before", "now", "verdict"),
    [
        ("launches.kernels", 1, 2, "regressed"),
        ("launches.kernels", 2, 1, "improved"),
        ("launches.memcpy", 0, 1, "regressed"),
        ("recompiles", 2, 3, "regressed"),
        ("sm_90/rms/spills", 0, 4, "regressed"),
        ("sm_90/rms/spills", 8, 4, "improved"),
        ("sm_90/rms/registers", 40, 96, "changed"),
        ("sm_90/rms/registers", 96, 40, "changed"),
        ("sm_90/rms/shared", 1024, 2048, "regressed"),
        ("sm_90/rms/occupancy", 32, 16, "regressed"),
        ("sm_90/rms/occupancy", 16, 32, "improved"),
        ("sm_90/rms/instructions.HMMA", 64, 0, "changed"),
        ("sm_90/spills_kernel/registers", 1, 2, "changed"),
        ("bytes.algorithmic", 4096, 8192, "regressed"),
        ("bytes.saved", 4096, 1024, "regressed"),
        ("bytes.reference", 4096, 8192, "changed"),
        ("memory.peak", 100, 101, "regressed"),
        ("flops", 10, 20, "changed"),
        ("something.new", 1, 2, "changed"),
        ("launches.kernels", 1, 1, "same"),
    ],
)
def test_each_fact_has_its_direction(fact: str, before: int, now: int, verdict: str) -> None:
    """More launches, spills, bytes or memory are worse; registers, FLOPs and single instructions only change."""
    assert [change.verdict for change in compare_facts({fact: before}, {fact: now})] == [verdict]


def test_a_kernels_name_says_nothing_about_direction() -> None:
    """A kernel that is called `bytes.launches` has registers like any other."""
    assert direction("sm_90/bytes.launches/registers") == 0
    assert direction("sm_90/k/Spills") == 1


def test_shared_memory_that_costs_no_occupancy_is_only_changed() -> None:
    """With as many warps on a multiprocessor as before nothing is lost; with fewer it regressed."""

    def verdict(occupancy: int) -> str:
        before = {"sm_90/rms/shared": 1024, "sm_90/rms/occupancy": 32}
        changes = compare_facts(before, {"sm_90/rms/shared": 2048, "sm_90/rms/occupancy": occupancy})
        return next(change.verdict for change in changes if "shared" in change.fact)

    assert [verdict(occupancy) for occupancy in (48, 32, 16)] == ["changed", "changed", "regressed"]


def test_the_figures_of_compiled_kernels_have_their_directions() -> None:
    """Under the very names that compiling gives them: spills that begin, memory that costs occupancy, and registers."""

    def figures_of(**changes: Any) -> dict[str, int]:
        held = Occupancy(changes.pop("warps_held", 32), 64, "registers")
        plain = Resources("k", "sm_90", registers=40, local_bytes=0, shared_dynamic=1024, warps=4, occupancy=held)
        return figures([replace(plain, **changes)])

    def verdicts(**changes: Any) -> dict[str, str]:
        found = compare_facts(figures_of(), figures_of(**changes))
        return {change.fact: change.verdict for change in found if change.verdict != "same"}

    assert verdicts() == {}
    assert verdicts(local_bytes=16) == {"sm_90/k/local_bytes": "regressed"}
    assert verdicts(registers=48) == {"sm_90/k/registers": "changed"}
    assert verdicts(shared_dynamic=2048) == {"sm_90/k/shared_bytes": "changed"}
    assert verdicts(shared_dynamic=2048, warps_held=16) == {
        "sm_90/k/shared_bytes": "regressed",
        "sm_90/k/occupancy_warps": "regressed",
    }


def test_what_one_side_lacks_is_unknown() -> None:
    """A kernel that is new or gone within a group, and a group that is on one side only, are never a pass."""
    before = {"sm_90/a/spills": 0, "sm_80/a/spills": 0, "sm_80/a/shared": 0}
    now = {"sm_90/b/spills": 4, "recompiles": 1}
    found = {change.fact: (change.verdict, change.reason) for change in compare_facts(before, now)}

    assert found == {
        "sm_90/a/spills": ("unknown", "this run did not find it; accept that with --fusion-update all"),
        "sm_90/b/spills": ("unknown", "the baseline lacks it; add it with --fusion-update new"),
        "sm_80": ("unknown", "this run did not measure 2 facts of the baseline"),
        "recompiles": ("unknown", "the baseline lacks one fact; add with --fusion-update new"),
    }


def test_counts_of_two_methods_do_not_compare() -> None:
    """A graph counts a memset that became a kernel otherwise than a profiler; neither count is a regression."""
    found = compare_facts(
        {"launches.kernels": 1, "recompiles": 1},
        {"launches.kernels": 2, "recompiles": 2},
        methods=({"launches": "graph"}, {"launches": "profiler"}),
    )

    assert [(change.fact, change.verdict) for change in found] == [
        ("recompiles", "regressed"),
        ("launches.kernels", "unknown"),
    ]


def test_what_a_kernel_is_compared_with_cannot_regress() -> None:
    """A reference that launches more since torch was updated is no fault of the kernel."""
    found = compare_facts({"launches.kernels": 5}, {"launches.kernels": 6}, judged=False, context="; torch")

    assert [(change.verdict, change.reason) for change in found] == [
        ("changed", "what the kernel is compared with changed; torch")
    ]


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({"a": 1, "b": 2}, {"a": 1, "b": 2}, ""),
        ({"a": 1}, {"a": 1, "vectorized_copy": 2}, "more 2 x vectorized_copy"),
        ({"a": 3}, {"b": 1}, "more b; fewer 3 x a"),
        ({}, {}, ""),
    ],
)
def test_kernels_that_came_and_went_are_named(before: dict[str, int], now: dict[str, int], said: str) -> None:
    """The difference of two multisets of kernel names, in words."""
    assert compare_names(before, now) == said
