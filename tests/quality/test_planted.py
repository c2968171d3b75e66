"""Every planted bug is caught by a check that names it, and shrunk to the smallest sizes that show it."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.quality.measure import BY_NAME, RIGHT_CAUSES, examine_plant, lacking, share_of_right_causes
from tests.quality.plant import Plant, next_boundary
from tests.quality.plants import BEYOND, PLANTS
from tests.quality.reports import REPORTS
from tests.sweeps import sweep

REQUIRED_CLASSES = frozenset(
    "A1 A2 A3 B1 B2 B3 B4 B5 C1 C2 C3 C4 C5 D1 D2 D3 D4 D5 D6 D7 E1 E2 E3 E4 F1 F2 F3 F4 G1 G2 G3 G4 G5 H1 H2 H3 H4 H5 "
    "H6 H7 I1 J1 K1 K2".split()
)

CLAIMED = [plant for plant in PLANTS if plant.name not in BEYOND]


# The plant of each class that is found and shrunk soonest, in 0.2 to 4 s, and one of each class that needs a GPU.
SAMPLE = (
    "rms_norm_nested/flattens",
    "rms_norm_grad/upstream-pitch",
    "swiglu/output-row",
    "swiglu/column-mask-only",
    "attention/tail-tile",
    "rms_norm/row-mask",
    "linear/weight-tail",
    "bag_mean/last-bag",
    "wide/product-in-int32",
    "any_rank_turns/so-many-turns",
    "softmax/width-cap",
    "bag_mean/empty-bag",
    "affine_relu/squeezes",
    "linear/bf16-operands",
    "activation/no-threshold",
    "softmax/masked-row",
    "adam/eps-inside",
    "quant_int8/no-floor",
    "cummax/ignores-nan",
    "activation/log-of-sigmoid",
    "loss_grad/first-upstream",
    "affine_relu/writes-input",
    "rms_norm_grad/frozen-weight",
    "geglu/tanh-for-erf",
    "column_sum/lost-update",
    "column_sum/any-order",
    "residual_norm_wide/block-by-rows",
    "launch/side-stream",
    "dropout/no-scale",
    "leaky_tuned/no-restore",
    "row_sum_tuned/width-not-in-key",
    "row_sum_tuned/one-config-drops-tail",
    "custom_op/fake-contiguous",
    "sized/width-is-constant",
    "activation/other-bound",
    "attention/top-left",
    "attention_window/window-inclusive",
    "rows_added/equal-neighbours-once",
    "cross_entropy/no-clamp",
    "gate/drops-ties",
    "adam/counts-from-zero",
    "launch/no-device-guard",
    "fast_path/vectors-only",
    "launch_count/two-kernels",
    "launch/synchronises",
    "refuses-everything",
    "affine/returns-input",
    "affine_relu/keeps-float32",
    "affine_relu/caches-bias",
)


@sweep("name", [plant.name for plant in CLAIMED], fast=SAMPLE, rest=pytest.mark.nightly)
def test_planted_bug_is_caught_and_shrunk(name: str) -> None:
    """With seed 0 its profile finds this bug and shrinks it below the next boundary."""
    if why := lacking(BY_NAME[name]):
        pytest.skip(why)
    finding = examine_plant(name, 0, explain=False)
    assert not finding.trouble, f"{name}: {finding.trouble}\n{finding.record.message}"


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(BEYOND))
def test_unclaimed_bug_is_still_beyond_the_judge(name: str) -> None:
    """What is listed as beyond the judge is really missed; once it is caught it belongs among the claims."""
    record = examine_plant(name, 0).record
    assert record.verdict == "pass", f"{name} is caught by {record.failed_check}: take it out of BEYOND"


def test_corpus_covers_the_classes() -> None:
    """The corpus claims at least 180 bugs, each named once, of 44 classes of the public corpus."""
    assert len({plant.name for plant in PLANTS}) == len(PLANTS)
    assert len(CLAIMED) >= 180
    assert {plant.bug_class for plant in CLAIMED} >= REQUIRED_CLASSES


@pytest.mark.nightly
def test_the_causes_are_right() -> None:
    """At least nine of ten failures name a cause that somebody who knows the bug would give."""
    findings = [examine_plant(plant.name, 0) for plant in CLAIMED if not lacking(plant)]
    wrong = [f"{found.plant.name}: {found.cause}" for found in findings if not found.cause_is_right]
    assert share_of_right_causes(found.cause_is_right for found in findings) >= RIGHT_CAUSES, "\n".join(wrong)


def test_every_plant_says_what_would_be_right() -> None:
    """Each has a check and a cause that would be right, and `unexplained` stands for want of any better."""
    for plant in PLANTS:
        assert plant.expect_checks, plant.name
        assert plant.causes, plant.name


def test_every_class_is_met_by_default() -> None:
    """What only the nightly run judges is of no class that the default run leaves out; of each class one is enough."""
    usual = [BY_NAME[name].bug_class for name in SAMPLE]
    assert sorted(usual) == sorted({plant.bug_class for plant in CLAIMED})


def test_every_row_has_its_thread() -> None:
    """Each report that a plant cites is listed, and no other."""
    assert {plant.row for plant in PLANTS} - {None} == set(REPORTS)


def test_smallest_sizes_name_the_dims_of_the_spec() -> None:
    """A plant states the size of every dim of its spec, so that none escapes the judgement on shrinking."""
    for plant in PLANTS:
        for sizes in plant.smallest:
            assert set(sizes) == set(plant.make_spec().dim_names), plant.name


def test_next_boundary_lies_above() -> None:
    """A boundary is a power of two or its neighbour, and the next one is never the size itself."""
    assert [next_boundary(n) for n in (0, 1, 3, 5, 9, 33, 257)] == [1, 2, 4, 7, 15, 63, 511]


def test_a_size_past_the_boundary_is_not_shrunk() -> None:
    """One dim above its limit is enough to call a case unshrunk; either of two smallest inputs will do."""
    sizes = ({"a": 2, "b": 1}, {"a": 1, "b": 5})
    plant = Plant("p", "A1", None, PLANTS[0].make_spec, frozenset({"values"}), frozenset(), sizes)
    assert plant.is_shrunk({"a": 3, "b": 2})
    assert plant.is_shrunk({"a": 2, "b": 7})
    assert not plant.is_shrunk({"a": 4, "b": 1})
    assert not plant.is_shrunk({"a": 3, "b": 7})
