"""Special functions that numpy lacks, in float64, from Python's ``math`` and ``statistics``."""

from __future__ import annotations

import math
from statistics import NormalDist

_NORMAL = NormalDist()
_TWO_OVER_ROOT_PI = 2.0 / math.sqrt(math.pi)


def gamma(x: float) -> float:
    """Gamma; NaN at negative integers and minus infinity, signed infinity at zero and beyond float64."""
    if x == 0.0:
        return math.copysign(math.inf, x)
    try:
        return math.gamma(x)
    except ValueError:
        return math.nan
    except OverflowError:
        return math.inf


def log_gamma(x: float) -> float:
    """log|Gamma|; infinity at zero and the negative integers."""
    try:
        return math.lgamma(x)
    except (ValueError, OverflowError):
        return math.inf


def erf_inverse(x: float) -> float:
    """Inverse of ``erf``: the normal quantile (Wichura 1988), sharpened by Newton steps on ``erf`` itself."""
    if not -1.0 < x < 1.0:
        return math.copysign(math.inf, x) if abs(x) == 1.0 else math.nan
    y = _NORMAL.inv_cdf((1.0 + x) / 2.0) / math.sqrt(2.0) if abs(x) > 1e-8 else x / _TWO_OVER_ROOT_PI
    for _ in range(2):
        y -= (math.erf(y) - x) / (_TWO_OVER_ROOT_PI * math.exp(-y * y))
    return y


def erfc_inverse(x: float) -> float:
    """Inverse of ``erfc``, accurate also where ``1 - x`` would round to one."""
    if not 0.0 < x < 2.0:
        return math.inf if x == 0.0 else -math.inf if x == 2.0 else math.nan
    y = -_NORMAL.inv_cdf(x / 2.0) / math.sqrt(2.0)
    for _ in range(2):
        slope = _TWO_OVER_ROOT_PI * math.exp(-y * y)
        y += (math.erfc(y) - x) / slope if slope else 0.0
    return y


def erfc_scaled(x: float) -> float:
    """``exp(x * x) * erfc(x)``; beyond 20 its asymptotic series, whose first term left out is below 2e-13."""
    if x < 20.0:
        try:
            return math.exp(x * x) * math.erfc(x)
        except OverflowError:
            return math.inf
    square = 2.0 * x * x
    series = 1.0 - 1.0 / square + 3.0 / square**2 - 15.0 / square**3
    return series / (x * math.sqrt(math.pi))


def normal_cdf(x: float) -> float:
    """P(Z <= x) of a standard normal."""
    return 0.5 * math.erfc(-x / math.sqrt(2.0))


def normal_quantile(p: float) -> float:
    """Inverse of ``normal_cdf``."""
    return -math.sqrt(2.0) * erfc_inverse(2.0 * p)
