"""Records accesses and reports races, gap accesses and loads of unwritten memory."""

from __future__ import annotations

import numpy as np

from pytest_fusion.interpreter.bridge.numpy_dtypes import Array
from pytest_fusion.interpreter.memory import memory_findings
from pytest_fusion.interpreter.memory.access import Access, launch
from pytest_fusion.interpreter.memory.races import Conflict, Shadow
from pytest_fusion.interpreter.memory.regions import Region, View
from pytest_fusion.interpreter.memory.touched import MANY, Touched


def own_lanes(
    access: Access, region: Region, view: View | None, elements: Array, selected: Array | None
) -> Array | None:
    """The lanes whose store stays inside what the launch owns; the others are reported."""
    if not memory_findings.current().tracking:
        return selected
    own = region.own()
    if own is None:
        return selected
    first = np.where(selected, elements, 0) if selected is not None else elements
    strange = ~own[first * access.itemsize]
    if selected is not None:
        strange &= selected
    if not strange.any():
        return selected
    access.report("gap-store", view, region, strange)
    return np.asarray(~strange if selected is None else selected & ~strange)


# A storage of gigabytes gets no access history, which takes four bytes for each element, gaps included. A smaller case
# shows its races, which do not depend on where the elements are.
def track_load(access: Access, region: Region, view: View | None, elements: Array, selected: Array | None) -> None:
    """Check a load; it races with a store of another program, before or after it."""
    lanes = Touched(elements, selected, access.itemsize)
    own = region.own() if view is not None else None
    if own is not None and view is not None and not own[lanes.flat * access.itemsize].all():
        memory_findings.current().gap_reads.setdefault((access.site.file, access.site.line, view.name), access.site)
    _check_written(access, region, view, lanes)
    if region.far:
        return
    conflict = _shadow(region, view, access.itemsize).load(lanes, access.site, view)
    if conflict is not None:
        access.report("racing-load", view, region, lanes.at(conflict.lanes), conflict=conflict)


def track_store(
    access: Access, region: Region, view: View | None, lanes: Touched, wanted: Array, memory: Array
) -> None:
    """Check a store of ``wanted``, (lanes,), before it is performed."""
    _mark_written(region, lanes)
    if region.far:
        return
    with_store, with_load = _shadow(region, view, access.itemsize).store(
        lanes, lambda: np.asarray(memory[lanes.index] != wanted), access.site, view
    )
    if with_store is not None:
        access.report("racing-stores", view, region, lanes.at(with_store.lanes), conflict=with_store)
    if with_load is not None:
        # The load ran first here, but the race decides its result: the finding names its line.
        _report_mirrored("racing-load", access, region, view, lanes, with_load)


def track_atomic(access: Access, region: Region, view: View | None, lanes: Touched) -> None:
    """Check an atomic; it races with a plain store of another program."""
    _check_written(access, region, view, lanes)
    _mark_written(region, lanes)
    if region.far:
        return
    conflict = _shadow(region, view, access.itemsize).atomic(lanes, access.site, view)
    if conflict is not None:
        _report_mirrored("racing-stores", access, region, view, lanes, conflict)


def lost_before(lanes: Touched, wanted: Array) -> Array | None:
    """Bool (lanes,): whether a store of ``wanted`` loses the lane's value to another lane; ``None`` for no lane."""
    if isinstance(lanes.index, slice):
        return None
    order = np.argsort(lanes.flat, kind="stable")
    ordered = lanes.flat[order]
    ends = np.append(ordered[1:] != ordered[:-1], True)
    # Of equal elements the last lane wins; each lane's run ends there.
    run = np.cumsum(ends) - ends
    lost = np.zeros(order.shape, np.bool_)
    lost[order] = wanted[order] != wanted[order[np.flatnonzero(ends)[run]]]
    return lost if lost.any() else None


def lost_after(lanes: Touched, wanted: Array, memory: Array) -> Array | None:
    """The same after the store, at a third of the cost."""
    if isinstance(lanes.index, slice):
        return None
    lost = np.asarray(memory[lanes.index] != wanted)
    return lost if lost.any() else None


def report_lost(access: Access, region: Region, view: View | None, lanes: Touched, lost: Array | None) -> None:
    """Report lanes of a store that have different values for the same element."""
    if lost is None:
        return
    first = int(np.argmax(lost))
    winner = int(np.flatnonzero(lanes.flat == lanes.flat[first])[-1])
    other = lanes.programs[winner] if lanes.programs.size > 1 else lanes.programs[0]
    if other == MANY:
        other = access.number(0, 1)
    conflict = Conflict(np.flatnonzero(lost), np.array([other]))
    access.report("racing-stores", view, region, lanes.at(conflict.lanes), conflict=conflict)


def _shadow(region: Region, view: View | None, itemsize: int) -> Shadow:
    if region.shadow is None:
        granule = view.itemsize if view is not None else itemsize
        x, y, z = launch().grid
        region.shadow = Shadow(region.nbytes // granule + 1, granule, x * y * z, launch().order)
    shadow: Shadow = region.shadow
    return shadow


def _report_mirrored(
    kind: memory_findings.Kind, access: Access, region: Region, view: View | None, lanes: Touched, conflict: Conflict
) -> None:
    """Report a race at the line of the earlier access."""
    at = lanes.at(conflict.lanes)
    row = int(np.unravel_index(int(np.argmax(at)), at.shape)[0])
    mirrored = Conflict(conflict.lanes, np.array([access.number(row, at.shape[0])]), access.site, view)
    number, argument = max(int(conflict.others[0]), 1), conflict.argument or view
    access.report(kind, argument, region, at, conflict=mirrored, site=conflict.site, number=number)


def _check_written(access: Access, region: Region, view: View | None, lanes: Touched) -> None:
    facts = region.facts
    if facts is None or facts.written is None:
        return
    first = lanes.flat * access.itemsize
    blank = ~facts.written[first]
    if not blank.any():
        return
    if facts.untouched is not None:
        # Untracked code may have written it: then it no longer holds the fill of fresh memory.
        blank[blank] = facts.untouched(first[blank])
    if blank.any():
        access.report("unwritten-load", view, region, lanes.at(np.flatnonzero(blank)))


def _mark_written(region: Region, lanes: Touched) -> None:
    if region.facts is None or region.facts.written is None:
        return
    size = lanes.itemsize
    whole = region.facts.written[: region.nbytes // size * size]
    # One item of the width of an element marks all of its bytes.
    whole.view(f"u{size}")[lanes.index] = int.from_bytes(b"\1" * size, "little")
