"""Remember who accessed what, and report what must not be: races, gaps, memory that nothing wrote."""

from __future__ import annotations

import numpy as np

from pytest_fusion.run.interpreter import findings
from pytest_fusion.run.interpreter.access import Access, launch
from pytest_fusion.run.interpreter.dtypes import Array
from pytest_fusion.run.interpreter.races import MANY, Conflict, Shadow
from pytest_fusion.run.interpreter.regions import Region, View

# The lanes of an access: its shape, and bool of that shape for those that take part (all: ``None``).
Lanes = tuple[tuple[int, ...], Array | None]


def own_lanes(
    access: Access, region: Region, view: View | None, elements: Array, selected: Array | None
) -> Array | None:
    """The lanes whose store stays inside what the launch owns; the others are reported."""
    if not findings.current().tracking:
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


def _spread(region: Region, view: View | None, elements: Array, itemsize: int) -> tuple[Shadow, Array, int]:
    if region.shadow is None:
        granule = view.itemsize if view is not None else itemsize
        x, y, z = launch().grid
        region.shadow = Shadow(region.nbytes // granule + 1, granule, x * y * z)
    wide, times = region.shadow.spread(elements, itemsize)
    return region.shadow, wide, times


def track_load(access: Access, region: Region, view: View | None, elements: Array, selected: Array | None) -> None:
    shape = elements.shape
    if selected is not None:
        shape = np.broadcast_shapes(shape, selected.shape)
        elements, selected = np.broadcast_to(elements, shape), np.broadcast_to(selected, shape)
    flat = elements.reshape(-1) if selected is None else elements[selected]
    if flat.size == 0:
        return
    _note_gap_reads(access, region, view, flat)
    _check_written(access, region, view, flat, (shape, selected))
    programs, actors = access.programs(shape, selected)
    shadow, wide, times = _spread(region, view, flat, access.itemsize)
    if times > 1 and programs.size > 1:
        programs = np.repeat(programs, times)
    conflict = shadow.load(wide, programs, actors, access.site, view, launch().order)
    if conflict is not None:
        access.report(
            "racing-load", view, region, _lanes_at(conflict.lanes // times, shape, selected), conflict=conflict
        )


def _note_gap_reads(access: Access, region: Region, view: View | None, flat: Array) -> None:
    if view is None:
        return
    own = region.own()
    if own is not None and not own[flat * access.itemsize].all():
        site = access.site
        findings.current().gap_reads.setdefault((site.file, site.line, view.name), site)


def _check_written(
    access: Access,
    region: Region,
    view: View | None,
    flat: Array,
    lanes: Lanes,
) -> None:
    facts = region.facts
    if facts is None or facts.written is None:
        return
    first = flat * access.itemsize
    blank = ~facts.written[first]
    if not blank.any():
        return
    if facts.untouched is not None:
        # Code that nobody watches may have written it: then it no longer holds what fresh memory held.
        blank[blank] = facts.untouched(first[blank])
    if blank.any():
        access.report("unwritten-load", view, region, _lanes_at(np.flatnonzero(blank), *lanes))


def track_store(
    access: Access,
    region: Region,
    view: View | None,
    flat: Array,
    wanted: Array,
    memory: Array,
    lanes: Lanes,
) -> None:
    shape, selected = lanes
    _mark_written(region, flat, access.itemsize)
    programs, actors = access.programs(shape, selected)
    shadow, wide, times = _spread(region, view, flat, access.itemsize)
    changed = memory[flat] != wanted
    if times > 1:
        changed = np.repeat(changed, times)
        programs = np.repeat(programs, times) if programs.size > 1 else programs
    with_store, with_load = shadow.store(wide, programs, actors, changed, access.site, view, launch().order)
    if with_store is not None:
        at = _lanes_at(with_store.lanes // times, shape, selected)
        access.report("racing-stores", view, region, at, conflict=with_store)
    if with_load is not None:
        _report_earlier_load(access, region, view, with_load, times, lanes)


def _report_earlier_load(
    access: Access,
    region: Region,
    view: View | None,
    conflict: Conflict,
    times: int,
    lanes: Lanes,
) -> None:
    """The load came first here, but it is the load that is at the mercy of the other: the finding is its line's."""
    shape, selected = lanes
    at = _lanes_at(conflict.lanes // times, shape, selected)
    position = int(np.unravel_index(int(np.argmax(at)), at.shape)[0])
    storing = access.number(position, at.shape[0])
    loading = int(conflict.others[0])
    mirrored = Conflict(conflict.lanes, np.array([storing]), access.site, view)
    access.report(
        "racing-load",
        conflict.argument or view,
        region,
        at,
        conflict=mirrored,
        site=conflict.site,
        number=max(loading, 1),
    )


def lanes_race(
    access: Access,
    region: Region,
    view: View | None,
    flat: Array,
    lost: Array,
    lanes: Lanes,
) -> None:
    """Two lanes of one instruction stored different values to one element."""
    shape, selected = lanes
    programs, _ = access.programs(shape, selected)
    first = int(np.argmax(lost))
    winner = int(np.flatnonzero(flat == flat[first])[-1])
    other = programs[winner] if programs.size > 1 else programs[0]
    if other == MANY:
        other = access.number(0, 1)
    conflict = Conflict(np.flatnonzero(lost), np.array([other]))
    access.report("racing-stores", view, region, _lanes_at(conflict.lanes, shape, selected), conflict=conflict)


def _mark_written(region: Region, flat: Array, itemsize: int) -> None:
    if region.facts is None or region.facts.written is None:
        return
    first = flat * itemsize
    for byte in range(itemsize):
        region.facts.written[first + byte] = True


def _lanes_at(positions: Array, shape: tuple[int, ...], selected: Array | None) -> Array:
    """Bool of ``shape``: the lanes at these positions among the selected ones."""
    result = np.zeros(shape, np.bool_)
    if selected is None:
        result.reshape(-1)[positions] = True
    else:
        result.reshape(-1)[np.flatnonzero(selected)[positions]] = True
    return result


def track_atomic(access: Access, region: Region, view: View | None, flat: Array, lanes: Lanes) -> None:
    """An atomic on the elements ``flat``; what races with it is another program's plain store."""
    shape, selected = lanes
    _check_written(access, region, view, flat, lanes)
    _mark_written(region, flat, access.itemsize)
    programs, _ = access.programs(shape, selected)
    shadow, wide, times = _spread(region, view, flat, access.itemsize)
    if times > 1 and programs.size > 1:
        programs = np.repeat(programs, times)
    conflict = shadow.atomic(wide, programs, access.site, view, launch().order)
    if conflict is None:
        return
    at = _lanes_at(conflict.lanes // times, shape, selected)
    row = int(np.unravel_index(int(np.argmax(at)), shape)[0])
    mirrored = Conflict(conflict.lanes, np.array([access.number(row, shape[0])]), access.site)
    storing = max(int(conflict.others[0]), 1)
    access.report(
        "racing-stores", conflict.argument or view, region, at, conflict=mirrored, site=conflict.site, number=storing
    )
