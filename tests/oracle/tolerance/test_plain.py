"""The explicit tolerance."""

from __future__ import annotations

import torch

from pytest_fusion.oracle.tolerance import judge_plain


def test_allowance_is_absolute_plus_relative() -> None:
    """|got - want| <= atol + rtol |want| per element, and the worst element is named."""
    want = torch.tensor([[1.0, 100.0], [0.0, -50.0]])
    got = want + torch.tensor([[0.0, 0.9], [0.09, -0.55]])

    passed, failed = judge_plain(got, want, 0.01, 0.1), judge_plain(got, want, 0.005, 0.1)

    assert passed.ok
    assert 0.8 < passed.ratio < 1
    assert not failed.ok
    assert failed.index == (1, 1)
    assert failed.mismatched == 2


def test_nonfinite_elements_must_match_in_both_directions() -> None:
    """NaN and infinities at other places fail whatever the tolerance; at the same places they are no difference."""
    want = torch.tensor([1.0, float("nan"), float("inf"), 2.0])
    for wrong in ([1.0, 0.0, float("inf"), 2.0], [1.0, float("nan"), float("-inf"), 2.0], [float("nan")] * 4):
        verdict = judge_plain(torch.tensor(wrong), want, 10.0, 10.0)
        assert not verdict.ok
        assert verdict.statistic == "nonfinite"

    assert judge_plain(want.clone(), want, 0.0, 0.0).ok


def test_other_shapes_fail_and_empty_ones_pass() -> None:
    """Nothing to compare is no difference; nothing comparable is one."""
    assert judge_plain(torch.zeros(0, 3), torch.zeros(0, 3), 0.0, 0.0).ok
    assert judge_plain(torch.zeros(3), torch.zeros(1, 3), 1.0, 1.0).statistic == "shape"
