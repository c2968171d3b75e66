"""What each mode of --fusion-update writes."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_fusion.bench.baseline import store
from pytest_fusion.bench.baseline.row import Key, Latency, Row, Session
from pytest_fusion.bench.baseline.update import update
from pytest_fusion.errors import BaselineError
from tests.bench.baseline.made import FACTS, H200, TEST, file_of, golden, latency, row

WORSE = row({**FACTS, "launches.kernels": 2})
OTHER = row(case="rows=9")
NEW = row(case="rows=1")


def _rows(folder: Path) -> dict[Key, Row]:
    found = store.load(folder, TEST, H200)
    return dict(found.rows) if found is not None else {}


def _latency(found: Row) -> Latency:
    assert found.latency is not None
    return found.latency


@pytest.mark.parametrize(
    ("mode", "kept", "written"),
    [
        ("none", {row().key: row(), OTHER.key: OTHER}, False),
        ("new", {row().key: row(), OTHER.key: OTHER, NEW.key: NEW}, True),
        ("regressed", {WORSE.key: WORSE, OTHER.key: OTHER, NEW.key: NEW}, True),
        ("all", {WORSE.key: WORSE, OTHER.key: replace(OTHER, names={"b": 1}), NEW.key: NEW}, True),
    ],
)
def test_each_mode_writes_what_it_says(tmp_path: Path, mode: str, kept: dict[Key, Row], written: bool) -> None:
    """new: what is missing; regressed: also what became worse; all: also what merely changed."""
    update(tmp_path, [row(), OTHER], "new")
    path = file_of(tmp_path, row())

    done = update(tmp_path, [WORSE, replace(OTHER, names={"b": 1}), NEW], mode, regressed={WORSE.key})

    assert _rows(tmp_path) == kept
    assert done == ([path] if written else [])


def test_every_path_that_is_written_is_listed(tmp_path: Path) -> None:
    """A file for each test and device class, and the folder's .gitignore the first time."""
    rows = [row(), row(test="t.py::test_b"), row(device="cpu (modelled)")]
    done = update(tmp_path, rows, "new")

    assert set(done) == {tmp_path / ".gitignore", *(file_of(tmp_path, one) for one in rows)}
    assert update(tmp_path, rows, "all") == []


@pytest.mark.parametrize("mode", ["none", "new", "regressed", "all"])
def test_a_partial_run_deletes_nothing(tmp_path: Path, mode: str) -> None:
    """Rows and files of what this run did not measure are as they were, in every mode."""
    update(tmp_path, [row(), OTHER, row(test="t.py::test_b")], "new")
    update(tmp_path, [WORSE], mode, regressed={WORSE.key})

    assert OTHER.key in _rows(tmp_path)
    assert file_of(tmp_path, row(test="t.py::test_b")).is_file()


def test_a_complete_run_with_all_takes_out_what_is_gone(tmp_path: Path) -> None:
    """Only with all, and only of tests whose every case was measured."""
    update(tmp_path, [row(), OTHER], "new")
    update(tmp_path, [row()], "new", complete={TEST})
    assert OTHER.key in _rows(tmp_path)

    update(tmp_path, [row()], "all", complete={TEST})
    assert list(_rows(tmp_path)) == [row().key]


def test_new_fills_what_a_row_lacks_and_accepts_nothing(tmp_path: Path) -> None:
    """A fact, a latency and golden outputs that the baseline lacks are added; a fact that changed is not."""
    update(tmp_path, [row({"launches.kernels": 1})], "new")
    update(tmp_path, [row({"launches.kernels": 2, "recompiles": 3}, latency=latency(), golden=(golden(),))], "new")
    found = _rows(tmp_path)[row().key]

    assert found.facts == {"launches.kernels": 1, "recompiles": 3}
    assert (found.latency, found.golden) == (latency(), (golden(),))


def test_reasons_are_kept_with_the_count_that_they_tell_of(tmp_path: Path) -> None:
    """An older row gets them where it counts as often; another count's are for who accepts that."""
    update(tmp_path, [row({"recompiles": 1})], "new")
    update(tmp_path, [row({"recompiles": 2}, reasons={"a": 2})], "new")
    assert _rows(tmp_path)[row().key].reasons == {}
    update(tmp_path, [row({"recompiles": 1}, reasons={"a": 1})], "new")
    update(tmp_path, [row({"recompiles": 1}, reasons={"b": 1})], "new")
    assert _rows(tmp_path)[row().key].reasons == {"a": 1}
    update(tmp_path, [row({"launches.kernels": 1})], "all")
    assert _rows(tmp_path)[row().key].reasons == {"a": 1}
    update(tmp_path, [row({"recompiles": 1}, reasons={"b": 1})], "all")
    assert _rows(tmp_path)[row().key].reasons == {"b": 1}


def test_what_was_not_measured_is_not_forgotten(tmp_path: Path) -> None:
    """An update without latency, golden outputs or a target leaves those of the baseline."""
    update(tmp_path, [row(latency=latency(), golden=(golden(),))], "new")
    update(tmp_path, [row({"launches.kernels": 2}, names={"a": 2})], "all")
    found = _rows(tmp_path)[row().key]

    assert found.facts == {**{k: v for k, v in FACTS.items() if "launches" not in k}, "launches.kernels": 2}
    assert (found.names, found.latency, found.golden) == ({"a": 2}, latency(), (golden(),))


def test_latency_gathers_sessions(tmp_path: Path) -> None:
    """Accepting the same level again keeps the earlier sessions, from which the spread between sessions is learnt."""
    for ratio in (-0.700, -0.701, -0.699):
        update(tmp_path, [row(latency=latency(ratio))], "all")
    found = _latency(_rows(tmp_path)[row().key])

    assert (found.ratio, [one.ratio for one in found.history]) == (-0.699, [-0.700, -0.701])


@pytest.mark.parametrize(
    "now",
    [latency(-0.5), latency(control="other"), latency(place={"gpu": "H100"}), latency(method={"timer": "events"})],
    ids="level reference place method".split(),
)
def test_another_level_or_way_begins_anew(tmp_path: Path, now: Latency) -> None:
    """Sessions across a step would hide the next step in their spread."""
    update(tmp_path, [row(latency=latency(history=(Session(-0.7),)))], "new")
    update(tmp_path, [row(latency=now)], "all")

    assert _latency(_rows(tmp_path)[row().key]).history == ()


def test_rows_of_several_workers_are_merged(tmp_path: Path) -> None:
    """The same row twice is one row; two that say different things are an error that names the fact, and no file."""
    update(tmp_path, [row(), row(latency=latency())], "new")
    assert _rows(tmp_path)[row().key].latency == latency()

    with pytest.raises(BaselineError, match=r"measured twice.*launches.kernels: 1 and 2"):
        update(tmp_path / "new", [row(), WORSE], "new")
    assert not (tmp_path / "new").exists()


def test_runs_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    """Eight writers of eight rows of one file leave eight rows: each reads what the one before it wrote."""
    rows = [row(case=f"rows={i}") for i in range(8)]
    start = threading.Barrier(len(rows))

    def write(one: Row) -> None:
        start.wait()
        update(tmp_path, [one], "new")

    threads = [threading.Thread(target=write, args=(one,)) for one in rows]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert set(_rows(tmp_path)) == {one.key for one in rows}


def test_one_file_that_is_damaged_stops_the_update_of_all(tmp_path: Path) -> None:
    """Nothing is written in a folder that holds a file which cannot be read, wherever it comes in the order."""
    update(tmp_path, [row(test="z.py::test_z")], "new")
    broken = file_of(tmp_path, row(test="z.py::test_z"))
    broken.write_text("{")

    with pytest.raises(BaselineError, match="test_z"):
        update(tmp_path, [row(test="a.py::test_a"), row(test="z.py::test_z")], "all")
    assert store.find(tmp_path) == [broken]
    assert broken.read_text() == "{"
