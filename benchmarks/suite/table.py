"""The table as markdown: one line for each pass of a row, its bars in words."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.suite.figures import Figures, Judged, shortened
from benchmarks.suite.model import COMPILE, EAGER, LIGER, OURS, Span

_COLUMNS = (EAGER, COMPILE, LIGER)
HEADER = (
    "| kernel, problem | pass | ours, us | eager | torch.compile | Liger | libraries | rate | of its ceiling "
    "| best/ours | peak | bars |\n|---|---|---|---|---|---|---|---|---|---|---|---|"
)
_PASSES: dict[Span, str] = {"forward": "fwd", "both": "fwd+bwd", "backward": "bwd"}


def line(figures: Figures, bars: Sequence[Judged]) -> str:
    """One line of the table. ``best/ours`` is how many times as long the fastest other way takes."""
    best = figures.fastest()
    beside = f"{best[1] / figures.ours:.2f} ({best[0]})" if best is not None and figures.ours else "-"
    peak = figures.memory.get(OURS)
    cells = (
        f"{figures.family}: {figures.text}",
        _PASSES[figures.span],
        _cell(figures, OURS),
        *(_cell(figures, way) for way in _COLUMNS),
        "; ".join(
            f"{way} {_cell(figures, way)}" for way in (*figures.seconds, *figures.words) if way not in (OURS, *_COLUMNS)
        )
        or "-",
        _rate(figures),
        _share(figures),
        beside,
        "-" if peak is None else size(peak),
        "; ".join(map(str, bars)) or "-",
    )
    return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"


def summary(bars: Sequence[Judged]) -> str:
    """How many bars are met, missed and not measured, goals apart."""
    parts = []
    for goal, what in ((False, "bars"), (True, "goals")):
        outcomes = [each.outcome for each in bars if each.bar.goal == goal]
        counts = [f"{outcomes.count(name)} {name}" for name in ("met", "missed", "not measured") if name in outcomes]
        parts.append(f"{len(outcomes)} {what}: {', '.join(counts) or 'none'}")
    return "; ".join(parts)


def size(amount: int) -> str:
    """Bytes as a person reads them: ``"1.35 GiB"``."""
    value, unit = float(amount), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


def _cell(figures: Figures, way: str) -> str:
    if way in figures.seconds:
        microseconds = 1e6 * figures.seconds[way]
        timed = f"{microseconds:.1f}" if microseconds < 1000 else f"{microseconds:.0f}"
        return timed + (" (events)" if figures.timers.get(way) == "events" else "")
    return shortened(figures.words.get(way, "-"))


def _rate(figures: Figures) -> str:
    flops, moved = figures.flops_per_s(), figures.bytes_per_s()
    if flops is not None and (moved is None or _bound(figures)[1] == "matmul"):
        return f"{flops * 1e-12:.0f} TFLOP/s"
    return f"{moved * 1e-9:.0f} GB/s" if moved is not None else "-"


def _share(figures: Figures) -> str:
    """Of a copy's bytes or of a product's operations, whichever the work takes longer for."""
    least, ceiling = _bound(figures)
    return f"{least / figures.ours:.2f} ({ceiling})" if figures.ours and least else "-"


def _bound(figures: Figures) -> tuple[float, str]:
    """Seconds that the work takes at its ceiling, and which that is."""
    copy, matmul = figures.copy_bytes_per_s, figures.matmul_flops_per_s
    by_bytes = figures.work.bytes / copy if copy else 0.0
    by_flops = figures.work.flops / matmul if matmul else 0.0
    return max((by_bytes, "copy"), (by_flops, "matmul"))
