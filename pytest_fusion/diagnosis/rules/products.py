"""Failures that a setting of torch makes, by which the products of a right kernel have fewer digits."""

from __future__ import annotations

from pytest_fusion.diagnosis.diagnosis_model import Found
from pytest_fusion.diagnosis.experiments import Lab
from pytest_fusion.run.precision import chosen, full_precision

_SEEDS = 3


def shortened(lab: Lab) -> Found | None:
    """Right once products have all digits, as the reference's have, and wrong again as they are set."""
    settings = chosen()
    cases = lab.telling(lab.base, _SEEDS) if settings else []
    if not cases:
        return None
    with full_precision():
        cured = all(lab.once(case).right for case in cases)
    if not cured or not lab.once(cases[-1]).wrong:
        lab.ruled_out.append(f"what products are set to: wrong without {' and '.join(settings)} too")
        return None
    return Found("shortened-products", [f"right without {' and '.join(settings)}, for {len(cases)} seeds"])
