"""A failing case as a Python script for a bug report, with the kernel's inputs in a file beside it."""

from __future__ import annotations

import functools
import inspect
import io
import os
import pprint
import shlex
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from pytest_fusion.case import counter_random
from pytest_fusion.case.case_model import Case
from pytest_fusion.case.containers import map_tensors
from pytest_fusion.case.layouts import geometry
from pytest_fusion.case.make import make_inputs
from pytest_fusion.checks.memory import BACKWARD, RECORDING
from pytest_fusion.checks.multiprocessors import multiprocessors_of
from pytest_fusion.checks.verdict import Facts, Verdict
from pytest_fusion.diagnosis.repro.replay_file import Replay, place
from pytest_fusion.interpreter.bridge.modelled_device import PROPERTIES
from pytest_fusion.oracle.reference import takes
from pytest_fusion.run import placing
from pytest_fusion.run.memory import FILLS
from pytest_fusion.spec.fusion_spec import FusionSpec

# Two calls beside the reference show these; other checks need more than a script of one case repeats.
_SHOWN = ("error", "crash", "structure", "inputs", "bounds", "unwritten", "repeat", "values", "gradients")
_MOST_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class Script:
    """The text, the file beside it, and what it lacks: an input, fixture or function by name, and why."""

    text: str
    saved: bytes
    missing: Mapping[str, str] = field(default_factory=dict)


def compose(
    spec: FusionSpec,
    replay: Replay,
    verdict: Verdict,
    *,
    device: torch.device,
    extra: Mapping[str, Any],
    root: Path,
    shown: str,
) -> Script:
    """The script for path ``shown``, with its inputs; raises ``OSError`` without its template, and as they do."""
    verdict, missing = _of_its_config(verdict), dict[str, str]()
    path, _, names = replay.nodeid.partition("[")[0].partition("::")
    test, module = names.split("::") if names else [], _module_of_test(spec, (root / path).resolve(), names)
    saved: dict[str, Any] = {"inputs": {}, "fixtures": {}, "functions": None}
    for name, value in _inputs(spec, replay.case, device, missing):
        _keep(saved["inputs"], name, value, missing, f"input {name}")
    for name, value in extra.items():
        _keep(saved["fixtures"], name, value, missing, f"fixture {name}")
    if module is None:
        _keep(saved, "functions", (spec.fused, spec.reference), missing, "the fused call and the reference")
    data = {
        "file": path if module is not None else _folder_of(spec.fused, root),
        "test": test if module is not None else [],
        "module": module,
        "method": len(test) > 1 and isinstance(spec.fused, functools.partial),
        "folders": _folders(root),
        "device": "cuda" if device.type == "cuda" else "cpu",
        "configs": replay.case.as_json().get("configs", {}),
        "gpu": {**PROPERTIES, "multi_processor_count": multiprocessors_of(replay.case)},
        "reference_takes": list(takes(spec.reference, extra)),
        **_failure(spec, replay.case, verdict),
        "missing": missing,
    }
    filled = f"CASE: dict[str, Any] = {pprint.pformat(data, width=110, sort_dicts=False)}\n"
    template = Path(__file__).with_name("script_template.py").read_text(encoding="utf-8")
    text = _header(spec, replay, verdict, missing, shown) + template.replace("CASE: dict[str, Any] = {}\n", filled)
    return Script(text, _bytes(saved), missing)


def _of_its_config(verdict: Verdict) -> Verdict:
    """The failure of one config as its check states it: the script launches that config."""
    facts = verdict.facts
    if "config" not in facts:
        return verdict
    return replace(verdict, check=facts["inner"], evidence=Facts(facts["found"]))


def _bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _keep(into: dict[str, Any], name: str, value: Any, missing: dict[str, str], what: str) -> None:
    try:
        _bytes(value)
        into[name] = value
    except Exception as error:  # noqa: BLE001 -- a user's class may raise anything when it is saved
        missing[what] = f"it cannot be saved ({error})"


def _inputs(spec: FusionSpec, case: Case, device: torch.device, missing: dict[str, str]) -> Iterator[tuple[str, Any]]:
    """The kernel's inputs: tensors in their layouts, on the CPU."""
    for name, value in make_inputs(spec, case, device).items():
        if isinstance(value, torch.Tensor) and name in case.tensors:
            span = geometry(tuple(value.shape), case.tensors[name].layout).storage * value.element_size()
            if span > _MOST_BYTES:
                missing[f"input {name}"] = f"its storage spans {span / 2**30:.1f} GiB"
                continue
        on_cpu = {name: map_tensors(value, lambda t: t.detach().cpu())}
        yield name, placing.place(on_cpu, case, torch.device("cpu"), FILLS[0]).arguments[name]


def _header(spec: FusionSpec, replay: Replay, verdict: Verdict, missing: Mapping[str, str], shown: str) -> str:
    versions = [f"{key} {replay.made[key]}" for key in ("torch", "triton") if key in replay.made]
    lines = [
        f"{spec.name}: {verdict.check} failed",
        *textwrap.wrap(verdict.reason, 110, initial_indent="  ", subsequent_indent="  "),
        *([f"  likely cause: {replay.cause}"] if replay.cause else []),
        *([f"  seen on {', '.join([place(replay.made), *versions])}"] if replay.made else []),
        "",
        f"Run it anywhere in the project, with the .pt file beside it:  python {shlex.quote(shown)} [cpu|cuda]",
        "It needs torch and the test's file with what that imports; pytest_fusion may be absent. It exits with 0 where",
        "the failure does not show, 1 where it does, 2 where it cannot run.",
        *(f"NOT COMPLETE, {what}: {why}" for what, why in missing.items()),
    ]
    return "#!/usr/bin/env python3\n" + "".join(f"# {line}".rstrip() + "\n" for line in lines)


def _module_of_test(spec: FusionSpec, file: Path, names: str) -> str | None:
    """The name of the loaded test module in which ``names`` lead to a test of this spec."""
    for name, module in list(sys.modules.items()) if names and file.is_file() else ():
        known = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(module, ModuleType) and known and Path(known).name == file.name and Path(known).resolve() == file:
            found: Any = module
            for part in names.split("::"):
                found = getattr(found, part, None)
            own = getattr(found, "fusion_spec", None)
            fused = spec.fused.func if isinstance(spec.fused, functools.partial) else spec.fused
            if own is not None and own.fused in (spec.fused, fused):
                return name
    return None


def _folder_of(function: Any, root: Path) -> str:
    """The file of a function, relative to the project; the project's own folder if it is elsewhere."""
    try:
        file = Path(inspect.getfile(inspect.unwrap(getattr(function, "func", function)))).resolve()
        return str(file.relative_to(root.resolve()))
    except (TypeError, OSError, ValueError):
        return os.curdir


def _folders(root: Path) -> list[str]:
    """The project's folders on ``sys.path``, relative to its root."""
    below = [Path(entry or os.curdir).resolve() for entry in sys.path]
    inside = [path for path in below if path.is_relative_to(root.resolve()) and "site-packages" not in path.parts]
    return list(dict.fromkeys(os.path.relpath(path, root.resolve()) for path in inside if path.is_dir())) or [os.curdir]


def _failure(spec: FusionSpec, case: Case, verdict: Verdict) -> dict[str, Any]:
    """What failed, what backward computed, and which inputs may change."""
    evidence = verdict.facts
    compared = evidence.get("index") is not None and evidence.get("expected") is not None
    by = evidence.get("by") if verdict.check == "inputs" else None
    backward = verdict.check == "gradients" or by in (BACKWARD.slug, RECORDING.slug)
    return {
        "check": verdict.check,
        "seen": {k: evidence.get(k) for k in ("output", "index", "got", "expected", "allowed")} if compared else None,
        "raised": evidence.get("error") if verdict.check == "error" else None,
        "wanted": (evidence.get("wanted") or _differentiable(spec, case)) if backward else [],
        "upstream": str(evidence.get("upstream") or "random"),
        "laid": dict(evidence.get("upstream_strides") or {}),
        "seeds": {n: counter_random.mix(case.seed, "upstream", n) >> 1 for n in evidence.get("layouts") or {}},
        "mutates": list(spec.mutates),
        "may_change": list(spec.given_up),
        "varies": spec.deterministic is not True,
        "beyond": _beyond(verdict, by),
    }


def _differentiable(spec: FusionSpec, case: Case) -> list[str]:
    named = list(case.tensors) if spec.grad is True else [spec.grad] if isinstance(spec.grad, str) else spec.grad or ()
    return [n for n in named if n in case.tensors and n not in case.absent and "float" in case.tensors[n].dtype]


def _beyond(verdict: Verdict, by: Any) -> str:
    """Why running the script cannot show the failure; empty if it can."""
    why = ""
    if by not in (None, BACKWARD.slug, RECORDING.slug):
        why = f"the input changes in a call under torch.{by}()"
    elif verdict.check not in _SHOWN:
        why = f"the check {verdict.check!r} makes more calls than this script"
    elif verdict.identity == "repeat:stale":
        why = "the failure needs an earlier call with other values"
    elif verdict.facts.get("access"):
        place = f"{Path(str(verdict.facts.get('file'))).name}:{verdict.facts.get('line')}"
        why = f"no result shows the {verdict.facts['access']} at {place}, which pytest-fusion's interpreter saw"
    return why and f"{why}; see the replay file"
