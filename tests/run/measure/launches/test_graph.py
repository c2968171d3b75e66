"""Nodes of a captured graph, with a driver that is modelled."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_fusion.run.measure.launches import Counts, Uncounted
from pytest_fusion.run.measure.launches.count import agreed
from pytest_fusion.run.measure.launches.graph_nodes import (
    CHILD,
    CONDITIONAL,
    KERNEL,
    MEMCPY,
    MEMSET,
    UncountableError,
    counts_of,
    readable,
    walk,
)

EMPTY, EVENT, HOST = 5, 7, 3


class Driver:
    """Graphs by number: their nodes as (type, name or child)."""

    def __init__(self, graphs: dict[int, list[tuple[int, object]]]) -> None:
        self._graphs = graphs

    def nodes(self, graph: int) -> list[int]:
        return [100 * graph + i for i in range(len(self._graphs[graph]))]

    def kind(self, node: int) -> int:
        return self._graphs[node // 100][node % 100][0]

    def child(self, node: int) -> int:
        child = self._graphs[node // 100][node % 100][1]
        assert isinstance(child, int)
        return child

    def name(self, node: int) -> str:
        return str(self._graphs[node // 100][node % 100][1])


def test_nodes_are_counted_by_type() -> None:
    """Kernels, copies and fills, those of child graphs too; events and host functions are nothing."""
    driver = Driver(
        {
            1: [(KERNEL, "a"), (MEMCPY, ""), (EVENT, ""), (HOST, ""), (EMPTY, ""), (CHILD, 2)],
            2: [(KERNEL, "_Z1bv"), (KERNEL, "a"), (MEMSET, ""), (CHILD, 3)],
            3: [(KERNEL, "MemEffAttention")],
        }
    )
    found = counts_of(walk(driver, 1))
    assert found == Counts(4, 1, 1, (("MemEffAttention", 1), ("a", 2), ("b", 1)), "graph")


def test_a_conditional_node_is_no_number() -> None:
    """The device decides how often its body runs."""
    with pytest.raises(UncountableError, match="conditional"):
        counts_of(walk(Driver({1: [(CONDITIONAL, "")]}), 1))


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("double_kernel", "double_kernel"),
        ("_ZN2at6native4fillEPfi", "at::native::fill"),
        ("void at::native::fill<4, F<float(int)> >(int, F<float(int)>)", "at::native::fill<4, F<float(int)> >"),
        ("(anonymous namespace)::softmax<float>(float*)", "(anonymous namespace)::softmax<float>"),
        ("_Znonsense", "_Znonsense"),
        ("odd)", "odd)"),
    ],
)
def test_names_are_readable(written: str, name: str) -> None:
    """As C++ writes them, without return type and parameters, so that graph and profiler say the same."""
    assert readable(written) == name


GRAPH = Counts(2, 0, 1, (("a", 2),), "graph")


def test_equal_counts_agree() -> None:
    """Two methods with the same numbers are one count, marked as agreed, whatever the names are cut to."""
    assert agreed(GRAPH, Counts(2, 0, 1, (("a<int>", 2),), "profiler")) == Counts(2, 0, 1, (("a", 2),), "graph", True)


def test_other_counts_are_no_number() -> None:
    """Both are told, with what the one saw and the other did not."""
    found = agreed(GRAPH, Counts(3, 0, 1, (("a", 2), ("on_my_stream", 1)), "profiler"))
    assert isinstance(found, Uncounted)
    for words in ("has 2 kernel(s)", "saw 3 kernel(s)", "the profiler alone saw on_my_stream", "stream"):
        assert words in found.reason


def test_an_empty_graph_alone_counts_nothing() -> None:
    """Work on a stream that nobody joins leaves one, and the profiler, which would see it, has no answer."""
    empty = Counts(0, 0, 0, (), "graph")
    found = agreed(empty, Uncounted("CUPTI is busy"))
    assert isinstance(found, Uncounted)
    assert "CUPTI is busy" in found.reason
    assert agreed(empty, replace(empty, method="profiler")) == replace(empty, agreed=True)


def test_one_method_alone_counts() -> None:
    """The profiler replaces a capture that fails; a graph without a profiler says what it cannot see."""
    profile, failed = Counts(2, 0, 1, (("a", 2),), "profiler"), Uncounted("cannot be captured")
    assert agreed(failed, profile) == profile
    found = agreed(GRAPH, Uncounted("CUPTI is busy"))
    assert isinstance(found, Counts)
    assert (found.kernels, found.agreed) == (2, None)
    assert "CUPTI is busy" in found.doubts[0]
    assert agreed(failed, Uncounted("CUPTI is busy")) == Uncounted("cannot be captured; CUPTI is busy")
