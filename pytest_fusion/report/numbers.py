"""Numbers of a bench as text: three significant digits and a unit; what is not known is ``?``."""

from __future__ import annotations

from pytest_fusion.report.columns import UNKNOWN

_UNITS = ("B", "kB", "MB", "GB", "TB")


def quantity(size: float | None) -> str:
    """Bytes with three significant digits and a decimal unit: ``"268 MB"``."""
    if size is None:
        return UNKNOWN
    value, unit = float(size), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.3g} {_UNITS[unit]}"


def time(seconds: float | None) -> str:
    """Three significant digits in microseconds, milliseconds or seconds: ``"55.1 us"``."""
    if seconds is None:
        return UNKNOWN
    for scale, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * scale < 999.5:
            return f"{three(seconds * scale)} {unit}"
    return f"{three(seconds)} s"


def three(value: float) -> str:
    """Three significant digits, zeros too, never in powers of ten: ``"5.70"``, ``"1240"``."""
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}" if value >= 0.9995 else f"{value:.3g}"


def whole(share: float | None) -> str:
    """Whole per cent, one digit where there is no more: ``"91 %"``, ``"0.4 %"``."""
    if share is None:
        return UNKNOWN
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.1f} %"
