"""Measure and print: ``python -m tests.outside.survey``, Markdown on stdout.

Calls run in forked children, all dtypes of one in the same.
"""

from __future__ import annotations

import importlib.metadata
import platform
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator

import torch

from pytest_fusion.run.process.fork import ChildError, Crash, run_isolated
from tests.outside.survey.measure import LIMIT_S, Outcome, measure
from tests.outside.survey.model import FLOATS, Op, Package, name_of

UNDEFINED = "right only where lanes that a masked load without `other` leaves undefined hold zero"


def outcomes(op: Op) -> Iterator[tuple[str, Outcome]]:
    """``op`` in each of its dtypes; what cannot run at all has its reason and no measurement."""
    dtypes = [d for d in op.dtypes if name_of(d) not in op.absent and "all" not in op.absent]
    for dtype in op.dtypes:
        if dtype not in dtypes:
            yield name_of(dtype), Outcome(False, False, op.absent.get("all") or op.absent[name_of(dtype)])

    def work(channel: object) -> list[Outcome]:
        found = []
        for dtype in dtypes:
            outcome = measure(op, dtype)
            if not outcome.right and name_of(dtype) not in op.bugs and measure(op, dtype, "zero").right:
                outcome = Outcome(outcome.ran, False, UNDEFINED, outcome.kernels, outcome.findings, outcome.serial)
            found.append(outcome)
        return found

    answer = run_isolated(work, time_limit_s=LIMIT_S, forward=False) if dtypes else []
    if isinstance(answer, Crash):
        answer = [Outcome(False, False, f"{answer.kind}: {answer.detail}")] * len(dtypes)
    elif isinstance(answer, ChildError):
        answer = [Outcome(False, False, f"the reference raised {answer.type_name}")] * len(dtypes)
    for dtype, outcome in zip(dtypes, answer, strict=True):
        yield name_of(dtype), outcome


Told = dict[str, dict[str, list[str]]]  # what is said: of which calls, in which dtypes


def survey(package: Package) -> str:
    """The package's tables."""
    ops = package.ops()
    results: dict[str, dict[str, Outcome]] = {}
    for op in ops:
        print(f"{package.title}: {op.name}", file=sys.stderr)
        results[op.name] = dict(outcomes(op))
    tried = {name for op in ops for name in op.covers or (op.name,)}
    reasons, findings, serial = _told(), _told(), _told()
    for op in ops:
        for dtype, outcome in results[op.name].items():
            if not outcome.right:
                reasons[op.bugs.get(dtype, outcome.reason)][op.name].append(dtype)
            for text in outcome.findings:
                findings[text][op.name].append(dtype)
            for text in outcome.serial:
                serial[text][op.name].append(dtype)
    kernels = {kernel for by_dtype in results.values() for outcome in by_dtype.values() for kernel in outcome.kernels}
    version = importlib.metadata.version(package.distribution)
    share = f"{len(tried)} of {package.total()}"
    lines = [
        f"## {package.title} {version}",
        "",
        f"{share} public operations tried in {len(ops)} calls; {len(kernels)} kernels launched.",
        "",
        "| dtype | calls | ran to the end | ran and right | operations right in every call |",
        "| --- | --- | --- | --- | --- |",
    ]
    for dtype in map(name_of, FLOATS):
        of = [(op, results[op.name][dtype]) for op in ops if dtype in results[op.name]]
        right = sum(outcome.right for _, outcome in of)
        named: dict[str, list[bool]] = defaultdict(list)
        for op, outcome in of:
            for name in op.covers or (op.name,):
                named[name].append(outcome.right)
        lines.append(
            f"| {dtype} | {len(of)} | {sum(outcome.ran for _, outcome in of)} | {right} "
            f"| {sum(map(all, named.values()))} of {len(named)} |"
        )
    lines += _table("Not right, and why", "reason", reasons)
    lines += _table("Accesses reported", "access", findings)
    lines += _table("Not run as one batch", "kernel", serial)
    for reason, names in package.others().items():
        lines += ["", f"{reason[0].upper()}{reason[1:]} ({len(names)}): {', '.join(f'`{name}`' for name in names)}."]
    return "\n".join(lines)


def _told() -> Told:
    return defaultdict(lambda: defaultdict(list))


def _table(title: str, what: str, told: Told) -> list[str]:
    if not told:
        return []
    # What concerns most calls comes first.
    rows = sorted(told.items(), key=lambda item: (-len(item[1]), item[0]))
    cells = [f"| {_cell(text)} | {_cell(_calls(calls))} |" for text, calls in rows]
    return ["", f"{title}:", "", f"| {what} | calls |", "| --- | --- |", *cells]


def _calls(calls: dict[str, list[str]]) -> str:
    """Names; where not all dtypes are concerned, with those that are."""
    return "; ".join(name if len(d) == len(FLOATS) else f"{name} ({', '.join(d)})" for name, d in calls.items())


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def main() -> int:
    """Prints the tables; 2 where FlagGems is not installed."""
    # Packages warn about what they call Triton with; that is theirs to hear.
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    import triton

    print(f"Measured with Python {platform.python_version()}, torch {torch.__version__}, Triton {triton.__version__}.")
    from tests.outside.survey.flag_gems import PACKAGE

    try:
        importlib.metadata.version(PACKAGE.distribution)
    except importlib.metadata.PackageNotFoundError:
        print(f"{PACKAGE.title} is not installed", file=sys.stderr)
        return 2
    print("\n" + survey(PACKAGE))
    return 0


if __name__ == "__main__":
    sys.exit(main())
