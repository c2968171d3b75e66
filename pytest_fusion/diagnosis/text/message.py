"""The text of a failure: what differs and by how much, the smallest case, where the errors are, how to run it again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_fusion.case.case_model import ORDINARY
from pytest_fusion.case.describe import configs_of
from pytest_fusion.case.value_json import written
from pytest_fusion.checks.verdict import Verdict
from pytest_fusion.diagnosis.causes import meaning as meaning_of
from pytest_fusion.diagnosis.diagnosis_model import Diagnosis
from pytest_fusion.diagnosis.remedies import REMEDIES
from pytest_fusion.diagnosis.text.heat import drawing


def replay_command(nodeid: str, path: str) -> str:
    """The one command that runs exactly this case again."""
    return f"pytest {shlex.quote(nodeid)} --fusion-replay {shlex.quote(path)}"


def _tensor_line(name: str, entry: dict[str, Any], absent: bool, held: str | None) -> str:
    if absent:
        return f"{name}: None"
    layout = entry["layout"] + (f"/{entry['variant']}" if entry["variant"] else "")
    text = f"{name}: {entry['dtype']} {entry['shape']}, {layout}, strides {entry['strides']}"
    if entry["offset"]:
        text += f", storage offset {entry['offset']}"
    kind = "" if held is not None and entry["values"] in ORDINARY else f" {entry['values']}"
    return f"{text}, values{kind}" + (f": {held}" if held is not None else "")


def _why(diagnosis: Diagnosis) -> list[str]:
    """The cause and its evidence; what was ruled out is shown only without a cause."""
    unexplained = diagnosis.cause == "unexplained"
    meaning = "no experiment found a cause" if unexplained and not diagnosis.ruled_out else meaning_of(diagnosis.cause)
    lines = [f"  likely cause: {diagnosis.cause} ({meaning})"]
    lines += [f"    {sentence}" for sentence in diagnosis.evidence]
    if unexplained:
        lines += [f"    not {sentence}" for sentence in diagnosis.ruled_out]
    if diagnosis.cause in REMEDIES:
        lines.append(f"  what to do: {REMEDIES[diagnosis.cause]}")
    return lines


def place(found: Mapping[str, Any] | None) -> list[str]:
    """Where the wrong elements are, in a sentence and a picture; empty for a single element."""
    if found is None or found["total"] == 1:
        return []
    return [f"where: {found['where']}", *(f"  {line}" for line in drawing(found))]


def larger_case(case: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """A second case, beside a smallest one that is too small to show where it is wrong."""
    integers = {name: words for name, words in case.get("held", {}).items() if "." not in words}
    shown = [f"{name}: {words}" for name, words in {**integers, **case.get("derived", {})}.items()]
    return [f"a larger case: {_titled(case)}", *(f"  {line}" for line in [*place(found), *shown])]


def inputs_of(case: Mapping[str, Any]) -> list[str]:
    """The inputs of a case, a line each."""
    held = case.get("held", {})
    lines = [_tensor_line(k, entry, k in case["absent"], held.get(k)) for k, entry in case["inputs"].items()]
    lines += [f"{key}: {words}" for key, words in case.get("derived", {}).items()]
    lines += [f"{key} = {written(value)}" for key, value in case["drawn"].items()]
    lines += [f"{key} = {words}" for key, words in case.get("constants", {}).items()]
    if "multiprocessors" in case:
        lines.append(f"on {case['multiprocessors']} multiprocessors, where the launcher queries them")
    lines += configs_of(case)
    return lines


def also_found(findings: Sequence[Mapping[str, Any]], behind: Sequence[str]) -> list[str]:
    """The other findings of a test, each with its own smallest case; ``behind``: what failed only where these do."""
    lines = ["  also found:"] if findings else []
    for one in findings:
        accepted = f", accepted: {one['allowed']}" if one["allowed"] else ""
        lines.append(f"    {one['level']}: {one['code']} ({one['check']}{accepted})")
        lines.append(f"      {one['message']}")
        case = one["case"]
        if case is not None and not case.get("given"):
            lines.append(f"      smallest case: {_titled(case)}")
        if one["accept"] and not one["allowed"]:
            lines.append(f"      to accept it: {one['accept']}")
    if behind:
        lines.append("  failed too, but only in cases that the findings above had spoiled:")
        lines += [f"    {sentence}" for sentence in behind]
    return lines


def _titled(case: Mapping[str, Any]) -> str:
    dims = " ".join(f"{key}={value}" for key, value in case["dims"].items()) or "no dims"
    return f"{dims}, dtype {case['dtype']}, seed {case['seed']}"


def compose(
    name: str,
    verdict: Verdict,
    case: dict[str, Any] | None,
    *,
    diagnosis: Diagnosis | None = None,
    where: Sequence[str] = (),
    larger: Sequence[str] = (),
    command: str | None = None,
    script: str = "",
    trace: str = "",
    found_after: str = "",
) -> str:
    """The failure as a person reads it, without empty lines."""
    lines = [f"{name}: {verdict.check} failed", f"  {verdict.reason}", *(f"  {line}" for line in where)]
    if case is not None:
        title = "called with:" if case.get("given") else f"smallest case: {_titled(case)}"
        lines += [f"  {title}", *(f"    {line}" for line in inputs_of(case))]
    lines += [f"  {line}" for line in larger]
    if diagnosis is not None:
        lines += _why(diagnosis)
    if found_after:
        lines.append(f"  {found_after}")
    if trace:
        lines.append("  kernel traceback:")
        lines += [f"    {line}" for line in trace.rstrip().splitlines()]
    if command:
        lines.append(f"  replay: {command}")
    if script:
        lines.append(f"  script: {script}")
    return "\n".join(lines)
