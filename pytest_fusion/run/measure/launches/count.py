"""Counts the launches of one call: by two methods on a GPU, by a model without one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from pytest_fusion.run.fused import bare
from pytest_fusion.run.measure.launches.cupti import profiled
from pytest_fusion.run.measure.launches.graph_nodes import captured
from pytest_fusion.run.measure.launches.launch_count import Counts, Uncounted
from pytest_fusion.run.measure.launches.modelled_launches import modelled


def count(
    call: Callable[[], Any],
    arguments: Any,
    device: torch.device,
    *,
    prepare: Callable[[], None] | None = None,
    capture: bool = True,
    cross_check: bool = True,
) -> Counts | Uncounted:
    """The launches of one call, after warm-up calls that compile and tune. Raises what the call raises. ``arguments``
    are its tensors, nested in any way. ``prepare`` runs before each call, uncounted, to restore what calls write. On a
    GPU the nodes of a captured graph count, cross-checked by the profiler: without ``cross_check`` it is used only if
    the capture fails, without ``capture`` alone."""
    if device.type == "cuda":
        graph = captured(call, device, prepare=prepare) if capture else Uncounted("capture was switched off")
        if isinstance(graph, Counts) and not cross_check:
            return graph
        return agreed(graph, profiled(call, device, prepare=prepare))
    with bare():
        call()
        if prepare is not None:
            prepare()
        return modelled(call, arguments, prepare=prepare).counts


def agreed(graph: Counts | Uncounted, profile: Counts | Uncounted) -> Counts | Uncounted:
    """The result of two methods for one call; `Uncounted` if both have a number and they differ."""
    if isinstance(graph, Uncounted):
        return Uncounted(f"{graph.reason}; {profile.reason}") if isinstance(profile, Uncounted) else profile
    if isinstance(profile, Uncounted):
        if not any(graph.totals):
            return Uncounted(f"a captured graph has nothing, and work on other streams is in none: {profile.reason}")
        return replace(graph, doubts=(f"work on streams of its own would not show: {profile.reason}",))
    if graph.totals == profile.totals:
        return replace(graph, agreed=True)
    ours, theirs = Counter(dict(graph.names)), Counter(dict(profile.names))
    extra = [f"the profiler alone saw {_listed(theirs - ours)}"] if theirs - ours else []
    extra += [f"the graph alone has {_listed(ours - theirs)}"] if ours - theirs else []
    return Uncounted(
        f"a captured graph has {_words(graph)} and the profiler saw {_words(profile)}"
        + (f" ({'; '.join(extra)})" if extra else "")
        + ": work on a stream that does not wait for the current one is in no graph"
    )


def _words(counts: Counts) -> str:
    return f"{counts.kernels} kernel(s), {counts.memcpy} copies, {counts.memset} fills"


def _listed(names: Counter[str]) -> str:
    return ", ".join(f"{count} x {name[:80]}" if count > 1 else name[:80] for name, count in sorted(names.items()))
