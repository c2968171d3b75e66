"""A failing case as a Python script of its own, for a bug report: torch and the user's module are all that it needs."""

from __future__ import annotations

import functools
import inspect
import os
import shlex
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from pytest_fusion.case import counter_random, recorded_values
from pytest_fusion.case.case_model import Case
from pytest_fusion.case.layouts import Geometry, geometry
from pytest_fusion.case.make import _bound, function_of, make_inputs
from pytest_fusion.checks.memory import BACKWARD, RECORDING
from pytest_fusion.checks.multiprocessors import multiprocessors_of
from pytest_fusion.checks.verdict import Verdict
from pytest_fusion.diagnosis.repro.embedded import machinery
from pytest_fusion.diagnosis.repro.literal import Unwritable, literal, tensor_text
from pytest_fusion.diagnosis.repro.replay_file import Replay, place
from pytest_fusion.run.placing import own_geometry
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import TensorSpec, unwrap
from pytest_fusion.spec.values import ValueProfile

# What two calls beside the reference show; the other checks ask for more than a script of one case repeats.
_SHOWN = ("error", "crash", "structure", "inputs", "bounds", "unwritten", "repeat", "values", "gradients")
_MOST_BYTES = 1 << 30
_TOP = """
from __future__ import annotations

import ctypes
import importlib.util
import os
import sys

if importlib.util.find_spec("torch") is None:
    print(f"cannot be run here: {{sys.executable}} has no torch")
    raise SystemExit(2)


def has_cuda():
    try:
        return ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
    except OSError:
        return False


DEVICE = sys.argv[1] if len(sys.argv) > 1 else {device}
if DEVICE == "cpu":
    # Read when Triton is imported. This is Triton's own interpreter, without the corrections that pytest-fusion makes:
    # bfloat16, casts and reductions may differ from it, and from a GPU.
    os.environ["TRITON_INTERPRET"] = "1"


"""


@dataclass(frozen=True, slots=True)
class Script:
    """The text, and what it lacks: the name of an input, fixture or function, and why it could not be written."""

    text: str
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
    """The script of a failure, whose path is ``shown``. Makes the inputs again, on ``device``.

    Raises ``OSError`` where our own sources cannot be read, and what making the inputs raises.
    """
    case, missing = replay.case, dict[str, str]()
    find = _find(spec, replay.nodeid, root, missing)
    inputs, large = _inputs(spec, case, device, missing)
    fixtures = _entries(extra, missing, "fixture", lambda name, value: _own(name, value, len(inputs)))
    body = [
        _header(spec, replay, verdict, missing, shown),
        _TOP.format(device='"cuda" if has_cuda() else "cpu"' if device.type == "cuda" else '"cpu"'),
        find,
        "\n\ndef inputs(tensor):\n    given = {\n",
        *inputs,
        "    }\n    fixtures = {\n",
        *fixtures,
        "    }\n    return given, fixtures\n\n\n",
        f"def failure():\n    return Failure(\n{_failure(spec, case, verdict)}    )\n\n\n",
        f"MISSING = {missing!r}\n\n",
        "# The rest is the same in every such script: how tensors are laid out, called with and compared.\n",
        machinery(generator=large),
        '\n\nif __name__ == "__main__":\n',
        "    raise SystemExit(main(find, inputs, failure(), DEVICE, MISSING))\n",
    ]
    return Script("".join(body), missing)


def _header(spec: FusionSpec, replay: Replay, verdict: Verdict, missing: Mapping[str, str], shown: str) -> str:
    versions = [f"{key} {replay.made[key]}" for key in ("torch", "triton") if key in replay.made]
    made = ", ".join([place(replay.made), *versions]) if replay.made else ""
    needs = replay.nodeid.partition("::")[0] if "::" in replay.nodeid else "the modules named below"
    lines = [
        f"{spec.name}: {verdict.check} failed",
        *textwrap.wrap(verdict.reason, 110, initial_indent="  ", subsequent_indent="  "),
        *([f"  likely cause: {replay.cause}"] if replay.cause else []),
        *([f"  seen on {made}"] if made else []),
        "",
        f"Run it anywhere in the project:  python {shlex.quote(shown)} [cpu|cuda]",
        f"It needs torch and {needs} with what that imports, not pytest_fusion. It leaves 0 where the failure does not",
        "show, 1 where it does, 2 where that cannot be told.",
    ]
    lines += [f"NOT COMPLETE, {what}: {why}" for what, why in missing.items()]
    return "#!/usr/bin/env python3\n" + "".join(f"# {line}".rstrip() + "\n" for line in lines)


def _find(spec: FusionSpec, nodeid: str, root: Path, missing: dict[str, str]) -> str:
    """The function that imports kernel and reference: through the test that failed, else each by its own name."""
    module = _module_of_test(spec, nodeid, root)
    folders = _folders(root)
    if module is not None:
        test = nodeid.partition("::")[0] + "::" + nodeid.partition("::")[2].partition("[")[0]
        return f"def find():\n    return judged_by({test!r}, {module!r}, folders={folders!r}, script=Path(__file__))\n"
    found = []
    for role, function in (("the fused call", spec.fused), ("the reference", spec.reference)):
        try:
            found.append(literal(function, _no_tensor))
        except Unwritable as error:
            missing[role] = f"{error}{_defined(function)}; import it in find()"
            found.append("None")
    anchor = _file_below(spec.fused, root) or _file_below(spec.reference, root)
    first = f"    use_project({anchor!r}, folders={folders!r}, script=Path(__file__))\n" if anchor else ""
    return f"def find():\n{first}    return {', '.join(found)}\n"


def _no_tensor(_: torch.Tensor) -> str:
    raise Unwritable("a tensor that is bound to the function")


def _defined(function: Any) -> str:
    try:
        inner = inspect.unwrap(function)
        return f" (defined in {Path(inspect.getfile(inner)).name}:{inspect.getsourcelines(inner)[1]})"
    except (TypeError, OSError):
        return ""


def _module_of_test(spec: FusionSpec, nodeid: str, root: Path) -> str | None:
    """The name of the loaded test module in which the node id leads to a test of this spec."""
    path, _, names = nodeid.partition("::")
    file = (root / path).resolve()
    if not names or not file.is_file():
        return None
    for name, module in list(sys.modules.items()):
        known = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(module, ModuleType) and known and Path(known).name == file.name and Path(known).resolve() == file:
            found: Any = module
            for part in names.partition("[")[0].split("::"):
                found = getattr(found, part, None)
            own = getattr(found, "fusion_spec", None)
            fused = spec.fused.func if isinstance(spec.fused, functools.partial) else spec.fused
            if own is not None and own.fused in (spec.fused, fused):
                return name
    return None


def _file_below(function: Any, root: Path) -> str | None:
    try:
        return str(
            Path(inspect.getfile(inspect.unwrap(getattr(function, "func", function)))).resolve().relative_to(root)
        )
    except (TypeError, OSError, ValueError):
        return None


def _folders(root: Path) -> list[str]:
    """The folders of the project that modules are imported from, relative to its root."""
    below = [Path(entry or os.curdir).resolve() for entry in sys.path]
    inside = [path for path in below if path.is_relative_to(root.resolve()) and "site-packages" not in path.parts]
    return list(dict.fromkeys(os.path.relpath(path, root.resolve()) for path in inside if path.is_dir())) or [os.curdir]


def _inputs(spec: FusionSpec, case: Case, device: torch.device, missing: dict[str, str]) -> tuple[list[str], bool]:
    """The lines of the inputs, and whether one of them is generated."""
    logical = make_inputs(spec, case, device)
    generated: list[str] = []
    count = iter(range(1_000_000))

    def text(name: str, value: Any) -> str:
        if not isinstance(value, torch.Tensor) or name not in case.tensors:
            return _own(name, value, count)
        plan = geometry(tuple(value.shape), case.tensors[name].layout)
        _affordable(plan, value.element_size())

        def from_seed() -> str:
            generated.append(name)
            return _generated(name, spec, case, plan)

        inner = unwrap(spec.inputs[name])
        regime = case.tensors[name].regime
        known = isinstance(inner, TensorSpec) and function_of(inner, regime) is None
        known = known and recorded_values.parse(regime) is None  # their generator is not copied into scripts
        return tensor_text(name, value.cpu(), plan, next(count), generated=from_seed if known else None)

    return _entries(logical, missing, "input", text), bool(generated)


def _entries(
    values: Mapping[str, Any], missing: dict[str, str], what: str, text: Callable[[str, Any], str]
) -> list[str]:
    lines = []
    for name, value in values.items():
        try:
            lines.append(f"        {name!r}: {text(name, value)},\n")
        except Unwritable as error:
            missing[f"{what} {name}"] = str(error)
            lines.append(f"        # {name!r}: {error}\n")
    return lines


def _own(name: str, value: Any, count: Any) -> str:
    """A value that the case gives no layout: tensors in it keep the one that they have."""
    numbered = count if not isinstance(count, int) else iter(range(count, 1_000_000))

    def tensor(found: torch.Tensor) -> str:
        plan = own_geometry(found)
        _affordable(plan, found.element_size())
        return tensor_text(name, found.detach().cpu().contiguous(), plan, next(numbered))

    return literal(value, tensor)


def _affordable(plan: Geometry, itemsize: int) -> None:
    if plan.storage * itemsize > _MOST_BYTES:
        raise Unwritable(f"its storage spans {plan.storage * itemsize / 2**30:.1f} GiB")


def _generated(name: str, spec: FusionSpec, case: Case, plan: Geometry) -> str:
    inner, entry = unwrap(spec.inputs[name]), case.tensors[name]
    assert isinstance(inner, TensorSpec)
    profile = inner.values if isinstance(inner.values, ValueProfile) else ValueProfile("default")
    made = [min(size, 1) if axis in plan.expanded else size for axis, size in enumerate(plan.shape)]
    seed = counter_random.mix(case.seed, name)
    return f"generated({_profile(profile, case)}, {entry.regime!r}, {made}, {entry.dtype!r}, seed={seed})"


def _profile(profile: ValueProfile, case: Case) -> str:
    params = tuple((key, _bound(value, case.sizes)) for key, value in profile.params)
    choices = "".join(f"{_profile(choice, case)}, " for choice in profile.choices)
    return f"types.SimpleNamespace(kind={profile.kind!r}, params={params!r}, choices=({choices}))"


def _failure(spec: FusionSpec, case: Case, verdict: Verdict) -> str:
    """The keywords of a script's ``Failure``."""
    evidence = verdict.facts
    fields: dict[str, Any] = {"check": verdict.check}
    if evidence.get("index") is not None and evidence.get("expected") is not None:
        keys = ("output", "index", "got", "expected", "allowed")
        fields["seen"] = {key: evidence.get(key) for key in keys}
    if verdict.check == "error":
        fields["raised"] = evidence.get("error")
    by = evidence.get("by") if verdict.check == "inputs" else None
    if verdict.check == "gradients" or by in (BACKWARD.slug, RECORDING.slug):
        fields["gradient"] = _gradient(spec, case, evidence)
    fields |= {key: tuple(getattr(spec, key)) for key in ("mutates", "clobbers") if getattr(spec, key)}
    if spec.deterministic is not True:
        fields["varies"] = True
    fields["multiprocessors"] = multiprocessors_of(case)
    if by not in (None, BACKWARD.slug, RECORDING.slug):
        fields["beyond"] = f"the input changes in a call under torch.{by}(); see the replay file"
    elif verdict.check not in _SHOWN:
        fields["beyond"] = f"the check {verdict.check!r} asks for more calls than this one; see the replay file"
    elif verdict.identity == "repeat:stale":
        fields["beyond"] = "the failure needs an earlier call with other values; see the replay file"
    elif evidence.get("access"):
        place = f"{Path(str(evidence.get('file'))).name}:{evidence.get('line')}"
        fields["beyond"] = (
            f"it sees results and the memory of inputs, and no single access: pytest-fusion's CPU lane saw the "
            f"{evidence['access']} at {place}; see the replay file"
        )
    return "".join(f"        {key}={literal(value, _no_tensor)},\n" for key, value in fields.items())


def _gradient(spec: FusionSpec, case: Case, evidence: Mapping[str, Any]) -> dict[str, Any]:
    """What backward was asked for; where the evidence does not tell, all that ``grad=`` names."""
    named = list(case.tensors) if spec.grad is True else [spec.grad] if isinstance(spec.grad, str) else spec.grad
    floating = [
        n for n in named or () if n in case.tensors and n not in case.absent and "float" in case.tensors[n].dtype
    ]
    used = list(evidence.get("layouts") or {})
    return {
        "wanted": list(evidence.get("wanted") or floating),
        "upstream": str(evidence.get("upstream") or "random"),
        "laid": dict(evidence.get("upstream_strides") or {}),
        "seeds": {name: counter_random.mix(case.seed, "upstream", name) >> 1 for name in used},
    }
