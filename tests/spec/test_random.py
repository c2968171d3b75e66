"""``rng=`` and ``distribution=`` refuse what contradicts itself, and fill in what goes without saying."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_fusion.errors import SpecError
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import tensor
from pytest_fusion.spec.random_numbers import rng


def fused(x: Any, seed: Any, p: Any) -> Any:
    return x


def plain(x: Any, seed: Any, p: Any) -> Any:
    return x


def masked(x: Any, seed: Any, p: Any, mask: Any) -> Any:
    return x


def make(reference: Any = plain, **changes: Any) -> FusionSpec:
    inputs = {"x": tensor("rows hidden"), "seed": 3, "p": 0.5}
    return FusionSpec(**{"fused": fused, "reference": reference, "inputs": inputs, **changes})


def test_a_parameter_called_mask_is_the_mask_and_p_the_probability() -> None:
    """Both are found by name; without a mask nobody asks for a probability."""
    own = make(masked, rng="seed").random
    assert own is not None
    assert (own.seed, own.mask, own.p) == ("seed", "mask", "p")
    without = make(rng="seed").random
    assert without is not None
    assert (without.mask, without.p) == (None, None)
    assert make().random is None


def test_a_completed_spec_can_be_changed() -> None:
    """A copy with other fields keeps what was found."""
    spec = make(masked, rng="seed")
    assert spec.with_(name="other").random == spec.random


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"rng": "sed"}, ["rng seed='sed' names no input", "did you mean 'seed'"]),
        ({"rng": 3}, ["rng=3", "the name of the input that seeds the kernel"]),
        ({"rng": rng("seed", p="q")}, ["rng p='q' names no input"]),
        ({"rng": rng("seed", mask="keep")}, ["rng mask='keep' is no parameter of the reference"]),
        ({"rng": rng("seed", mask="x")}, ["rng mask='x' is an input"]),
        ({"rng": rng("seed", recover=lambda x: x)}, ["describe a mask that the reference does not take"]),
        ({"reference": masked}, ["the reference needs 'mask'"]),
        ({"distribution": True}, ["distribution= needs rng="]),
        ({"distribution": True, "rng": "seed", "grad": True}, ["grad= does not apply to sampled outputs"]),
    ],
)
def test_contradictions_are_errors(changes: dict[str, Any], parts: list[str]) -> None:
    """The message says what is wrong and what would be right."""
    with pytest.raises(SpecError) as caught:
        make(**changes)
    for part in parts:
        assert part in str(caught.value)


def test_a_probability_is_one() -> None:
    """Numbers outside of 0 to 1 are refused where they are written."""
    with pytest.raises(SpecError, match="expected a probability"):
        rng("seed", p=1.5)
    with pytest.raises(SpecError, match="expected a function"):
        rng("seed", recover=3)  # type: ignore[arg-type]
