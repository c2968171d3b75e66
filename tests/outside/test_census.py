"""The census itself, and Liger's kernels in it; ``python -m tests.outside.census`` runs all packages with all cases."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_fusion import interpreter
from tests.outside.census import __main__ as census
from tests.outside.census.entry import Kernel, in_float32, without_init
from tests.outside.census.examined import examine_one
from tests.sweeps import sweep

if torch.cuda.device_count() > 0 and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton compiles for the GPU here; set TRITON_INTERPRET=1", allow_module_level=True)

interpreter.enable()  # before a package makes its kernels
pytest.importorskip("triton")
if not interpreter.installed():
    pytest.skip(str(interpreter.problem()), allow_module_level=True)

from tests.outside import planted  # noqa: E402

# How packages call Triton is theirs: some use what it has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore")
PLANTED = "tests.outside.planted"
SETTINGS = census.Settings("cpu", seconds=60.0, cases=3)
FINDINGS = Path(__file__).parents[2] / "docs" / "findings.md"
# Of each kind one: norms, a gate, a rotation.
FAST = {"layer_norm", "rms_norm", "rope", "softmax", "swiglu"}


def of_liger() -> list[Kernel]:
    if importlib.util.find_spec("liger_kernel") is None:
        return []
    from tests.outside.census import liger

    return [entry for entry in liger.kernels() if "cpu" in entry.devices]


LIGER = of_liger()


@pytest.mark.skipif(not LIGER, reason="Liger is not installed")
@sweep("entry", LIGER, fast=FAST if LIGER else 0, ids=lambda entry: str(entry.name))
def test_a_kernel_of_liger_runs_and_what_is_wrong_with_it_is_proved(entry: Kernel) -> None:
    """Every access is in bounds, outputs and gradients are the formula's; a hazard is none of these."""
    record = examine_one(entry, "dtype", seed=0, device="cpu", cases=3)
    row = census.Row("liger", entry.name, "dtype", 0, record)
    assert row.verdict in ("pass", "hazard", "strides", "proved"), (row.wrong, record["message"])


def test_all_that_is_called_proved_is_in_the_findings() -> None:
    """A heading of its own there shows how."""
    headings = set(re.findall(r"^## (.*)$", FINDINGS.read_text(encoding="utf-8"), re.MULTILINE))
    assert len(headings) > 5
    assert {heading for entry in LIGER for heading in entry.proved.values()} <= headings


def run(name: str, settings: census.Settings = SETTINGS) -> list[census.Row]:
    return list(census.rows(PLANTED, name, range(1), settings))


@pytest.mark.slow
def test_an_honest_kernel_passes_against_both_references() -> None:
    """Each in the same process of its own."""
    rows = run("honest")
    assert [row.reference for row in rows] == ["dtype", "float32"]
    assert [row.verdict for row in rows] == ["pass", "pass"]


@pytest.mark.slow
def test_a_process_that_dies_is_a_row() -> None:
    """And the other reference is tried after it."""
    assert [(row.reference, row.verdict) for row in run("dies")] == [("dtype", "died"), ("float32", "died")]


@pytest.mark.slow
def test_what_does_not_end_is_a_row() -> None:
    """The limit is each test's."""
    rows = run("hangs", census.Settings("cpu", seconds=6.0, cases=3))
    assert [row.verdict for row in rows] == ["no end", "no end"]


@pytest.mark.slow
def test_a_package_that_does_not_import_is_left_out_with_the_reason() -> None:
    """Its own words."""
    names, why = census.listed("no_such_package", SETTINGS)
    assert names == []
    assert why.startswith("ModuleNotFoundError")


@pytest.mark.parametrize(("name", "verdict"), [("honest", "pass"), ("wrong", "wrong"), ("known", "proved")])
def test_a_row_tells_what_is_known_from_what_is_not(name: str, verdict: str) -> None:
    """The same plant is ``proved`` where its entry lists the code."""
    entry = next(entry for entry in planted.kernels() if entry.name == name)
    record = examine_one(entry, "dtype", seed=0, device="cpu", cases=2)
    assert census.Row("planted", name, "dtype", 0, record).verdict == verdict


def row(verdict: str, findings: tuple[tuple[str, str], ...] = (), **more: Any) -> census.Row:
    listed = [{"code": code, "level": level} for level, code in findings]
    return census.Row("p", "k", "dtype", 0, {"verdict": verdict, "findings": listed, **more})


def test_a_layout_that_is_not_taken_is_no_other_wrong() -> None:
    """It counts on its own; beside another code it does not hide it."""
    strides = ("wrong", "ignores-strides")
    assert row("fail", (strides,)).verdict == "strides"
    assert row("fail", (strides, ("wrong", "tail-mask"))).verdict == "wrong"
    assert row("pass", (("hazard", "refuses"),)).verdict == "hazard"


def test_the_summary_counts_a_kernel_by_its_worst_seed() -> None:
    """Three seeds of one kernel are one kernel."""
    found = [row("pass"), row("fail", (("wrong", "tail-mask"),)), row("pass")]
    assert census.summary(found)[-1] == "| p | dtype | 1 | 0 | 0 | 0 | 0 | 1 | 0 |"


def test_the_second_reference_computes_in_float32_and_rounds_once() -> None:
    """But for results that stay wide, and for what is no floating tensor."""

    def formula(x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert x.dtype == torch.float32
        return x / 3, at, x.sum()

    x, at = torch.ones(3, dtype=torch.float16), torch.arange(3)
    third, same, total = in_float32(formula, wide=(2,))(x=x, at=at)
    assert (third.dtype, same.dtype, total.dtype) == (torch.float16, torch.int64, torch.float32)
    assert torch.equal(third, (torch.ones(3) / 3).half())


def test_the_second_reference_writes_where_the_formula_does() -> None:
    """In float32, and then in the input's dtype; other inputs stay as they are."""

    def formula(x: torch.Tensor, y: torch.Tensor) -> None:
        x.add_(y / 3)

    x, y = torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)
    in_float32(formula)(x=x, y=y)
    assert torch.equal(x, (torch.ones(3) + 1 / 3).bfloat16())
    assert torch.equal(y, torch.ones(3, dtype=torch.bfloat16))


def test_a_module_is_imported_without_the_init_of_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever that would need."""
    inner = tmp_path / "needy_package" / "inner"
    inner.mkdir(parents=True)
    for folder in (inner.parent, inner):
        (folder / "__init__.py").write_text("raise ImportError('needs much')")
    (inner / "part.py").write_text("ANSWER = 42")
    monkeypatch.syspath_prepend(str(tmp_path))
    without_init("needy_package", "needy_package.inner")
    assert importlib.import_module("needy_package.inner.part").ANSWER == 42
