"""Targets: their names, their limits, and how many warps of a kernel one multiprocessor holds."""

from __future__ import annotations

import pytest

from pytest_fusion.errors import FusionError
from pytest_fusion.run.measure.resources.targets import TARGETS, Resources, occupancy, parse_targets


def test_targets_are_read_in_any_spelling_once_each() -> None:
    """Commas, blanks, capitals and the suffix of architecture-specific features are all the same."""
    assert [target.name for target in parse_targets("sm_90a, SM_80 sm_90")] == ["sm_90", "sm_80"]


@pytest.mark.parametrize(("text", "said"), [("sm_91", "did you mean 'sm_90'"), ("", "names no target")])
def test_a_wrong_target_is_told(text: str, said: str) -> None:
    """A misspelt target names the nearest one."""
    with pytest.raises(FusionError, match=said):
        parse_targets(text)


@pytest.mark.parametrize(("name", "most"), [("sm_75", 65536), ("sm_80", 166912), ("sm_89", 101376), ("sm_100", 232448)])
def test_a_block_may_take_what_cuda_documents(name: str, most: int) -> None:
    """Shared memory of a block is that of the multiprocessor less what the system reserves."""
    assert TARGETS[name].shared_per_block == most


@pytest.mark.parametrize(
    ("warps", "registers", "shared", "expected"),
    [
        (4, 32, 0, (64, "warps")),
        (1, 16, 0, (32, "blocks")),
        (8, 48, 0, (40, "registers")),
        (8, 255, 0, (8, "registers")),
        (4, 32, 100_000, (8, "shared memory")),
        (4, 32, 232_448, (4, "shared memory")),
        (4, 32, 232_449, (0, "shared memory")),
        (32, 128, 0, (0, "registers")),
        (64, 16, 0, (0, "threads of a block")),
    ],
)
def test_occupancy_is_bounded_by_the_scarcest(
    warps: int, registers: int, shared: int, expected: tuple[int, str]
) -> None:
    """Warps that fit one multiprocessor of sm_90, and what there is too little of."""
    kernel = Resources("kernel", "sm_90", warps=warps, registers=registers, shared_dynamic=shared)

    held = occupancy(TARGETS["sm_90"], kernel)

    assert (held.warps, held.limited_by) == expected
